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
from functools import partial
from itertools import product
from pathlib import Path

from experiments.reproduce import comparisons, tables
from experiments.reproduce.checks import Fault, fingerprint
from experiments.reproduce.claims import early_accuracies
from experiments.reproduce.design import BEYOND, COMPARING, DEMOS, PRESETS
from experiments.reproduce.paper import FIGURE_3, FIGURE_4, LEVELS
from experiments.reproduce.promises import noise_in_model
from experiments.reproduce.results import (
    Cell,
    over_seeds,
    read_result,
    read_results,
    result_path,
    select,
    spread,
)
from experiments.reproduce.tables import MISSING, decibels, percent
from niss.claims import digits
from niss.errors import ConfigError
from niss.files import write_output

_MARKED = re.compile(r"<!-- result: (?P<key>\S+) -->(?P<text>.*?)<!-- end -->", re.DOTALL)

TABLES: dict[str, Callable[[Path], str]] = {
    "figure-3": tables.figure_3_table,
    "gaps": tables.gaps_table,
    "figure-4": tables.figure_4_table,
    "readings": lambda _: tables.readings_table(),
    "sweep": tables.sweep_table,
    "tuned": comparisons.tuned_where,
    "verdicts": comparisons.verdicts_table,
    "differences": comparisons.differences_table,
    "beyond": comparisons.accuracies_table,
    "learned": comparisons.learned_words,
    "silos": comparisons.silos_table,
    "silos-tabular": partial(comparisons.silos_table, tabular=True),
    "demo": comparisons.demo_table,
    "demo-noise": comparisons.demo_noise_table,
    "demo-silos": partial(comparisons.demo_table, name="silos"),
    "tuning": comparisons.tuning_table,
    "claims": tables.claims_table,
    "files": tables.files_table,
}
TABLES_FILE, FIGURES_FILE = "tables.md", "figures.json"


def narrow(preset: str) -> str:
    """The figure of a preset as phones show it, with its names below the curves."""
    return f"{preset}-narrow"


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
        "Accuracy over epsilon of NISS as it is, with colluders, and with dropouts; thin lines: five rounds before",
    ),
    "rivals": (
        BEYOND,
        "Accuracy over epsilon of all rivals with fixed cohorts; thin lines: the five rounds before the last",
    ),
    "noise": (BEYOND, "Noise variance in the model over rounds, by method, at epsilon 3"),
    "demo": (DEMOS, "Test accuracy over 30 rounds of the demo, by method"),
    "silos": (DEMOS, "Test accuracy over 100 rounds of ten silos, by method"),
}
FIGURES |= {narrow(name): FIGURES[name] for name in PRESETS}
"""The figures: the experiment that each one shows, and what that is for those who cannot see it."""
_DEMO = {"demo.central-dp", "demo.dp-fedavg", "demo.niss", "demo.niss-carried", "demo.niss-carried.before"}
MARKS = {
    "README.md": {*_DEMO, *(f"demo.{one}" for one in ("fedavg", "central-dp.before", "niss.before"))},
    "docs/tutorial.md": {"demo", "demo-noise", "demo.share"},
    "docs/guides/silos.md": {"demo-silos", "silos", "silos-tabular"},
    "docs/concepts/comparison-tables.md": {*_DEMO, "demo.niss.noise", "demo.dp-fedavg.noise"},
    "docs/concepts/paper.md": {
        "figure-3",
        "tuned",
        "verdicts",
        "learned",
        *(f"{name}.image" for name, (shown, _) in FIGURES.items() if shown != DEMOS),
    },
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
    """What belongs between the marks of `key`: a table, a figure, or one number.

    Numbers: `PANEL.early` (accuracy by round 60 at X = 0); `figure-4.PICTURE.LEVEL` (PSNR at the end, at the paper's
    noise where the level takes that); `SETTING.METHOD.EPSILON` (accuracy after the last round) and `demo.METHOD`, and
    with `.before` that of the five rounds before it, with `.noise` the variance measured; `demo.share` (of the noise
    that a trusted server leaves in the model, that of carried shares). `NAME.image` shows a figure, once drawn, in a
    page one folder below `docs/`.
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
    if key == "demo.share":
        return _carried_share(folder)
    if found := re.fullmatch(_CELLS, key):
        return _of_cells(folder, found)
    raise ConfigError(f"unknown key {key!r}", field="result", hint="use one of: " + ", ".join(TABLES))


_CELLS = r"(?P<name>[a-z0-9-]+)\.(?P<method>[a-z0-9-]+)(\.(?P<epsilon>\d+))?(\.(?P<what>before|noise))?"


def _of_cells(folder: Path, key: re.Match[str]) -> str:
    """A number of the runs of one method without faults, over their seeds."""
    results = [read_results(folder, kind).get(key["name"]) for kind in (*COMPARING, DEMOS)]
    for result in (one for one in results if one is not None):
        labels = {"method": key["method"], "variant": "none"}
        cells: list[Cell] = select(
            result, **labels, **({"epsilon": float(key["epsilon"])} if key["epsilon"] else {})
        )
        if cells and key["what"] == "noise":
            return digits(spread([cell.aggregate_variance for cell in cells]).mean)
        if cells:
            mean = spread([cell.before if key["what"] else cell.accuracy for cell in cells]).mean
            return f"{100 * mean:.1f} %"
    return MISSING


def _carried_share(folder: Path) -> str:
    """In the demo, the noise in the model after its last round over that of a trusted server."""
    result = read_results(folder, DEMOS).get("demo")
    left = {cell.labels["method"]: cell for cell in result.cells} if result else {}
    if result is None or not {"niss-carried", "central-dp"} <= left.keys():
        return MISSING
    carried, central = (
        noise_in_model(result, left[name], predicted=True)[-1] for name in ("niss-carried", "central-dp")
    )
    return f"{carried / central:.2f}"


def figure_name(figure: str, *, dark: bool = False) -> str:
    """The file of a figure, on white or for a dark page."""
    return f"{figure}-dark.png" if dark else f"{figure}.png"


def copy_name(figure: Path) -> str:
    """The file in `docs/images` that shows a figure."""
    first = re.split("[-.]", figure.name)[0]
    if first in PRESETS:
        return figure.name.replace(first, f"{first}-accuracy", 1)
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
    return decibels(
        over_seeds([cell for cell in cells if not cell.labels["noise"].startswith("sigma-")], "psnr")
    )


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
