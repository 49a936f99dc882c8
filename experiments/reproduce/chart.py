"""The figures beyond the paper, drawn from the result files, and `write_figures`, which writes all there are.

Accuracy over epsilon, the epsilon that really holds, what colluders and dropouts cost, and the size of a round. This
module loads matplotlib; what runs experiments must not import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reproduce.chart_paper import (
    accuracy_axis,
    accuracy_limits,
    curve_look,
    draw_figure_3,
    draw_figure_4,
    draw_gaps,
)
from experiments.reproduce.chart_rivals import draw_noise, draw_rivals, of_cohorts
from experiments.reproduce.design import (
    BEYOND,
    EARLIER,
    EPSILONS,
    FIGURE_3,
    FIGURE_4,
    METHODS,
    SCALE,
    SETTINGS,
    VARIANTS,
    Setting,
    find_setting,
)
from experiments.reproduce.results import Cell, Result, read_results, select, spread
from experiments.reproduce.stamps import DRAWN_FROM, data_digest, stamp
from experiments.reproduce.tables import leaks_in_order
from niss.files import SHARED, write_atomically
from niss.report.canvas import QUIET, STYLE, as_png
from niss.report.method_charts import MARKERS

_COLUMNS = 4
_HELD_AT = 3.0
_UNITS = {"client": "a whole client hidden", "record": "one record hidden"}
FAULTS, GAPS = "faults", "gaps"
RIVALS_FIGURE, NOISE_FIGURE = "rivals", "noise"
_METHOD = "niss-planned"
_LOOKS = list(METHODS)
# Without faults in the looks that the methods have in the other figures.
_CURVES = (
    ("dp-fedavg", "none", "dp-fedavg", _LOOKS.index("dp-fedavg")),
    ("central-dp", "none", "central-dp", _LOOKS.index("central-dp")),
    (_METHOD, "none", "niss", _LOOKS.index(_METHOD)),
    (_METHOD, "collusion", "niss, a fifth collude", 3),
    (_METHOD, "repair", "niss, a tenth drop out, repaired", 4),
    (_METHOD, "tolerate", "niss, a tenth drop out, tolerated", 0),
)


def draw_beyond(results: dict[str, Result]) -> Figure:
    """Accuracy over the epsilon promised, a panel for each setting; below, the epsilon that holds in each view.

    Settings with fixed cohorts have a figure of their own.
    """
    results = {name: result for name, result in results.items() if name not in of_cohorts(results)} or results
    rows = max(1, math.ceil(len(results) / _COLUMNS))
    height = 2.5 * rows + 3.4
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, height))
        parts = figure.add_gridspec(
            2,
            1,
            height_ratios=(2.5 * rows, 1.9),
            left=0.065,
            right=0.985,
            top=1.0 - 0.3 / height,
            bottom=0.55 / height,
            hspace=1.25 / (2.5 * rows + 1.9) * 2,
        )
        grid = parts[0].subgridspec(rows, _COLUMNS, hspace=0.45, wspace=0.3)
        for number, result in enumerate(in_order(results.values())):
            axes = figure.add_subplot(grid[number // _COLUMNS, number % _COLUMNS])
            _setting(axes, result)
            if number % _COLUMNS == 0:
                axes.set_ylabel("Test accuracy")
        figure.legend(
            handles=_handles(),
            loc="upper center",
            bbox_to_anchor=(0.5, 2.95 / height),
            ncols=len(EARLIER),
        )
        for place, (unit, words) in enumerate(_UNITS.items()):
            below = figure.add_subplot(parts[1].subgridspec(1, 2, wspace=0.16)[0, place])
            _held(below, [one for one in results.values() if one.base["unit"] == unit], words)
    return figure


def _handles() -> list[Line2D]:
    return [
        Line2D([], [], marker=MARKERS[number % len(MARKERS)], label=name, **curve_look(number))
        for number, name in enumerate(METHODS)
        if name in EARLIER
    ]


def in_order(results: Iterable[Result]) -> list[Result]:
    """Settings as they are listed, then those with rounds of another size."""

    def place(result: Result) -> tuple[bool, int, str]:
        usual = _usual(result).name
        listed = SETTINGS.index(usual) if usual in SETTINGS else len(SETTINGS)
        return result.name != usual, listed, result.name

    return sorted(results, key=place)


def _usual(result: Result) -> Setting:
    base = result.base
    return find_setting(f"{base['dataset']}-{base['split']}-{base['unit']}")


def setting_title(result: Result) -> str:
    """The setting, with the participants of a round where they are not the usual ones."""
    usual = _usual(result)
    if "images_per_client" in result.base:
        return f"{usual.title}, {result.base['participants']:,} of {result.base['clients']:,}"
    size = "" if result.name == usual.name else f", m = {result.base['participants']:,}"
    return usual.title + size


def _setting(axes: Axes, result: Result) -> None:
    axes.set_title(setting_title(result), fontsize=9.5)
    accuracy_axis(axes)
    shown: list[float] = []
    for number, method in enumerate(METHODS):
        cells = select(result, method=method, variant="none")
        if cells and cells[0].labels["epsilon"] is None:
            shown.append(spread([cell.accuracy for cell in cells]).mean)
            axes.axhline(shown[-1], **curve_look(number))
        else:
            shown += draw_points(axes, cells, "epsilon", number)
    epsilon_axis(axes)
    accuracy_limits(axes, shown)


def epsilon_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.set_xlabel("ε promised, whole training")


def draw_points(axes: Axes, cells: Sequence[Cell], label: str, number: int) -> list[float]:
    """Mean and deviation of the accuracy over a label; returns the accuracies that should be in sight."""
    places = sorted({cell.labels[label] for cell in cells})
    found = [spread([cell.accuracy for cell in cells if cell.labels[label] == place]) for place in places]
    _errorbar(axes, places, [(one.mean, one.deviation) for one in found], number)
    return [one.mean + side * one.deviation for one in found for side in (-1.0, 1.0)]


def _errorbar(axes: Axes, places: Any, values: Sequence[tuple[float, float]], number: int) -> None:
    means, deviations = [mean for mean, _ in values], [deviation for _, deviation in values]
    look = curve_look(number)
    axes.errorbar(
        places, means, yerr=deviations, marker=MARKERS[number % len(MARKERS)], markersize=4, capsize=2, **look
    )


def _held(axes: Axes, results: Sequence[Result], words: str) -> None:
    """The epsilon that holds in the joint and in the marginal view where 3 was promised: the largest over runs."""
    axes.set_title(f"ε that holds where ε = {_HELD_AT:g} was promised ({words})", fontsize=9.5)
    private = [name for name in EARLIER if METHODS[name].private]
    top = 2.0 * _HELD_AT
    for place, method in enumerate(private):
        number = list(METHODS).index(method)
        cells = [
            cell
            for one in results
            for cell in select(one, method=method, variant="none")
            if cell.labels["epsilon"] == _HELD_AT
        ]
        if cells:
            _two_views(axes, place, cells, number, top)
    axes.axhline(_HELD_AT, color=QUIET, linewidth=0.9, linestyle=":")
    axes.set_xticks(range(len(private)), private, fontsize=8.5)
    axes.set_xlim(-0.5, len(private) - 0.5)
    axes.set_ylim(-0.12 * top, 1.15 * top)  # room for words below a small epsilon
    axes.set_yticks([0.0, _HELD_AT, top], ["0", f"{_HELD_AT:g}", "none"])


def _two_views(axes: Axes, place: int, cells: Sequence[Cell], number: int, top: float) -> None:
    colour = curve_look(number)["color"]
    views = (
        ("joint", [cell.epsilon_joint for cell in cells], -0.21, colour),
        ("marginal", [cell.epsilon_marginal for cell in cells], 0.21, "white"),
    )
    for name, values, aside, face in views:
        finite = [value for value in values if value is not None]
        height = max(finite) if len(finite) == len(values) else top
        axes.plot(
            [place + aside],
            [height],
            marker=MARKERS[number % len(MARKERS)],
            markersize=7,
            color=colour,
            markerfacecolor=face,
            linestyle="none",
        )
        axes.annotate(
            name,
            (place + aside, height),
            (0, -7),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=7.0,
        )


def draw_scale(results: dict[str, Result]) -> Figure:
    """Accuracy over the participants of a round, a panel for each dataset."""
    datasets = sorted(
        {result.base["dataset"] for result in results.values()}, key=lambda name: name != "mnist"
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 4.6 * len(datasets)), 3.6))
        grid = figure.subplots(1, len(datasets), squeeze=False)[0]
        for axes, dataset in zip(grid, datasets, strict=True):
            _scale(axes, [one for one in results.values() if one.base["dataset"] == dataset])
        found = {cell.labels["method"] for one in results.values() for cell in one.cells}
        handles = [handle for handle in _handles() if handle.get_label() in found]
        figure.legend(handles=handles, loc="lower center", ncols=len(handles))
        figure.subplots_adjust(left=0.11, right=0.97, top=0.9, bottom=0.28, wspace=0.25)
    return figure


def _scale(axes: Axes, results: Sequence[Result]) -> None:
    axes.set_title(f"{_usual(results[0]).title}, ε = {_epsilon(results):g}", fontsize=9.5)
    accuracy_axis(axes)
    sizes = sorted({result.base["participants"] for result in results})
    shown: list[float] = []
    for number, method in enumerate(METHODS):
        by_size = {
            result.base["participants"]: spread([cell.accuracy for cell in cells])
            for result in results
            if (cells := select(result, method=method))
        }
        places = sorted(by_size)
        if places:
            _errorbar(axes, places, [(by_size[at].mean, by_size[at].deviation) for at in places], number)
            shown += [
                by_size[at].mean + side * by_size[at].deviation for at in places for side in (-1.0, 1.0)
            ]
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    accuracy_limits(axes, shown)
    axes.set_xlabel("Participants a round")
    axes.set_ylabel("Test accuracy")


def _epsilon(results: Sequence[Result]) -> float:
    return max(
        float(cell.labels["epsilon"]) for one in results for cell in one.cells if cell.labels["epsilon"]
    )


def with_faults(results: dict[str, Result]) -> dict[str, Result]:
    """Those settings in which clients drop out."""
    dropping = [name for name, variant in VARIANTS.items() if variant.dropout]
    return {
        name: result
        for name, result in results.items()
        if any(select(result, method=_METHOD, variant=variant) for variant in dropping)
    }


def draw_faults(results: dict[str, Result]) -> Figure:
    """A panel for each setting in which clients drop out."""
    shown = in_order(with_faults(results).values())
    rows, columns = max(1, math.ceil(len(shown) / _COLUMNS)), max(1, min(_COLUMNS, len(shown)))
    height = 2.6 * rows + 0.75
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 2.75 * columns), height))
        grid = figure.subplots(rows, columns, squeeze=False)
        for number, axes in enumerate(grid.flat):
            if number >= len(shown):
                axes.set_visible(False)
                continue
            _fault_panel(axes, shown[number])
            if number % columns == 0:
                axes.set_ylabel("Test accuracy")
        handles = [
            Line2D([], [], marker=MARKERS[look % len(MARKERS)], label=words, **curve_look(look))
            for _, _, words, look in _CURVES
        ]
        figure.legend(handles=handles, loc="lower center", ncols=3)
        figure.subplots_adjust(
            left=0.075, right=0.985, top=1.0 - 0.3 / height, bottom=1.1 / height, hspace=0.5, wspace=0.3
        )
    return figure


def _fault_panel(axes: Axes, result: Result) -> None:
    axes.set_title(setting_title(result), fontsize=9.5)
    accuracy_axis(axes)
    shown: list[float] = []
    for method, variant, _, look in _CURVES:
        shown += draw_points(axes, select(result, method=method, variant=variant), "epsilon", look)
    epsilon_axis(axes)
    accuracy_limits(axes, shown)


def write_figures(folder: Path, work: Path | None = None) -> list[Path]:
    """Draws what there is results for, into the results folder.

    Figure 4 shows recovered pictures, which only the folder `work` of its runs holds; without them it stays as it is.
    """
    drawers: dict[str, Callable[[dict[str, Result]], Figure]] = {
        FIGURE_3: draw_figure_3,
        GAPS: draw_gaps,
        BEYOND: draw_beyond,
        SCALE: draw_scale,
    }
    figures: dict[str, Figure | None] = {
        name: draw(results)
        for name, draw in drawers.items()
        if (results := read_results(folder, DRAWN_FROM[name]))
    }
    beyond = read_results(folder, BEYOND)
    if cohorts := of_cohorts(beyond):
        figures[RIVALS_FIGURE], figures[NOISE_FIGURE] = draw_rivals(cohorts), draw_noise(cohorts)
    if dropping := with_faults(beyond):
        figures[FAULTS] = draw_faults(dropping)
    if work is not None and (leaks := leaks_in_order(folder)):
        figures[FIGURE_4] = draw_figure_4(leaks, work)
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(folder / f"{name}.png")
            png = stamp(as_png(figure), data_digest(folder, name))
            write_atomically(written[-1], png, mode=SHARED)
    return written
