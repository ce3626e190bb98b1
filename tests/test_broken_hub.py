"""Broken models and answers of the Hub, and what is not there: the right reason in one line."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hub_cases import CARD, QUICK, cli, done, files_of
from hub_server import Hub, patch, serving
from safetensors.torch import load_file, save
from tiny_tasks import write_model
from transformers import AutoModel

from collabify.errors import CheckpointError

MIXING = "bert.encoder.layer.1.attention.self.mixing"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DRIFT = ("--data", "synthetic", "--samples", 4, "--max-length", 12)
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("broken-hub")
    write_model(made / "original", num_labels=2)
    (made / "original" / "README.md").write_text(CARD)
    done("convert", made / "original", *QUICK, "--out", made / "made")
    return made


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
        patch(running, tmp_path / "home", monkeypatch)
        yield running


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def changed(root: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Files:
    state = load_file(root / "made" / WEIGHTS)
    change(state)
    return files_of(root / "made") | {WEIGHTS: save(state, {"format": "pt"})}


def indexed(files: Files, name: str, content: bytes | None) -> Files:
    """The same weights, in another file that an index names."""
    names = json.dumps({"metadata": {}, "weight_map": {MIXING: name}}).encode()
    rest = {key: value for key, value in files.items() if key != WEIGHTS}
    return rest | {INDEX: names} | ({} if content is None else {name: content})


def pickled(root: Path, tmp_path: Path) -> Files:
    torch.save(load_file(root / "made" / WEIGHTS), tmp_path / "weights.bin")
    content = (tmp_path / "weights.bin").read_bytes()
    return indexed(files_of(root / "made"), "weights.bin", content)


def integers(root: Path, tmp_path: Path) -> Files:
    return changed(root, tmp_path, lambda state: state.update({MIXING: state[MIXING].long()}))


def cut(root: Path, tmp_path: Path) -> Files:
    files = files_of(root / "made")
    return files | {WEIGHTS: files[WEIGHTS][:20_000]}


def climbing(root: Path, tmp_path: Path) -> Files:
    return indexed(files_of(root / "made"), "../../../elsewhere.safetensors", None)


def shard_gone(root: Path, tmp_path: Path) -> Files:
    return indexed(files_of(root / "made"), "model-00001-of-00002.safetensors", None)


BROKEN = {
    pickled: (
        ("info", "drift", "convert"),
        "has weights in 'weights.bin', which is no safetensors",
    ),
    integers: (("info", "drift", "convert"), "holds I64 and must hold numbers in floating point"),
    cut: (("drift", "convert"), "'model.safetensors' of 'me/odd' is missing or damaged"),
    climbing: (("info", "drift", "convert"), "index.json of 'me/odd' cannot be used (it names fil"),
    shard_gone: (("info", "drift"), "'model-00001-of-00002.safetensors' of 'me/odd' "),
}


@pytest.mark.parametrize(
    ("damage", "command"),
    [(damage, command) for damage in BROKEN for command in BROKEN[damage][0]],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_weights_on_the_hub_are_checked_as_in_a_folder(
    damage: Callable[[Path, Path], Files], command: str, root: Path, hub: Hub, tmp_path: Path
) -> None:
    hub.add("me/odd", damage(root, tmp_path))
    commands: dict[str, tuple[Any, ...]] = {
        "info": ("info", "me/odd"),
        "drift": ("eval", "drift", "me/odd", "--baseline", root / "original", *DRIFT),
        "convert": ("convert", "me/odd", *QUICK, "--out", tmp_path / "out"),
    }
    outcome = cli(*commands[command])
    assert outcome.exit_code == 1
    assert BROKEN[damage][1] in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_pickle_of_an_original_on_the_hub_is_not_read(
    root: Path, hub: Hub, tmp_path: Path
) -> None:
    """Nor with a quantizer's help: nothing of it is converted."""
    files, state = files_of(root / "original"), load_file(root / "original" / WEIGHTS)
    torch.save(state, tmp_path / "weights.bin")
    hub.add("me/odd", indexed(files, "weights.bin", (tmp_path / "weights.bin").read_bytes()))
    outcome = cli("convert", "me/odd", *QUICK, "--out", tmp_path / "out")
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (1, 1)
    assert "'weights.bin', which is no safetensors and could be a pickle" in outcome.stderr
    assert not list((tmp_path / "home").rglob("weights.bin")), "it is not even downloaded"


@pytest.mark.parametrize("damage", [pickled, integers])
def test_transformers_itself_is_stopped(
    damage: Callable[[Path, Path], Files], root: Path, hub: Hub, tmp_path: Path
) -> None:
    hub.add("me/odd", damage(root, tmp_path))
    with pytest.raises(CheckpointError, match=r"no safetensors|floating point"):
        AutoModel.from_pretrained("me/odd")


def test_shards_on_the_hub_load(root: Path, hub: Hub, tmp_path: Path) -> None:
    model = transformers.AutoModel.from_pretrained(root / "made")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    hub.add("me/shards", files_of(tmp_path / "sharded"))
    said = json.loads(done("info", "me/shards", "--json").stdout)
    assert len(said["files"]) > 1
    done("eval", "drift", "me/shards", "--baseline", root / "original", *DRIFT)
    again = json.loads(done("info", "me/shards", "--json").stdout)
    assert (again["numbers"], again["files"]) == (said["numbers"], said["files"]), "from the cache"


def test_info_offline_is_of_the_cache(
    root: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/good", files_of(root / "made"))
    before = done("info", "me/good").stdout
    done("eval", "drift", "me/good", "--baseline", root / "original", *DRIFT)
    offline(monkeypatch)
    asked = len(hub.log)
    assert done("info", "me/good").stdout == before
    assert len(hub.log) == asked
    outcome = cli("info", "me/never")
    assert outcome.exit_code == 1
    assert "'me/never' is not in the cache, or not all of it, and HF_HUB_OFFLINE" in outcome.stderr


def test_info_without_a_connection_names_it(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    hub.answers["HEAD /me/good"] = (503, "out of order")
    outcome = cli("info", "me/good")
    assert outcome.exit_code == 1
    assert "The Hub answered 503 to 'me/good' (out of order)." in outcome.stderr
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )
    assert "The connection to " in cli("info", "me/good").stderr


@pytest.mark.parametrize("how", ["offline", "503"])
def test_a_card_that_cannot_be_had_is_told(
    how: str, root: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("them/tiny", files_of(root / "original"))
    done("analyze", "them/tiny", "--calibration", "none")  # into the cache, without the card
    if how == "offline":
        offline(monkeypatch)
    else:
        commit = hub.repos["them/tiny"].branches["main"]
        hub.answers[f"HEAD /them/tiny/resolve/{commit}/README.md"] = (503, "out of order")
    outcome = cli("convert", "them/tiny", *QUICK, "--out", tmp_path / "out")
    assert outcome.exit_code == 0, outcome.stderr
    assert "Licence, language and data sets of 'them/tiny' are not carried over: " in outcome.stderr
    assert "base" not in json.loads((tmp_path / "out" / "collabify.json").read_text())


def test_an_absent_card_is_known_to_be_absent_offline(
    root: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(root / "original")
    del files["README.md"]
    hub.add("them/tiny", files)
    done("convert", "them/tiny", *QUICK, "--out", tmp_path / "online")
    offline(monkeypatch)
    outcome = done("convert", "them/tiny", *QUICK, "--out", tmp_path / "out")
    assert "not carried over" not in outcome.stderr


def test_a_card_that_cannot_be_asked_for_is_not_replaced(
    root: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = b"---\nlicense: mit\n---\n\n# Somebody's own\n"
    hub.add("me/tiny", {"README.md": own, ".gitattributes": b""})
    model = AutoModel.from_pretrained(root / "made")
    hub.answers["HEAD /me/tiny/resolve/main/README.md"] = (503, "out of order")
    with pytest.raises(OSError, match="503"):
        model.push_to_hub("me/tiny")
    assert hub.files("me/tiny")["README.md"] == own


def test_a_card_that_is_no_text_stays(root: Path, hub: Hub) -> None:
    files = {"README.md": b"\xff\xfe\x00", "config.json": b"{}", "collabify.json": b"{}"}
    hub.add("me/tiny", files)
    outcome = done("push", root / "made", "me/tiny")
    assert "The card on the Hub was edited, and stays." in outcome.stdout
    assert hub.files("me/tiny")["README.md"] == b"\xff\xfe\x00"


def test_a_token_with_odd_characters_is_named(
    root: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_töken")
    for command in (("push", root / "made", "me/tiny"), ("info", "me/tiny")):
        outcome = cli(*command)
        assert outcome.exit_code == 1
        assert "The token (HF_TOKEN, or that of hf auth login) has a character" in outcome.stderr


def test_a_full_disk_is_no_broken_connection(
    root: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    hub.add("me/good", files_of(root / "made"))
    monkeypatch.setattr("collabify.hub.hf_hub_download", full)
    outcome = cli("info", "me/good")
    assert "'me/good' cannot be kept in " in outcome.stderr
    assert "(No space left on device). Free space there, or set HF_HOME." in outcome.stderr


def test_answers_that_are_odd_are_no_broken_connection(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*_: Any, **__: Any) -> None:
        raise ValueError("no JSON")

    monkeypatch.setattr("collabify.hub.hf_hub_download", odd)
    outcome = cli("info", "me/good")
    assert "What the Hub says of 'me/good' cannot be used (no JSON). Run the same" in outcome.stderr


def test_a_revision_without_a_name_is_refused(root: Path, hub: Hub, tmp_path: Path) -> None:
    outcome = cli("push", root / "made", "me/tiny", "--revision", "")
    assert (outcome.exit_code, hub.log) == (2, [])
    assert "revision='' must name a branch. Leave out --revision." in outcome.stderr
    for command in (("info",), ("analyze",), ("convert", "--dk", 8, "--out", tmp_path / "out")):
        outcome = cli(command[0], "me/tiny", *command[1:], "--revision", " ")
        assert outcome.exit_code == 2
        assert "revision=' ' must be a branch, tag or commit. Leave out" in outcome.stderr


@pytest.mark.parametrize("link", ["LICENSE", "figures", "tokenizer.json", WEIGHTS])
def test_links_out_of_the_folder_are_not_pushed(
    link: str, root: Path, hub: Hub, tmp_path: Path
) -> None:
    folder, secret = tmp_path / "made", tmp_path / "secret"
    shutil.copytree(root / "made", folder)
    secret.mkdir()
    (secret / "file").write_bytes((folder / WEIGHTS).read_bytes())
    (folder / link).unlink(missing_ok=True)
    (folder / link).symlink_to(secret if link == "figures" else secret / "file")
    outcome = cli("push", folder, "me/tiny")
    assert (outcome.exit_code, hub.log) == (1, [])
    name = "figures/file" if link == "figures" else link
    assert f"{name!r} of {str(folder)!r} is a link to {str(secret / 'file')!r}" in outcome.stderr


def test_links_within_the_folder_and_into_the_cache_are_pushed(
    root: Path, hub: Hub, tmp_path: Path
) -> None:
    hub.add("me/made", files_of(root / "made"))
    done("eval", "drift", "me/made", "--baseline", root / "original", *DRIFT)
    done("info", "me/made")
    (config,) = (tmp_path / "home").rglob("snapshots/*/config.json")
    assert config.is_symlink(), "as the Hub's cache is"
    assert WEIGHTS in done("push", config.parent, "me/tiny", "--dry-run").stdout
    folder = tmp_path / "made"
    shutil.copytree(root / "made", folder)
    (folder / WEIGHTS).rename(folder / "elsewhere")
    (folder / WEIGHTS).symlink_to("elsewhere")
    assert WEIGHTS in done("push", folder, "me/tiny", "--dry-run").stdout


def test_links_out_of_an_original_are_not_copied(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "original", tmp_path / "original")
    (tmp_path / "secret").write_text("of the user")
    (tmp_path / "original" / "LICENSE").symlink_to(tmp_path / "secret")
    outcome = done("convert", tmp_path / "original", *QUICK, "--out", tmp_path / "out")
    assert "'LICENSE' of " in outcome.stderr
    assert "is a link to " in outcome.stderr
    assert not (tmp_path / "out" / "LICENSE").exists()


@pytest.mark.parametrize("odd", [None, "mamba", "gpt2", ["bert"], 3])
def test_standalone_of_an_unknown_kind_is_refused(odd: Any, root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(root / "made", folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": odd}
    if odd is None:
        del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    outcome = cli("push", folder, "me/tiny", "--standalone", "--dry-run")
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.count("\n") == 1
    from collabify.storage import with_auto_map

    with pytest.raises(CheckpointError, match=r"model_type=.* must be one that collabify convert"):
        with_auto_map(config)
