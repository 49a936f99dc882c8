"""The figures beyond the paper, drawn from the result files, and `write_figures`, which writes all there are.

Accuracy over epsilon, the epsilon that really holds, what colluders and dropouts cost, and the size of a round. This
module loads matplotlib; what runs experiments must not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reproduce.chart_panels import (
    LOOKS,
    Curve,
    draw_curves,
    epsilon_axis,
    named,
    over,
    panels,
)
from experiments.reproduce.chart_paper import STYLE, draw_figure_3, draw_figure_4, draw_gaps, keep_shown
from experiments.reproduce.chart_rivals import draw_datasets, draw_noise, draw_rivals, of_cohorts
from experiments.reproduce.design import (
    BEYOND,
    DATASETS,
    EARLIER,
    FIGURE_3,
    FIGURE_4,
    METHODS,
    PARTICIPANTS,
    SCALE,
    VARIANTS,
    Setting,
    find_setting,
)
from experiments.reproduce.results import Cell, Result, read_results, select, spread
from experiments.reproduce.stamps import DRAWN_FROM, data_digest, figure_name, stamp
from experiments.reproduce.tables import leaks_in_order
from niss.figures import grid, png
from niss.files import SHARED, write_atomically
from niss.methods.look import CRIMSON, DASHED, OLIVE, QUIET, SHORT, SKY, Look

_HELD_AT = 3.0
_UNITS = {"client": "whole clients", "record": "single records"}
FAULTS, GAPS = "faults", "gaps"
RIVALS_FIGURE, NOISE_FIGURE = "rivals", "noise"
_METHOD = "niss-planned"
# Without faults in the looks that the methods have everywhere.
_CURVES = (
    ("dp-fedavg", "none", "dp-fedavg", LOOKS["dp-fedavg"]),
    ("central-dp", "none", "central-dp", LOOKS["central-dp"]),
    (_METHOD, "none", "niss", LOOKS[_METHOD]),
    (_METHOD, "collusion", "niss, a fifth collude", Look(CRIMSON, "X", DASHED)),
    (_METHOD, "repair", "niss, dropouts repaired", Look(SKY, ">", SHORT)),
    (_METHOD, "tolerate", "niss, dropouts tolerated", Look(OLIVE, "<", DASHED)),
)


def in_order(results: Iterable[Result]) -> list[Result]:
    """By dataset, split, unit and size: MNIST first, IID first, clients before records, large rounds first."""

    def place(result: Result) -> tuple[bool, bool, bool, int, int]:
        base = result.base
        return (
            base["dataset"] != "mnist",
            base["split"] != "iid",
            base["unit"] != "client",
            -int(base["participants"]),
            -int(base["clients"]),
        )

    return sorted(results, key=place)


def _usual(result: Result) -> Setting:
    base = result.base
    return find_setting(f"{base['dataset']}-{base['split']}-{base['unit']}")


def setting_title(result: Result) -> str:
    """Dataset and split, and below them the unit and the size of a round."""
    base = result.base
    size = f"{base['participants']:,} a round"
    if "images_per_client" in base:
        size = f"{base['participants']:,} of {base['clients']:,}"
    elif base["participants"] == PARTICIPANTS["record"] and base["unit"] == "record":
        size = "records"
    return f"{_usual(result).title.removesuffix(', client').removesuffix(', record')}\n{size}"


def draw_beyond(results: dict[str, Result]) -> Figure:
    """Accuracy over the epsilon promised, a panel for each setting; below, the epsilon that holds in each view.

    Settings with fixed cohorts have a figure of their own.
    """
    results = {name: result for name, result in results.items() if name not in of_cohorts(results)} or results
    shown = in_order(results.values())

    def draw(axes: Axes, number: int) -> None:
        cells = {name: select(shown[number], method=name, variant="none") for name in EARLIER}
        draw_curves(
            axes, [curve for name in EARLIER for curve in over(cells[name], "epsilon", name, LOOKS[name])]
        )
        epsilon_axis(axes)

    foot = 2.9
    legend = [(named(name), LOOKS[name]) for name in EARLIER]
    figure = panels(
        [setting_title(one) for one in shown],
        draw,
        across="ε promised",
        up="Test accuracy",
        legend=legend,
        foot=foot,
    )
    height = figure.get_figheight()
    with mpl.rc_context(STYLE):
        for place, (unit, words) in enumerate(_UNITS.items()):
            axes = figure.add_axes((0.235 + 0.39 * place, 0.85 / height, 0.35, (foot - 1.35) / height))
            _held(axes, [one for one in shown if one.base["unit"] == unit], words, labelled=place == 0)
        marks = [
            Line2D([], [], color=QUIET, marker="o", linestyle="", markerfacecolor=face, label=words)
            for face, words in (
                (QUIET, "all uploads (joint view)"),
                ("white", "one upload alone (marginal view)"),
            )
        ]
        figure.legend(handles=marks, loc="lower center", ncols=2, bbox_to_anchor=(0.55, 0.02 / height))
    return figure


def _held(axes: Axes, results: Sequence[Result], words: str, *, labelled: bool) -> None:
    """The epsilon that holds in the joint and in the marginal view where 3 was promised: the largest over runs."""
    axes.set_title(f"ε that holds, {words}", fontsize=10.5)
    private = [name for name in EARLIER if METHODS[name].private]
    nothing = 1.75 * _HELD_AT
    axes.axvspan(nothing - 0.8, nothing + 0.8, color=QUIET, alpha=0.12, linewidth=0)
    for place, method in enumerate(private):
        cells = [
            cell
            for one in results
            for cell in select(one, method=method, variant="none")
            if cell.labels["epsilon"] == _HELD_AT
        ]
        if cells:
            _two_views(axes, place, cells, LOOKS[method], nothing)
    axes.axvline(_HELD_AT, color=QUIET, linewidth=1.0, linestyle=":")
    axes.set_yticks(range(len(private)), private if labelled else [""] * len(private))
    axes.set_ylim(len(private) - 0.5, -0.5)
    axes.set_xlim(-0.3, nothing + 0.8)
    axes.set_xticks([0.0, _HELD_AT, nothing], ["0", f"{_HELD_AT:g}\npromised", "no\nguarantee"], fontsize=10)
    axes.tick_params(axis="y", length=0)
    grid(axes, "y")


def _two_views(axes: Axes, place: int, cells: Sequence[Cell], look: Look, nothing: float) -> None:
    for values, face, size in (
        ([cell.epsilon_marginal for cell in cells], "white", 8.5),
        ([cell.epsilon_joint for cell in cells], look.colour, 6.0),
    ):
        finite = [value for value in values if value is not None]
        at = max(finite) if len(finite) == len(values) else nothing
        axes.plot(
            [at],
            [place],
            marker=look.marker,
            markersize=size,
            markeredgewidth=1.5,
            color=look.colour,
            markerfacecolor=face,
            linestyle="none",
        )


def draw_scale(results: dict[str, Result]) -> Figure:
    """Accuracy over the participants of a round, a panel for each dataset."""
    datasets = sorted(
        {result.base["dataset"] for result in results.values()}, key=lambda name: name != "mnist"
    )
    groups = [[one for one in results.values() if one.base["dataset"] == name] for name in datasets]
    found = {cell.labels["method"] for one in results.values() for cell in one.cells}
    return panels(
        [f"{_usual(group[0]).title}, ε = {_epsilon(group):g}" for group in groups],
        lambda axes, number: _scale(axes, groups[number]),
        across="Participants a round",
        up="Test accuracy",
        legend=[(named(name), LOOKS[name]) for name in METHODS if name in found],
    )


def _scale(axes: Axes, results: Sequence[Result]) -> None:
    sizes = sorted({result.base["participants"] for result in results})
    curves = []
    for method in METHODS:
        by_size = {
            result.base["participants"]: spread([cell.accuracy for cell in cells])
            for result in results
            if (cells := select(result, method=method))
        }
        if by_size:
            places = sorted(by_size)
            curves.append(Curve(method, LOOKS[method], places, [by_size[at] for at in places]))
    draw_curves(axes, curves)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()


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
    """A panel for each setting in which clients drop out, whole clients first; fixed cohorts where there are any."""
    dropping = with_faults(results)
    cohorts = of_cohorts(dropping)
    chosen = [
        one
        for name, one in dropping.items()
        if not cohorts or name in cohorts or one.base["unit"] == "record"
    ]
    shown = sorted(in_order(chosen), key=lambda one: one.base["unit"] == "record")

    def draw(axes: Axes, number: int) -> None:
        curves = [
            curve
            for method, variant, words, look in _CURVES
            for curve in over(select(shown[number], method=method, variant=variant), "epsilon", words, look)
        ]
        draw_curves(axes, curves)
        epsilon_axis(axes)

    return panels(
        [setting_title(one) for one in shown],
        draw,
        across="ε promised",
        up="Test accuracy",
        legend=[(words, look) for _, _, words, look in _CURVES],
    )


def write_figures(folder: Path, work: Path | None = None) -> list[Path]:
    """Draws what there is results for, into the results folder.

    Figure 4 shows recovered pictures, which are kept beside its results; what a run left in `work` is newer.
    """
    drawers: dict[str, Callable[[dict[str, Result]], Figure]] = {
        FIGURE_3: draw_figure_3,
        GAPS: draw_gaps,
        BEYOND: draw_beyond,
        SCALE: draw_scale,
        DATASETS: draw_datasets,
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
    if leaks := leaks_in_order(folder):
        if work is not None:
            keep_shown(leaks, work, folder)
        figures[FIGURE_4] = draw_figure_4(leaks, folder)
    written = []
    for name, figure in figures.items():
        if figure is not None:
            # The dark one changes the figure, so it comes second.
            for dark in (False, True):
                path = folder / figure_name(name, dark=dark)
                image = stamp(png(figure, style=STYLE, dark=dark), data_digest(folder, name))
                write_atomically(path, image, mode=SHARED)
                written.append(path)
    return written
