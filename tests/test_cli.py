"""Every command as a user runs it: exit code, text and JSON, on success and on each user error."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel
from typer.testing import CliRunner

import collabify
from collabify.cli.app import app
from collabify.cli.common import spread

HEADS, HEAD_DIM, WIDTH, LAYERS = 3, 8, 24, 2
FULL = HEADS * HEAD_DIM
QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers, with a tokenizer's vocabulary beside it."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = BertConfig(
        vocab_size=31,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=29,
        max_position_embeddings=37,
        initializer_range=0.3,
    )
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])
    )
    return folder


class Outcome:
    def __init__(self, result: Any) -> None:
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: object) -> Outcome:
    result = CliRunner().invoke(app, spread([str(argument) for argument in arguments]))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result)


def collabify_process(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "collabify", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes, **options)


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_analyze_prints_a_table_a_reading_and_a_suggestion(tiny: Path) -> None:
    outcome = run("analyze", tiny)
    assert outcome.code == 0, outcome.err
    rows = [line for line in outcome.out.splitlines() if re.match(r" *[01]  ", line)]
    assert len(rows) == 2 * LAYERS, "of the weights, and where tokens move"
    assert all(f"of {size})" in outcome.out for size in (HEAD_DIM, WIDTH))
    assert "heads alone need" in outcome.out
    assert "--dk" in outcome.out


def test_analyze_json_agrees_with_the_library(tiny: Path) -> None:
    outcome = run("analyze", tiny, "--json", "--layer", 1, "--energy", 0.5, 0.75)
    report = outcome.json
    expected = collabify.analyze(
        BertModel.from_pretrained(tiny), layers=[1], levels=[0.5, 0.75]
    ).to_dict()
    assert report | {"source": None} == json.loads(json.dumps(expected))
    assert [layer["index"] for layer in report["layers"]] == [1]
    assert set(report["layers"][0]["concatenated"]["directions"]) == {"0.5", "0.75"}
    assert report["source"] == str(tiny)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_analyze_draws_the_figure(tiny: Path, tmp_path: Path, suffix: str) -> None:
    figure = tmp_path / f"figure.{suffix}"
    assert run("analyze", tiny, "--plot", figure).code == 0
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert figure.read_bytes().startswith(magic)


def test_convert_writes_a_model_that_loads(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    outcome = run("convert", tiny, "--dk", 10, "--out", out)
    assert outcome.code == 0, outcome.err
    assert "from_pretrained" in outcome.out
    assert {path.name for path in out.iterdir()} >= {
        "collabify.json",
        "config.json",
        "model.safetensors",
        "vocab.txt",
    }
    model = BertModel.from_pretrained(out)
    assert model.encoder.layer[0].attention.self.query.weight.shape == (10, WIDTH)
    assert not list(tmp_path.glob("**/.*"))


def test_convert_json_has_the_promised_keys(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = run("convert", tiny, "--dk", 9, "--layer", 1, "--out", out, "--json", "--seed", 5)
    report = outcome.json
    assert [layer["name"] for layer in report["layers"]] == ["encoder.layer.1.attention.self"]
    assert report["layers"][0]["rank"] == 9
    assert 0 < report["layers"][0]["relative_error"] < 1
    assert report["layers"][0]["seconds"] > 0
    for part in ("query_key", "attention", "model"):
        count = report["parameters"][part]
        assert count["kept"] == count["after"] / count["before"] < 1
    model = BertModel.from_pretrained(out)
    assert report["parameters"]["model"]["after"] == sum(p.numel() for p in model.parameters())
    assert report["options"]["seed"] == 5
    assert set(report["versions"]) >= {"collabify", "torch", "transformers", "tensorly"}
    assert json.loads((out / "collabify.json").read_text()) == {"version": 1} | report


def test_dry_run_counts_what_convert_makes(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("convert", tiny, "--dk", 7, "--method", "tucker", "--head-rank", 2, "--out", out)
    dry = run(*options, "--dry-run", "--json").json
    assert not out.exists()
    assert dry["dry_run"]
    assert dry["layers"][0]["relative_error"] is None
    assert dry["parameters"] == run(*options, "--json").json["parameters"]
    assert "Dry run" in run("convert", tiny, "--dk", 7, "--dry-run").out


@pytest.mark.parametrize("solver", ["factored", "tensorly"])
@pytest.mark.parametrize("method", ["cp", "tucker"])
def test_solvers_and_methods(tiny: Path, tmp_path: Path, method: str, solver: str) -> None:
    out = tmp_path / "out"
    options = ("--dk", 6, "--method", method, "--solver", solver, "--iterations", 30)
    report = run("convert", tiny, *options, "--out", out, "--json").json
    assert (report["method"], report["solver"]) == (method, solver)
    assert all(0 < layer["relative_error"] < 1 for layer in report["layers"])


def test_dtype(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", tiny, "--dk", 6, "--dtype", "bfloat16", "--out", out).code == 0
    tensors = load_file(out / "model.safetensors")
    assert {t.dtype for name, t in tensors.items() if "channels" not in name} == {torch.bfloat16}


def test_overwrite_replaces_a_model_and_only_a_model(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", tiny, "--dk", 6, "--out", out).code == 0
    refused = run("convert", tiny, "--dk", 5, "--out", out)
    assert (refused.code, "--overwrite" in refused.err) == (1, True)
    assert BertModel.from_pretrained(out).encoder.layer[0].attention.self.mixing.shape[1] == 6
    assert run("convert", tiny, "--dk", 5, "--out", out, "--overwrite").code == 0
    assert BertModel.from_pretrained(out).encoder.layer[0].attention.self.mixing.shape[1] == 5
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    assert run("convert", tiny, "--dk", 5, "--out", precious, "--overwrite").code == 1
    assert (precious / "thesis.tex").exists()


def broken(tiny: Path, tmp_path: Path, kind: str) -> Path:
    """A copy of the tiny model with one thing wrong."""
    folder = tmp_path / kind
    shutil.copytree(tiny, folder)
    weights = folder / "model.safetensors"
    if kind == "no-config":
        (folder / "config.json").unlink()
    elif kind == "no-weights":
        weights.unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "bad-json":
        (folder / "config.json").write_text("{")
    elif kind in ("nan", "inf"):
        tensors = load_file(weights)
        tensors[QUERY][0, 0] = float(kind)
        save_file(tensors, weights, metadata={"format": "pt"})
    elif kind == "unknown":
        (folder / "config.json").write_text('{"model_type": "perceptron"}')
    elif kind == "wrong-shape":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 30}))
    return folder


@pytest.mark.parametrize("command", ["analyze", "convert"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no-config", "has no config.json"),
        ("no-weights", "has no model.safetensors"),
        ("truncated", "damaged"),
        ("bad-json", "config.json"),
        ("nan", QUERY),
        ("inf", QUERY),
        ("unknown", "Supported: albert, bert"),
        ("wrong-shape", "has not the shape that its config.json gives"),
    ],
)
def test_broken_models_are_one_line_and_exit_1(
    tiny: Path, tmp_path: Path, command: str, kind: str, said: str
) -> None:
    out = tmp_path / "out"
    options = ("--dk", 5, "--out", out) if command == "convert" else ()
    outcome = run(command, broken(tiny, tmp_path, kind), *options)
    assert_refused(outcome, 1, said)
    assert {path.name for path in tmp_path.iterdir()} == {kind}


def assert_refused(outcome: Outcome, code: int, said: str) -> None:
    assert outcome.code == code
    assert outcome.out == ""
    errors = [line for line in outcome.err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, outcome.err
    assert said in errors[0]
    assert errors[0].endswith((".", "'")), "the way out closes the line"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--dk", FULL + 1), 1, f"dk={FULL + 1} must be between 1 and {FULL}"),
        (("--dk", 5, "--layer", 2), 1, "layer=2 must be between 0 and 1"),
        (("--dk", 5, "--layer", -1), 1, "layer=-1 must be between 0 and 1"),
        (("--dk", 5, "--method", "tucker", "--head-rank", 4), 1, "head_rank=4"),
        (("--dk", 5, "--head-rank", 2), 2, "head_rank=2 goes with method='tucker'"),
        (("--dk", 5, "--method", "head-svd", "--solver", "tensorly"), 2, "head-svd"),
        (("--dk", 5, "--iterations", 0), 2, "iterations=0"),
        (("--dk", 5, "--tol", 1), 2, "tolerance=1.0"),
        (("--dk", 5, "--device", "toaster"), 2, "device='toaster'"),
        (("--dk", 5, "--kept", 0.5), 2, "dk and kept given"),
        ((), 2, "no size given"),
        (("--kept", 0.01), 1, "kept=0.01 must be at least"),
        (("--dk", 5, "--channels", "some"), 2, "channels='some'"),
        (("--dk", 5, "--calibration", "no/such/thing.txt"), 2, "calibration="),
    ],
)
def test_bad_options_write_nothing(
    tiny: Path, tmp_path: Path, options: tuple[object, ...], code: int, said: str
) -> None:
    assert_refused(run("convert", tiny, "--out", tmp_path / "out", *options), code, said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [("--dk", 0), ("--dk", "many"), ("--dk", 5, "--method", "x")])
def test_usage_errors_exit_2(tiny: Path, tmp_path: Path, options: tuple[object, ...]) -> None:
    assert run("convert", tiny, "--out", tmp_path / "out", *options).code == 2
    assert not list(tmp_path.iterdir())


def test_missing_out_is_a_usage_error(tiny: Path) -> None:
    assert_refused(run("convert", tiny, "--dk", 5), 2, "--out is missing")


def test_analyze_options_are_checked(tiny: Path, tmp_path: Path) -> None:
    assert_refused(run("analyze", tiny, "--energy", 95), 2, "energy=95.0")
    assert_refused(run("analyze", tiny, "--plot", tmp_path / "a.gif"), 2, ".png, .svg, .pdf")
    assert_refused(run("analyze", tiny, "--plot", tmp_path / "no" / "a.png"), 1, "is not a folder")


def test_a_converted_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    assert run("convert", tiny, "--dk", 5, "--out", tmp_path / "once").code == 0
    again = run("convert", tmp_path / "once", "--dk", 5, "--out", tmp_path / "twice")
    assert_refused(again, 1, "was converted before")
    assert "M: a head reads" in run("analyze", tmp_path / "once").out


def test_rotary_models_are_refused_by_name(tmp_path: Path) -> None:
    config = ModernBertConfig(
        vocab_size=31,
        pad_token_id=0,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=29,
    )
    ModernBertModel(config).save_pretrained(tmp_path / "rotary")
    outcome = run("convert", tmp_path / "rotary", "--dk", 5, "--out", tmp_path / "out")
    assert_refused(outcome, 1, "RoPE")
    assert "modernbert" in outcome.err


def test_the_source_is_never_overwritten(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    for out in (tmp_path / "model", tmp_path):
        outcome = run("convert", tmp_path / "model", "--dk", 5, "--out", out, "--overwrite")
        assert_refused(outcome, 1, "holds the model to convert")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_out_that_cannot_be_made(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert_refused(run("convert", tiny, "--dk", 5, "--out", file), 1, "is a file")
    assert_refused(run("convert", tiny, "--dk", 5, "--out", "/proc/out"), 1, "cannot be written")


def own_lines(stderr: str) -> list[str]:
    """Without torch's log, to which torchao adds where transformers finds it."""
    return [line for line in stderr.splitlines() if not re.match(r"[IWE]\d{4} \d\d:", line)]


def test_hub_id_without_a_hub(tmp_path: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    process = collabify_process("analyze", "nobody/nothing", env=environment)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    (line,) = own_lines(err)
    assert line.startswith("Error: 'nobody/nothing' is neither a folder nor a model")


def test_a_full_disk_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    """The kernel refuses files beyond a size, as a full disk would."""
    out = tmp_path / "out"
    code = (
        "import resource, sys; import collabify.conversion, collabify.storage;"
        "from collabify.cli.app import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        f"sys.argv = ['collabify', 'convert', {str(tiny)!r}, '--dk', '5', '--out', {str(out)!r}];"
        "main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1, result.stderr
    (line,) = own_lines(result.stderr)
    assert line.startswith(f"Error: {str(out)!r} could not be written")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_nothing_and_exits_130(tiny: Path, tmp_path: Path) -> None:
    endless = ("--solver", "tensorly", "--iterations", 10**8, "--tol", 0)
    # Shells start background jobs with the signal ignored, and children inherit that.
    listening = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    arguments = ("convert", tiny, "--dk", 9, *endless, "--out", tmp_path / "out")
    process = collabify_process(*arguments, **listening)
    deadline = time.monotonic() + 120
    try:
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


HEAVY = ("torch", "transformers", "datasets", "evaluate", "tensorly", "matplotlib")


@pytest.mark.parametrize("arguments", [("--help",), ("analyze", "--help"), ("convert", "--help")])
def test_help_is_light(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from collabify.cli.app import app\n"
        f"try: app({list(arguments)!r})\n"
        f"except SystemExit as e: print(e.code, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.splitlines()[-1] == "0 []", result.stdout + result.stderr
    assert "MODEL" in result.stdout


def test_version() -> None:
    assert run("--version").out.strip() == f"collabify {collabify.__version__}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a m --layer 0 1 2", "a m --layer 0 --layer 1 --layer 2"),
        ("a --energy 0.9 0.95 m", "a --energy 0.9 --energy 0.95 m"),
        ("a --layer 0 --energy 1 --json", "a --layer 0 --energy 1 --json"),
        ("a --layer 0 m 3", "a --layer 0 m 3"),
        ("a --layer=0 1 2 m", "a --layer=0 --layer 1 --layer 2 m"),
        ("a --energy=0.9 0.95 --layer=1 m 3", "a --energy=0.9 --energy 0.95 --layer=1 m 3"),
        ("a --dk=3 4", "a --dk=3 4"),
        ("a --dk 3 4", "a --dk 3 4"),
    ],
)
def test_several_numbers_after_one_option(given: str, expected: str) -> None:
    assert spread(given.split()) == expected.split()
