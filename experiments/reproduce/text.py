"""Numbers in the text come from the result files: between `<!-- result: KEY -->` and `<!-- end -->`.

`fill` writes them, `disagreements` finds where a text says something else than the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.reproduce import tables
from experiments.reproduce.checks import Fault
from experiments.reproduce.claims import BY_ROUND, gap
from experiments.reproduce.design import BEYOND, FIGURE_3, FIGURE_4, LEVELS
from experiments.reproduce.results import read_leaks, read_result, result_path, select, select_level, spread
from experiments.reproduce.sensitivity import NBAFL
from experiments.reproduce.stamps import DRAWN_FROM
from experiments.reproduce.tables import MISSING, decibels, percent, points, psnr, settled
from niss.errors import ConfigError

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
    "claims": tables.claims_table,
    "files": tables.files_table,
}
TABLES_FILE = "tables.md"
MARKS = {
    "docs/concepts/paper.md": {"figure-3", "datasets-learned", *(f"{name}.image" for name in DRAWN_FROM)},
}
"""Results that a text has to take from the files: without their marks somebody might have typed them."""


IMAGES = {
    "figure-3": "Eight panels: test accuracy over rounds at X = 0, 0.3, 0.6 and 1, with bands over seeds",
    "gaps": "Eight panels: the gap between X = 0 and X = 1 over rounds, beside the range that the paper gives",
    "figure-4": "Original and recovered pictures by kind of protection, and the DLG loss over iterations",
    "faults": "Accuracy over epsilon of NISS as it is, with colluders, and with dropouts repaired and tolerated",
    "rivals": "Accuracy over epsilon of all rivals in settings with fixed cohorts",
    "noise": "Noise variance in the model over rounds, by method, at epsilon 3",
    "datasets": "Accuracy over epsilon of all rivals with other models, on text and photographs",
}
"""The figures of the text, and what they show for those who cannot see them."""


@dataclass(frozen=True)
class Disagreement:
    """A place where the text says something else than the result files."""

    path: Path
    key: str
    written: str
    computed: str


def computed_text(folder: Path, key: str) -> str:
    """What belongs between the marks of `key`: a table, or one number of a panel or picture.

    Numbers: `PANEL.gap` (points), `PANEL.x0` ... (accuracy at an X), `PANEL.early` (accuracy by round 60 at X = 0),
    `figure-4.PICTURE.LEVEL` (PSNR at the end, at the paper's noise where the level takes that). `beyond.SETTING` is the
    table of one setting. `NAME.image` shows a figure, once it is drawn, in a page one folder below `docs/`.
    """
    if key in TABLES:
        return "\n" + TABLES[key](folder)
    if key.removesuffix(".image") in IMAGES:
        return _image(folder, key.removesuffix(".image"))
    if key.startswith(f"{BEYOND}."):
        return "\n" + tables.setting_table(folder, key.removeprefix(f"{BEYOND}."))
    if key.startswith(f"{FIGURE_4}."):
        return _psnr(folder, key)
    panel, _, wanted = key.rpartition(".")
    result = read_result(result_path(folder, FIGURE_3, panel)) if panel else None
    if wanted == "gap":
        return points(gap(result) if result else None)
    if wanted == "early":
        cells = select(result, x=0.0, reading=NBAFL.name) if result else []
        reached = [value for cell in cells if (value := cell.at(BY_ROUND)) is not None]
        return percent(spread(reached) if reached else None)
    if panel and re.fullmatch(r"x[0-9.]+", wanted):
        cells = select(result, x=float(wanted[1:]), reading=NBAFL.name) if result else []
        return percent(settled(cells))
    raise ConfigError(f"unknown key {key!r}", field="result", hint="use one of: " + ", ".join(TABLES))


def copy_name(name: str) -> str:
    """The file in `docs/images` that shows a figure."""
    return f"reproduce-{name}.png"


def _image(folder: Path, name: str) -> str:
    if not (folder / f"{name}.png").exists():
        return f"\n{MISSING}\n"
    return f"\n![{IMAGES[name]}](../images/{copy_name(name)})\n"


def _psnr(folder: Path, key: str) -> str:
    picture, _, level = key.removeprefix(f"{FIGURE_4}.").rpartition(".")
    if level not in LEVELS or not picture:
        raise ConfigError(
            f"unknown key {key!r}",
            field="result",
            hint="use figure-4.PICTURE.LEVEL with a level of the figure",
        )
    leaks = read_leaks(result_path(folder, FIGURE_4, picture))
    cells = select_level(leaks, level) if leaks is not None else []
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
