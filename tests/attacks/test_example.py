"""The example runs as it stands and prints what the guide says it shows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "attack_upload.py"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    values = {line[:28].strip(): line[28:].split() for line in lines[1:]}
    assert values["tau = 0, all uploads"][2] == "100.0%"
    for hidden in ("tau = 0, one upload alone", "calibrated, all uploads"):
        assert float(values[hidden][2].rstrip("%")) <= 0.1
    for error, predicted, _ in list(values.values())[::2]:
        assert float(error) == pytest.approx(float(predicted), rel=0.05)
