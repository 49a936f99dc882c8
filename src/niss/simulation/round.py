"""One federated round, from top to bottom.

The server invites clients; each trains on its own data, clips what it learned and hides it in noise;
the server sums the uploads, and what was shared cancels.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from niss.accounting import Balance, Ledger, Plan
from niss.errors import PrivacyError
from niss.learning import Clipping, Evaluation, FlatLayout, Job, Uploads
from niss.randomness import SimStream
from niss.simulation.clients import Clients
from niss.simulation.config import Config
from niss.simulation.dropouts import absent_seats
from niss.simulation.exchange import ProtocolExchange
from niss.simulation.participants import aggregation_weights, choose_participants
from niss.simulation.summation import ProtocolRecord, sum_by_protocol, sum_simulated
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
    round_plan = None
    if federation.exchange is None:  # else its parties agree on both
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
    #    uploads that arrive, in which the shared noises cancel.
    absent = absent_seats(participants.size, config.protocol.dropout, stream.child("dropout"))
    if round_plan is not None:
        summed = sum_simulated(config.protocol, uploads, share, round_plan, ledger, stream, absent)
    else:
        assert federation.exchange is not None
        summed = sum_by_protocol(federation.exchange, uploads, participants, plan, ledger, number, absent)

    # 5. The model moves by what came out.
    moved = weights + torch.from_numpy(summed.total).to(weights.dtype)

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
        worst_of_search=summed.worst_of_search,
        balance=summed.balance,
        evaluation=_evaluate(federation, moved, number),
        protocol=summed.protocol,
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
