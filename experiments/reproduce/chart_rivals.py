"""Two figures of the settings with fixed cohorts: accuracy over epsilon, and the noise in the model over rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.reproduce.chart_paper import accuracy_axis, accuracy_limits, curve_look
from experiments.reproduce.checks import setting_of
from experiments.reproduce.design import COMPARED, EPSILONS, METHODS, RIVALS
from experiments.reproduce.recompute import CarriedNoise, FloatArray, banded_noise
from experiments.reproduce.results import Cell, Result, select, spread
from niss.report.canvas import STYLE
from niss.report.method_charts import MARKERS

_COLUMNS = 4
_AT = 3.0
_LOOKS = {name: number for number, name in enumerate(RIVALS)}


def of_cohorts(results: Mapping[str, Result]) -> dict[str, Result]:
    """Those settings, the most telling first."""
    found = {name: one for name, one in results.items() if "images_per_client" in one.base}
    places = {name: number for number, name in enumerate(COMPARED)}
    return {name: found[name] for name in sorted(found, key=lambda name: (places.get(name, 99), name))}


def draw_rivals(results: Mapping[str, Result]) -> Figure:
    """Accuracy over the epsilon promised, for all rivals, without faults."""
    return _panels(results, _accuracy, "Test accuracy")


def draw_noise(results: Mapping[str, Result]) -> Figure:
    """Noise variance in the model after each round at epsilon 3, in squared sensitivities of one upload."""
    sizes = {(one.base["participants"], one.base["clients"], one.base["rounds"]) for one in results.values()}
    # The noise depends on the size alone.
    shown = {}
    for name, result in results.items():
        size = result.base["participants"], result.base["clients"], result.base["rounds"]
        if size in sizes:
            sizes.remove(size)
            shown[name] = result
    return _panels(shown, _noise, "Noise in the model")


def _panels(results: Mapping[str, Result], draw: Callable[[Axes, Result], None], label: str) -> Figure:
    columns = min(_COLUMNS, len(results))
    rows = math.ceil(len(results) / columns)
    height = 2.6 * rows + 0.75
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.4, 2.75 * columns), height))
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(results) :]:
            axes.set_visible(False)
        for number, (axes, result) in enumerate(zip(grid.flat, results.values(), strict=False)):
            setting = setting_of(result)
            size = f"{setting.participants:,} of {setting.clients:,}"
            axes.set_title(f"{setting.title.removesuffix(', client')}, {size}", fontsize=9.5)
            draw(axes, result)
            if number % columns == 0:
                axes.set_ylabel(label)
        found = {cell.labels["method"] for result in results.values() for cell in result.cells}
        handles = [
            Line2D([], [], marker=MARKERS[look % len(MARKERS)], label=name, **curve_look(look))
            for name, look in _LOOKS.items()
            if name in found
        ]
        figure.legend(handles=handles, loc="lower center", ncols=4)
        figure.subplots_adjust(
            left=0.09, right=0.985, top=1.0 - 0.3 / height, bottom=1.1 / height, hspace=0.5, wspace=0.3
        )
    return figure


def _accuracy(axes: Axes, result: Result) -> None:
    accuracy_axis(axes)
    shown: list[float] = []
    for name, look in _LOOKS.items():
        cells = select(result, method=name, variant="none")
        places = sorted({cell.labels["epsilon"] for cell in cells if cell.labels["epsilon"] is not None})
        if cells and not places:
            shown.append(spread([cell.accuracy for cell in cells]).mean)
            axes.axhline(shown[-1], **curve_look(look))
            continue
        found = [
            spread([cell.accuracy for cell in cells if cell.labels["epsilon"] == place]) for place in places
        ]
        axes.errorbar(
            places,
            [one.mean for one in found],
            yerr=[one.deviation for one in found],
            marker=MARKERS[look % len(MARKERS)],
            markersize=4,
            capsize=2,
            **curve_look(look),
        )
        shown += [one.mean for one in found]
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()
    axes.set_xlabel("ε promised, whole training")
    if shown:
        accuracy_limits(axes, shown)


def _noise(axes: Axes, result: Result) -> None:
    for name, look in _LOOKS.items():
        cells = [
            cell for cell in select(result, method=name, variant="none") if cell.labels["epsilon"] == _AT
        ]
        if cells:
            variance = noise_in_model(result, cells[0])
            axes.plot(
                np.arange(1, variance.size + 1),
                variance,
                marker=MARKERS[look % len(MARKERS)],
                markevery=max(variance.size // 6, 1),
                markersize=4,
                **curve_look(look),
            )
    axes.set_yscale("log")
    axes.set_xlabel("Round")


def noise_in_model(result: Result, cell: Cell) -> FloatArray:
    """Variance after each round, in squared sensitivities, from what the run recorded."""
    rounds, size = result.base["rounds"], result.base["participants"]
    facts, kind = cell.mechanism, METHODS[cell.labels["method"]].noise
    carried = cell.aggregate_variance / (cell.labels["clip"] / size) ** 2
    if kind == "carried":
        noise = CarriedNoise(rounds, size, facts["spatial"], facts["carried"], facts["residual"])
        return noise.model_variance()
    if kind == "banded":
        _, by_round, model = banded_noise(rounds, facts["bands"] or facts["separation"])
        return np.asarray(carried / by_round.mean() * model)
    return np.asarray(carried * np.arange(1.0, rounds + 1.0))
