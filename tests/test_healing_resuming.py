"""Runs of healing that break off: they go on to the same end, and leave nothing else behind."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from healing_cases import FAST, equal, interrupt_after, pair, values

import collabify
from collabify.errors import CheckpointError, CollabifyWarning, NonFiniteError, OutputError
from collabify.healing import training


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 1e-2), (7, 1e-2), (8, 1e-2), (20, 1e-2), (4, 1.0), (5, 1.0), (11, 1.0)]
)
def test_an_interrupted_run_goes_on_to_the_same_end(step: int, rate: float, tmp_path: Path) -> None:
    """Where the learning rate is too high and lowered, too."""
    whole, original, seen = pair()
    same = FAST | {"learning_rate": rate}
    expected = collabify.heal(whole, original, calibration=seen, **same)
    assert bool(expected.went_back) == (rate == 1.0)
    converted, _, _ = pair()
    before, state = values(converted), tmp_path / ".state"
    options: dict[str, Any] = {"calibration": seen, "state": state} | same
    with pytest.raises(KeyboardInterrupt, match=f"after step {step} of 20; .*same command again"):
        collabify.heal(converted, original, progress=interrupt_after(step), **options)
    assert equal(before, values(converted))
    steps = []
    report = collabify.heal(
        converted, original, progress=lambda *seen: steps.append(seen[1]), **options
    )
    assert report.resumed_at == step
    assert steps == list(range(step + 1, 21))
    assert (report.curve, report.went_back) == (expected.curve, expected.went_back)
    assert (report.drift_after, report.best_step) == (expected.drift_after, expected.best_step)
    assert equal(values(whole), values(converted))


@pytest.mark.parametrize("where", ["judge", "put", "killed"])
def test_an_interruption_while_going_back_changes_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it, in the middle of it, or a kill one step after it."""
    whole, original, seen = pair()
    same = FAST | {"learning_rate": 0.15}
    expected = collabify.heal(whole, original, calibration=seen, **same)
    converted, _, _ = pair()
    options: dict[str, Any] = {"calibration": seen, "state": tmp_path / ".state"} | same
    first, put = expected.went_back[0], training.put
    assert first > 2, "there is a state before it"

    def broken(*arguments: Any) -> None:
        if where == "put":
            put(*(each[:1] for each in arguments))
        raise KeyboardInterrupt

    def killed(_stage: str, done: int, *_: Any) -> None:
        if done == first + 1:
            raise SystemExit

    with monkeypatch.context() as patch:
        if where != "killed":
            patch.setattr(training, "put" if where == "put" else "_go_back", broken)
        progress = killed if where == "killed" else None
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            collabify.heal(converted, original, progress=progress, **options)
    report = collabify.heal(converted, original, **options)
    assert report.resumed_at is not None
    assert (report.curve, report.went_back) == (expected.curve, expected.went_back)
    assert equal(values(whole), values(converted))


def test_an_interrupted_step_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, original, seen = pair()
    collabify.heal(whole, original, calibration=seen, **FAST)
    converted, _, _ = pair()
    options: dict[str, Any] = {"calibration": seen, "state": tmp_path / ".state"} | FAST
    step, count = torch.optim.Adam.step, []

    def torn(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.append(1)
        result = step(self, *args, **kwargs)
        if len(count) == 8:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", torn)
        with pytest.raises(KeyboardInterrupt):
            collabify.heal(converted, original, **options)
    report = collabify.heal(converted, original, **options)
    assert report.resumed_at == 6
    assert equal(values(whole), values(converted))


def test_other_options_start_over_and_say_so(tmp_path: Path) -> None:
    whole, original, seen = pair()
    collabify.heal(whole, original, calibration=seen, **FAST | {"steps": 10})
    converted, _, _ = pair()
    options: dict[str, Any] = {"calibration": seen, "state": tmp_path / ".state"} | FAST
    with pytest.raises(KeyboardInterrupt):
        collabify.heal(converted, original, progress=interrupt_after(7), **options)
    with pytest.warns(CollabifyWarning, match="another steps: starting over"):
        report = collabify.heal(converted, original, **options | {"steps": 10})
    assert report.resumed_at is None
    assert equal(values(whole), values(converted))
    with pytest.warns(CollabifyWarning, match="another steps, model: starting over"):
        collabify.heal(converted, original, **options)


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    converted, original, seen = pair()
    before, state = values(converted), tmp_path / ".state"
    options: dict[str, Any] = {"calibration": seen, "state": state} | FAST
    with pytest.raises(KeyboardInterrupt):
        collabify.heal(converted, original, progress=interrupt_after(7), **options)
    (max(state.iterdir()) / "optimizer.bin").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"\.state' holds a run .* Delete it to start over"):
        collabify.heal(converted, original, **options)
    assert equal(before, values(converted))


@pytest.mark.parametrize("when", [1, 2])
@pytest.mark.parametrize("inside", ["save_state", "write_text", "rename"])
def test_nothing_stays_of_a_save_that_breaks_off(
    when: int, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second Ctrl-C: the first is answered by saving."""
    whole, original, seen = pair()
    collabify.heal(whole, original, calibration=seen, **FAST)
    converted, _, _ = pair()
    before, state = values(converted), tmp_path / ".state"
    options: dict[str, Any] = {"calibration": seen, "state": state} | FAST
    owner: Any = Accelerator if inside == "save_state" else Path
    work, count = getattr(owner, inside), []

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.append(1)
        result = work(self, *args, **kwargs) if inside == "save_state" else None
        if len(count) >= when:
            raise KeyboardInterrupt
        return work(self, *args, **kwargs) if result is None else result

    with monkeypatch.context() as patch:
        patch.setattr(owner, inside, broken)
        with pytest.raises(KeyboardInterrupt):
            collabify.heal(converted, original, **options)
    assert equal(before, values(converted))
    assert [path.name for path in tmp_path.iterdir()] == [".state"] * (when - 1)
    assert [path.name for path in tmp_path.rglob(".state/*")] == ["1"] * (when - 1)
    report = collabify.heal(converted, original, **options)
    assert report.resumed_at == (None if when == 1 else 2)
    assert equal(values(whole), values(converted))


def test_what_a_kill_leaves_is_in_the_folder_and_no_obstacle(tmp_path: Path) -> None:
    whole, original, seen = pair()
    collabify.heal(whole, original, calibration=seen, **FAST)
    converted, _, _ = pair()
    state = tmp_path / ".state"
    options: dict[str, Any] = {"calibration": seen, "state": state} | FAST
    (state / "new").mkdir(parents=True)
    (state / "new" / "optimizer.bin").write_bytes(b"half")
    with pytest.raises(KeyboardInterrupt):
        collabify.heal(converted, original, progress=interrupt_after(7), **options)
    assert [path.name for path in tmp_path.iterdir()] == [".state"]
    assert [path.name for path in state.iterdir()] == ["4"]  # after steps 2, 4, 6 and 7
    shutil.copytree(state / "4", state / "3")  # as if killed before the older one was deleted
    (state / "3" / "run.json").write_text("{}")
    assert collabify.heal(converted, original, **options).resumed_at == 7
    assert equal(values(whole), values(converted))


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("write failed\nat")])
def test_a_full_disk_is_told_in_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted, original, seen = pair()
    before = values(converted)

    def full(self: Any, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        raise error

    monkeypatch.setattr(Accelerator, "save_state", full)
    with pytest.raises(OutputError, match=r"^The progress of healing cannot be .*\.state' \(.*$"):
        collabify.heal(converted, original, calibration=seen, state=tmp_path / ".state", **FAST)
    assert equal(before, values(converted))
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_leaves_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted, original, seen = pair()
    state = tmp_path / ".state"

    def progress(stage: str, done: int, total: int, note: str) -> None:
        if done == 5:
            assert state.is_dir()
            monkeypatch.setattr("collabify.healing.loss.relative", lambda sums: sums.sum() / 0)

    with pytest.raises(NonFiniteError, match="at step 7 of 20"):
        collabify.heal(
            converted, original, calibration=seen, state=state, progress=progress, **FAST
        )
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_before_the_first_step_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the state of another run is there."""
    converted, original, seen = pair()
    options: dict[str, Any] = {"calibration": seen, "state": tmp_path / ".state"} | FAST
    with pytest.raises(KeyboardInterrupt):
        collabify.heal(converted, original, progress=interrupt_after(3), **options)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("collabify.healing.training.held_out_loss", interrupted)
    with (
        pytest.warns(CollabifyWarning, match="another seed: starting over"),
        pytest.raises(KeyboardInterrupt) as caught,
    ):
        collabify.heal(converted, original, seed=5, **options)
    assert caught.value.args == ()
