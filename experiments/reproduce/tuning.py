"""How every method is tuned: the same axes, the same search, the same number of trials, on images no client trains on.

The search goes from coarse to fine: every clip; every rate at the best clip; every width at the best of those; then the
`nearest` choices around the best so far that were not tried. It is a function of the trials alone, so that it goes on
where it stopped, and `niss verify` plays it again from the recorded accuracies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from experiments.reproduce.design import Choice, Contestant, Method, Setting, trial_cell
from experiments.reproduce.results import Result


@dataclass(frozen=True)
class Axes:
    """The values that may be chosen, in ascending order, where the search begins, and how many it tries at its end."""

    clip: tuple[float, ...]
    learning_rate: tuple[float, ...]
    hidden: tuple[int, ...]
    start: Choice
    nearest: int = 4

    def place(self, choice: Choice) -> tuple[int, int, int]:
        return (
            self.clip.index(choice.clip),
            self.learning_rate.index(choice.learning_rate),
            self.hidden.index(choice.hidden),
        )

    def choices(self) -> Iterator[Choice]:
        """All there are, in the order of their places."""
        return (Choice(*values) for values in product(self.clip, self.learning_rate, self.hidden))

    @property
    def trials(self) -> int:
        """How many a whole search takes."""
        sizes = len(self.clip), len(self.learning_rate), len(self.hidden)
        return min(sum(sizes) - 2 + self.nearest, math.prod(sizes))


AXES = Axes(
    clip=(0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    learning_rate=(0.05, 0.1, 0.2),
    hidden=(16, 32, 64),
    start=Choice(clip=0.5, learning_rate=0.1, hidden=32),
    nearest=1,
)


def axes_of(setting: Setting) -> Axes:
    """The usual ones, or its own; the search then begins in their middle and tries one neighbour at its end."""
    if not setting.clips:
        return AXES
    start = Choice(
        setting.clips[len(setting.clips) // 2], setting.rates[len(setting.rates) // 2], setting.width
    )
    return Axes(setting.clips, setting.rates, (setting.width,), start, nearest=1)


def axes_for(method: Method, axes: Axes) -> Axes:
    """Without noise nothing clips updates, so trials that differ in the clip would be one run."""
    return axes if method.private else replace(axes, clip=(axes.start.clip,))


def next_trials(axes: Axes, tried: Mapping[Choice, float]) -> list[Choice]:
    """What has to be tried next, given the accuracies so far; nothing once the search is over."""
    seen: dict[Choice, float] = {}
    for axis in ("clip", "learning_rate", "hidden"):
        centre = best_of(seen, axes) if seen else axes.start
        wanted = [replace(centre, **{axis: value}) for value in getattr(axes, axis)]
        missing = [choice for choice in wanted if choice not in tried]
        if missing:
            return missing
        seen |= {choice: tried[choice] for choice in wanted}
    best = axes.place(best_of(seen, axes))

    def steps(choice: Choice) -> int:
        return sum(abs(a - b) for a, b in zip(axes.place(choice), best, strict=True))

    # Of equally near ones, in the order of the axes.
    around = sorted((choice for choice in axes.choices() if choice not in seen), key=steps)
    return [choice for choice in around[: axes.nearest] if choice not in tried]


def best_of(tried: Mapping[Choice, float], axes: Axes) -> Choice:
    """The most accurate; of equals the one with the least clip, rate and width."""
    return min(tried, key=lambda choice: (-tried[choice], axes.place(choice)))


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
            clip = axes_of(setting).start.clip if labels["clip"] is None else labels["clip"]
            score = cell.accuracy if len(setting.trials) == 1 else cell.score
            scores[Choice(clip, labels["learning_rate"], labels["hidden"])].append(score)
    return {
        choice: sum(found) / len(found)
        for choice, found in scores.items()
        if len(found) == len(setting.trials)
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
        return axes_of(setting).start, "nothing"
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
