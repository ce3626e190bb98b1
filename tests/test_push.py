"""``collabify push`` against a Hub on this machine."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hub_cases import cli, done, make, record_of
from hub_server import OWNER, READER, Hub, environment, patch, serving
from huggingface_hub import ModelCard
from tiny_models import LOW, TINY, assert_same

import collabify
from collabify.errors import CollabifyWarning, HubError
from collabify.hub import told
from collabify.modelcard import is_generated

NAME = "me/tiny-10"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("push"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
        patch(running, tmp_path / "home", monkeypatch)
        yield running


def test_it_pushes_all_that_belongs_to_the_model_in_one_commit(hub: Hub, folder: Path) -> None:
    outcome = done("push", folder, NAME, "--message", "First of all")
    files = hub.files(NAME)
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    ours = {"config.json", "model.safetensors", "collabify.json", "README.md", "figure.png"}
    assert set(files) == {".gitattributes"} | tokenizer | ours
    for name in {"config.json", "model.safetensors", "figure.png"} | tokenizer:
        assert files[name] == (folder / name).read_bytes()
    assert hub.repos[NAME].messages == ["initial commit", "First of all"]
    assert not hub.repos[NAME].private
    assert "Left out: .env, checkpoint-1/optimizer.pt, notes.txt." in outcome.stdout
    assert f"Pushed: {hub.url}/{NAME}" in outcome.stdout
    assert f"AutoModelForSequenceClassification.from_pretrained('{NAME}')" in outcome.stdout


def test_the_card_is_valid_and_says_nothing_of_this_machine(hub: Hub, folder: Path) -> None:
    done("push", folder, NAME)
    files = hub.files(NAME)
    text = files["README.md"].decode()
    card = ModelCard(text)
    card.validate()
    data = card.data.to_dict()
    assert (data["license"], data["language"]) == ("mit", ["en", "de"])
    assert data["datasets"] == ["someone/texts"]
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-classification")
    assert data["tags"] == ["collabify", "collaborative-attention"]
    assert "base_model" not in data
    assert "model-index" not in data
    for name, content in files.items():
        assert b"secret" not in content, name
        assert str(folder.parent).encode() not in content, name
    assert "`./original`" in text
    assert "texts of texts.txt" in text
    record = record_of(files)
    assert (record["source"], record["options"]["calibration"]) == ("./original", "./texts.txt")
    mine = json.loads((folder / "collabify.json").read_text())
    assert mine["source"].endswith("secret/original"), "the record in DIR stays as it is"
    assert record["parameters"] == mine["parameters"]


def test_it_loads_elsewhere_and_is_the_same(hub: Hub, folder: Path, tmp_path: Path) -> None:
    done("push", folder, NAME)
    loaded = load_elsewhere(hub, tmp_path, NAME, OWNER)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    model.eval()
    ids = torch.arange(5, 19).reshape(2, 7)
    with torch.no_grad():
        assert torch.equal(loaded, clone(model)(input_ids=ids).logits)


LOADER = """
import sys, torch, collabify, transformers
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
cls = transformers.AutoModelForSequenceClassification
model = cls.from_pretrained(sys.argv[1]).eval()
for parameter in model.parameters():
    parameter.data = parameter.data.clone()
with torch.no_grad():
    torch.save(model(input_ids=torch.arange(5, 19).reshape(2, 7)).logits, sys.argv[2])
"""


def clone(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def load_elsewhere(hub: Hub, tmp_path: Path, name: str, token: str | None) -> torch.Tensor:
    out = tmp_path / "logits.pt"
    own = environment(hub, tmp_path / "other-home", token)
    subprocess.run([sys.executable, "-c", LOADER, name, out], env=os.environ | own, check=True)
    return torch.load(out)


def test_pushing_again_changes_what_changed(hub: Hub, folder: Path) -> None:
    done("push", folder, NAME)
    sent, commits = hub.count("PUT"), len(hub.repos[NAME].commits)
    outcome = json.loads(done("push", folder, NAME, "--json").stdout)
    assert (hub.count("PUT"), len(hub.repos[NAME].commits)) == (sent, commits)
    assert outcome["pushed"]["commit"] == hub.repos[NAME].branches["main"]
    (folder / "figure.png").write_text("another")
    done("push", folder, NAME)
    assert hub.files(NAME)["figure.png"] == b"another"
    assert hub.count("PUT") == sent, "the weights are not sent again"


def test_weights_of_an_earlier_push_never_stay_beside_new_ones(hub: Hub, folder: Path) -> None:
    done("push", folder, NAME)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    outcome = done("push", folder, NAME)
    shards = {name for name in hub.files(NAME) if name.endswith(".safetensors")}
    assert len(shards) > 1
    assert "model.safetensors" not in shards
    assert "Deleted there, of an earlier push: model.safetensors." in outcome.stdout
    assert_same(transformers.AutoModelForSequenceClassification.from_pretrained(NAME), model, IDS)


IDS = {"input_ids": torch.arange(5, 19).reshape(2, 7)}


def test_private(hub: Hub, folder: Path, tmp_path: Path) -> None:
    done("push", folder, NAME, "--private")
    assert hub.repos[NAME].private
    assert load_elsewhere(hub, tmp_path, NAME, OWNER).shape == (2, 2)
    hub.repos[NAME].private = False
    outcome = cli("push", folder, NAME, "--private")
    assert outcome.exit_code == 1
    assert "is there already, and everybody can see it." in one_line(outcome)


def test_a_branch_and_a_pull_request(hub: Hub, folder: Path) -> None:
    done("push", folder, NAME, "--revision", "smaller")
    assert set(hub.repos[NAME].branches) == {"main", "smaller"}
    assert "model.safetensors" not in hub.files(NAME)
    assert "model.safetensors" in hub.files(NAME, "smaller")
    outcome = done("push", folder, NAME, "--revision", "smaller")
    assert f"Pushed: {hub.url}/{NAME}/tree/smaller" in outcome.stdout
    hub.add("them/theirs", {"config.json": b"{}"})
    outcome = done("push", folder, "them/theirs", "--create-pr")
    assert f"Proposed: {hub.url}/them/theirs/discussions/1" in outcome.stdout
    assert set(hub.files("them/theirs")) == {"config.json"}
    assert "model.safetensors" in hub.files("them/theirs", "refs/pr/1")
    hub.add("me/theirs", {"config.json": b"{}", "README.md": b"Of the original."})
    done("push", folder, "me/theirs", "--revision", "smaller")
    assert is_generated(hub.files("me/theirs", "smaller")["README.md"].decode())
    assert hub.files("me/theirs")["README.md"] == b"Of the original."
    outcome = cli("push", folder, "me/theirs", "--revision", "refs/pr/7")
    assert "'me/theirs' has no such branch, tag or commit. Change" in one_line(outcome)
    outcome = cli("push", folder, NAME, "--create-pr", "--revision", "smaller")
    assert (outcome.exit_code, "Leave out --revision or --create-pr." in one_line(outcome)) == (
        2,
        True,
    )


def test_a_dry_run_sends_nothing(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    outcome = done("push", folder, NAME, "--dry-run")
    assert "Dry run: nothing was sent." in outcome.stdout
    assert "# tiny-10" in outcome.stdout
    report = json.loads(done("push", folder, NAME, "--dry-run", "--json").stdout)
    size = (folder / "model.safetensors").stat().st_size
    assert report["files"]["model.safetensors"] == size
    assert report["files"]["README.md"] == len(report["readme"].encode())
    assert (report["pushed"], report["card"]) == (None, "generated")
    assert is_generated(report["readme"])
    assert hub.log == []
    assert not (folder / "README.md").exists()


def test_a_card_that_somebody_wrote_stays(hub: Hub, folder: Path) -> None:
    done("push", folder, NAME)
    ours = hub.files(NAME)["README.md"]
    (folder / "README.md").write_bytes(ours)  # as it comes back with a download
    record = json.loads((folder / "collabify.json").read_text())
    record["base"]["license"] = "apache-2.0"
    (folder / "collabify.json").write_text(json.dumps(record))
    done("push", folder, NAME)
    assert b"license: apache-2.0" in hub.files(NAME)["README.md"], "written anew"
    edited = ours.replace(b"# tiny-10", b"# My tiny model")
    hub.add(NAME, hub.files(NAME) | {"README.md": edited})
    (folder / "README.md").unlink()
    outcome = done("push", folder, NAME, "--message", "once more")
    assert "The card on the Hub was edited, and stays." in outcome.stdout
    assert hub.files(NAME)["README.md"] == edited
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    outcome = done("push", folder, NAME)
    assert "README.md goes as it is in DIR" in outcome.stdout
    assert hub.files(NAME)["README.md"] == b"---\nlicense: mit\n---\nMine.\n"
    (folder / "README.md").write_text("---\ndatasets: [a, b]\nmodel-index: 7\n---\nMine.\n")
    outcome = cli("push", folder, NAME)
    assert outcome.exit_code == 1
    assert "does not take the metadata of README.md (" in one_line(outcome)


def one_line(outcome: Any) -> str:
    assert outcome.stdout == ""
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    assert outcome.stderr.startswith("Error: ")
    return str(outcome.stderr)


def no_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")


def wrong_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")


def read_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)


def read_token_and_a_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    hub.add(NAME, {})


def offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def a_data_set(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, {}, kind="dataset")


def another_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, {"config.json": b"{}", "model.safetensors": b""})


def taken(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.answers["POST /api/models/me/tiny-10/preupload"] = (409, "This name is being renamed")


def gone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.answers["POST /api/models/me/tiny-10/preupload"] = (404, "Repository not found")


def changed_meanwhile(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.answers["POST /api/models/me/tiny-10/commit"] = (412, "A commit has happened since.")


def too_large(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.answers["PUT /lfs"] = (413, "Payload Too Large")


def out_of_order(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.answers["POST /api/models/me/tiny-10/commit"] = (500, "Internal Error")


def no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def cut_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.broken["PUT /lfs"] = 100


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (no_token, "There is no token to push to 'me/tiny-10' with. Run: hf auth login, or"),
        (wrong_token, "The Hub does not know this token (Invalid credentials"),
        (read_token, "This token may not write to 'me/tiny-10' (You don't have the rights"),
        (read_token_and_a_repository, "This token may not write to 'me/tiny-10' (Forbidden"),
        (offline, "HF_HUB_OFFLINE is set, so 'me/tiny-10' cannot be pushed to. Unset it"),
        (a_data_set, "'me/tiny-10' is the name of a dataset already. Choose another name."),
        (another_model, "holds a model that collabify did not make. Choose another name, a new"),
        (taken, "'me/tiny-10' is taken (This name is being renamed). Choose another name."),
        (gone, "The Hub answered 404 to 'me/tiny-10' (Repository not found). Try the same"),
        (changed_meanwhile, "'me/tiny-10' was changed by somebody else meanwhile. Run the same"),
        (too_large, "does not take a file of this size to 'me/tiny-10' (Payload Too Large). Save"),
        (out_of_order, "The Hub answered 500 to 'me/tiny-10' (Internal Error). Try the same"),
        (no_network, "The connection to http://127.0.0.1:9 broke off at 'me/tiny-10' ("),
        (cut_off, "Run the same command again: what was uploaded is not sent twice."),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(
    trouble: Callable[[Hub, pytest.MonkeyPatch], None],
    said: str,
    hub: Hub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trouble(hub, monkeypatch)
    before = {name: dict(repo.commits) for name, repo in hub.repos.items()}
    outcome = cli("push", folder, NAME)
    assert outcome.exit_code == 1
    assert said in one_line(outcome)
    for name, repo in hub.repos.items():
        kept = before.get(name) or {sha: {".gitattributes": b""} for sha in repo.commits}
        assert repo.commits == kept, "nothing half pushed"


def test_a_batch_that_is_refused() -> None:
    message = "LFS batch API returned errors:\nEncountered error for file with OID 1: `Too big"
    with pytest.raises(HubError, match=r"of this size to 'me/x' \(Too big\)\. Save"), told("me/x"):
        raise ValueError(message)


def test_after_an_interruption_the_same_command_goes_on(hub: Hub, folder: Path) -> None:
    hub.answers["POST /api/models/me/tiny-10/commit"] = (503, "down")
    assert cli("push", folder, NAME).exit_code == 1
    sent = hub.count("PUT")
    assert sent == len(hub.stored) > 0
    assert set(hub.files(NAME)) == {".gitattributes"}, "a repository without half a model"
    hub.answers.clear()
    done("push", folder, NAME)
    assert hub.count("PUT") == sent, "what was uploaded is not sent twice"
    assert hub.files(NAME)["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def test_a_connection_that_breaks_for_a_moment_is_taken_up(hub: Hub, folder: Path) -> None:
    hub.broken["PUT /lfs"] = 2
    done("push", folder, NAME)
    assert hub.files(NAME)["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def spoil(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "has no config.json. Give a folder that collabify convert wrote."),
        ("config.json", b"{", "config.json' cannot be read ("),
        ("config.json", b"[]", "config.json' cannot be read (it holds no JSON object). Make"),
        ("config.json", b'{"model_type": "bert"}', "was not converted. Convert it first:"),
        ("model.safetensors", None, "has no model.safetensors. Give a folder that"),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}", "'model.safetensors' of '"),
        ("collabify.json", None, "has no collabify.json, of which its card is written."),
        ("collabify.json", b"{", "collabify.json' cannot be read ("),
        ("collabify.json", b'{"version": 1, "layers": [7]}', "(layers[0] must be an object)"),
    ],
)
def test_what_is_no_converted_model_is_refused(
    name: str, content: bytes | None, said: str, hub: Hub, folder: Path
) -> None:
    spoil(folder, name, content)
    outcome = cli("push", folder, NAME)
    assert outcome.exit_code == 1
    assert said in one_line(outcome)
    assert hub.log == []


def test_a_truncated_model_and_an_index_that_lies_are_refused(hub: Hub, folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    spoil(folder, "model.safetensors", whole[:-1])
    assert "is missing or damaged" in one_line(cli("push", folder, NAME))
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for content, said in (
        ("{", "cannot be used ("),
        ('{"weight_map": {"a": "../secret/original/model.safetensors"}}', "names files elsewhere"),
        ('{"weight_map": {"a": "model-1.safetensors"}}', "'model-1.safetensors' of '"),
    ):
        index.write_text(content)
        assert said in one_line(cli("push", folder, NAME))
    assert hub.log == []


@pytest.mark.parametrize("name", ["tiny", "me/tiny/10", "me/--", "me/a b", "me/x.git"])
def test_invalid_names_are_a_mistake_of_usage(name: str, hub: Hub, folder: Path) -> None:
    outcome = cli("push", folder, name)
    assert outcome.exit_code == 2
    assert f"'{name}' must be USER/NAME" in one_line(outcome)
    assert hub.log == []


# huggingface_hub gives httpx its files in the way of requests.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
@pytest.mark.parametrize("loaded", [False, True], ids=["converted", "loaded"])
def test_push_to_hub_of_transformers_takes_record_and_card_along(
    loaded: bool, hub: Hub, folder: Path
) -> None:
    cls = transformers.AutoModelForSequenceClassification
    if loaded:
        model = cls.from_pretrained(folder)
    else:
        model = TINY["bert"].build(headed=True)
        collabify.convert(model, **LOW["cp"])
    model.push_to_hub(NAME, tags=["mine"])
    files = hub.files(NAME)
    assert {"config.json", "model.safetensors", "collabify.json", "README.md"} <= set(files)
    text = files["README.md"].decode()
    assert is_generated(text)
    tags = ModelCard(text).data.tags
    assert tags == ["collabify", "collaborative-attention", "mine"]
    assert b"secret" not in files["collabify.json"] + files["README.md"]
    assert_same(cls.from_pretrained(NAME), model, IDS)
    edited = text.replace("# tiny-10", "# My tiny model").encode()
    hub.add(NAME, files | {"README.md": edited})
    model.push_to_hub(NAME)
    assert b"# My tiny model" in hub.files(NAME)["README.md"]
    model.save_pretrained(folder.parent / "saved", push_to_hub=True, repo_id="me/other")
    assert is_generated(hub.files("me/other")["README.md"].decode())
    assert hub.files("me/other")["collabify.json"] == files["collabify.json"]


def test_models_stay_what_they_were_in_all_other_ways(tmp_path: Path) -> None:
    model = TINY["bert"].build(headed=True)
    cls = type(model)
    collabify.convert(model, **LOW["cp"])
    assert isinstance(model, cls)
    assert (type(model).__name__, type(model).__module__) == (cls.__name__, cls.__module__)
    for other in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert_same(other, model, TINY["bert"].batch(model))
    model.save_pretrained(tmp_path / "one")
    record = json.loads((tmp_path / "one" / "collabify.json").read_text())
    assert record["method"] == "cp"
    assert record["versions"]["collabify"] == collabify.__version__
    loaded = cls.from_pretrained(tmp_path / "one")
    shutil.rmtree(tmp_path / "one")
    loaded.save_pretrained(tmp_path / "two")
    assert json.loads((tmp_path / "two" / "collabify.json").read_text()) == record
    plain = TINY["bert"].build()
    plain.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "collabify.json").exists()


def test_healing_in_python_is_in_the_record(tmp_path: Path) -> None:
    model, original = TINY["bert"].build(), TINY["bert"].build()
    collabify.convert(model, **LOW["cp"])
    report = collabify.heal(model, original, samples=16, max_length=8, steps=2, batch_size=8)
    model.save_pretrained(tmp_path)
    found = json.loads((tmp_path / "collabify.json").read_text())["healing"]
    assert found == json.loads(report.to_json())


def test_a_record_that_cannot_be_read_keeps_no_model_from_loading(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "collabify.json").write_text("{")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.warns(CollabifyWarning, match="cannot be read .* It is saved without that"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "collabify.json").exists()
