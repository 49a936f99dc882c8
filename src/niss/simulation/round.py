"""One federated round, from top to bottom.

The server invites clients; each trains on its own data, clips what it learned and hides it in noise;
the server sums the uploads, and what was shared cancels.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.accounting import Balance, Ledger, Plan, RoundPlan
from niss.errors import PrivacyError
from niss.learning import Clipping, Evaluation, FlatLayout, Job, Uploads
from niss.randomness import SimStream
from niss.simulation.clients import Clients
from niss.simulation.config import Config, ProtocolConfig
from niss.simulation.dropouts import absent_seats, left_over_variance, repair, with_self_masks
from niss.simulation.exchange import ProtocolExchange
from niss.simulation.methods import add_client_noise, add_server_noise
from niss.simulation.participants import aggregation_weights, choose_participants
from niss.simulation.training import Trainer


@dataclass(frozen=True)
class Federation:
    """What stays the same over the rounds of one run."""

    config: Config
    plan: Plan
    clients: Clients
    test: tuple[Tensor, Tensor]
    layout: FlatLayout
    trainer: Trainer
    stream: SimStream
    exchange: ProtocolExchange | None = None


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
class RoundOutcome:
    """What a round left behind; `exact`: nothing but the intended noise was left in the sum."""

    weights: Tensor
    participants: int
    zeroed_updates: int
    dropped: int
    exact: bool
    tau2: float
    aggregate_variance: float
    aggregate_variance_predicted: float
    joint_mu: float
    marginal_mu: float
    noise_multiplier: float
    worst_of_search: int | None
    balance: Balance | None
    evaluation: Evaluation | None
    protocol: ProtocolRecord | None = None


def play_round(
    federation: Federation, weights: Tensor, ledger: Ledger, number: int
) -> Generator[list[Job], Uploads, RoundOutcome]:
    """Play round `number` (from 0): global weights in, global weights out; the ledger is charged.

    In the middle it hands out what its clients have to train and waits for their updates, so that the
    clients of several methods can be trained as one cohort.
    """
    config, plan = federation.config, federation.plan
    stream = federation.stream.child("round", number)

    # 1. The server invites clients whose budget has room for one more round.
    everyone = np.arange(len(federation.clients))
    eligible = ledger.room(everyone, plan.round_mu(everyone))
    participants = choose_participants(
        number,
        sampling=config.training.sampling,
        size=config.training.participants,
        eligible=eligible,
        stream=federation.stream.child("participants"),
    )
    if participants.size < 2:
        raise PrivacyError(
            f"round {number + 1}: only {participants.size} clients have budget left",
            hint="fewer rounds, a larger epsilon, or privacy.participations higher",
        )

    # 2. Public weights, the share graph from a public beacon, and the noise that this graph needs.
    sizes = federation.clients.sizes[participants]
    share = aggregation_weights(sizes, rule=config.training.weights, cap=config.training.size_cap)
    beacon = stream.child("beacon").generator().bytes(32)
    round_plan = plan.for_round(participants, weights=share, records=sizes, beacon=beacon)

    # 3. Every client trains on its own data and bounds what it may reveal.
    uploads = yield [
        Job(weights, federation.clients.samples(int(client)), stream.child("client", int(client)))
        for client in participants
    ]
    zeroed = uploads.bound(_clipping(plan), plan.clip, share)

    # 4. Noise: each client adds its shares, the negatives of its neighbours' and its distortion.
    #    The round is charged to each client's ledger before its upload leaves, and the server sums the
    #    uploads, in which the shared noises cancel.
    summed = _exchange(federation, uploads, share, round_plan, ledger, number, stream)

    # 5. The model moves by what came out.
    moved = weights + torch.from_numpy(summed.total).to(weights.dtype)

    worst = summed.plan.worst
    return RoundOutcome(
        weights=moved,
        participants=participants.size,
        zeroed_updates=zeroed,
        tau2=summed.tau2,
        dropped=summed.dropped,
        exact=summed.exact,
        aggregate_variance=summed.noise_variance,
        aggregate_variance_predicted=summed.predicted_variance,
        joint_mu=summed.joint_mu,
        marginal_mu=summed.marginal_mu,
        noise_multiplier=summed.noise_multiplier,
        worst_of_search=None if worst is None or worst.exact else worst.examined,
        balance=summed.plan.balance(),
        evaluation=_evaluate(federation, moved, number),
        protocol=summed.protocol,
    )


@dataclass(frozen=True)
class _Summed:
    """What the server holds at the end of a round, and how it came about."""

    total: NDArray[np.float64]
    plan: RoundPlan
    noise_variance: float
    predicted_variance: float
    joint_mu: float
    marginal_mu: float
    tau2: float
    noise_multiplier: float
    dropped: int = 0
    exact: bool = True
    protocol: ProtocolRecord | None = None


def _exchange(
    federation: Federation,
    uploads: Uploads,
    weights: NDArray[np.float64],
    plan: RoundPlan,
    ledger: Ledger,
    number: int,
    stream: SimStream,
) -> _Summed:
    """Hide the contributions `p_k x_k`, charge the round, sum what arrives: simulated noise, or the real protocol."""
    size = plan.participants.size
    absent = absent_seats(size, federation.config.protocol.dropout, stream.child("dropout"))
    if federation.exchange is None:
        return _simulated(federation.config.protocol, uploads, weights, plan, ledger, stream, absent)
    return _protocol(federation.exchange, uploads, plan, ledger, number, absent)


def _simulated(
    protocol: ProtocolConfig,
    uploads: Uploads,
    weights: NDArray[np.float64],
    plan: RoundPlan,
    ledger: Ledger,
    stream: SimStream,
    absent: list[int],
) -> _Summed:
    """Uploads and sum with simulated noise. A dropout changes no charge: the server might only pretend it."""
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
    predicted, multiplier = plan.aggregate_variance, plan.noise_multiplier
    if absent:
        predicted = left_over_variance(plan, absent, repaired=edges is not None)
        multiplier *= math.sqrt(predicted / plan.aggregate_variance) if multiplier else 0.0
        # Those who are left stand for all: dividing by their weight instead is post-processing.
        total *= weights.sum() / weights[here].sum()
    return _Summed(
        total=total,
        plan=plan,
        noise_variance=noise,
        predicted_variance=predicted,
        joint_mu=float(joint_mu.max()),
        marginal_mu=float(plan.marginal_mu.max()),
        tau2=float(plan.tau2.mean()),
        noise_multiplier=multiplier,
        dropped=len(absent),
        exact=not (absent and shares) or edges is not None,
    )


def _protocol(
    exchange: ProtocolExchange,
    uploads: Uploads,
    plan: RoundPlan,
    ledger: Ledger,
    number: int,
    absent: list[int],
) -> _Summed:
    members, rows = plan.participants, uploads.rows()
    exchanged = exchange.play(
        number,
        members,
        lambda seat: rows[seat] * members.size,
        charge=lambda mu, alone: ledger.charge(
            members, np.full(members.size, mu), np.full(members.size, alone)
        ),
        absent=absent,
    )
    survivors = list(exchanged.outcome.survivors)
    total = exchanged.outcome.total
    noise = float(np.mean((total - rows[survivors].sum(axis=0, dtype=np.float64)) ** 2))
    predicted = exchanged.predicted_variance
    return _Summed(
        total=total * (members.size / max(len(survivors), 1)),
        plan=plan,
        noise_variance=noise,
        predicted_variance=predicted,
        joint_mu=exchanged.mu,
        marginal_mu=exchanged.marginal_mu,
        tau2=exchanged.tau2,
        noise_multiplier=math.sqrt(predicted) * members.size / plan.plan.clip,
        dropped=len(absent),
        exact=exchanged.outcome.exact,
        protocol=ProtocolRecord(exchanged.attempts, exchanged.grid_delta, exchanged.public),
    )


def _clipping(plan: Plan) -> Clipping:
    """How an update is bounded; in the unit `record` its samples were, one by one."""
    if not plan.private or plan.unit == "record":
        return "none"
    return "l2" if plan.unit == "client" else "elements"


def _evaluate(federation: Federation, weights: Tensor, number: int) -> Evaluation | None:
    config = federation.config
    if (number + 1) % config.evaluate_every and number + 1 != config.rounds:
        return None
    return federation.trainer.evaluate(weights, *federation.test)
