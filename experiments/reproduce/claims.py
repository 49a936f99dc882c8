"""What the text claims, recomputed from the result files: Figures 3 and 4, and the same epsilon for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from experiments.reproduce import design
from experiments.reproduce.results import Attempt, Cell, Leaks, Result, Spread, read_results, select, spread
from experiments.reproduce.sensitivity import NBAFL

UNMEASURED = "not measured yet"


@dataclass(frozen=True)
class Claim:
    """One claim: `holds` is None where nothing is measured yet. One that is not `required` is the paper's, not ours.

    `answer` takes the place of the verdict where yes or no is not the answer.
    """

    name: str
    holds: bool | None = None
    detail: str = UNMEASURED
    required: bool = True
    answer: str = ""

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return UNMEASURED
        if self.answer:
            return self.answer
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
    images = {design.picture_name(image): image for image in design.IMAGES}
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
    for cell in _cells(leaks, *design.PAPER_LEVELS):
        if cell.labels["noise"] in ("none", NBAFL.name):
            by_seed.setdefault(cell.labels["seed"], []).append(cell.loss)
    whole = [losses for losses in by_seed.values() if len(losses) == len(design.PAPER_LEVELS)]
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
CHANCE = 0.1
LEARNS = CHANCE + 0.1
BY_ROUND, REACHED = 60, 0.965
CLOSE = 0.01


def check_claims(folder: Path) -> list[Claim]:
    """Every claim, from the files in a results folder."""
    figure, beyond = (read_results(folder, name) for name in (design.FIGURE_3, design.BEYOND))
    paper = (_early_accuracy, _monotone, _gaps, _average_gap)
    claims = [claim for check in paper for claim in check(figure)]
    claims += leak_claims(read_results(folder, design.FIGURE_4))
    for name, result in beyond.items():
        claims += [*_close_to_central(name, result), *_honest(name, result), *_faults(name, result)]
    for name, result in read_results(folder, design.DATASETS).items():
        claims += [*_close_to_central(name, result), *_honest(name, result)]
    return claims


def learns(accuracy: Spread, result: Result) -> bool:
    """Whether a model knows more than the most frequent label: a point more, and more than seeds differ."""
    if "majority" not in result.base:
        return accuracy.mean >= LEARNS
    majority: float = result.base["majority"]
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
            for low, high in pairwise(design.X_VALUES)
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


def _gaps(figure: dict[str, Result]) -> Iterator[Claim]:
    """The paper does not say after how many rounds its gaps were taken, and ours depend on that."""
    for name, (low, high) in PAPER_GAPS.items():
        claim = f"{name}: the paper's gap of {low} to {high} points"
        gaps = gap_by_round(figure.get(name))
        if not gaps:
            yield Claim(claim, required=False)
            continue
        within = rounds_within(gaps, low, high)
        most = max(gaps, key=lambda last: gaps[last].mean)
        last, largest = (100 * gaps[at].mean for at in (max(gaps), most))
        detail = (
            f"{last:.1f} points over the last {WINDOW} rounds; "
            f"{largest:.1f} over rounds {most - WINDOW + 1} to {most}, where it is largest"
        )
        yield Claim(claim, bool(within), detail, required=False, answer=stretches(within))


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


def _close_to_central(name: str, result: Result) -> Iterator[Claim]:
    for epsilon in design.EPSILONS:
        niss_cells, central_cells = (
            select(result, method=method, epsilon=epsilon, variant="none")
            for method in ("niss-planned", "central-dp")
        )
        if not niss_cells or not central_cells:
            continue
        niss, central = (spread([cell.accuracy for cell in one]) for one in (niss_cells, central_cells))
        claim = f"{name}, epsilon {epsilon:g}: calibrated NISS within 1 point of central DP"
        numbers = f"{niss.mean:.2%} against {central.mean:.2%}"
        if not learns(central, result):
            yield Claim(claim, True, f"central DP does not learn here: {numbers}", required=False)
            continue
        ratio = _relative_noise(niss_cells) / _relative_noise(central_cells)
        detail = f"{numbers}; noise variance {ratio:.2f} times that of a trusted server, per clip"
        # A choice that was made at another epsilon favours now the one, now the other: their noise is alike, their
        # clips, rates and widths are not.
        labels = [cell.labels for cell in (*niss_cells, *central_cells)]
        elsewhere = any(f"at epsilon {epsilon:g}" not in one["tuned_for"] for one in labels)
        unlike = len({(one["clip"], one["learning_rate"], one["hidden"]) for one in labels}) > 1
        if elsewhere and unlike:
            detail += "; their choices differ, and were made at another epsilon"
        # Where little is learned three seeds alone differ by more than a point.
        near = max(CLOSE, _chance(niss, central))
        if near > CLOSE:
            detail += f"; seeds differ by {100.0 * near:.1f} points"
        yield Claim(claim, niss.mean >= central.mean - near, detail, required=not (elsewhere and unlike))


def _relative_noise(cells: list[Cell]) -> float:
    """The noise variance left in the sum, in squared clips."""
    return spread([cell.aggregate_variance / cell.labels["clip"] ** 2 for cell in cells]).mean


def _honest(name: str, result: Result) -> Iterator[Claim]:
    """The epsilon of the joint view is the one promised."""
    promised = [cell for cell in result.cells if design.METHODS[cell.labels["method"]].private]
    over = [
        cell.id
        for cell in promised
        if cell.epsilon_joint is None or cell.epsilon_joint > cell.labels["epsilon"] * (1 + 1e-6)
    ]
    if promised:
        detail = f"{len(promised)} runs" if not over else "not in " + ", ".join(over)
        yield Claim(f"{name}: epsilon in the joint view is at most the one promised", not over, detail)


def _faults(name: str, result: Result) -> Iterator[Claim]:
    """What colluders and dropouts leave of the lead over DP-FedAvg, at the worst epsilon.

    Dropouts that are only tolerated may cost all of it: that is said, not required.
    """
    for variant in [one for one in design.VARIANTS.values() if one.rho or one.dropout]:
        leads = []
        for epsilon in design.EPSILONS:
            niss = select(result, method="niss-planned", epsilon=epsilon, variant=variant.name)
            local = select(result, method="dp-fedavg", epsilon=epsilon, variant="none")
            if niss and local:
                one, other = (spread([cell.accuracy for cell in cells]) for cells in (niss, local))
                leads.append((one.mean - other.mean, _chance(one, other), epsilon))
        if leads:
            lead, chance, epsilon = min(leads)
            yield Claim(
                f"{name}: NISS with {variant.words} at least as accurate as DP-FedAvg",
                lead >= -chance,
                f"{100 * lead:.1f} points ahead where the lead is least, at epsilon {epsilon:g}",
                required=variant.name != "tolerate",
                answer="behind" if variant.name == "tolerate" and lead < -chance else "",
            )


def _chance(one: Spread, other: Spread) -> float:
    """By how much two methods may differ by chance."""
    return max(2 * (one.error + other.error), ONE_SEED_NOISE)
