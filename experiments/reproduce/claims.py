"""What the text claims of the paper's Figures 3 and 4, recomputed from the result files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from experiments.reproduce import paper
from experiments.reproduce.paper import NBAFL
from experiments.reproduce.results import Attempt, Leaks, Result, Spread, read_results, select, spread

UNMEASURED = "not measured yet"


@dataclass(frozen=True)
class Claim:
    """One claim: `holds` is None where nothing is measured yet. One that is not `required` is the paper's, not ours."""

    name: str
    holds: bool | None = None
    detail: str = UNMEASURED
    required: bool = True

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return UNMEASURED
        if self.holds:
            return "holds"
        return "does not hold" if self.required else "differs"


RECOVERED = 20.0
"""PSNR in dB, a mean squared error of 0.01, from which a picture counts as recovered; an even grey has 9 to 13."""

BARE = "DLG recovers the picture from a bare update"
JOINT = "NISS as printed, all uploads together: the picture is recovered all the same"
HIDDEN = "noise for epsilon 3: DLG stays below an even grey, wherever it stops"
LOSS = "the DLG loss rises from FedAvg over DP-FedAvg to NISS, as in the paper"
PAPER = "NISS as printed, one upload: almost nothing leaks, as the paper says"


def leak_claims(leaks: dict[str, Leaks]) -> Iterator[Claim]:
    """Every claim for every picture of the figure, and for every other one that was attacked."""
    images = {paper.picture_name(image): image for image in paper.IMAGES}
    for name in dict.fromkeys((*images, *leaks)):
        found = leaks.get(name)
        image = images.get(name) or leaks[name].base["image"]
        yield _recovered(f"{image}: {BARE}", _cells(found, "fedavg"))
        yield _recovered(f"{image}: {JOINT}", _cells(found, "niss-joint", "client-niss-joint"))
        promised = _cells(found, "client-dp-fedavg", "client-niss", "client-niss-calibrated")
        yield _hidden(f"{image}: {HIDDEN}", found, promised)
        yield _loss_order(f"{image}: {LOSS}", found)
        printed = select(found, level="niss", noise=NBAFL.name)
        yield replace(_hidden(f"{image}: {PAPER}", found, printed, ends=True), required=False)


def _cells(leaks: Leaks | None, *levels: str) -> list[Attempt]:
    return [cell for level in levels for cell in select(leaks, level=level)]


def _recovered(name: str, cells: list[Attempt]) -> Claim:
    if not cells:
        return Claim(name)
    worst = min(cell.psnr for cell in cells)
    labels = sum(cell.label_found for cell in cells)
    detail = f"{worst:.1f} dB in the worst of {len(cells)} attacks, the label found in {labels}"
    return Claim(name, worst >= RECOVERED and labels == len(cells), detail)


def _hidden(name: str, leaks: Leaks | None, cells: list[Attempt], *, ends: bool = False) -> Claim:
    """Nothing better than an even grey, wherever the search stops; `ends`: what it ends with is told, too."""
    if not cells or leaks is None:
        return Claim(name)
    best, grey = max(cell.best_psnr for cell in cells), leaks.base["grey_psnr"]
    if ends:
        detail = f"{max(cell.psnr for cell in cells):.1f} dB at the end, {best:.1f} dB on the way"
    else:
        detail = f"{best:.1f} dB in the best of {len(cells)} attacks"
    return Claim(name, best < grey, f"{detail}, an even grey has {grey:.1f} dB")


def _loss_order(name: str, leaks: Leaks | None) -> Claim:
    """At the reading of Figure 3, in every seed that has all three."""
    by_seed: dict[int, list[float]] = {}
    for cell in _cells(leaks, *paper.PAPER_LEVELS):
        if cell.labels["noise"] in ("none", NBAFL.name):
            by_seed.setdefault(cell.labels["seed"], []).append(cell.loss)
    whole = [losses for losses in by_seed.values() if len(losses) == len(paper.PAPER_LEVELS)]
    if not whole:
        return Claim(name)
    wrong = [losses for losses in whole if any(low >= high for low, high in pairwise(losses))]
    shown = ", ".join(f"{loss:.2g}" for loss in (wrong or whole)[0])
    return Claim(name, not wrong, f"{shown} in one of {len(whole)} seeds")


PAPER_GAPS = {
    "mnist-mlp-iid": (12, 13),
    "mnist-cnn-iid": (12, 13),
    "mnist-mlp-non-iid": (30, 40),
    "mnist-cnn-non-iid": (30, 40),
    "cifar10-mlp-iid": (15, 25),
    "cifar10-cnn-iid": (15, 25),
    "cifar10-mlp-non-iid": (10, 20),
    "cifar10-cnn-non-iid": (10, 20),
}
"""Points of accuracy between X = 0 and X = 1, as the paper's text gives them."""

PAPER_AVERAGE = 21
WINDOW = 10
"""Rounds over which gaps are averaged: with non-IID clients a single round says little."""

ONE_SEED_NOISE = 0.005
"""Two runs on 10,000 test images differ by this much by chance: one deviation of the difference at 85 %."""
BY_ROUND, REACHED = 60, 0.965
CLOSE = 0.01


def check_claims(folder: Path) -> list[Claim]:
    """Every claim, from the files in a results folder."""
    figure = read_results(folder, paper.FIGURE_3)
    claims = [claim for check in (_early_accuracy, _monotone, _average_gap) for claim in check(figure)]
    return [*claims, *leak_claims(read_results(folder, paper.FIGURE_4))]


def learns(accuracy: Spread, result: Result) -> bool:
    """Whether a model knows more than the most frequent label: a point more, and more than seeds differ.

    Where a result does not say how frequent that label is, everything counts as learned.
    """
    majority: float = result.base.get("majority", -1.0)
    return accuracy.mean > majority + max(CLOSE, 2.0 * accuracy.error)


def gap(
    result: Result | None, low: float = 0.0, high: float = 1.0, reading: str = NBAFL.name
) -> Spread | None:
    """Settled accuracy at X = `low` less that at X = `high`, paired by seed, over the seeds that have both."""
    one = {cell.labels["seed"]: cell for cell in select(result, x=low, reading=reading)}
    other = {cell.labels["seed"]: cell for cell in select(result, x=high, reading=reading)}
    shared = sorted(one.keys() & other.keys())
    return spread([one[seed].settled - other[seed].settled for seed in shared]) if shared else None


def _early_accuracy(figure: dict[str, Result]) -> Iterator[Claim]:
    name = f"mnist-mlp-iid reaches {REACHED:.1%} by round {BY_ROUND} at X = 0"
    reached = early_accuracies(figure.get("mnist-mlp-iid"))
    if not reached:
        yield Claim(name)
        return
    yield Claim(name, min(reached) >= REACHED, f"{min(reached):.2%} in the worst of {len(reached)} seeds")


def early_accuracies(result: Result | None) -> list[float]:
    """The best by round 60 at X = 0, of each seed that got there."""
    cells = select(result, x=0.0, reading=NBAFL.name)
    return [value for cell in cells if (value := cell.at(BY_ROUND)) is not None]


def _monotone(figure: dict[str, Result]) -> Iterator[Claim]:
    for name in dict.fromkeys((*PAPER_GAPS, *figure)):
        claim = f"{name}: accuracy falls in X, within seed noise"
        steps = [
            (low, high, found)
            for low, high in pairwise(paper.X_VALUES)
            if (found := gap(figure.get(name), low, high)) is not None
        ]
        if not steps:
            yield Claim(claim)
            continue
        rises = [
            f"X = {high:g} is {-100 * step.mean:.2f} points above X = {low:g}"
            for low, high, step in steps
            if -step.mean > max(2 * step.error, ONE_SEED_NOISE)
        ]
        falls = ", ".join(f"{100 * step.mean:.2f}" for _, _, step in steps)
        yield Claim(claim, not rises, "; ".join(rises) or f"steps of {falls} points")


def gap_by_round(result: Result | None, width: int = WINDOW) -> dict[int, Spread]:
    """The gap between X = 0 and X = 1 by the last of `width` rounds over which it is averaged, paired by seed."""
    one, other = (
        {cell.labels["seed"]: dict(cell.curve) for cell in select(result, x=x, reading=NBAFL.name)}
        for x in (0.0, 1.0)
    )
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return {}
    rounds = sorted(set.intersection(*(set(curves[seed]) for curves in (one, other) for seed in shared)))
    return {
        last: spread([sum(one[seed][at] - other[seed][at] for at in window) / width for seed in shared])
        for last in rounds
        if len(window := [at for at in rounds if last - width < at <= last]) == width
    }


def rounds_within(gaps: dict[int, Spread], low: float, high: float) -> list[tuple[int, int]]:
    """From when to when the gap, averaged over the rounds up to then, lies between `low` and `high` points."""
    found: list[tuple[int, int]] = []
    for last, one in gaps.items():
        if low <= 100 * one.mean <= high:
            goes_on = bool(found) and found[-1][1] == last - 1
            found[-1:] = [(found[-1][0], last)] if goes_on else [*found[-1:], (last, last)]
    return found


def stretches(within: list[tuple[int, int]]) -> str:
    """In words: at which rounds."""
    if not within:
        return "at no round"
    return "rounds " + ", ".join(
        str(first) if first == last else f"{first} to {last}" for first, last in within
    )


def _average_gap(figure: dict[str, Result]) -> Iterator[Claim]:
    claim = f"the paper's gap of {PAPER_AVERAGE} points on average over the panels"
    every = [gap(figure.get(name)) for name in PAPER_GAPS]
    measured = [100 * one.mean for one in every if one is not None]
    if len(measured) < len(PAPER_GAPS):
        yield Claim(claim, required=False)
        return
    average = sum(measured) / len(measured)
    yield Claim(claim, round(average) == PAPER_AVERAGE, f"{average:.1f} points", required=False)
