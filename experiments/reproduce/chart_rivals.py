"""Two figures of the settings with fixed cohorts: accuracy over epsilon, and the noise in the model over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.reproduce.chart_panels import LOOKS, Curve, draw_curves, epsilon_axis, named, over, panels
from experiments.reproduce.checks import setting_of
from experiments.reproduce.design import METHODS, RIVALS
from experiments.reproduce.modelled import MODELLED
from experiments.reproduce.recompute import CarriedNoise, FloatArray, banded_noise
from experiments.reproduce.results import Cell, Result, select, spread
from niss.figures import grid, line_options
from niss.methods.look import DOTTED, QUIET, Look

_AT = 3.0
_GUESS, _GUESS_LOOK = "most frequent label", Look(QUIET, "", DOTTED)


def of_cohorts(results: Mapping[str, Result]) -> dict[str, Result]:
    """Those settings, by dataset, split and size: MNIST before CIFAR-10, IID before not, large rounds first."""
    found = {name: one for name, one in results.items() if "images_per_client" in one.base}

    def place(name: str) -> tuple[bool, bool, int]:
        base = found[name].base
        return base["dataset"] != "mnist", base["split"] != "iid", -base["participants"]

    return {name: found[name] for name in sorted(found, key=place)}


def draw_rivals(results: Mapping[str, Result]) -> Figure:
    """Accuracy over the epsilon promised, for all rivals, without faults."""
    return _over_epsilon(list(of_cohorts(results).values()), _legend(results))


def draw_datasets(results: Mapping[str, Result]) -> Figure:
    """The same for other models and data, with what the most frequent label is worth."""
    shown = [
        results[name] for name in (*MODELLED, *sorted(results.keys() - MODELLED.keys())) if name in results
    ]
    return _over_epsilon(shown, [*_legend(results), (_GUESS, _GUESS_LOOK)])


def _over_epsilon(shown: Sequence[Result], legend: Sequence[tuple[str, Look]]) -> Figure:
    def draw(axes: Axes, number: int) -> None:
        curves = [
            curve
            for name in RIVALS
            for curve in over(
                select(shown[number], method=name, variant="none"), "epsilon", name, LOOKS[name]
            )
        ]
        if (guess := shown[number].base.get("majority")) is not None:
            curves.append(Curve(_GUESS, _GUESS_LOOK, (), [spread([guess])]))
        draw_curves(axes, curves)
        epsilon_axis(axes)

    return panels(
        [_title(one) for one in shown], draw, across="ε promised", up="Test accuracy", legend=legend
    )


def draw_noise(results: Mapping[str, Result]) -> Figure:
    """Noise variance in the model after each round at epsilon 3, in squared sensitivities of one upload."""
    # The noise depends on the size alone, so each size is shown once.
    by_size = {
        (one.base["participants"], one.base["clients"], one.base["rounds"]): one
        for one in reversed(of_cohorts(results).values())
    }
    shown = [by_size[size] for size in sorted(by_size, reverse=True)]
    return panels(
        [f"{setting_of(one).participants:,} of {setting_of(one).clients:,}" for one in shown],
        lambda axes, number: _noise(axes, shown[number]),
        across="Round",
        up="Noise in the model",
        legend=_legend(results, private=True),
    )


def _legend(results: Mapping[str, Result], *, private: bool = False) -> list[tuple[str, Look]]:
    """The rivals that were run, or of them those that add noise."""
    found = {cell.labels["method"] for result in results.values() for cell in result.cells}
    return [
        (named(name), LOOKS[name])
        for name in RIVALS
        if name in found and (METHODS[name].private or not private)
    ]


def _title(result: Result) -> str:
    setting = setting_of(result)
    return f"{setting.title.removesuffix(', client')}\n{setting.participants:,} of {setting.clients:,}"


def _noise(axes: Axes, result: Result) -> None:
    for name in RIVALS:
        cells = [
            cell for cell in select(result, method=name, variant="none") if cell.labels["epsilon"] == _AT
        ]
        if cells:
            variance = noise_in_model(result, cells[0])
            every = max(variance.size // 5, 1)
            axes.plot(
                np.arange(1, variance.size + 1),
                variance,
                markevery=every,
                **line_options(LOOKS[name], size=5.5),
            )
    axes.set_yscale("log")
    grid(axes, "y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))


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
