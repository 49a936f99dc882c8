"""Metrics inside the upload: a few more coordinates of the sum that NISS protects, in place of an open door.

A metric v with the range [a, b] is cut to it and becomes `u = (2 v - a - b) / (b - a)`, between -1 and 1; 0 where the
app gave no such number. With k metrics, the clip C and the part p, a client uploads

    x = [ w ; s u ],   s = p C / sqrt(k),   ||w|| <= C sqrt(1 - p^2)

so that `||x||^2 <= (1 - p^2) C^2 + k s^2 = C^2`. The noise of a round is the same and independent in every coordinate,
and its charge is that of any vector within the clip: it covers x as it covers an update alone, in each view and for
both relations (to zero x out is to send no update and middling metrics, as a client does whose app failed). Metrics
therefore cost no privacy beyond the round's charge. They cost room: updates are clipped a little shorter. Clipping
several vectors jointly: McMahan et al., A General Approach to Adding Differential Privacy to Iterative Training
Procedures (2018).

The mean over the clients has noise of standard deviation `(b - a) / (2 s)` times that of a coordinate of the mean.

**Weights.** A metric n can weigh the update: w becomes `min(n, cap) / cap * w`, which is no longer than w was, and n is
sent beside it. The server divides the sum of the updates by the noisy sum of the weights, which it was told with them.
So weights are as private as all else, and nobody's depends on anyone else's; sensitivity and charge stay. (A weight
`n_k / sum n` would not do: one client's count would move the uploads of all.) Updates of clients below the cap use less
of the clip under the same noise. Capped weights: McMahan et al., Learning Differentially Private Recurrent Language
Models (2018), where their sum is taken to be public.

**Blanks.** A client whose app fails, or is late, uploads zeros. So that a server learns how many do, and of nobody
whether it did, the metric `niss-blank` is 1 for them and 0 for others: one more coordinate, hidden like all others.

**A clip that follows the norms.** `niss.mechanism.clipping` says how it moves, and what it costs. The bit of a client
travels as the metric `niss-below-clip`. The clip of a round stands in its terms, as it always did: a client accepts any
that is not above the plan's, nor above its own limit, and finds for itself what the round costs with it. Terms have
noise in proportion to their clip, so that is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan
from niss.errors import ConfigError, RemoteProtocolError
from niss.mechanism.blocks import Blocks
from niss.mechanism.clipping import AdaptiveClip, clipped, was_short
from niss.mechanism.grid import Grid
from niss.mechanism.rounding import beside
from niss.protocol.agreement import Agreed
from niss.protocol.messages import Terms
from niss.protocol.server import Outcome

PART = 0.2
"""Leaves 98 % of the clip to the update."""
NOISE = "_noise_sd"
"""What follows the name of a metric in the name of its noise."""
_PARTS = (0.01, 0.9)
_LONGEST_NAME = 64
_RESERVED = "niss-"
BELOW_CLIP = "niss-below-clip"
"""The fraction of the updates that clipping left as they were: what an adaptive clip follows. A client finds it itself
and always agrees to send it, since the charge of an update covers it, and it says nothing that an update does not."""
BLANK = "niss-blank"
"""Whether an upload is a blank. A client agrees to send it for the same reasons."""
OWN_BITS = (BELOW_CLIP, BLANK)
WEIGHT = "niss-weight:"
"""What comes before the name of a metric that is the weight of an update, `min(metric, cap) / cap`, and is sent itself
with the range (0, cap). A client agrees to that by agreeing to send the metric with this range."""

FloatArray = NDArray[np.float64]
Ranges = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class NoisyMetrics:
    """Which metrics travel inside the uploads of a run; `ConfigError` for what cannot be.

    ranges  by name the least and the greatest value of each, in order of their names
    part    p: how much of the clip all of them together may take up
    """

    ranges: Ranges = field(default_factory=dict)
    part: float = PART

    def __post_init__(self) -> None:
        if not _PARTS[0] <= self.part <= _PARTS[1]:
            raise ConfigError(
                f"must lie between {_PARTS[0]:g} and {_PARTS[1]:g}, not {self.part!r}", field="metric_part"
            )
        ranges = {_checked_name(name, self.ranges): _range(name, pair) for name, pair in self.ranges.items()}
        object.__setattr__(self, "ranges", dict(sorted(ranges.items())))
        weights = [least for name, (least, _) in ranges.items() if name.startswith(WEIGHT)]
        if len(weights) > 1 or any(weights):
            raise ConfigError("an update has one weight, which begins at 0", field="metrics")

    @property
    def weight(self) -> tuple[str, float] | None:
        """The name, as it is sent, of the metric that weighs an update, and its cap; None: all weigh the same."""
        return next(((name, cap) for name, (_, cap) in self.ranges.items() if name.startswith(WEIGHT)), None)

    def check(self, proposed: NoisyMetrics) -> None:
        """Raise `RemoteProtocolError` for metrics of a run that these, which a client agrees to send, do not include.

        Whatever part of the clip is proposed, the charge covers it.
        """
        for sent, (least, most) in proposed.ranges.items():
            name = sent.removeprefix(WEIGHT)
            own = sent in OWN_BITS and (least, most) == (0.0, 1.0)
            if not own and self.ranges.get(name) != (least, most):
                raise RemoteProtocolError(
                    f"the run wants the metric {name!r} between {least:g} and {most:g}, which this client has not "
                    "agreed to send",
                    hint=f"agree in the app: NissMod(metrics={{{name!r}: ({least:g}, {most:g})}})",
                )

    def joined(
        self,
        update: Blocks,
        values: Mapping[str, object],
        terms: Terms,
        participants: int,
        *,
        blank: bool = False,
    ) -> Blocks:
        """x: a finite update and the metrics as one vector of norm at most the round's clip; `blank` says that there is
        no update, so that it is zeros.

        Rounding to the grid shortens a vector that is too long for it. What that takes is taken from the update in
        advance: shortened metrics would be wrong by more than their noise, if models are large.
        """
        if not self.ranges:
            return update
        clip = terms.clip
        room = clip * math.sqrt(1.0 - self.part**2)
        # What the app says about that counts nothing.
        short = was_short(update.norm, room)
        values, share = {**values, BELOW_CLIP: (1.0 + short) / 2.0, BLANK: float(blank)}, 1.0
        if self.weight is not None:
            name, cap = self.weight
            count = values.get(name.removeprefix(WEIGHT))
            share = min(max(count, 0.0), cap) / cap if _is_number(count) else 0.0
            values[name] = share * cap
        spread = np.array([_position(values.get(name), *ends) for name, ends in self.ranges.items()])
        weighed, tail = clipped(update, room).map(lambda block: share * block), self._scale(clip) * spread
        joined = Blocks.joined([weighed, Blocks.of(tail)])
        return clipped(beside(Grid(terms.grid_bits), joined, clip, participants, len(self.ranges)), clip)

    def means(self, tail: FloatArray, clip: float, deviation: float) -> dict[str, float]:
        """By name: each metric's mean over the clients, and the standard deviation of the noise in it.

        The mean is without bias, and so may lie outside of the range; clients without a number count with its middle.

        tail       the last coordinates of the clients' mean
        clip       of the round
        deviation  of the noise in a coordinate of the mean
        """
        means: dict[str, float] = {}
        for (name, (least, most)), value in zip(self.ranges.items(), tail.tolist(), strict=True):
            half = (most - least) / 2.0
            means[name] = least + half + half * value / self._scale(clip)
            means[name + NOISE] = half * deviation / self._scale(clip)
        return means

    def _scale(self, clip: float) -> float:
        """s of the formula above."""
        return self.part * clip / math.sqrt(len(self.ranges))


NO_METRICS = NoisyMetrics()


def _position(value: object, least: float, most: float) -> float:
    """Where a number lies in its range, from -1 to 1; 0 for anything that is not a number."""
    if not _is_number(value):
        return 0.0
    half = (most - least) / 2.0
    return min(max((min(max(value, least), most) - least - half) / half, -1.0), 1.0)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _checked_name(name: str, names: Iterable[str]) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"a name must have 1 to {_LONGEST_NAME} printable characters", field="metrics")
    own = name in OWN_BITS or (name.startswith(WEIGHT) and name != WEIGHT)
    taken = name.startswith(_RESERVED) and not own
    if taken or (name.endswith(NOISE) and name.removesuffix(NOISE) in names):
        raise ConfigError(f"the name {name!r} is taken", field="metrics", hint="use another name")
    return name


def _range(name: str, pair: Iterable[float]) -> tuple[float, float]:
    try:
        least, most = (float(end) for end in pair)
    except (TypeError, ValueError, OverflowError):
        least = most = math.nan
    if not 0.0 < (most - least) / 2.0 < math.inf:
        raise ConfigError(
            "a range is two finite numbers, the smaller first",
            field=f"metrics.{name}",
            hint="for an accuracy: (0, 1)",
        )
    return least, most


def adaptive_clip(plan: Plan, quantile: float | None, first: float | None) -> AdaptiveClip | None:
    """How the clip moves below that of the plan; None without a quantile, where it stays.

    Raises `ConfigError` for numbers that cannot be, and for a plan whose rounds must all have the same clip.
    """
    if quantile is None:
        if first is not None:
            raise ConfigError("the clip stays as it is without a quantile", field="first_clip")
        return None
    _require_independent(plan, "quantile", "the clip, and the noise with it, has changed")
    return AdaptiveClip(plan.clip, quantile, first)


def with_own(
    plan: Plan,
    ranges: Mapping[str, tuple[float, float]] | None,
    adaptive: AdaptiveClip | None,
    weight: str,
    cap: float | None,
    blanks: bool = False,
) -> Ranges:
    """The metrics of a run; with the fraction of short updates where the clip follows it, capped weights if any, and
    `blanks` where whole clients are hidden: a silo has none that depend on its records.
    """
    own: Ranges = {}
    if ranges:
        _require_clients(plan, "metrics")
    if adaptive is not None:
        own[BELOW_CLIP] = 0.0, 1.0
    if blanks and plan.unit == "client":
        own[BLANK] = 0.0, 1.0
    if cap is not None:
        if not 0.0 < cap < math.inf:
            raise ConfigError(f"must be a finite number above 0, not {cap!r}", field="weight_cap")
        _require_independent(plan, "weight_cap", "the sum is divided by another weight")
        own[WEIGHT + weight] = 0.0, float(cap)
    return {**(ranges or {}), **own}


def _require_clients(plan: Plan, field: str) -> None:
    """Refuse what one record of a silo would move further than its clip."""
    if plan.unit == "record":
        raise ConfigError(
            "says of a silo's records what their clip does not bound, and has no place where records are hidden",
            field=field,
            hint="leave it out, and evaluate on public data at the server",
        )


def _require_independent(plan: Plan, field: str, change: str) -> None:
    _require_clients(plan, field)
    if plan.kind.correlates:
        raise ConfigError(
            f"the plan takes noise of one round out in another, which fails if {change} in between",
            field=field,
            hint="leave it out, or use a plan whose rounds are independent",
        )


def next_clip(adaptive: AdaptiveClip, metrics: NoisyMetrics, agreed: Agreed, outcome: Outcome) -> float:
    """The clip of the round after this one; the same again where no upload arrived."""
    clip, size = agreed.terms.clip, len(outcome.survivors)
    if not size:
        return clip
    tail = outcome.total[-len(metrics.ranges) :] * (len(agreed.participants) / size)
    return adaptive.after(clip, metrics.means(tail, clip, 0.0)[BELOW_CLIP])
