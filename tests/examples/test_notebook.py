"""The notebook runs from top to bottom and shows what it says."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'niss[dev]'")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'niss[dev]'")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "niss.ipynb"


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_its_outputs_are_stored_whole_and_in_order() -> None:
    """`tools/run_notebook.py` stores them; a cell that was changed or run alone afterwards shows here."""
    notebook = read()
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = [{output.output_type for output in cell.outputs} for cell in code]
    assert all(kinds[1:]), "every cell but the imports shows something"
    assert not any("error" in kind for kind in kinds)
    assert re.search(r"about [1-9]\d* seconds of CPU time", notebook.cells[0].source)
    shown = NOTEBOOK.read_text(encoding="utf-8")
    assert "/tmp/" not in shown
    assert "/home/" not in shown


@pytest.mark.filterwarnings("default")
def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    # As `make` does: more threads than cores make many small steps crawl.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read()
    # Every line of it, but not every round: what is learned in them stands in the stored outputs.
    (training,) = (cell for cell in notebook.cells if '"rounds": 12,' in cell.source)
    training.source = training.source.replace('"rounds": 12,', '"rounds": 2,')
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "at tau^2 = 0 the joint view gives None" in printed
    assert "epsilon in the joint view = 3.000" in printed
    assert "together give the picture away" in printed
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 4
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
