"""The paper's Figure 4: original and recovered pictures, and the loss over iterations. This module loads matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from experiments.reproduce.design import LEVELS, PAPER_LEVELS, Level
from experiments.reproduce.results import (
    ORIGINAL,
    Attempt,
    Leaks,
    kept_pictures,
    pictures_path,
    select,
    write_kept,
)
from niss.figures import STYLE as COMMON
from niss.figures import grid
from niss.methods import METHODS as KINDS
from niss.methods import look_of
from niss.methods.look import QUIET, RULE

STYLE: dict[Any, Any] = {**COMMON, "font.size": 11.0, "legend.fontsize": 10.5}


def _level_look(level: Level) -> dict[str, Any]:
    """That of its method; NISS that is not calibrated protects nobody."""
    look = look_of(level.method, protected=level.calibrated or not KINDS[level.method].shares_noise)
    return {"color": look.colour, "linestyle": look.line, "linewidth": 1.7}


_TITLES = {
    "fedavg": "FedAvg",
    "dp-fedavg": "DP-FedAvg",
    "niss": "NISS\nas printed",
    "niss-joint": "NISS as\nprinted,\nall uploads",
    "niss-calibrated": "NISS\ncalibrated,\nall uploads",
    "client-dp-fedavg": "DP-FedAvg",
    "client-niss": "NISS, τ = 0",
    "client-niss-joint": "NISS, τ = 0,\nall uploads",
    "client-niss-calibrated": "NISS\ncalibrated,\nall uploads",
}
_ROW, _TOP, _LOWER = 1.13, 0.95, 2.75


def keep_shown(leaks: Sequence[Leaks], work: Path, folder: Path) -> None:
    """Keep the recovered pictures that the figure shows beside their results, as far as they are in `work`."""
    for one in leaks:
        kept = kept_pictures(folder, one.name)
        for level in LEVELS.values():
            cell = _first_attempt(one, level)
            path = None if cell is None else pictures_path(work, one.name, cell.id)
            if cell is not None and path is not None and path.exists():
                with np.load(path) as found:
                    kept |= {ORIGINAL: found[ORIGINAL], cell.id: found["frames"][-1]}
        if kept:
            write_kept(folder, one.name, kept)


def draw_figure_4(leaks: Sequence[Leaks], folder: Path) -> Figure | None:
    """A row for each picture: original, then what the first seed recovered at each level, with its PSNR.

    None where no recovered pictures are kept in `folder`.
    """
    pictures = {one.name: kept_pictures(folder, one.name) for one in leaks}
    shown = [one for one in leaks if pictures[one.name]]
    if not shown:
        return None
    height = _TOP + _ROW * len(shown) + _LOWER
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, height))
        upper = figure.add_gridspec(
            len(shown),
            len(LEVELS) + 1,
            left=0.03,
            right=0.99,
            top=1.0 - _TOP / height,
            bottom=(_LOWER + 0.1) / height,
            wspace=0.08,
            hspace=0.22,
        )
        for row, one in enumerate(shown):
            for column, level in enumerate((None, *LEVELS.values())):
                axes = figure.add_subplot(upper[row, column])
                _picture(axes, pictures[one.name], one, level, titled=row == 0)
        _brackets(figure, height)
        lower = figure.add_gridspec(
            1,
            len(shown),
            left=0.065,
            right=0.985,
            top=(_LOWER - 0.35) / height,
            bottom=0.85 / height,
            wspace=0.28,
        )
        for column, one in enumerate(shown):
            axes = figure.add_subplot(lower[0, column])
            _losses(axes, one)
            if column == 0:
                axes.set_ylabel("DLG loss")
        handles = [
            Line2D([], [], label=LEVELS[name].title, **_level_look(LEVELS[name])) for name in PAPER_LEVELS
        ]
        figure.legend(handles=handles, loc="lower center", ncols=len(handles))
    return figure


def _first_attempt(leaks: Leaks, level: Level) -> Attempt | None:
    """The attempt at a level with the first seed, at the first reading of the paper's noise."""
    found = select(leaks, level=level.name)
    return min(found, key=lambda cell: (cell.labels["seed"], cell.labels["sigma_k"] or 0.0), default=None)


def _picture(
    axes: Axes, pictures: dict[str, NDArray[np.uint8]], leaks: Leaks, level: Level | None, *, titled: bool
) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(True)
        side.set_color(RULE)
    cell = None if level is None else _first_attempt(leaks, level)
    image = pictures.get(ORIGINAL if level is None else "" if cell is None else cell.id)
    if level is None:
        axes.set_ylabel(leaks.base["image"], fontsize=8.5)
    if titled:
        title = "original" if level is None else _TITLES[level.name]
        axes.set_title(title, fontsize=8.5, pad=4, va="bottom")
    if image is None:
        return
    if len(image) == 1:
        axes.imshow(image[0], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    else:
        axes.imshow(image.transpose(1, 2, 0), interpolation="nearest")
    words = f"grey {leaks.base['grey_psnr']:.0f} dB" if cell is None else f"{cell.psnr:.0f} dB"
    axes.set_xlabel(words, fontsize=8.5, labelpad=2, color=QUIET if cell is None else "black")


def _brackets(figure: Figure, height: float) -> None:
    """What the columns have in common: the paper's noise, or one that promises something."""
    paper = [number for number, level in enumerate(LEVELS.values(), start=1) if not level.promising]
    client = [number for number, level in enumerate(LEVELS.values(), start=1) if level.promising]
    width = 0.96 / (len(LEVELS) + 1)
    for columns, words in (
        (paper, "the paper's noise"),
        (client, "noise for ε = 3, δ = 1e-5, a whole client, one round"),
    ):
        left, right = 0.03 + width * columns[0] + 0.006, 0.03 + width * (columns[-1] + 1) - 0.006
        at = 1.0 - 0.28 / height
        figure.add_artist(Line2D([left, right], [at, at], color=QUIET, linewidth=0.8))
        figure.text((left + right) / 2, at + 0.04 / height, words, ha="center", va="bottom", fontsize=9)


def _losses(axes: Axes, leaks: Leaks) -> None:
    axes.set_title(leaks.base["image"], fontsize=9.5)
    for name in PAPER_LEVELS:
        cell = _first_attempt(leaks, LEVELS[name])
        if cell is not None:
            axes.plot(*zip(*cell.losses, strict=True), **_level_look(LEVELS[name]))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("Iteration")
    grid(axes)
