"""What models cost: a planted clock, exact counts, and everything left as it was."""

import copy
import json
import re
import shutil
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hub_cases import QUICK, cli, done
from tiny_models import LOW, TINY
from tiny_tasks import write_model

import collabify
from collabify import benchmark
from collabify.benchmark import check_alike, size_of
from collabify.cli.common import spread
from collabify.errors import CollabifyError, LabelError, OptionError
from collabify.scoreboard import bench_notes, latency_table


def pair(kind: str = "bert") -> tuple[Any, Any]:
    """A converted model and its original, in training mode."""
    original = TINY[kind].build().train()
    model = copy.deepcopy(original)
    collabify.convert(model, **LOW["cp"])
    return model.train(), original


class Clock:
    """Time that only passes in models: so many seconds a pass, times how slow the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slow = 0.0, 1.0
        self.passes: list[str] = []
        self.inputs: list[dict[str, Any]] = []
        monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def watch(self, name: str, model: Any, seconds: list[float]) -> None:
        """Its n-th pass takes the n-th of the seconds, and so on from the start."""
        count = 0

        def tick(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            nonlocal count
            self.passes.append(name)
            self.inputs.append(kwargs)
            self.now += self.slow * seconds[count % len(seconds)]
            count += 1

        model.register_forward_hook(tick, with_kwargs=True)


def test_medians_and_quartiles_of_interleaved_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = pair()
    clock = Clock(monkeypatch)
    ours = [9.0, 9.0, 3.0, 1.0, 2.0, 5.0, 4.0]  # two passes to warm up, then five rounds
    clock.watch("model", model, ours)
    clock.watch("baseline", original, [9.0, 9.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    report = collabify.bench(model, original, batch_sizes=[3], lengths=[11], repeats=5)
    assert clock.passes == ["baseline", "model"] * 7
    (found,) = report.latencies
    assert (found.batch_size, found.length) == (3, 11)
    assert (found.seconds, found.quartiles) == (3, (2, 4))
    assert (found.baseline_seconds, found.baseline_quartiles) == (4, (4, 4))
    assert (found.over_baseline, found.over_quartiles) == (0.75, (0.5, 1))
    assert report.seconds == sum(ours) + 38
    alone = collabify.bench(model, batch_sizes=[3], lengths=[11], repeats=5).latencies[0]
    assert alone.over_baseline is alone.over_quartiles is alone.baseline_seconds is None
    assert clock.passes[14:] == ["model"] * 7


def test_a_machine_that_slows_down_does_not_change_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, original = pair()
    clock = Clock(monkeypatch)
    clock.watch("model", model, [1.0])
    clock.watch("baseline", original, [2.0])

    def slower(stage: str, done: int, total: int, note: str) -> None:
        clock.slow *= 1.5

    report = collabify.bench(model, original, repeats=4, lengths=[5], progress=slower)
    assert [each.over_baseline for each in report.latencies] == [0.5, 0.5]
    assert all(each.over_quartiles == (0.5, 0.5) for each in report.latencies)


def test_a_model_beside_a_slow_one_in_real_time() -> None:
    model, _ = pair()
    slow = copy.deepcopy(model)
    slow.register_forward_hook(lambda *_: time.sleep(0.2))
    report = collabify.bench(model, slow, repeats=4, batch_sizes=[1])
    (found,) = report.latencies
    assert found.baseline_seconds is not None
    assert found.baseline_seconds > 0.2
    assert found.over_baseline is not None
    assert found.over_baseline < 1
    assert report.size == report.baseline_size
    assert report.machine.processor
    assert json.loads(report.to_json())["latencies"][0]["peak_bytes"] is None


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "albert", "vit", "dinov2"])
def test_shapes_are_what_the_model_takes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY[kind].build()
    clock = Clock(monkeypatch)
    clock.watch("model", model, [1.0])
    report = collabify.bench(model, repeats=4)
    shapes = [(each.batch_size, each.length) for each in report.latencies]
    # 23 positions, of which RoBERTa counts from the one after its padding.
    longest = {"vit": None, "dinov2": None, "roberta": 21}.get(kind, 23)
    assert shapes == [(1, longest), (8, longest)]
    for inputs in clock.inputs:
        if longest is None:
            assert inputs["pixel_values"].shape[1:] == (3, 8, 8)
            continue
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        assert ids.shape[1] == longest
        assert (mask.sum(1) == longest - longest // 8).all()
        assert (ids[mask == 0] == model.config.pad_token_id).all()
        assert (ids[mask == 1] != model.config.pad_token_id).all()


@pytest.mark.parametrize("kind", ["bert", "albert-inner", "vit"])
def test_sizes_are_those_of_the_conversion(kind: str) -> None:
    model, original = copy.deepcopy(TINY[kind].build()), TINY[kind].build()
    said = collabify.convert(model, **LOW["values"])
    for size, when in ((size_of(original), "before"), (size_of(model), "after")):
        for part in ("query_key", "attention", "model"):
            assert getattr(size, part) == getattr(getattr(said, part), when)
    assert size_of(model.half()).bytes < size_of(original).bytes / 1.5


def test_all_is_left_as_it_was() -> None:
    model, original = pair()
    model.pooler.eval()
    original.set_attn_implementation("eager")
    before = torch.get_num_threads()
    modes = [module.training for module in model.modules()]
    seen: list[Any] = []

    def look(module: Any, args: Any) -> None:
        seen.append((torch.get_num_threads(), module.training, module.config._attn_implementation))

    for each in (model, original):
        each.register_forward_pre_hook(look)
    report = collabify.bench(model, original, repeats=4, threads=before + 2)
    assert set(seen) == {(before + 2, False, "sdpa")}
    assert (report.machine.threads, report.attention, report.dtype) == (
        before + 2,
        "sdpa",
        "float32",
    )
    report = collabify.bench(model, original, repeats=4, lengths=[7], attention="eager")
    assert (report.attention, report.machine.threads) == ("eager", before)

    def fail(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    original.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        collabify.bench(model, original, repeats=4, threads=before + 2, attention="eager")
    assert torch.get_num_threads() == before
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert original.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"repeats": 3}, "repeats=3 must be at least 4 for quartiles."),
        ({"threads": 0}, "threads=0 must be at least 1."),
        ({"attention": "abacus"}, "attention='abacus' must be one of eager, sdpa."),
        ({"batch_sizes": [4, 0]}, "batch_size=0 must be at least 1."),
        ({"lengths": [24]}, "length=24 must be between 2 and 23 for model_type='bert'."),
        ({"batch_sizes": []}, "batch_sizes=[] must hold at least one. Leave it out for the usual."),
        ({"lengths": []}, "lengths=[] must hold at least one."),
        ({"lengths": [1]}, "length=1 must be between 2 and 23"),
    ],
)
def test_options_out_of_bounds(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(said)}"):
        collabify.bench(TINY["bert"].build(), **options)


def test_images_have_no_length() -> None:
    with pytest.raises(OptionError, match=r"length=5 is for texts, and model_type='vit' takes"):
        collabify.bench(TINY["vit"].build(), lengths=[5])


def test_only_like_is_compared_with_like() -> None:
    model, original = pair()
    check_alike(model, original)
    cases: list[tuple[Any, type[CollabifyError], str]] = [
        (
            transformers.BertForMaskedLM(TINY["bert"].config()),
            LabelError,
            "is a BertModel and the baseline a BertForMaskedLM, whose head takes time of its own",
        ),
        (TINY["vit"].build(), LabelError, "the baseline a ViT"),
        (copy.deepcopy(original).half(), OptionError, "dtype=torch.float16 of the baseline must"),
        (
            copy.deepcopy(original).to("meta"),
            OptionError,
            "device=meta of the baseline must be cpu",
        ),
    ]
    for baseline, error, said in cases:
        with pytest.raises(error, match=said):
            collabify.bench(model, baseline)
    other = copy.deepcopy(original)
    other.config.num_hidden_layers = 3
    with pytest.raises(LabelError, match="num_hidden_layers=2 and the baseline has 3"):
        collabify.bench(model, other)
    for sizes in ({"intermediate_size": 61}, {"max_position_embeddings": 12}):
        config = TINY["bert"].config()
        config.update(sizes)
        with pytest.raises(
            LabelError, match=r"parameters outside attention and the baseline [\d,]+"
        ):
            collabify.bench(model, transformers.BertModel(config), lengths=[20])


@pytest.mark.parametrize("kind", ["bert", "albert-inner", "distilbert", "vit", "dinov2"])
@pytest.mark.parametrize("form", LOW)
def test_every_conversion_is_like_its_original(kind: str, form: str) -> None:
    original = TINY[kind].build()
    model = copy.deepcopy(original)
    collabify.convert(model, **LOW[form])
    check_alike(model, original)
    check_alike(original, model)


def test_less_than_eight_tokens_are_padded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    clock = Clock(monkeypatch)
    clock.watch("model", model, [1.0])
    report = collabify.bench(model, repeats=4, batch_sizes=[2], lengths=[7])
    assert all((each["attention_mask"].sum(1) == 6).all() for each in clock.inputs)
    assert report.inputs == "token ids, one in 8 padded and at least one"


def test_one_choice_of_a_model_that_takes_several() -> None:
    model = transformers.BertForMultipleChoice(TINY["bert"].config())
    report = collabify.bench(model, repeats=4, batch_sizes=[2])
    assert report.latencies[0].batch_size == 2


def test_memory_is_told_where_the_allocator_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accelerator is here: what torch would say is planted."""
    model, original = pair()
    peaks = iter([700, 500])
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 100)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Abacus 3000")
    synchronised: list[Any] = []
    monkeypatch.setattr("torch.accelerator.synchronize", synchronised.append)
    cuda = property(lambda self: torch.device("cuda"))
    for each in (model, original):
        monkeypatch.setattr(type(each), "device", cuda)
    report = collabify.bench(model, original, repeats=4, batch_sizes=[1])
    (found,) = report.latencies
    assert (found.baseline_peak_bytes, found.peak_bytes) == (600, 400)
    assert report.machine.device == "Abacus 3000"
    assert len(synchronised) == 2 * 2 * (2 + 4 + 1)  # around each pass of both models
    assert latency_table(report)[0][-2:] == ["peak, MB", "baseline, MB"]
    assert "On Abacus 3000, " in bench_notes(report)[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Originals with a head and without, and the first converted."""
    root = tmp_path_factory.mktemp("bench")
    write_model(root / "original", num_labels=2)
    write_model(root / "three", num_labels=3)
    write_model(root / "bare")
    done("convert", root / "original", *QUICK, "--out", root / "made")
    return root


FAST = ("--repeats", 4, "--batch-size", 1, "--batch-size", 2, "--length", 9)


def test_the_recorded_original_is_the_baseline(made: Path) -> None:
    outcome = done("bench", made / "made", *FAST, "--json")
    report = json.loads(outcome.stdout)
    assert (report["model"], report["baseline"]) == (str(made / "made"), str(made / "original"))
    assert [(row["batch_size"], row["length"]) for row in report["latencies"]] == [(1, 9), (2, 9)]
    said = json.loads((made / "made" / "collabify.json").read_text())["parameters"]
    for part in ("query_key", "attention", "model"):
        assert report["size"][part] == said[part]["after"]
        assert report["baseline_size"][part] == said[part]["before"]
    text = done("bench", made / "made", *FAST, "--threads", 1).stdout
    assert f"{said['model']['before']:,}" in text
    assert re.search(r"2 x 9 +[\d.]+ +[\d.]+ +\d+\.\d{3} +\d+\.\d{3} to \d+\.\d{3}", text)
    assert "medians of 4 interleaved runs." in text
    assert ", 1 thread, torch " in text


def test_a_baseline_without_the_head_runs_with_one(made: Path) -> None:
    for baseline in ("bare", "three"):
        outcome = done("bench", made / "made", "--baseline", made / baseline, *FAST, "--json")
        report = json.loads(outcome.stdout)
        assert report["baseline"] == str(made / baseline)
        assert report["baseline_size"]["model"] > report["size"]["model"]
        labels = [report[size]["model"] - report[size]["attention"] for size in SIZES]
        assert labels[0] == labels[1], "the same but for attention"


SIZES = ("size", "baseline_size")


def test_without_an_original_only_absolute_figures(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = json.loads(done("bench", made / "original", *FAST, "--json").stdout)
    assert report["baseline"] is report["baseline_size"] is None
    assert all(row["over_baseline"] is None for row in report["latencies"])
    text = done("bench", made / "original", *FAST, "--attention", "eager", "--dtype", "bfloat16")
    assert text.stderr == ""
    assert "bfloat16, eager attention" in text.stdout
    assert "Nothing to compare with: --baseline MODEL" in text.stdout
    copied = tmp_path / "copy"
    copied.mkdir()
    for path in (made / "made").iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    write_model(tmp_path / "deep", num_labels=2, num_hidden_layers=3)
    write_model(tmp_path / "wide", num_labels=2, intermediate_size=61)
    shutil.copytree(made / "original", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"xx")
    shutil.copytree(made / "original", tmp_path / "here" / "original")
    monkeypatch.chdir(tmp_path / "here")
    for source, said in (
        ("/no/such/model", "is neither a folder nor"),
        (None, "does not name it"),
        ("./original", "does not name it"),  # so it is in what was pushed from elsewhere
        (str(tmp_path / "deep"), "and the baseline has 3"),
        (str(tmp_path / "wide"), "parameters outside attention"),
        (str(tmp_path / "damaged"), "damaged"),
    ):
        record = json.loads((copied / "collabify.json").read_text()) | {"source": source}
        (copied / "collabify.json").write_text(json.dumps(record))
        outcome = done("bench", copied, *FAST, "--json")
        assert json.loads(outcome.stdout)["baseline"] is None
        assert outcome.stderr.count("\n") == 1
        assert said in outcome.stderr
        assert "Name it: --baseline MODEL" in outcome.stderr


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (("--repeats", 1), 2, "repeats=1 must be at least 4"),
        (("--length", 400), 2, "length=400 must be between 2 and 23"),
        (("--batch-size", 0), 2, "batch_size=0 must be at least 1"),
        (("--threads", 0), 2, "threads=0 must be at least 1"),
        (("--device", "abacus"), 2, "device='abacus' must be one that torch can use"),
        (("--revision", "v1"), 2, "revision='v1' is for models on the Hub"),
        (("--baseline", "/no/such"), 1, "'/no/such' is neither a folder nor a model"),
    ],
)
def test_refused_in_one_line(made: Path, change: tuple[object, ...], code: int, said: str) -> None:
    outcome = cli("bench", made / "made", *change)
    assert (outcome.exit_code, outcome.stdout) == (code, "")
    assert said in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_several_sizes_and_lengths_after_one_option() -> None:
    given = "bench m --batch-size 1 8 --length=32 128 --json"
    spread_out = "bench m --batch-size 1 --batch-size 8 --length=32 --length 128 --json"
    assert spread(given.split()) == spread_out.split()
    one = "eval glue m --batch-size 1 8"
    assert spread(one.split()) == one.split()


def test_the_spread_agrees_with_numpys() -> None:
    values = [0.3, 0.1, 0.7, 0.2, 0.9, 0.4]
    middle, (low, high) = benchmark._spread(values)
    quartiles = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    assert [low, middle, high] == pytest.approx(quartiles.tolist())
    assert middle == statistics.median(values)
