"""The figures, as charts of the result files: `CHARTS` has one function for each, `write_figures` draws what there is.

Accuracies are means over seeds with their deviation; thin lines are means over the five rounds before the last. Where a
method lies far below the others, so that nothing could be told of them on one axis, it is named with its numbers in the
title of the chart. This module loads matplotlib; what runs experiments must not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from experiments.reproduce import design, paper
from experiments.reproduce.claims import PAPER_GAPS, WINDOW, gap_by_round
from experiments.reproduce.comparisons import as_listed, at_epsilon, in_preset_order
from experiments.reproduce.paper import NBAFL
from experiments.reproduce.promises import noise_in_model
from experiments.reproduce.results import (
    ORIGINAL,
    Attempt,
    Cell,
    Leaks,
    Result,
    kept_pictures,
    read_results,
    select,
    spread,
)
from experiments.reproduce.tables import leaks_in_order
from experiments.reproduce.text import FIGURES, figure_name, narrow, write_stamps
from niss.charts import Chart, Curves, Series, Strip, marked, points, shown
from niss.figures import png
from niss.files import write_output
from niss.methods import METHODS, look_of
from niss.methods.look import (
    BLUE,
    CRIMSON,
    DASHED,
    DOTTED,
    OLIVE,
    PINK,
    PURPLE,
    SHORT,
    SKY,
    Look,
    distinct,
)
from niss.report.run_charts import accuracy_curves
from niss.svg import sheet

_HELD_AT = 3.0
_ACCURACY, _PROMISED = "Test accuracy, %", "ε promised"
# From NISS as printed, which protects nobody, to what is as DP-FedAvg.
_X_LOOKS = (Look(SKY, "", DOTTED), Look(BLUE, ""), Look(PURPLE, "", DASHED), Look(PINK, "", SHORT))
_X_NAMES = {0.0: "X = 0 (as FedAvg)", 1.0: "X = 1 (as DP-FedAvg)"}
LOOKS = dict(
    zip(
        design.METHODS,
        distinct(look_of(one.kind, protected=one.protects) for one in design.METHODS.values()),
        strict=True,
    )
)
_NAMES = {name: marked(name, protected=one.protects) for name, one in design.EVERYONE.items()}
_NISS = "niss-planned"
# Method, variant, name and look; without faults in the looks that the methods have everywhere.
_Contestant = tuple[str, str, str, Look]
_PLAIN: dict[str, _Contestant] = {name: (name, "none", _NAMES[name], LOOKS[name]) for name in design.METHODS}
_FAULTS: tuple[_Contestant, ...] = (
    _PLAIN["dp-fedavg"],
    _PLAIN["central-dp"],
    (_NISS, "none", "niss", LOOKS[_NISS]),
    (_NISS, "collusion", "niss, a fifth collude", Look(CRIMSON, "X", DASHED)),
    (_NISS, "repair", "niss, dropouts repaired", Look(SKY, ">", SHORT)),
    (_NISS, "tolerate", "niss, dropouts tolerated", Look(OLIVE, "<", DASHED)),
)


def in_order(results: Iterable[Result]) -> list[Result]:
    """By dataset, split and size: MNIST first, IID first, large rounds first."""

    def place(result: Result) -> tuple[bool, bool, int, int]:
        base = result.base
        size = -int(base["participants"]), -int(base["clients"])
        return (base["dataset"] != "mnist", base["split"] != "iid", *size)

    return sorted(results, key=place)


def _title(result: Result) -> str:
    """Dataset and split, and below them the size of a round, and how everyone was tuned."""
    setting = design.setting_of(result.name, result.base)
    return f"{setting.title}\n{_size(result)}\ntuned {setting.search.words}"


def _size(result: Result) -> str:
    return f"{result.base['participants']:,} of {result.base['clients']:,}"


def _accuracies(name: str, look: Look, groups: Sequence[Sequence[Cell]]) -> Iterator[Series]:
    """A point for each group of cells that has any: faintly the mean of the five rounds before the last, and that one.

    Both have one name, so that the legend has it once.
    """
    for measure in ("before", "accuracy"):
        found = [
            (float(place), spread([100 * getattr(cell, measure) for cell in cells]))
            for place, cells in enumerate(groups)
            if cells
        ]
        points = [(place, one.mean) for place, one in found]
        if measure == "before":
            yield Series(name, replace(look, marker="", line=DOTTED), points, thin=True)
        else:
            ends = [(one.mean - one.deviation, one.mean + one.deviation) for _, one in found]
            yield Series(name, look, points, marks=True, spread=ends)


def _cut(chart: Curves) -> Curves:
    """The chart where its curves differ; those that lie far below are named in its title."""
    told = [one for one in chart.series if not one.thin]
    low = far_below([[y for _, y in one.points] for one in told])
    named = {one.name: one for number, one in enumerate(told) if number in low}
    words = [f"\n↓ {one.name}: " + ", ".join(f"{y:.0f}" for _, y in one.points) for one in named.values()]
    kept = [one for one in chart.series if one.name not in named]
    return replace(chart, series=kept, title=chart.title + "".join(words))


def far_below(curves: Sequence[Sequence[float]]) -> set[int]:
    """The numbers of the curves that lie below all others where these, together, fill little of the common axis.

    Little is less than two fifths.
    """
    kept = {number: values for number, values in enumerate(curves) if len(values)}
    everything = set(kept)
    while len(kept) > 2:
        lowest = min(kept, key=lambda number: max(kept[number]))
        others = [value for number, values in kept.items() if number != lowest for value in values]
        whole = max(others) - min(kept[lowest])
        if max(kept[lowest]) >= min(others) or max(others) - min(others) > 0.4 * whole:
            break
        del kept[lowest]
    return everything - set(kept)


def _over_epsilon(results: Iterable[Result], contestants: Iterable[_Contestant]) -> list[Chart]:
    """Accuracy over the epsilon promised, a chart for each setting."""
    wanted, ticks = list(contestants), tuple(f"{epsilon:g}" for epsilon in design.EPSILONS)
    charts: list[Chart] = []
    for result in results:
        series = [
            one
            for method, variant, name, look in wanted
            if (cells := select(result, method=method, variant=variant))
            for one in _accuracies(name, look, [at_epsilon(cells, epsilon) for epsilon in design.EPSILONS])
        ]
        guess = result.base.get("majority")
        levels = {} if guess is None else {"most frequent label": 100 * guess}
        chart = Curves(
            title=_title(result), across=_PROMISED, up=_ACCURACY, series=series, ticks=ticks, levels=levels
        )
        charts.append(_cut(chart))
    return charts


def _faults(results: Mapping[str, Result]) -> list[Chart]:
    """A chart for each setting in which clients drop out."""
    variants = [name for name, variant in design.VARIANTS.items() if variant.dropout]
    dropping = [
        one
        for one in in_order(results.values())
        if any(select(one, method=_NISS, variant=name) for name in variants)
    ]
    return _over_epsilon(dropping, _FAULTS)


def _preset(name: str, results: Mapping[str, Result]) -> list[Chart]:
    """Accuracy by round of a preset's comparison, on an axis from 0 to 100 %: nothing is cut off."""
    cells = in_preset_order(results.get(name))
    methods = [design.EVERYONE[cell.labels["method"]] for cell in cells]
    looks = distinct(look_of(one.kind, protected=one.protects) for one in methods)
    series = [
        Series(_NAMES[one.name], look, [(float(at), value) for at, value in cell.curve], marks=True)
        for one, look, cell in zip(methods, looks, cells, strict=True)
    ]
    return [accuracy_curves(series, results[name].base["rounds"])] if series else []


def _noise(results: Mapping[str, Result]) -> list[Chart]:
    """Noise variance in the model after each round at epsilon 3, in squared sensitivities of one upload."""
    # The noise depends on the size alone, so each size is shown once.
    by_size = {
        (one.base["participants"], one.base["clients"], one.base["rounds"]): one
        for one in reversed(in_order(results.values()))
    }
    charts: list[Chart] = []
    for size in sorted(by_size, reverse=True):
        result, series = by_size[size], []
        for name in design.METHODS:
            if cells := select(result, method=name, variant="none", epsilon=_HELD_AT):
                variance = noise_in_model(result, cells[0])
                places = points(range(1, variance.size + 1), variance, "y")
                series.append(Series(_PLAIN[name][2], LOOKS[name], places, marks=True))
        charts.append(
            Curves(title=_size(result), across="Round", up="Noise in the model", series=series, log="y")
        )
    return charts


def _figure_3(results: Mapping[str, Result]) -> list[Chart]:
    """The eight panels: mean over seeds, band from worst to best."""
    charts: list[Chart] = []
    for panel in paper.panels_in(results):
        result = results[panel.name]
        series = [
            _band(_X_NAMES.get(x, f"X = {x:g}"), look, cells)
            for x, look in zip(paper.X_VALUES, _X_LOOKS, strict=True)
            if (cells := select(result, x=x, reading=NBAFL.name))
        ]
        charts.append(Curves(title=panel.title, across="Round", up=_ACCURACY, series=series))
    return charts


def _band(name: str, look: Look, cells: Sequence[Cell]) -> Series:
    """Seeds may have been evaluated at different rounds: only those that all have are shown."""
    curves = [dict(cell.curve) for cell in cells]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[100 * curve[at] for curve in curves] for at in rounds]
    means = [(float(at), sum(column) / len(column)) for at, column in zip(rounds, values, strict=True)]
    return Series(name, look, means, spread=[(min(column), max(column)) for column in values])


def _gaps(results: Mapping[str, Result]) -> list[Chart]:
    """The gap between X = 0 and X = 1 over rounds in the eight panels, with the range that the paper gives."""
    charts: list[Chart] = []
    for panel in paper.panels_in(results):
        gaps = {
            at: (100 * one.mean, 100 * one.deviation) for at, one in gap_by_round(results[panel.name]).items()
        }
        measured = Series(
            "measured; band: one deviation over seeds",
            _X_LOOKS[1],
            [(float(at), mean) for at, (mean, _) in gaps.items()],
            spread=[(mean - aside, mean + aside) for mean, aside in gaps.values()],
        )
        ends = zip(("least", "most"), PAPER_GAPS.get(panel.name, ()), strict=False)
        levels = {f"{end} of the paper's gap": float(value) for end, value in ends}
        across = f"Round (mean of {WINDOW} up to it)"
        charts.append(
            Curves(
                title=panel.title,
                across=across,
                up="Gap, points",
                series=[measured],
                levels=levels,
                least=0.0,
            )
        )
    return charts


def recovered_strips(leaks: Sequence[Leaks], folder: Path) -> list[Strip]:
    """For each picture: original, then what the first seed recovered at each level, with its PSNR."""
    strips: list[Strip] = []
    for one in leaks:
        if kept := kept_pictures(folder, one.name):
            row = [(f"original\n(grey {one.base['grey_psnr']:.0f} dB)", kept[ORIGINAL] / 255.0)]
            for level in paper.LEVELS.values():
                cell = _first_attempt(one, level)
                if cell is not None and cell.id in kept:
                    caption = f"{cell.psnr:.0f} dB" if strips else f"{level.caption}\n{cell.psnr:.0f} dB"
                    row.append((caption, kept[cell.id] / 255.0))
            strips.append(Strip(one.base["image"], row))
    return strips


def _first_attempt(leaks: Leaks, level: paper.Level) -> Attempt | None:
    """The attempt at a level with the first seed, at the first reading of the paper's noise."""
    found = select(leaks, level=level.name)
    return min(found, key=lambda cell: (cell.labels["seed"], cell.labels["sigma_k"] or 0.0), default=None)


def _losses(leaks: Sequence[Leaks]) -> list[Chart]:
    """The DLG loss over iterations at the paper's levels, in the looks of their methods; a chart for each picture."""
    charts: list[Chart] = []
    for one in leaks:
        series = []
        for level in (paper.LEVELS[name] for name in paper.PAPER_LEVELS):
            if cell := _first_attempt(one, level):
                # NISS that is not calibrated protects nobody.
                look = look_of(level.method, protected=not METHODS[level.method].shares_noise)
                at, losses = zip(*cell.losses, strict=True)
                series.append(Series(level.title, look, points(at, losses, "xy")))
        charts.append(
            Curves(title=one.base["image"], across="Iteration", up="DLG loss", series=series, log="xy")
        )
    return charts


CHARTS: dict[str, Callable[[Mapping[str, Result]], list[Chart]]] = {
    paper.FIGURE_3: _figure_3,
    "gaps": _gaps,
    "faults": _faults,
    "rivals": lambda results: _over_epsilon(as_listed(results), _PLAIN.values()),
    "noise": _noise,
    **{name: partial(_preset, name) for name in design.PRESETS},
    **{narrow(name): partial(_preset, name) for name in design.PRESETS},
}
"""By the name of the figure; each shows the results of the experiment that `FIGURES` names."""


def write_figures(folder: Path) -> list[Path]:
    """Draws what there is results for, into the results folder; Figure 4 shows the pictures beside its results."""
    sheets = {
        name: sheet(charts, keys_once=len(charts) > 1, narrow=name in map(narrow, design.PRESETS))
        for name, charts_of in CHARTS.items()
        if (charts := shown(charts_of(read_results(folder, FIGURES[name][0]))))
    }
    leaks = leaks_in_order(folder)
    if strips := recovered_strips(leaks, folder):
        sheets[paper.FIGURE_4] = sheet(shown(_losses(leaks)), strips, keys_once=True)
    written = [
        write_output(folder / figure_name(name, dark=dark), png(sheets[name], dark=dark))
        for name, dark in product(sheets, (False, True))
    ]
    write_stamps(folder)
    return written
