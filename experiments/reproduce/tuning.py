"""How every method is tuned: the same axes, the same search, on images no client trains on.

A search walks: from its start to the best of the choices one step away along each axis, until none of them is better.
So whatever is chosen has been tried beside its neighbours, and lies on no edge unless the axis ends there. The first
epsilon begins at the start of the setting, every further one at what was chosen for the method at the first.

Older files were searched from coarse to fine: every clip; every rate at the best clip; every width at the best of
those; then the nearest choice that was not tried. Both are functions of the trials alone, so that they go on where they
stopped, and `niss verify` plays them again from the recorded accuracies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from experiments.reproduce.design import Choice, Contestant, Search, Setting, trial_cell
from experiments.reproduce.results import Result


def next_trials(search: Search, start: Choice, tried: Mapping[Choice, float]) -> list[Choice]:
    """What has to be tried next, given the accuracies so far; nothing once the search is over."""
    return _walk(search, start, tried) if search.walks else _coarse_to_fine(search, start, tried)


def _walk(search: Search, best: Choice, tried: Mapping[Choice, float]) -> list[Choice]:
    here: Choice | None = None
    while best != here:
        here = best
        near = [choice for choice in search.choices() if _steps(search, choice, here) <= 1]
        if missing := [choice for choice in near if choice not in tried]:
            return missing
        best = best_of({choice: tried[choice] for choice in near}, search)
    return []


def _coarse_to_fine(search: Search, start: Choice, tried: Mapping[Choice, float]) -> list[Choice]:
    seen: dict[Choice, float] = {}
    for axis in ("clip", "learning_rate", "hidden"):
        centre = best_of(seen, search) if seen else start
        wanted = [replace(centre, **{axis: value}) for value in getattr(search, axis)]
        missing = [choice for choice in wanted if choice not in tried]
        if missing:
            return missing
        seen |= {choice: tried[choice] for choice in wanted}
    best = best_of(seen, search)
    # Of equally near ones, in the order of the axes.
    around = sorted(
        (choice for choice in search.choices() if choice not in seen),
        key=lambda choice: _steps(search, choice, best),
    )
    return [choice for choice in around[:1] if choice not in tried]


def _steps(search: Search, one: Choice, other: Choice) -> int:
    return sum(abs(a - b) for a, b in zip(search.place(one), search.place(other), strict=True))


def best_of(tried: Mapping[Choice, float], search: Search) -> Choice:
    """The most accurate; of equals the one with the least clip, rate and width."""
    return min(tried, key=lambda choice: (-tried[choice], search.place(choice)))


def open_trials(tuned: Result | None, setting: Setting, one: Contestant) -> list[Choice]:
    """What a contestant has to try next; nothing yet where the search that it begins from is not over."""
    first = _first(setting, one)
    if first != one and (tuned is None or open_trials(tuned, setting, first)):
        return []
    start, tried = beginning(tuned, setting, one), trials_of(tuned, setting, one)
    return next_trials(setting.search.of(one.method), start, tried)


def beginning(tuned: Result | None, setting: Setting, one: Contestant) -> Choice:
    """Where the search of a contestant begins."""
    first = _first(setting, one)
    trials = trials_of(tuned, setting, first) if first != one else {}
    return winner(first, trials) if trials else setting.search.start


def _first(setting: Setting, one: Contestant) -> Contestant:
    """At whose choice the search of another one begins."""
    walks = setting.search.walks and one.epsilon is not None
    return replace(one, epsilon=setting.search.epsilons[0]) if walks else one


def searches_in(tuned: Result) -> list[Contestant]:
    """Everyone who was tuned there."""
    found = {Contestant.of(cell.labels) for cell in tuned.cells}
    return sorted(found, key=lambda one: (one.method.name, one.variant.name, one.epsilon or 0.0))


def trials_of(tuned: Result | None, setting: Setting, one: Contestant) -> dict[Choice, float]:
    """What each choice of a contestant scored, once its trials with all seeds are there."""
    scores: dict[Choice, list[float]] = defaultdict(list)
    for cell in tuned.cells if tuned else ():
        if Contestant.of(cell.labels) == one:
            labels = cell.labels
            clip = setting.search.start.clip if labels["clip"] is None else labels["clip"]
            score = cell.accuracy if len(setting.search.seeds) == 1 else cell.score
            scores[Choice(clip, labels["learning_rate"], labels["hidden"])].append(score)
    return {
        choice: sum(found) / len(found)
        for choice, found in scores.items()
        if len(found) == len(setting.search.seeds)
    }


def winner(one: Contestant, trials: Mapping[Choice, float]) -> Choice:
    """The best choice; of equals the one whose trial comes last by name."""
    return max(trials, key=lambda choice: (trials[choice], trial_cell(one.trial(choice))))


def chosen(tuned: Result | None, setting: Setting, one: Contestant) -> tuple[Choice, str]:
    """The best choice for a contestant on the held-out images, and what was tuned for it.

    It is taken from the epsilon nearest to its own, among those at which the method was tuned, and from the
    variant without faults where its variant was not tuned itself.
    """
    known = [other for other in searches_in(tuned) if other.method == one.method] if tuned else []
    mine = [other for other in known if other.variant == one.variant]
    mine = mine or [other for other in known if other.variant.name == "none"]
    if not mine:
        return setting.search.start, "nothing"
    # Without noise the one choice serves for every epsilon.
    nearest = min(mine, key=lambda other: abs(math.log((other.epsilon or 1.0) / (one.epsilon or 1.0))))
    under = "" if nearest.variant.name == "none" else f" with {nearest.variant.name}"
    at = "" if nearest.epsilon is None else f" at epsilon {nearest.epsilon:g}"
    return winner(nearest, trials_of(tuned, setting, nearest)), one.method.name + under + at


def edges_of(trials: Mapping[Choice, float], best: Choice) -> list[str]:
    """Where the best of the trials has the least or the largest value that was tried: further out might be better."""
    found = []
    for name in ("clip", "learning_rate", "hidden"):
        values = sorted({getattr(choice, name) for choice in trials})
        if len(values) > 1 and getattr(best, name) in (values[0], values[-1]):
            found.append(name.replace("learning_", ""))
    return found
