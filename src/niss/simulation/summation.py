"""From contributions to the sum that the server holds: hidden, charged, and added up as far as they arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Balance, Ledger, Plan, RoundPlan
from niss.accounting.corruption import WorstCase
from niss.learning import Uploads
from niss.randomness import SimStream
from niss.simulation.config import ProtocolConfig
from niss.simulation.dropouts import left_over_variance, repair, with_self_masks
from niss.simulation.exchange import ProtocolExchange
from niss.simulation.methods import add_client_noise, add_server_noise


@dataclass(frozen=True)
class ProtocolRecord:
    """What only a round of the real protocol has.

    attempts    graphs drawn until one kept the promise
    grid_delta  what rounding and the sampler add to delta
    public      the beacon and what it was let out for, from which the graph follows
    """

    attempts: int
    grid_delta: float
    public: dict[str, str]


@dataclass(frozen=True)
class Summed:
    """What the server holds at the end of a round, and how it came about.

    `total` stands for all participants, whoever is missing; the variances are those of the plain sum of the uploads
    that arrived. `worst_of_search` counts the sets of colluders that were tried, where that was not all of them.
    """

    total: NDArray[np.float64]
    noise_variance: float
    predicted_variance: float
    joint_mu: float
    marginal_mu: float
    tau2: float
    noise_multiplier: float
    dropped: int
    exact: bool
    worst_of_search: int | None
    balance: Balance | None = None
    protocol: ProtocolRecord | None = None


def sum_simulated(
    protocol: ProtocolConfig,
    uploads: Uploads,
    weights: NDArray[np.float64],
    plan: RoundPlan,
    ledger: Ledger,
    stream: SimStream,
    absent: list[int],
) -> Summed:
    """With simulated noise. A dropout changes no charge: the server might only pretend it."""
    shares = plan.plan.method == "niss"
    repairing = shares and protocol.dropout > 0.0 and protocol.mode == "repair"
    here = np.delete(np.arange(plan.participants.size), absent)
    exact = uploads.total(here)
    edges = repair(plan, absent) if repairing and absent else None
    plan = add_client_noise(uploads, plan, stream.child("noise"), edges)
    joint_mu = with_self_masks(plan) if repairing else plan.joint_mu
    ledger.charge(plan.participants, joint_mu, plan.marginal_mu)
    total = uploads.total(here)
    add_server_noise(total, plan, stream.child("noise"))
    noise = float(np.mean((total - exact) ** 2))
    predicted = left_over_variance(plan, absent, repaired=edges is not None)
    return Summed(
        # Those who are left stand for all: dividing by their weight instead is post-processing.
        total=total * (weights.sum() / weights[here].sum()) if absent else total,
        noise_variance=noise,
        predicted_variance=predicted,
        joint_mu=float(joint_mu.max()),
        marginal_mu=float(plan.marginal_mu.max()),
        tau2=float(plan.tau2.mean()),
        noise_multiplier=plan.noise_multiplier(predicted),
        dropped=len(absent),
        exact=not (absent and shares) or edges is not None,
        worst_of_search=_searched(plan.worst),
        balance=plan.balance(),
    )


def sum_by_protocol(
    exchange: ProtocolExchange,
    uploads: Uploads,
    members: NDArray[np.int64],
    plan: Plan,
    ledger: Ledger,
    number: int,
    absent: list[int],
) -> Summed:
    """By the machines of a deployment, every client of weight 1 / m."""
    rows = uploads.rows()
    exchanged = exchange.play(
        number,
        members,
        lambda seat: rows[seat] * members.size,
        charge=lambda mu, alone, attempt: ledger.charge(
            members, np.full(members.size, mu), np.full(members.size, alone), attempt
        ),
        absent=absent,
    )
    survivors = list(exchanged.outcome.survivors)
    total = exchanged.outcome.total
    noise = float(np.mean((total - rows[survivors].sum(axis=0, dtype=np.float64)) ** 2))
    predicted = exchanged.predicted_variance
    return Summed(
        total=total * (members.size / max(len(survivors), 1)),
        noise_variance=noise,
        predicted_variance=predicted,
        joint_mu=exchanged.mu,
        marginal_mu=exchanged.marginal_mu,
        tau2=exchanged.tau2,
        noise_multiplier=math.sqrt(predicted) * members.size / plan.clip,
        dropped=len(absent),
        exact=exchanged.outcome.exact,
        worst_of_search=_searched(exchanged.found),
        protocol=ProtocolRecord(exchanged.attempts, exchanged.grid_delta, exchanged.public),
    )


def _searched(found: WorstCase | None) -> int | None:
    return None if found is None or found.exact else found.examined
