"""What every figure was drawn from, in a file beside them: digests of the result files and of the picture.

The first no longer fits once the results change, the second once the picture does, whoever draws it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from experiments.reproduce.checks import Fault, fingerprint
from experiments.reproduce.design import BEYOND, DATASETS, FIGURE_3, FIGURE_4
from experiments.reproduce.results import Record, all_leaks, read_results
from niss.files import write_output

FIGURES_FILE = "figures.json"
DRAWN_FROM = {
    "figure-3": FIGURE_3,
    "gaps": FIGURE_3,
    "figure-4": FIGURE_4,
    "faults": BEYOND,
    "rivals": BEYOND,
    "noise": BEYOND,
    "datasets": DATASETS,
}
"""The figures, and the experiment that each one shows."""


def figure_name(figure: str, *, dark: bool = False) -> str:
    """The file of a figure, on white or for a dark page."""
    return f"{figure}-dark.png" if dark else f"{figure}.png"


def _stamp(folder: Path, figure: str, picture: bytes) -> dict[str, str]:
    """Digests of the result files that a figure is drawn from, and of the picture."""
    experiment = DRAWN_FROM[figure]
    records: Iterable[Record[Any]] = (
        all_leaks(folder).values() if experiment == FIGURE_4 else read_results(folder, experiment).values()
    )
    lines = sorted(f"{record.name} {fingerprint(record)}" for record in records)
    return {
        "results": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        "picture": hashlib.sha256(picture).hexdigest(),
    }


def write_stamps(folder: Path) -> None:
    """Of all figures in the folder, as they were drawn just now."""
    stamps = {
        path.name: _stamp(folder, name, path.read_bytes())
        for name, dark in product(DRAWN_FROM, (False, True))
        if (path := folder / figure_name(name, dark=dark)).exists()
    }
    write_output(folder / FIGURES_FILE, (json.dumps(stamps, indent=1) + "\n").encode())


def figure_faults(folder: Path, images: Path | None) -> Iterator[Fault]:
    """Figures that are missing, or were drawn from other results, or are not the ones in the documentation."""
    file = folder / FIGURES_FILE
    stamps = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name, dark in product(DRAWN_FROM, (False, True)):
        path = folder / figure_name(name, dark=dark)
        if not path.exists():
            yield Fault("figure", path.name, "is missing; `niss reproduce figures` draws it")
            continue
        now, then = _stamp(folder, name, path.read_bytes()), stamps.get(path.name, {})
        if then.get("results") != now["results"]:
            detail = "was drawn from other results; `niss reproduce figures` draws it again"
            yield Fault("figure", path.name, detail)
        if then.get("picture") != now["picture"]:
            yield Fault("figure", path.name, "is not the picture that was drawn")
        copy = None if images is None else images / f"reproduce-{path.name}"
        if copy is not None and (not copy.exists() or copy.read_bytes() != path.read_bytes()):
            detail = "is not the figure of the results; `tools/update_results.py` copies it"
            yield Fault("figure", copy.name, detail)
