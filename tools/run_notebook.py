"""Run the notebook from top to bottom and store its outputs, with the time that it really took.

Usage: python tools/run_notebook.py [examples/niss.ipynb]

The time is CPU time of the kernel and its workers, which does not depend on what else the machine is doing.
"""

from __future__ import annotations

import re
import resource
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
_TIME = re.compile(r"It takes about \d+ seconds of CPU time")


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "examples" / "niss.ipynb"
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}).execute()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    first = notebook.cells[0]
    first.source, found = _TIME.subn(f"It takes about {seconds:.0f} seconds of CPU time", first.source)
    assert found == 1, "the first cell says how long it takes"
    for cell in notebook.cells:
        # When each cell was run is nobody's business, and would change the file every time.
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, path)
    print(f"{path}: {seconds:.0f} s of CPU time, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
