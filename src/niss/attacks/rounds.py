"""A round simulated with the mechanism itself, and what the adversary may see of it.

`make_setting` gives the plan under which clients are attacked, `simulate_round` clips, weighs and hides their updates
as that plan says. The truth stays with the caller, who scores the attack; the attack is given the `Observation`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan, RoundPlan
from niss.attacks.estimates import FloatArray, Observation
from niss.attacks.experiment import Preset, visible_names
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.mechanism import add_shares, clip_elements, clip_l2, gdp_epsilon
from niss.methods import PlainRows
from niss.randomness import SimStream

PAPER_RECORDS = 600.0


@dataclass(frozen=True)
class SimulatedRound:
    """One round, simulated.

    observation   what the adversary sees
    updates       what the clients really contributed, one clipped update x_k per row
    plan          the plan of the round with the distortion factors that were drawn, which are secret
    """

    observation: Observation
    updates: FloatArray
    plan: RoundPlan

    def claimed_epsilon(self, victim: int) -> tuple[float, float]:
        """What is promised to the victim at the plan's delta: in the joint and in the marginal view."""
        delta = self.plan.plan.delta
        joint, marginal = float(self.plan.joint_mu[victim]), float(self.plan.marginal_mu[victim])
        return gdp_epsilon(joint, delta), gdp_epsilon(marginal, delta)

    def predicted_variance(self, victim: int) -> float:
        """The accountant's effective variance of the victim's upload p_k x_k against this very adversary."""
        seen = self.observation
        variances = self.plan.plan.kind.variance_against(self.plan, seen.colluders)
        return float(variances[int(np.searchsorted(seen.honest, victim))])

    def predicted_noise(self, victim: int) -> float:
        """v / p^2: the same variance of the update x_k itself."""
        return self.predicted_variance(victim) / float(self.observation.share[victim]) ** 2

    def predicted_error(self, victim: int) -> float:
        """sqrt(h v) / (p ||x||): the error expected of the best linear estimate, relative to the update."""
        truth = self.updates[victim]
        return float(np.sqrt(truth.size * self.predicted_noise(victim) / np.sum(truth**2)))

    def predicted_fraction(self, victim: int) -> float:
        """The most of the victim's update that the accountant expects to be recovered (see `recovered_fraction`).

        With signal ||x||^2 / h and noise v / p^2 per coordinate, the squared cosine between the best linear
        estimate and the truth is signal / (signal + noise).
        """
        signal, noise = float(np.mean(self.updates[victim] ** 2)), self.predicted_noise(victim)
        return signal / (signal + noise) if signal + noise > 0.0 else 0.0


def simulate_round(
    updates: NDArray[np.floating[Any]],
    plan: Plan,
    *,
    stream: SimStream,
    share: FloatArray | None = None,
    records: float = 1.0,
    colluders: Collection[int] = (),
    knows_updates_of: Collection[int] = (),
    keep_factors: bool = False,
    public: RoundPlan | None = None,
) -> SimulatedRound:
    """Clip, weigh and hide `updates` as the plan says.

    updates            one row of h numbers per client
    share              the aggregation weights p_k; 1/m each where none are given
    records            d_k of every client, for units that count records
    colluders          seats on the adversary's side: it gets their updates and all shares they sent or received
    knows_updates_of   seats whose update the adversary knows besides
    keep_factors       keep the factors of the `coordinate` distortion (edges x h), which `predicted_variance` needs
    public             the plan of an earlier round, whose graph and noise are taken over, as where the graph is
                       complete and nothing else has changed

    Raises ConfigError for a method under which a server sees no single upload, or whose rounds hang together.
    """
    if plan.kind.masks_uploads or plan.kind.carries:
        unseen = "a server sees the sum of the uploads and no single one"
        why = unseen if plan.kind.masks_uploads else "claims are about a whole run, and a round shows less"
        hint = "attack one of: " + ", ".join(visible_names())
        raise ConfigError(f"under {plan.kind.name} {why}", field="method", hint=hint)
    size = len(updates)
    p = np.full(size, 1.0 / size) if share is None else share
    if public is None:
        public = plan.for_round(
            np.arange(size),
            weights=p,
            records=np.full(size, records),
            beacon=stream.child("beacon").generator().bytes(32),
        )
    clipped = np.stack([clip_update(row, plan) for row in updates.astype(np.float64)])
    uploads = p[:, None] * clipped
    noise = stream.child("noise")
    drawn = add_noise(uploads, public, noise, keep_factors=keep_factors)
    observation = Observation(
        uploads=uploads,
        plan=public,
        share=p,
        colluders=tuple(sorted(colluders)),
        known_updates={seat: clipped[seat] for seat in sorted({*colluders, *knows_updates_of})},
        known_shares=_shares_of(public, set(colluders), uploads.shape[1], noise),
    )
    return SimulatedRound(observation, clipped, drawn)


def clip_update(update: FloatArray, plan: Plan) -> FloatArray:
    """What the plan's unit bounds: the L2 norm, or single entries in the paper's reading; nothing in fedavg."""
    if not plan.private:
        return update.copy()
    return clip_elements(update, plan.clip) if plan.unit == "nbafl" else clip_l2(update, plan.clip)


def add_noise(
    uploads: FloatArray, plan: RoundPlan, stream: SimStream, *, keep_factors: bool = False
) -> RoundPlan:
    """Add every client's noise to its row `p_k x_k`, in place; returns the plan with the factors drawn."""
    kept = replace(plan, keep_factors=keep_factors)
    return plan.plan.kind.add_client_noise(PlainRows(uploads), kept, stream)


def _shares_of(
    plan: RoundPlan, colluders: set[int], coordinates: int, stream: SimStream
) -> dict[tuple[int, int], FloatArray]:
    """The shares between a colluder and an honest client. An edge draws the same numbers again from its stream."""
    graph = plan.graph
    known: dict[tuple[int, int], FloatArray] = {}
    for sender, receiver, weight in zip(
        graph.senders.tolist(), graph.receivers.tolist(), graph.weights.tolist(), strict=True
    ):
        if (sender in colluders) == (receiver in colluders):
            continue
        rows = np.zeros((graph.size, coordinates))
        add_shares(
            rows,
            ShareGraph(graph.size, [(sender, receiver, weight)]),
            unit_variance=plan.unit_variance,
            tau2=0.0,
            distortion="additive",
            stream=stream,
        )
        known[sender, receiver] = rows[sender]
    return known


def recovered_fraction(estimate: FloatArray, truth: FloatArray) -> float:
    """The squared cosine between estimate and truth: the part of the update's energy that a scaled estimate gets.

    1 is the whole update, 0 nothing; noise alone scores about 1/h.
    """
    product = float(np.sum(estimate * truth))
    energy = float(np.sum(estimate**2)) * float(np.sum(truth**2))
    return product * product / energy if energy > 0.0 else 0.0


def relative_error(estimate: FloatArray, truth: FloatArray) -> float:
    """||estimate - truth|| / ||truth||; 1 is as bad as guessing zero."""
    return float(np.sqrt(np.sum((estimate - truth) ** 2) / np.sum(truth**2)))


@dataclass(frozen=True)
class RoundSetting:
    """A plan, and how the updates it hides come about.

    learning_rate   of the clients' local steps
    unit_weights    whether p_k = 1, which puts the noise on the gradient itself, instead of 1/m
    """

    plan: Plan
    learning_rate: float
    unit_weights: bool

    def with_plan(self, **changes: Any) -> RoundSetting:
        """The same setting with some fields of its plan changed."""
        return replace(self, plan=replace(self.plan, **changes))


def make_setting(preset: Preset, *, clients: int, **numbers: float | None) -> RoundSetting:
    """One of the two settings in which clients are attacked, with other `numbers` of its plan where they are given.

    `default` is what `niss.Plan` promises: client-level privacy, epsilon = 3 at delta = 1e-5 in one round. `paper`
    is the reading of the paper's Figure 4 that comes closest to it: noise of deviation

        2 zeta sqrt(2 ln(1.25 / delta)) / (epsilon d_k),   zeta = 3, d_k = 600, epsilon = 10, delta = 1e-4,

    put on the gradient itself; it is a heuristic and proves nothing. As printed, NISS without colluders distorts
    nothing: tau = 0.

    Raises `ConfigError` for numbers that no plan can have.
    """
    plan = Plan(neighbours=min(10, clients - 1))
    paper = preset == "paper"
    if paper:
        plan = replace(
            plan,
            unit="nbafl",
            clip=3.0,
            epsilon=10.0,
            delta=1e-4,
            mechanism="classical",
            allow_invalid=True,
            distortion="scalar",
            tau2=0.0,
        )
    changes: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    plan = replace(plan, **changes)
    # A wrong epsilon or delta is refused here, before any work.
    plan.round_mu(np.zeros(1, dtype=np.int64))
    return RoundSetting(plan, 1.0 if paper else 0.1, paper)
