"""What a run with carried shares commits to before its first round, what that promises, and what its rounds cost.

The promise is mu-GDP for every client over the whole committed run, whatever allowed pattern it takes part in, against
a server that sees everything and holds the assumed colluders. A participation is charged what it adds to `1' K[P, P] 1`
before the upload, K that of the whole run at its worst; with the budget fixed in advance this is a filter (Smith and
Thakurta, 2022), and valid whatever the server does within the rules. Charging by an endless run instead would
undercharge the ends, where less noise is carried. All in units of the squared sensitivity of one upload.

The noise in the model after round t is that of all rounds so far and what is still under way, `r (t + 1) + w`. With a
share d of dropouts `2 d (1 - d) w` of every round stays for good, unless it is repaired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from niss.accounting.patterns import PATTERNS, WorstPattern, heaviest, spent_in, worst_pattern
from niss.errors import ConfigError, PrivacyError
from niss.mechanism.noise import Noise
from niss.views import CompleteRun
from niss.views.tails import binomial_tail

FloatArray = NDArray[np.float64]

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A run whose clients all share with all, within a round and with the next.

    noise                of every round; the last carries nothing on
    horizon              T: rounds in which clients take part
    separation, pattern  a client comes back after exactly (`cyclic`) or at least (`any`) that many rounds
    closing              one more round without data takes out what the last round carried
    """

    noise: Noise
    horizon: int
    separation: int
    pattern: str = "cyclic"
    closing: bool = False

    def __post_init__(self) -> None:
        for name in ("horizon", "separation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", field=name)
        if self.pattern not in PATTERNS:
            raise ConfigError(
                f"unknown value {self.pattern!r}", field="pattern", hint="use one of: " + ", ".join(PATTERNS)
            )
        if self.noise.known >= self.noise.participants:
            raise PrivacyError(
                "no honest client is left to protect", hint="assume fewer colluders, or fewer that drop out"
            )

    @property
    def rounds(self) -> int:
        """All rounds, the closing one included."""
        return self.horizon + self.closing

    @property
    def private(self) -> bool:
        """Whether anything is promised: without fresh noise nothing is."""
        return self.noise.residual > 0.0

    @cached_property
    def view(self) -> CompleteRun:
        """The run at a fresh noise of 1 in each sum, with the ratio of what is carried."""
        if not self.private:
            raise PrivacyError("without fresh noise nothing is promised", hint="leave tau2 calibrated")
        carried = np.full(self.rounds - 1, self.noise.carried / self.noise.residual)
        return CompleteRun(self.noise.participants, self.noise.known, np.ones(self.rounds), carried)

    @cached_property
    def matrix(self) -> FloatArray:
        """K (horizon x horizon): a client that takes part in P spends `1' K[P, P] 1` of mu^2.

        In the rounds D in which it is called dropped a client has its own noise alone: it spends `1' K[P - D, P - D] 1`
        and `1 / own` for each of D. No entry of K is negative, so that this is at most `1' K[P, P] 1` if each entry on
        the diagonal is at least `1 / own`: where rounds are repaired it is raised to that.
        """
        whole = self._unmasked
        if not self.noise.committee:
            return whole
        own = self.noise.residual + self.noise.self_mask
        return np.asarray(whole + np.diag(np.maximum(1.0 / own - np.diag(whole), 0.0)))

    @cached_property
    def _unmasked(self) -> FloatArray:
        matrix = self.view.matrix(self.noise.participants * self.noise.residual, self.noise.spatial)
        return matrix[: self.horizon, : self.horizon]

    @property
    def needed_self_mask(self) -> float:
        """The least that a self-mask must have, in all rounds, for whoever is called dropped to lose nothing by it."""
        return float(max(np.max(1.0 / np.diag(self._unmasked)) - self.noise.residual, 0.0))

    @cached_property
    def worst(self) -> WorstPattern:
        """The costliest participations that are allowed."""
        return worst_pattern(self.matrix, self.separation, self.pattern)

    @property
    def mu(self) -> float:
        """The promise: mu-GDP for every client over the whole run."""
        return math.sqrt(self.worst.cost)

    def cost(self, number: int, earlier: Sequence[int] | None) -> float:
        """What a participation in round `number` (from 0) adds to mu^2, after those in the rounds `earlier`.

        None: after the dearest allowed ones.
        """
        if not 0 <= number < self.horizon:
            raise PrivacyError(
                f"round {number + 1} lies past the committed end of {self.horizon} rounds",
                hint="going on is a new run, with its own budget",
            )
        if earlier is None:
            row = self.matrix[number]
            past = heaviest(row[: max(number - self.separation + 1, 0)], self.separation)
            return float(row[number] + 2.0 * past)
        return spent_in(self.matrix, [*earlier, number]) - spent_in(self.matrix, earlier)

    def charge(self, number: int, earlier: Sequence[int], budget: float | None = None) -> float:
        """The same, but refused where the plan does not allow that participation, or it would overspend.

        budget  of mu^2 over the whole run; None: what its dearest allowed participations cost
        """
        cost = self.cost(number, earlier)
        if earlier:
            gap = number - earlier[-1]
            if gap < self.separation or (self.pattern == "cyclic" and gap % self.separation):
                wanted = "a multiple of" if self.pattern == "cyclic" else "at least"
                raise PrivacyError(
                    f"round {number} comes {gap} after round {earlier[-1]}, but the plan promises {wanted} "
                    f"{self.separation}",
                    hint="leave this round out",
                )
        most, spent = self.worst.cost if budget is None else budget, spent_in(self.matrix, earlier)
        if spent + cost > most * (1.0 + _ROUNDING):
            raise PrivacyError(
                f"round {number} would cost {cost:.4g} of mu^2, and {most - spent:.4g} are left",
                hint="the plan's budget covers its worst pattern; this client was charged more",
            )
        return cost

    def with_residual(self, residual: float, *, ratio: float, spatial: float) -> Committed:
        """The same run with that much fresh noise in each sum, `ratio` times as much carried on, and such shares."""
        noise, each = self.noise, residual / self.noise.participants
        unit = spatial / (2.0 * noise.neighbours)
        return replace(self, noise=replace(noise, residual=each, carried=ratio * each, unit=unit))

    def noise_in_model(self, dropout: float = 0.0, *, repaired: bool = True) -> FloatArray:
        """Noise variance in the model after each round, on average over what drops out.

        dropout   probability with which a client vanishes after the graphs were fixed, each on its own
        repaired  whether shares within the round are taken out again when a client drops out; carried ones are too
                  where clients may be called dropped. A round that loses more clients than that is not repaired.
        """
        noise, size = self.noise, self.noise.participants
        steps = np.full(self.rounds, (1.0 - dropout) * size * noise.residual)
        crossing = dropout * (1.0 - dropout) * size * noise.spatial
        if not repaired:
            steps += crossing
        elif noise.dropped:
            steps += self._beyond_repair(dropout, others=2) * crossing
        # The clients that are lost for good, with what they had carried and should have taken out.
        lost = dropout * (self._beyond_repair(dropout, others=1) if repaired else 1.0)
        left = (1.0 - dropout) * lost + lost * (1.0 - lost)
        # What each round adds to the noise in the model, and takes out of it.
        steps[:-1] += (1.0 - dropout) * size * noise.carried
        steps[1:] += (left - (1.0 - dropout)) * size * noise.carried
        return np.cumsum(steps)

    def _beyond_repair(self, dropout: float, *, others: int) -> float:
        """How likely it is that a round loses too many, given that `others` of its clients have their part in it.

        With N of m lost, `E[N; N > d] = m q P(B(m - 1, q) >= d)` and
        `E[N (m - N); N > d] = m (m - 1) q (1 - q) P(B(m - 2, q) >= d)`: beside one client, and beside a pair.
        """
        return binomial_tail(self.noise.dropped - 1, max(self.noise.participants - others, 0), dropout)
