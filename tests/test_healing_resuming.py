"""Runs of healing that break off: they go on to the same end, and leave nothing else behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from healing_cases import FAST, equal, interrupt_after, pair, values

import collabify
from collabify.errors import (
    CheckpointError,
    CollabifyWarning,
)


@pytest.mark.parametrize("step", [1, 7, 8, 20])
def test_an_interrupted_run_goes_on_to_the_same_end(step: int, tmp_path: Path) -> None:
    whole, original, seen = pair()
    expected = collabify.heal(whole, original, calibration=seen, **FAST)
    converted, _, _ = pair()
    before, state = values(converted), tmp_path / ".state"
    options: dict[str, Any] = {"calibration": seen, "state": state} | FAST
    with pytest.raises(KeyboardInterrupt, match=f"after step {step} of 20; .*same command again"):
        collabify.heal(converted, original, progress=interrupt_after(step), **options)
    assert equal(before, values(converted))
    steps = []
    report = collabify.heal(
        converted, original, progress=lambda *seen: steps.append(seen[1]), **options
    )
    assert report.resumed_at == step
    assert steps == list(range(step + 1, 21))
    assert report.curve == expected.curve
    assert (report.drift_after, report.best_step) == (expected.drift_after, expected.best_step)
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
