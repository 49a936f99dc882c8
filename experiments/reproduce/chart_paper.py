"""The paper's Figures 3 and 4, and the look that all figures share. This module loads matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from experiments.reproduce.claims import PAPER_GAPS, WINDOW, gap_by_round
from experiments.reproduce.design import LEVELS, PANELS, PAPER_LEVELS, X_VALUES, Level, Panel
from experiments.reproduce.results import (
    ORIGINAL,
    Attempt,
    Cell,
    Leaks,
    Result,
    Spread,
    kept_pictures,
    pictures_path,
    select,
    select_level,
    write_kept,
)
from experiments.reproduce.sensitivity import NBAFL
from niss.figures import STYLE as COMMON
from niss.figures import grid, look_of
from niss.methods import METHODS as KINDS
from niss.methods.look import BLUE, DASHED, DOTTED, ORANGE, PINK, PURPLE, QUIET, RULE, SHORT, SKY, SOLID

STYLE: dict[Any, Any] = {**COMMON, "font.size": 11.0, "legend.fontsize": 10.5}
# From NISS as printed, which protects nobody, to what is as DP-FedAvg.
_X_LOOKS = ((SKY, DOTTED), (BLUE, SOLID), (PURPLE, DASHED), (PINK, SHORT))


def _x_look(number: int) -> dict[str, Any]:
    """The look of the curve at that X, the same in plots and legends."""
    colour, line = _X_LOOKS[number]
    return {"color": colour, "linestyle": line, "linewidth": 1.7}


def _level_look(level: Level) -> dict[str, Any]:
    """That of its method; NISS that is not calibrated protects nobody."""
    look = look_of(level.method, protected=level.calibrated or not KINDS[level.method].shares_noise)
    return {"color": look.colour, "linestyle": look.line, "linewidth": 1.7}


def accuracy_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    grid(axes, "y")


def accuracy_limits(axes: Axes, shown: Iterable[float]) -> None:
    """From a little below the least to a little above the most, at least ten points high."""
    values = list(shown) or [0.0, 1.0]
    low, high = min(values), max(values)
    room = max(0.06 * (high - low), 0.5 * (0.1 - (high - low)), 0.005)
    axes.set_ylim(max(0.0, low - room), min(1.0, high + room))


_MEANINGS = {0.0: "X = 0 (as FedAvg)", 1.0: "X = 1 (as DP-FedAvg)"}


def draw_figure_3(results: dict[str, Result], reading: str = NBAFL.name) -> Figure:
    """Eight panels, by dataset and model, IID beside non-IID: mean over seeds, band from worst to best."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 8.6))
        panes = figure.subplots(4, 2, squeeze=False)
        for number, panel in enumerate(_layout()):
            axes = panes[number // 2][number % 2]
            _figure_3_panel(axes, panel, results.get(panel.name), reading)
            if number % 2 == 0:
                axes.set_ylabel("Test accuracy")
            if number >= 6:
                axes.set_xlabel("Round")
        handles = [Line2D([], [], label=_meaning(x), **_x_look(number)) for number, x in enumerate(X_VALUES)]
        figure.legend(handles=handles, loc="lower center", ncols=2)
        figure.subplots_adjust(left=0.11, right=0.98, top=0.965, bottom=0.13, hspace=0.36, wspace=0.24)
    return figure


_GAP_LOOK: dict[str, Any] = {"color": BLUE, "linewidth": 1.8}


def draw_gaps(results: dict[str, Result]) -> Figure:
    """The gap between X = 0 and X = 1 over rounds in the eight panels, with the range that the paper gives."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 8.6))
        panes = figure.subplots(4, 2, squeeze=False, sharex=True)
        for number, panel in enumerate(_layout()):
            axes = panes[number // 2][number % 2]
            _gap_panel(axes, panel, gap_by_round(results.get(panel.name)))
            if number % 2 == 0:
                axes.set_ylabel("Gap, points")
            if number >= 6:
                axes.set_xlabel(f"Round (mean of {WINDOW} up to it)")
        handles = [
            Line2D([], [], label="measured; band: one deviation over seeds", **_GAP_LOOK),
            Patch(
                color=ORANGE,
                alpha=0.25,
                linewidth=0,
                label="the paper's gap, at a round it does not name",
            ),
        ]
        figure.legend(handles=handles, loc="lower center", ncols=2)
        figure.subplots_adjust(left=0.09, right=0.98, top=0.965, bottom=0.13, hspace=0.3, wspace=0.18)
    return figure


def _gap_panel(axes: Axes, panel: Panel, gaps: dict[int, Spread]) -> None:
    axes.set_title(panel.title, fontsize=11)
    grid(axes, "y")
    low, high = PAPER_GAPS[panel.name]
    axes.axhspan(low, high, color=ORANGE, alpha=0.25, linewidth=0)
    rounds, means = list(gaps), [100 * one.mean for one in gaps.values()]
    if rounds:
        axes.plot(rounds, means, **_GAP_LOOK)
        aside = [100 * one.deviation for one in gaps.values()]
        low_edge, high_edge = (
            [mean + side * by for mean, by in zip(means, aside, strict=True)] for side in (-1.0, 1.0)
        )
        axes.fill_between(rounds, low_edge, high_edge, color=BLUE, alpha=0.18, linewidth=0)
    else:
        axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center", color=QUIET)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1 * max([high, *means]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _layout() -> list[Panel]:
    return sorted(
        PANELS, key=lambda panel: (panel.dataset != "mnist", panel.model != "mlp", panel.split != "iid")
    )


def _meaning(x: float) -> str:
    return _MEANINGS.get(x, f"X = {x:g}")


def _figure_3_panel(axes: Axes, panel: Panel, result: Result | None, reading: str) -> None:
    axes.set_title(panel.title, fontsize=11)
    accuracy_axis(axes)
    by_x = {x: select(result, x=x, reading=reading) if result else [] for x in X_VALUES}
    heights = [
        height for number, cells in enumerate(by_x.values()) if cells for height in _band(axes, cells, number)
    ]
    if not heights:
        axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center", color=QUIET)
    accuracy_limits(axes, heights)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _band(axes: Axes, cells: Sequence[Cell], number: int) -> list[float]:
    """Draws mean and band; returns the accuracies that should be in sight, which the first tenth need not be."""
    # Seeds may have been evaluated at different rounds: only those that all have are shown.
    curves = [dict(cell.curve) for cell in cells]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[at] for curve in curves] for at in rounds]
    means = [sum(column) / len(column) for column in values]
    axes.plot(rounds, means, **_x_look(number))
    if len(cells) > 1:
        low, high = [min(column) for column in values], [max(column) for column in values]
        axes.fill_between(rounds, low, high, color=_X_LOOKS[number][0], alpha=0.18, linewidth=0)
    end = max(rounds, default=0)
    return [value for at, column in zip(rounds, values, strict=True) if at > 0.1 * end for value in column]


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
    found = select_level(leaks, level.name)
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
    words = f"grey {leaks.grey:.0f} dB" if cell is None else f"{cell.psnr:.0f} dB"
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
