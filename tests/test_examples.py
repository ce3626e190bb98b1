"""Examples run as they stand."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_tasks import write_model, write_task

from collabify.storage import DEMO_PACKAGE

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.skipif(
    importlib.util.find_spec(DEMO_PACKAGE) is None,
    reason="the demo model is not installed: pip install 'collabify[demo]'",
)
def test_compare_a_model_with_itself() -> None:
    command = [sys.executable, str(EXAMPLES / "compare.py"), "demo", "demo"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "parameters: 22,713,216 before, 22,713,216 after" in result.stdout
    assert "mean 1.0000, worst 1.0000" in result.stdout


def test_the_table_of_glue_on_a_small_slice(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_task(tmp_path / "glue", "sst2", {"train": 96, "validation": 48})
    command = [sys.executable, str(EXAMPLES / "glue_table.py"), str(model), str(tmp_path / "out")]
    command += ["--task", "sst2", "--data", str(tmp_path / "glue"), "--dk", "6", "--steps", "3"]
    environment = os.environ | {"HF_EVALUATE_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("sst2 accuracy")]
    assert [line.rsplit(", ", 1)[1] for line in lines] == [
        "weights only",
        "calibrated",
        "calibrated and healed",
    ]
    assert len({line.split()[2] for line in lines}) == 1, "the baseline is the same model"
    assert (tmp_path / "out" / "sst2-original" / "collabify.json").is_file()
