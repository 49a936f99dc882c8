"""What a run with carried shares commits to: `CarriedPlan`, what it promises and how much noise it leaves in the model.

With factors `a` (rate over planned round size) the noise in the model after round t is

    sum_{s<=t} a_s^2 r_s  +  what is still under way, a_s^2 w_s  +  what came back, (a_s - a_{s+1})^2 w_s

(0 in place of the last where receivers rescale). With a share d of dropouts `2 d (1 - d) w` of every round stays for
good, unless it is repaired. The promise is mu-GDP for every client over the whole committed run, whatever allowed
pattern it takes part in, against a server that sees everything and holds the assumed colluders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from niss.accounting.carried_charges import PATTERNS, CarriedCharges, WorstPattern, worst_pattern
from niss.errors import ConfigError, PrivacyError
from niss.graph import CarriedGraph, ShareGraph
from niss.views.carried_floor import (
    RunFloor,
    carried_touching,
    complete_floor,
    mixed_carried,
    round_bands,
    within_connectivity,
)
from niss.views.collusion import expected_weights
from niss.views.tails import binomial_tail

FloatArray = NDArray[np.float64]

# Parts of the carried variance given up for the coupling of sums and deviations. A fixed list keeps claims monotone.
_CONCESSIONS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)

# Participants up to which floors against more colluders than assumed are tried too.
_TINY = 16


@dataclass(frozen=True)
class Connectivity:
    """How well the graphs spread noise, against colluders placed anywhere. The default is complete graphs, exactly.

    spatial  `y' L y >= spatial * (variance of the shares in one upload) * |y|^2` for deviations y of the honest
             clients; None: complete graphs, h / (m - 1)
    carried  s_2, second over first singular value of the carried matrices; None: complete graphs, 0
    known_neighbours  of any honest client within a round, at most, that `spatial` holds for; 0 on complete graphs,
             where all are neighbours
    """

    spatial: float | None = None
    carried: float | None = None
    known_neighbours: int = 0


COMPLETE = Connectivity()


@dataclass(frozen=True)
class UnitFloor:
    """A floor of residual 1 without shares within the round, and what such shares add to its deviations.

    With w / r fixed, all of a floor is proportional to the residual, except for the shares within the round.
    """

    floor: RunFloor
    by_spatial: FloatArray

    def at(self, residual: float, spatial: float) -> RunFloor:
        one = self.floor
        deviations = self.deviations(residual, spatial)
        return RunFloor(residual * one.bands, deviations, one.honest, one.factors)

    def deviations(self, residual: float, spatial: float) -> FloatArray:
        return np.asarray(residual * self.floor.deviations + spatial * self.by_spatial)


def drawn_connectivity(
    participants: int,
    *,
    neighbours: float | None = None,
    carried: float | None = None,
    known_neighbours: int = 0,
    worse: float = 0.0,
) -> Connectivity:
    """What to commit to for graphs that are yet to be drawn; those that turn out worse are drawn again.

    neighbours, carried  unit shares that a client sends within a round and to the next; None: everyone to everyone
    known_neighbours     at most that many neighbours of any client collude, or may be called dropped
    worse                how much worse than a sample of their size and degree they may be

    Graphs of one size and degree differ little, and all of them are public, so that everybody can check them
    (`views.carried_floor.within_connectivity`).
    """
    spatial = second = None
    beacon = b"niss.planner"
    if neighbours is not None:
        sample = ShareGraph.regular(participants, degree=neighbours, beacon=beacon)
        taken = expected_weights(participants, neighbours)[:known_neighbours].sum() / (2.0 * neighbours)
        spatial = max((1.0 - worse) * within_connectivity(sample) - float(taken), 0.0)
    if carried is not None:
        graph = CarriedGraph.draw(
            (participants, participants), degree=carried, beacon=beacon, lists=(bytes(32), bytes(32))
        )
        second = min((1.0 + worse) * graph.second_singular_value, 1.0)
    return Connectivity(spatial, second, known_neighbours if neighbours is not None else 0)


@dataclass(frozen=True, kw_only=True)
class CarriedPlan:
    """What is committed before the first round. Variances are those of uploads, or of sums of all uploads of a round.

    participants         m of every round, of whom at most `colluders` collude
    horizon              T: rounds in which clients take part; the last carries nothing on
    separation, pattern  a client comes back after exactly (`cyclic`) or at least (`any`) that many rounds
    residual             r: fresh noise in the sum of a round
    carried_to_residual  w / r for each lag, the first being the next round
    ends                 the residual of the first and of the last round is this many times r
    spatial              variance of the shares within the round in one upload, sent and received
    factors              a_t, with which rounds enter the model; () means equal
    rescaled             receivers subtract `a_t / a_s` times a share, so that it cancels exactly
    closing              one more round without data takes out what the last round carried
    declared_dropped     most clients of a round that may be called dropped in repairs; all their shares may be
                         revealed, carried ones too, so they count like colluders
    revealed             share of the carried variance between two rounds that repairs may reveal besides, by both sides
                         together
    self_variance        of the self-mask that a client keeps, besides its fresh noise, in a round in which it is called
                         dropped; None: as much as its charge covers
    sensitivity          Delta: how far one client can move its upload
    """

    participants: int
    horizon: int
    separation: int
    residual: float
    carried_to_residual: tuple[float, ...]
    spatial: float
    pattern: str = "cyclic"
    ends: float = 1.0
    factors: tuple[float, ...] = ()
    rescaled: bool = False
    closing: bool = False
    colluders: int = 0
    declared_dropped: int = 0
    revealed: float = 0.0
    sensitivity: float = 1.0
    connectivity: Connectivity = COMPLETE
    self_variance: float | None = None

    def __post_init__(self) -> None:
        counts = {"participants": 1, "horizon": 1, "separation": 1, "colluders": 0, "declared_dropped": 0}
        for name, least in counts.items():
            if getattr(self, name) < least:
                raise ConfigError(f"must be at least {least}, not {getattr(self, name)}", field=name)
        if self.pattern not in PATTERNS:
            raise ConfigError(
                f"unknown value {self.pattern!r}", field="pattern", hint="use one of: " + ", ".join(PATTERNS)
            )
        for name in ("residual", "ends", "sensitivity"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise ConfigError(f"must be a finite number above 0, not {value!r}", field=name)
        for name, values in (("carried_to_residual", self.carried_to_residual), ("spatial", (self.spatial,))):
            if not all(math.isfinite(value) and value >= 0.0 for value in values):
                raise ConfigError("must be finite and not negative", field=name)
        if self.factors and (
            len(self.factors) != self.horizon or not all(math.isfinite(a) and a > 0.0 for a in self.factors)
        ):
            raise ConfigError(f"needs {self.horizon} finite numbers above 0", field="factors")
        if not 0.0 <= self.revealed < 1.0:
            raise ConfigError(f"must lie in [0, 1), not {self.revealed!r}", field="revealed")
        if self.known >= self.participants:
            raise PrivacyError(
                "no honest client is left to protect", hint="assume fewer colluders, or fewer that drop out"
            )

    @property
    def known(self) -> int:
        """Clients of a round whose shares the adversary may know."""
        return self.colluders + self.declared_dropped

    @property
    def rounds(self) -> int:
        """All rounds, the closing one included."""
        return self.horizon + self.closing

    @cached_property
    def scales(self) -> FloatArray:
        """a_t of all rounds; a closing round takes the last one's."""
        factors = self.factors or (1.0,) * self.horizon
        return np.array([*factors, *factors[-1:] * self.closing])

    @cached_property
    def residuals(self) -> FloatArray:
        """r_t."""
        values = np.full(self.rounds, self.residual)
        values[[0, -1]] *= self.ends
        return values

    @cached_property
    def carried(self) -> FloatArray:
        """w_t as lags x rounds, in the units of the round that adds it."""
        rows = np.zeros((max(len(self.carried_to_residual), 1), self.rounds))
        for lag, ratio in enumerate(self.carried_to_residual, start=1):
            rows[lag - 1, : max(self.rounds - lag, 0)] = ratio * self.residual
        return rows

    @cached_property
    def unit_floors(self) -> tuple[UnitFloor, ...]:
        """The floors at residual 1, for the colluders and reveals assumed; one of them for complete graphs.

        Whoever knows more clients' shares sees more, so a floor against more of them holds too. In a tiny round it can
        be the higher one, where the bound on deviations is weak: with all of them no claim improves with colluders.
        """
        most = self.known + 1
        if self.participants <= _TINY and (self.connectivity != COMPLETE or self.revealed):
            most = self.participants
        return tuple(floor for known in range(self.known, most) for floor in self._floors_against(known))

    def _floors_against(self, known: int) -> tuple[UnitFloor, ...]:
        m, honest = self.participants, self.participants - known
        scales = self.scales if self.rescaled else np.ones(self.rounds)
        squares, sizes = scales**2, np.full(self.rounds, float(honest))
        residuals, carried = self.residuals / self.residual, self.carried / self.residual
        second, within = self.connectivity.carried or 0.0, self.connectivity.spatial
        by_spatial = squares * (honest / max(m - 1, 1) if within is None else within)
        if self.connectivity == COMPLETE and not self.revealed:
            whole = complete_floor(
                participants=m,
                residual=residuals,
                carried=carried,
                spatial=0.0,
                colluders=known,
                factors=scales,
            )
            return (UnitFloor(whole, by_spatial),)
        fresh, carried = honest / m * residuals * squares, carried * squares
        touching = carried_touching(carried)
        kept, loss = mixed_carried(1.0, second, m, known, self.revealed)
        spread = fresh / honest
        if not known and not self.revealed:
            spread = spread + (1.0 - second) * touching / m
        floors = [UnitFloor(RunFloor(fresh[None], spread, sizes, scales), by_spatial)]
        for theta in _CONCESSIONS if loss else (0.0,):
            deviations = spread - (loss * touching / theta if loss else 0.0)
            bands = round_bands(fresh, (1.0 - theta) * kept * carried)
            floors.append(UnitFloor(RunFloor(bands, deviations, sizes, scales), by_spatial))
        return tuple(floors)

    @cached_property
    def floors(self) -> tuple[RunFloor, ...]:
        """Noise that the run has at least."""
        scaled = (unit.at(self.residual, self.spatial) for unit in self.unit_floors)
        return tuple(floor for floor in scaled if np.all(floor.deviations > 0.0))

    @cached_property
    def matrix(self) -> FloatArray:
        """K (horizon x horizon): a client that takes part in P spends `Delta' K[P, P] Delta` of mu^2.

        In the rounds D in which it is called dropped a client has its own noise alone: it spends
        `Delta' K[P - D, P - D] Delta` and `Delta^2 / own` for each of D. No entry of K is negative, so that this is at
        most `Delta' K[P, P] Delta` if each entry on the diagonal is at least `1 / own`: it is raised to that.
        """
        candidates = [floor.matrix[: self.horizon, : self.horizon] for floor in self.floors]
        chosen = candidates[0]
        if len(candidates) > 1:
            # Searching all patterns takes long in long runs.
            pattern = self.pattern if self.participants <= _TINY else "cyclic"
            chosen = min(candidates, key=lambda k: worst_pattern(k, self.separation, pattern).cost)
        if self.self_variance is None:
            return chosen
        own = self.residuals[: self.horizon] / self.participants + self.self_variance
        return np.asarray(chosen + np.diag(np.maximum(1.0 / own - np.diag(chosen), 0.0)))

    @property
    def needed_self_variance(self) -> float:
        """The least that a self-mask must have, in all rounds, for whoever is called dropped to lose nothing by it."""
        own = 1.0 / np.diag(replace(self, self_variance=None).matrix)
        return float(max(np.max(own - self.residuals[: self.horizon] / self.participants), 0.0))

    @cached_property
    def worst(self) -> WorstPattern:
        """The costliest participations that the plan allows."""
        return worst_pattern(
            self.matrix,
            self.separation,
            self.pattern,
            sensitivity=self.sensitivity,
            one_lag=len(self.carried_to_residual) <= 1,
        )

    @property
    def mu(self) -> float:
        """The promise: mu-GDP for every client over the whole run."""
        return math.sqrt(self.worst.cost)

    def charges(self) -> CarriedCharges:
        """A client's account for this run."""
        return CarriedCharges(self.matrix, self.separation, self.pattern, self.worst.cost, self.sensitivity)

    def noise_in_model(self, dropout: float = 0.0, *, repaired: bool = True) -> FloatArray:
        """Noise variance in the model after each round, on average over what drops out.

        dropout   probability with which a client vanishes after the graphs were fixed, each on its own
        repaired  whether shares within the round are taken out again when a client drops out; carried ones are too
                  where clients may be called dropped (`declared_dropped`), or else as far as they may be `revealed`.
                  A round that loses more clients than that is not repaired.
        """
        squares = self.scales**2
        fresh = (1.0 - dropout) * self.residuals * squares
        crossing = dropout * (1.0 - dropout) * self.participants * self.spatial * squares
        if not repaired:
            fresh = fresh + crossing
        elif self.declared_dropped:
            fresh = fresh + self._beyond_repair(dropout, others=2) * crossing
        # The clients that are lost for good, with what they had carried and should have taken out.
        lost = dropout * (self._beyond_repair(dropout, others=1) if repaired else 1.0)
        added_only, taken_only = (1.0 - dropout) * lost, lost * (1.0 - lost)
        staying = max(1.0 - self.revealed / (added_only + taken_only), 0.0) if lost else 0.0
        # What each round adds to the noise in the model, and takes out of it.
        steps = fresh
        for lag, row in enumerate(self.carried, start=1):
            away = row[: max(self.rounds - lag, 0)]
            first, second = self.scales[: away.size], self.scales[lag:]
            back = first if self.rescaled else second
            left = staying * (added_only * first**2 + taken_only * back**2)
            left = left + (1.0 - dropout) * (1.0 - lost) * (first - back) ** 2
            steps[: away.size] += (1.0 - dropout) * first**2 * away
            steps[lag:] += (left - (1.0 - dropout) * first**2) * away
        return np.cumsum(steps)

    def _beyond_repair(self, dropout: float, *, others: int) -> float:
        """How likely it is that a round loses too many, given that `others` of its clients have their part in it.

        With N of m lost, `E[N; N > d] = m q P(B(m - 1, q) >= d)` and
        `E[N (m - N); N > d] = m (m - 1) q (1 - q) P(B(m - 2, q) >= d)`: beside one client, and beside a pair.
        """
        return binomial_tail(self.declared_dropped - 1, max(self.participants - others, 0), dropout)
