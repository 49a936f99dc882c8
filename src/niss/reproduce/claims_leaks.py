"""What the text claims about Figure 4, for every picture and in every seed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from niss.reproduce.claim import UNMEASURED, Claim
from niss.reproduce.figure4_levels import IMAGES, PAPER_LEVELS, picture_name
from niss.reproduce.leaks import Attempt, Leaks, select_level
from niss.reproduce.sensitivity import NBAFL

RECOVERED = 20.0
"""PSNR in dB, a mean squared error of 0.01, from which a picture counts as recovered; an even grey has 9 to 13."""

BARE = "DLG recovers the picture from a bare update"
JOINT = "NISS as printed, all uploads together: the picture is recovered all the same"
HIDDEN = "noise for epsilon 3: DLG stays below an even grey, wherever it stops"
LOSS = "the DLG loss rises from FedAvg over DP-FedAvg to NISS, as in the paper"
PAPER = "NISS as printed, one upload: almost nothing leaks, as the paper says"


def leak_claims(leaks: dict[str, Leaks]) -> Iterator[Claim]:
    """Every claim for every picture of the figure, and for every other one that was attacked."""
    images = {picture_name(image): image for image in IMAGES}
    for name in dict.fromkeys((*images, *leaks)):
        found = leaks.get(name)
        image = images.get(name) or leaks[name].base["image"]
        yield _recovered(f"{image}: {BARE}", _cells(found, "fedavg"))
        yield _recovered(f"{image}: {JOINT}", _cells(found, "niss-joint", "client-niss-joint"))
        yield _hidden(f"{image}: {HIDDEN}", found)
        yield _loss_order(f"{image}: {LOSS}", found)
        yield _almost_nothing(f"{image}: {PAPER}", found)


def _cells(leaks: Leaks | None, *levels: str) -> list[Attempt]:
    return [cell for level in levels for cell in select_level(leaks, level)] if leaks is not None else []


def _recovered(name: str, cells: list[Attempt]) -> Claim:
    if not cells:
        return Claim(name, None, UNMEASURED)
    worst = min(cell.psnr for cell in cells)
    labels = sum(cell.label_found for cell in cells)
    detail = f"{worst:.1f} dB in the worst of {len(cells)} attacks, the label found in {labels}"
    return Claim(name, worst >= RECOVERED and labels == len(cells), detail)


def _hidden(name: str, leaks: Leaks | None) -> Claim:
    cells = _cells(leaks, "client-dp-fedavg", "client-niss", "client-niss-calibrated")
    if not cells or leaks is None:
        return Claim(name, None, UNMEASURED)
    best = max(cell.best_psnr for cell in cells)
    detail = f"{best:.1f} dB in the best of {len(cells)} attacks, an even grey has {leaks.grey:.1f} dB"
    return Claim(name, best < leaks.grey, detail)


def _loss_order(name: str, leaks: Leaks | None) -> Claim:
    """At the reading of Figure 3, in every seed that has all three."""
    by_seed: dict[int, list[float]] = {}
    for level in PAPER_LEVELS:
        for cell in _cells(leaks, level):
            if cell.labels["noise"] in ("none", NBAFL.name):
                by_seed.setdefault(cell.labels["seed"], []).append(cell.loss)
    whole = [losses for losses in by_seed.values() if len(losses) == len(PAPER_LEVELS)]
    if not whole:
        return Claim(name, None, UNMEASURED)
    wrong = [losses for losses in whole if any(low >= high for low, high in pairwise(losses))]
    shown = ", ".join(f"{loss:.2g}" for loss in (wrong or whole)[0])
    return Claim(name, not wrong, f"{shown} in one of {len(whole)} seeds")


def _almost_nothing(name: str, leaks: Leaks | None) -> Claim:
    cells = [cell for cell in _cells(leaks, "niss") if cell.labels["noise"] == NBAFL.name]
    if not cells or leaks is None:
        return Claim(name, None, UNMEASURED, required=False)
    ends, best = max(cell.psnr for cell in cells), max(cell.best_psnr for cell in cells)
    detail = f"{ends:.1f} dB at the end, {best:.1f} dB on the way, an even grey has {leaks.grey:.1f} dB"
    return Claim(name, best < leaks.grey, detail, required=False)
