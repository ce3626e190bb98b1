"""Models that load where collabify cannot be imported, by the code that they bring."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hub_cases import done, files_of, make
from hub_server import OWNER, environment, patch, serving
from safetensors import safe_open
from tiny_models import LOW, TINY, aligned, assert_same
from torch import Tensor

import collabify
from collabify import convert, find_attention, storage
from collabify.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from collabify.models import requirement

DYNAMIC: dict[str, Any] = {"method": "talking-heads", "calibration": "none", "dynamic": True}
CASES = {f"bert-{form}": ("bert", LOW[form]) for form in LOW}
CASES |= {f"{name}-cp": (name, LOW["cp"]) for name in TINY}
CASES |= {f"{name}-heads": (name, LOW["talking-heads"]) for name in ("albert", "distilbert", "vit")}
CASES |= {f"{name}-values": (name, LOW["values"]) for name in ("albert-groups", "deit", "roberta")}
CASES["bert-dynamic"] = "bert", DYNAMIC
CASES["bert-full"] = "bert", TINY["bert"].full("cp")
BODIES = {f"{name}-body": (name, LOW["cp"]) for name in TINY}  # models without a head
BODIES |= {f"{name}-body-values": (name, LOW["values"]) for name in ("bert", "vit")}

STEPS = ("loaded", "saved", "body")

# Loads every folder without collabify, saves it again, and loads that; then its body alone.
LOADER = """
import sys, json, torch, transformers
from pathlib import Path
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("collabify", "jaxtyping", "wrapt"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
assert not {"collabify", "jaxtyping"} & set(sys.modules)
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
root, out = map(Path, sys.argv[1:])
results = {}
for folder in sorted(root.iterdir()):
    try:
        config = json.loads((folder / "config.json").read_text())
        name = f"modeling_collabify.{config['architectures'][0]}"
        auto = next(auto for auto, found in config["auto_map"].items() if found == name)
        again = folder
        for step in ("loaded", "saved"):
            model = getattr(transformers, auto).from_pretrained(again, trust_remote_code=True)
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            with torch.no_grad():
                results[folder.name, step] = model(**torch.load(folder / "batch.pt"))[0]
            again = out.parent / folder.name
            model.save_pretrained(again)
    except Exception as error:
        results[folder.name, step] = f"{type(error).__name__}: {error}"
transformers.logging.set_verbosity_error()  # it warns of poolers that a head had no use for
for folder in sorted(root.iterdir()):
    try:
        model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            results[folder.name, "body"] = model(**torch.load(folder / "batch.pt"))[0]
    except Exception as error:
        results[folder.name, "body"] = f"{type(error).__name__}: {error}"
torch.save(results, out)
"""


def apart(script: str, *arguments: object, cwd: Path, **more: str) -> Any:
    """A process of its own, with its own place for code that comes with models."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= {"HF_HOME": str(cwd / "home"), "HF_HUB_OFFLINE": "1", **more}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=own, text=True, capture_output=True, check=False)


def bring(model: Any, batch: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Save a model with its code and a batch; its outputs."""
    model.save_pretrained(folder)
    collabify.write_standalone(folder)
    torch.save(batch, folder / "batch.pt")
    with torch.no_grad():
        whole, body = (each(**batch)[0] for each in (aligned(model), model.base_model))
    return {"loaded": whole, "saved": whole, "body": body}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, str]:
    """Outputs here; those of a process without collabify; what it saved; what it said."""
    root, here = tmp_path_factory.mktemp("alone"), {}
    for label, (name, options) in (CASES | BODIES).items():
        model = TINY[name].build(headed=label in CASES)
        convert(model, **options)
        here[label] = bring(model, TINY[name].batch(model), root / label)
    out = tmp_path_factory.mktemp("outputs")
    child = apart(LOADER, root, out / "results.pt", cwd=out)
    assert child.returncode == 0, child.stderr
    return here, torch.load(out / "results.pt"), out, child.stderr


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("label", [*CASES, *BODIES])
def test_a_process_without_collabify_gives_the_same_bits(fresh: Any, label: str, step: str) -> None:
    here, there, _, _ = fresh
    assert isinstance(there[label, step], Tensor), there[label, step]
    assert torch.equal(there[label, step], here[label][step])


def test_a_real_vision_model_without_collabify(
    real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """DINOv2 as it is published: no head, the names of older versions in its checkpoint."""
    model = transformers.AutoModel.from_pretrained(real_model("dinov2-small")).eval()
    convert(model, method="head-svd", dk=192, calibration="none")
    images = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(3))
    here = bring(model, {"pixel_values": images}, tmp_path / "root" / "dinov2")
    assert any(".attention.attention.query." in name for name in names(tmp_path / "root/dinov2"))
    child = apart(LOADER, tmp_path / "root", tmp_path / "results.pt", cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    for (_, step), found in torch.load(tmp_path / "results.pt").items():
        assert isinstance(found, Tensor), found
        assert torch.equal(found, here[step])


def names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_it_is_loaded_without_a_word(fresh: Any) -> None:
    assert "quantization" not in fresh[3]
    assert "newly initialized" not in fresh[3]


def test_what_it_saves_is_a_converted_model(fresh: Any) -> None:
    """collabify loads it, and it still brings its code."""
    here, _, out, _ = fresh
    folder = out / "bert-cp"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert all(site.converted for site in find_attention(model))
    with torch.no_grad():
        assert torch.equal(
            aligned(model)(**TINY["bert"].batch(model))[0], here["bert-cp"]["loaded"]
        )
    assert (folder / "modeling_collabify.py").read_text() == storage.modeling()


@pytest.fixture
def alone(saved: Any) -> tuple[Any, Path, dict[str, Tensor]]:
    model, folder, batch = saved
    collabify.write_standalone(folder)
    return model, folder, batch


@pytest.mark.parametrize("trust", [None, False, True])
def test_where_collabify_is_imported_it_loads_the_model(alone: Any, trust: bool | None) -> None:
    model, folder, batch = alone
    auto = transformers.AutoModelForSequenceClassification
    loaded = auto.from_pretrained(folder, trust_remote_code=trust)
    assert type(loaded) is type(model)
    assert all(site.converted for site in find_attention(loaded))
    assert_same(loaded, model, batch)


def test_the_code_stays_when_the_model_is_saved(alone: Any, tmp_path: Path) -> None:
    _, folder, _ = alone
    (folder / "modeling_collabify.py").write_text("raise SystemExit('code of a checkpoint ran')")
    storage.load(str(folder))[0].save_pretrained(tmp_path / "again")
    for name in ("config.json", "modeling_collabify.py"):
        assert (tmp_path / "again" / name).is_file()
    assert (tmp_path / "again" / "modeling_collabify.py").read_text() == storage.modeling()


def test_models_without_their_own_code_get_none(saved: Any) -> None:
    _, folder, _ = saved
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    assert not (folder / "modeling_collabify.py").exists()


def test_every_class_is_named_under_its_auto_class() -> None:
    named = storage.with_auto_map({"model_type": "bert"})["auto_map"]
    assert named["AutoModel"] == "modeling_collabify.BertModel"
    assert named["AutoModelForMaskedLM"] == "modeling_collabify.BertForMaskedLM"
    assert "AutoModelForCausalLM" not in named
    for auto, name in named.items():
        assert hasattr(transformers, auto)
        assert hasattr(transformers, name.rpartition(".")[2])


def test_what_gets_no_code(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        collabify.write_standalone(tmp_path)
    TINY["bert"].build().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="was not converted"):
        collabify.write_standalone(tmp_path)
    assert not (tmp_path / "modeling_collabify.py").exists()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        collabify.write_standalone(tmp_path)


def test_the_file_stands_alone() -> None:
    source = storage.modeling()
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", source, re.MULTILINE))
    assert imported <= set(sys.stdlib_module_names) | {"safetensors", "torch", "transformers"}
    assert "jaxtyping" not in source
    compile(source, "modeling_collabify.py", "exec")


def test_transformers_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = r"==4\.57\.1 must be at least 5\.21 .* Run: pip install --upgrade transformers"
    # transformers puts another object in its own place once it has loaded models
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(ImportError, match=pattern):
        exec(storage.modeling(), {"__name__": "modeling_collabify"})


def test_the_lowest_version_is_that_of_the_package() -> None:
    root = Path(__file__).parent.parent
    major, minor = requirement.LOWEST
    assert f'"transformers>={major}.{minor},' in (root / "pyproject.toml").read_text()
    assert f"transformers=={major}.{minor}.*" in (root / "lowest.txt").read_text()


ODD = """
import sys, json, shutil, transformers
from pathlib import Path
from safetensors.torch import load_file, save_file
sys.modules["collabify"] = None
model, out = map(Path, sys.argv[1:])
load = transformers.AutoModelForSequenceClassification
told = {}
GPTQ = transformers.GPTQConfig(bits=4)
for kind in ("none", "newer", "layer", "lost", "whole", "random", "quantised"):
    folder = out / kind
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    record = config["quantization_config"]
    if kind == "none":
        del config["quantization_config"]
    elif kind == "newer":
        record["version"] = 2
    elif kind == "layer":
        record["layers"][0]["index"] = 7
    elif kind == "lost":
        state = load_file(folder / "model.safetensors")
        del state["bert.encoder.layer.1.attention.self.mixing"]
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    elif kind == "whole":
        state = load_file(folder / "model.safetensors")
        name = "bert.encoder.layer.1.attention.self.mixing"
        state[name] = state[name].long()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    try:
        if kind == "random":
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
            load.from_config(config, trust_remote_code=True)
        options = {"quantization_config": GPTQ} if kind == "quantised" else {}
        load.from_pretrained(folder, trust_remote_code=True, **options)
    except Exception as error:
        told[kind] = f"{type(error).__name__}: {error}"
(out / "told.json").write_text(json.dumps(told))
"""


def test_it_refuses_as_collabify_does(alone: Any, tmp_path: Path) -> None:
    out = tmp_path / "odd"
    out.mkdir()
    child = apart(ODD, alone[1], out, cwd=out)
    assert child.returncode == 0, child.stderr
    told = json.loads((out / "told.json").read_text())
    option = told.pop("quantised")
    assert re.match(
        r"OptionError: quantization_config=GPTQConfig must not be given for '.*odd/qu", option
    )
    assert all(line.startswith(f"{CheckpointError.__name__}: ") for line in told.values())
    assert "has no record of collabify" in told["none"]
    assert "version=2 must be 1" in told["newer"]
    assert "names layer 7, but the model has 2" in told["layer"]
    assert "attention.self.mixing' is not in the checkpoint" in told["lost"]
    assert "holds I64 and must hold numbers in floating" in told["whole"]
    assert "cannot start from random weights" in told["random"]


LATE = """
import sys, transformers
model = transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
import collabify
try:
    collabify.find_attention(model)
except collabify.CollabifyError as error:
    print(type(error).__name__, error)
"""


def test_collabify_does_not_take_such_a_model_for_an_original(alone: Any, tmp_path: Path) -> None:
    child = apart(LATE, alone[1], cwd=tmp_path, PYTHONPATH=str(Path(collabify.__file__).parents[1]))
    assert child.stdout.startswith(UnsupportedModelError.__name__), child.stderr
    assert "Import collabify before loading it" in child.stdout


def test_push_takes_the_code_along(tmp_path: Path) -> None:
    folder = make(tmp_path)
    plain = json.loads(done("push", folder, "me/tiny", "--dry-run", "--json").stdout)
    assert "modeling_collabify.py" not in plain["files"]
    assert "trust_remote_code" not in plain["readme"]
    outcome = json.loads(
        done("push", folder, "me/tiny", "--dry-run", "--json", "--standalone").stdout
    )
    assert outcome["files"]["modeling_collabify.py"] == len(storage.modeling().encode())
    loading = (
        'AutoModelForSequenceClassification.from_pretrained("me/tiny", trust_remote_code=True)'
    )
    assert loading in outcome["readme"]
    sent = storage.package(folder, "me/tiny", standalone=True).files
    config = sent["config.json"]
    assert isinstance(config, bytes)
    assert "AutoModelForSequenceClassification" in json.loads(config)["auto_map"]
    assert "auto_map" not in json.loads((folder / "config.json").read_text()), "DIR stays"
    collabify.write_standalone(folder)
    (folder / "modeling_collabify.py").write_text("print('not ours')")
    again = storage.package(folder, "me/tiny").files
    assert again["modeling_collabify.py"] == storage.modeling().encode()


def test_the_code_goes_with_the_push_that_comes_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path)
    with serving() as hub:
        patch(hub, tmp_path / "home", monkeypatch)
        done("push", folder, "me/tiny", "--standalone")
        assert "modeling_collabify.py" in hub.files("me/tiny")
        again = json.loads(done("push", folder, "me/tiny", "--json").stdout)["pushed"]
        assert again["deleted"] == ["modeling_collabify.py"]
        files = hub.files("me/tiny")
    assert "modeling_collabify.py" not in files
    assert "auto_map" not in json.loads(files["config.json"])


FROM_HUB = """
import sys, torch, transformers
sys.modules["collabify"] = None
torch.set_num_threads(1)
def outputs(auto, name, **options):
    model = getattr(transformers, auto).from_pretrained(name, trust_remote_code=True, **options)
    for parameter in model.eval().parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        return model(**torch.load(sys.argv[1]).get(name))[0]
text = outputs("AutoModelForSequenceClassification", "me/tiny")
maps = outputs("AutoBackbone", "me/seen")
below = outputs("AutoModel", "me/seen", subfolder="below")
torch.save((text, maps[0], below), sys.argv[2])
"""


def test_it_comes_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backbones, too, which transformers finds nowhere else, and folders beside the code."""
    folder, seen = make(tmp_path), tmp_path / "seen"
    model = TINY["dinov2"].build()
    convert(model, **LOW["cp"])
    batches = {"me/tiny": {"input_ids": torch.arange(5, 19).reshape(2, 7)}}
    batches["me/seen"] = TINY["dinov2"].batch(model)
    below = bring(model, batches["me/seen"], seen)["body"]
    torch.save(batches, tmp_path / "batches.pt")
    with serving() as hub:
        patch(hub, tmp_path / "home", monkeypatch)
        done("push", folder, "me/tiny", "--standalone")
        files = files_of(seen)
        hub.add("me/seen", files | {f"below/{name}": files[name] for name in files})
        own = environment(hub, tmp_path / "other", OWNER) | {"HF_HUB_OFFLINE": "0"}
        out = tmp_path / "outputs.pt"
        child = apart(FROM_HUB, tmp_path / "batches.pt", out, cwd=tmp_path, **own)
    assert child.returncode == 0, child.stderr
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    backbone = aligned(transformers.Dinov2Backbone.from_pretrained(seen).eval())
    with torch.no_grad():
        text = aligned(model)(**batches["me/tiny"]).logits
        (maps,) = backbone(**batches["me/seen"]).feature_maps
    for found, here in zip(torch.load(out), (text, maps, below), strict=True):
        assert torch.equal(found, here)
