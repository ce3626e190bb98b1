"""Models by their names on the Hub: revisions, private ones, caches, for every command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_cases import CARD, QUICK, cli, done, files_of
from hub_server import OWNER, READER, Hub, environment, patch, serving
from huggingface_hub import ModelCard
from tiny_tasks import FAST, write_model, write_task
from transformers import AutoModel

NAME = "them/tiny"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a model, and a task."""
    made = tmp_path_factory.mktemp("ids")
    names = {"id2label": {0: "negative", 1: "positive"}}
    write_model(made / "old", num_labels=2, intermediate_size=31, **names)
    write_model(made / "new", num_labels=2, **names)
    (made / "new" / "README.md").write_text(CARD)
    write_task(made / "glue", "sst2", {"train": 32, "validation": 16})
    return made


@pytest.fixture
def hub(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    with serving() as running:
        patch(running, tmp_path / "home", monkeypatch)
        old = running.add(NAME, files_of(root / "old"))
        running.add(NAME, files_of(root / "new"))
        running.repos[NAME].branches["v1"] = old
        yield running


def commit(hub: Hub, revision: str) -> str:
    return hub.repos[NAME].branches[revision]


def test_convert_records_the_commit_and_carries_the_licence(hub: Hub, tmp_path: Path) -> None:
    done("convert", NAME, *QUICK, "--out", tmp_path / "main")
    record = json.loads((tmp_path / "main" / "collabify.json").read_text())
    assert (record["source"], record["revision"]) == (NAME, commit(hub, "main"))
    assert record["base"] == {"license": "mit", "language": ["en", "de"]} | {
        "datasets": ["someone/texts"]
    }
    assert (tmp_path / "main" / "tokenizer.json").is_file()
    assert not (tmp_path / "main" / "README.md").exists()
    done("convert", NAME, *QUICK, "--revision", "v1", "--out", tmp_path / "v1")
    record = json.loads((tmp_path / "v1" / "collabify.json").read_text())
    assert (record["source"], record["revision"]) == (NAME, commit(hub, "v1"))
    assert "base" not in record
    for name, size in (("main", 29), ("v1", 31)):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["intermediate_size"] == size
    pushed = done("push", tmp_path / "main", "me/x", "--dry-run", "--json")
    text = json.loads(pushed.stdout)["readme"]
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == (NAME, "finetune")
    assert f"collabify convert {NAME} " in text
    assert f"--revision {commit(hub, 'main')} " in text


def test_analyze_and_eval_read_the_revision(hub: Hub, root: Path) -> None:
    for revision in ("v1", commit(hub, "v1")):
        report = json.loads(
            done("analyze", NAME, "--revision", revision, "--calibration", "none", "--json").stdout
        )
        assert (report["source"], report["revision"]) == (NAME, commit(hub, "v1"))
    (root / "texts.txt").write_text("\n".join(f"w{i} w{i + 1} w3" for i in range(25)))
    done("analyze", NAME, "--revision", "v1", "--calibration", root / "texts.txt", "--samples", 9)
    assert hub.count(f"GET /{NAME}/resolve/{commit(hub, 'v1')}/tokenizer.json")
    assert not [line for line in hub.log if "/main/" in line], "the tokenizer is of v1 too"
    glue = ("--task", "sst2", "--data", root / "glue", "--resamples", 2, "--json")
    at, main = (
        json.loads(done("eval", "glue", NAME, *more, *glue).stdout)["tasks"][0]["scores"]
        for more in (("--revision", "v1"), ())
    )
    old, new = (
        json.loads(done("eval", "glue", root / name, *glue).stdout)["tasks"][0]["scores"]
        for name in ("old", "new")
    )
    assert (at, main) == (old, new)
    drift = ("--data", "synthetic", "--samples", 4, "--max-length", 8, "--json")
    for more, same in (((), True), (("--revision", "v1"), False)):
        found = done("eval", "drift", NAME, "--baseline", root / "new", *more, *drift)
        assert (json.loads(found.stdout)["hidden_error"] < 1e-6) == same


def test_eval_image_reads_the_revision(hub: Hub, tmp_path: Path) -> None:
    from tiny_tasks import write_images

    write_images(tmp_path / "photos", {"test": 4})
    labels = {"id2label": {0: "red", 1: "blue"}, "num_labels": 2}
    first = hub.add("them/seer", files_of(write_model(tmp_path / "one", "vit", **labels)))
    hub.add("them/seer", {"config.json": b"{}"})
    look = ("--data", tmp_path / "photos", "--resamples", 2, "--json")
    assert json.loads(done("eval", "image", "them/seer", "--revision", first, *look).stdout)
    assert cli("eval", "image", "them/seer", *look).exit_code == 1


def test_finetune_and_heal_take_names(hub: Hub, root: Path, tmp_path: Path) -> None:
    fast = [f"--{name.replace('_', '-')}={value}" for name, value in (FAST | {"epochs": 1}).items()]
    task = ("--task", "sst2", "--data", root / "glue", "--device", "cpu", *fast)
    done("finetune", NAME, *task, "--revision", "v1", "--out", tmp_path / "tuned")
    record = json.loads((tmp_path / "tuned" / "collabify.json").read_text())["finetuning"]
    assert (record["source"], record["revision"]) == (NAME, commit(hub, "v1"))
    assert record["converted"] is False
    done("convert", NAME, *QUICK, "--out", tmp_path / "made")
    done("push", tmp_path / "made", "me/made")
    steps = ("--samples", 32, "--max-length", 12, "--steps", 2, "--batch-size", 8)
    done("heal", "me/made", *steps, "--out", tmp_path / "healed")
    record = json.loads((tmp_path / "healed" / "collabify.json").read_text())
    assert record["healing"]["teacher"] == NAME
    assert record["base"]["license"] == "mit"
    done("finetune", "me/made", *task, "--out", tmp_path / "again")
    record = json.loads((tmp_path / "again" / "collabify.json").read_text())
    assert record["finetuning"]["converted"] is True
    assert record["source"] == NAME, "the record of the conversion comes along"


COMMANDS: list[tuple[Any, ...]] = [
    ("analyze",),
    ("convert", "--dk", 8, "--out", "out"),
    ("eval", "glue", "--task", "sst2", "--data", "glue"),
    ("eval", "image", "--data", "photos"),
    ("eval", "drift", "--baseline", "demo", "--data", "synthetic"),
    ("finetune", "--task", "sst2", "--data", "glue", "--out", "out"),
    ("info",),
]


def call(command: tuple[Any, ...], name: object, *more: object) -> Any:
    verbs = 2 if command[0] == "eval" else 1
    return cli(*command[:verbs], name, *command[verbs:], *more)


def refused(outcome: Any, code: int, said: str) -> None:
    assert (outcome.exit_code, outcome.stdout) == (code, ""), outcome.stderr
    assert said in outcome.stderr
    assert outcome.stderr.count("\n") == 1, outcome.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(map(str, words[:2])))
def test_names_and_revisions_that_are_not_there(
    command: tuple[Any, ...],
    hub: Hub,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root)
    refused(call(command, NAME, "--revision", "v7"), 1, "no such branch, tag or commit. Change")
    refused(call(command, "them/nothing"), 1, "'them/nothing' does not exist, or is private and")
    said = "revision='v1' is for models on the Hub, and 'new' is on this machine. Leave out"
    refused(call(command, "new", "--revision", "v1"), 2, said)
    hub.repos[NAME].private = True
    monkeypatch.delenv("HF_TOKEN")
    said = f"'{NAME}' does not exist, or is private and there is no token. Check its name, or run"
    refused(call(command, NAME), 1, said)
    monkeypatch.setenv("HF_TOKEN", READER)
    said = f"'{NAME}' does not exist, or is private and this token may not see it. Check its name"
    refused(call(command, NAME), 1, said)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(call(command, NAME), 1, NAME)


def test_the_record_is_of_the_revision_that_was_loaded(hub: Hub, tmp_path: Path) -> None:
    for number, rank in enumerate((8, 12)):
        out = tmp_path / f"made-{number}"
        done("convert", NAME, *QUICK, "--dk", rank, "--out", out)
        hub.add("me/made", files_of(out))
    first, last = hub.repos["me/made"].commits
    for revision, rank in ((None, 12), (first, 8), (last, 12)):
        at = {} if revision is None else {"revision": revision}
        model = AutoModel.from_pretrained("me/made", **at)
        model.save_pretrained(tmp_path / "saved")
        record = json.loads((tmp_path / "saved" / "collabify.json").read_text())
        assert record["options"]["dk"] == rank
        assert "_commit_hash" not in (tmp_path / "saved" / "config.json").read_text()


def test_a_gated_model_says_where_consent_is_given(hub: Hub) -> None:
    hub.gated.add(NAME)
    for command in (("info", NAME), ("analyze", NAME)):
        refused(cli(*command), 1, f"'{NAME}' asks for consent on its page first. Give it, then")


def test_home_offline_and_token_are_honoured(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    hub.repos[NAME].private = True
    home = tmp_path / "own home"

    def info(**more: str) -> subprocess.CompletedProcess[str]:
        own = environment(hub, home, None) | more
        command = [sys.executable, "-m", "collabify", "analyze", NAME, "--calibration", "none"]
        return subprocess.run(
            command, env=os.environ | own, capture_output=True, text=True, check=False
        )

    found = info(HF_TOKEN=OWNER)
    assert found.returncode == 0, found.stderr
    assert list((home / "hub" / "models--them--tiny" / "snapshots").iterdir())
    asked = len(hub.log)
    offline = info(HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, found.stdout), offline.stderr
    assert len(hub.log) == asked, "what is in the cache needs no network"
