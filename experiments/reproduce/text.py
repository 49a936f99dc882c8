"""What is published comes from the result files: figures, and numbers in the text.

Those stand between `<!-- result: KEY -->` and `<!-- end -->`. `fill` writes them, `disagreements` finds where a text
says something else than the files. What every figure was drawn from is in a file beside them: digests of the result
files and of the picture. The first no longer fits once the results change, the second once the picture does, whoever
draws it again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from experiments.reproduce import tables
from experiments.reproduce.checks import Fault, fingerprint
from experiments.reproduce.claims import early_accuracies
from experiments.reproduce.design import BEYOND, DATASETS, FIGURE_3, FIGURE_4, LEVELS
from experiments.reproduce.results import read_result, read_results, result_path, select, spread
from experiments.reproduce.tables import MISSING, decibels, percent, psnr
from niss.errors import ConfigError
from niss.files import write_output

_MARKED = re.compile(r"<!-- result: (?P<key>\S+) -->(?P<text>.*?)<!-- end -->", re.DOTALL)

TABLES: dict[str, Callable[[Path], str]] = {
    "figure-3": tables.figure_3_table,
    "gaps": tables.gaps_table,
    "figure-4": tables.figure_4_table,
    "readings": lambda _: tables.readings_table(),
    "sweep": tables.sweep_table,
    "headline": tables.headline_table,
    "beyond": tables.beyond_table,
    "tuning": tables.tuning_table,
    "datasets": tables.datasets_table,
    "datasets-learned": tables.datasets_words,
    "datasets-tuning": lambda folder: tables.tuning_table(folder, models=True),
    "silos": tables.silos_table,
    "claims": tables.claims_table,
    "files": tables.files_table,
}
TABLES_FILE, FIGURES_FILE = "tables.md", "figures.json"
FIGURES = {
    "figure-3": (
        FIGURE_3,
        "Eight panels: test accuracy over rounds at X = 0, 0.3, 0.6 and 1, with bands over seeds",
    ),
    "gaps": (
        FIGURE_3,
        "Eight panels: the gap between X = 0 and X = 1 over rounds, beside the range that the paper gives",
    ),
    "figure-4": (
        FIGURE_4,
        "Original and recovered pictures by kind of protection, and the DLG loss over iterations",
    ),
    "faults": (
        BEYOND,
        "Accuracy over epsilon of NISS as it is, with colluders, and with dropouts repaired and tolerated",
    ),
    "rivals": (BEYOND, "Accuracy over epsilon of all rivals in settings with fixed cohorts"),
    "noise": (BEYOND, "Noise variance in the model over rounds, by method, at epsilon 3"),
    "datasets": (
        DATASETS,
        "Accuracy over epsilon of all rivals with other models, on text and photographs",
    ),
}
"""The figures: the experiment that each one shows, and what that is for those who cannot see it."""
MARKS = {
    "docs/concepts/paper.md": {"figure-3", "datasets-learned", *(f"{name}.image" for name in FIGURES)},
}
"""Results that a text has to take from the files: without their marks somebody might have typed them."""


@dataclass(frozen=True)
class Disagreement:
    """A place where the text says something else than the result files."""

    path: Path
    key: str
    written: str
    computed: str


def computed_text(folder: Path, key: str) -> str:
    """What belongs between the marks of `key`: a table, or one number of a panel or picture.

    Numbers: `PANEL.early` (accuracy by round 60 at X = 0), `figure-4.PICTURE.LEVEL` (PSNR at the end, at the paper's
    noise where the level takes that). `NAME.image` shows a figure, once drawn, in a page one folder below `docs/`.
    """
    if key in TABLES:
        return "\n" + TABLES[key](folder)
    if key.removesuffix(".image") in FIGURES:
        return _image(folder, key.removesuffix(".image"))
    if key.startswith(f"{FIGURE_4}."):
        return _psnr(folder, key)
    if key.endswith(".early"):
        reached = early_accuracies(read_result(result_path(folder, FIGURE_3, key.removesuffix(".early"))))
        return percent(spread(reached) if reached else None)
    raise ConfigError(f"unknown key {key!r}", field="result", hint="use one of: " + ", ".join(TABLES))


def figure_name(figure: str, *, dark: bool = False) -> str:
    """The file of a figure, on white or for a dark page."""
    return f"{figure}-dark.png" if dark else f"{figure}.png"


def copy_name(figure: Path) -> str:
    """The file in `docs/images` that shows a figure."""
    return f"reproduce-{figure.name}"


def _image(folder: Path, name: str) -> str:
    path = folder / figure_name(name)
    return f"\n![{FIGURES[name][1]}](../images/{copy_name(path)})\n" if path.exists() else f"\n{MISSING}\n"


def _psnr(folder: Path, key: str) -> str:
    picture, _, level = key.removeprefix(f"{FIGURE_4}.").rpartition(".")
    if level not in LEVELS or not picture:
        raise ConfigError(
            f"unknown key {key!r}",
            field="result",
            hint="use figure-4.PICTURE.LEVEL with a level of the figure",
        )
    leaks = read_result(result_path(folder, FIGURE_4, picture))
    cells = select(leaks, level=level)
    # Other readings of the noise may stand beside the usual one.
    return decibels(psnr([cell for cell in cells if not cell.labels["noise"].startswith("sigma-")]))


def fill(text: str, folder: Path) -> str:
    """The text with everything between marks replaced by what the files say."""

    def replaced(found: re.Match[str]) -> str:
        return f"<!-- result: {found['key']} -->{computed_text(folder, found['key'])}<!-- end -->"

    return _MARKED.sub(replaced, text)


def disagreements(path: Path, folder: Path) -> list[Disagreement]:
    """Where the text in `path` disagrees with the results in `folder`."""
    return [
        Disagreement(path, found["key"], found["text"], computed)
        for found in _MARKED.finditer(path.read_text(encoding="utf-8"))
        if (computed := computed_text(folder, found["key"])) != found["text"]
    ]


def tables_text(folder: Path) -> str:
    """All tables, one under the other, as in `TABLES_FILE`."""
    return "\n".join(f"## {name}\n\n{table(folder)}" for name, table in TABLES.items())


def text_faults(folder: Path, root: Path) -> Iterator[Fault]:
    """Texts that lost their marks, and tables that are not those of the files."""
    for name, keys in MARKS.items():
        if (root / name).exists():
            found = {one["key"] for one in _MARKED.finditer((root / name).read_text(encoding="utf-8"))}
            for key in sorted(keys - found):
                yield Fault("text", name, f"does not show {key} between marks")
    tables_file = folder / TABLES_FILE
    if not tables_file.exists() or tables_file.read_text(encoding="utf-8") != tables_text(folder):
        yield Fault(
            "text", TABLES_FILE, "is not what the files say; `niss reproduce figures` writes it again"
        )


def results_folder(path: Path) -> Path:
    """`results/` or `results/paper/`: the folder that holds the experiments."""
    return path / "paper" if (path / "paper").is_dir() else path


def _stamp(folder: Path, figure: str, picture: bytes) -> dict[str, str]:
    """Digests of the result files that a figure is drawn from, and of the picture."""
    records = read_results(folder, FIGURES[figure][0]).values()
    lines = sorted(f"{record.name} {fingerprint(record)}" for record in records)
    return {
        "results": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        "picture": hashlib.sha256(picture).hexdigest(),
    }


def write_stamps(folder: Path) -> None:
    """Of all figures in the folder, as they were drawn just now."""
    stamps = {
        path.name: _stamp(folder, name, path.read_bytes())
        for name, dark in product(FIGURES, (False, True))
        if (path := folder / figure_name(name, dark=dark)).exists()
    }
    write_output(folder / FIGURES_FILE, (json.dumps(stamps, indent=1) + "\n").encode())


def figure_faults(folder: Path, images: Path | None) -> Iterator[Fault]:
    """Figures that are missing, or were drawn from other results, or are not the ones in the documentation."""
    file = folder / FIGURES_FILE
    stamps = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name, dark in product(FIGURES, (False, True)):
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
        copy = None if images is None else images / copy_name(path)
        if copy is not None and (not copy.exists() or copy.read_bytes() != path.read_bytes()):
            detail = "is not the figure of the results; `tools/update_results.py` copies it"
            yield Fault("figure", copy.name, detail)
