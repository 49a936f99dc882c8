"""One federated round, from top to bottom.

The server invites clients; each trains on its own data, clips what it learned and hides it in noise; the server sums
the uploads, in which what was shared cancels; the model moves by the sum.

A round is written as two halves, `begin_round` and `OpenRound.finish`, because training stands between them: in a
comparison the clients of all methods train as one cohort, which is many times as fast as one method after another.
So all methods begin a round, one call trains everybody, and each method finishes with the updates of its own clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.accounting import Ledger, Outlook, Plan, RoundPlan, outlook
from niss.errors import PrivacyError
from niss.learning import Job
from niss.mechanism.adaptive import AdaptiveClip, short_fraction
from niss.methods import NoiseHistory
from niss.randomness import SimStream
from niss.runs import RoundRecord
from niss.simulation.carrying import can_repair
from niss.simulation.config import Config
from niss.simulation.exchange import Exchange, Played, Simulated
from niss.simulation.materials import Materials
from niss.simulation.sampling import absent_seats, aggregation_weights, choose_participants
from niss.simulation.sections import Sampling
from niss.simulation.server import FRESH, Optimizer, ServerState
from niss.simulation.training import Trainer
from niss.simulation.uploads import Clipping, Uploads

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Federation:
    """What stays the same over the rounds of one run.

    config     the settings, with this run's method as the only one
    plan       how the clients are protected
    materials  the clients with their data, the test data, the model
    trainer    trains clients and evaluates models
    stream     every random number of a simulated run
    history    what a trusted server remembers of its noise
    exchange   how uploads become a sum: simulated, or by the parties of the real protocol
    """

    config: Config
    plan: Plan
    materials: Materials
    trainer: Trainer
    stream: SimStream
    history: NoiseHistory
    exchange: Exchange

    @classmethod
    def of(cls, config: Config, materials: Materials, trainer: Trainer) -> Federation:
        """The federation of the config's one method."""
        (method,) = config.methods
        plan, settings = config.plan(method), config.protocol
        exchange: Exchange = Simulated()
        # Where no noise is shared there is nothing to exchange.
        if config.exchange == "protocol" and plan.kind.has_protocol:
            trainer.ranks.require_one("the parties of the real protocol", field="exchange")
            exchange = Played(
                plan,
                rounds=plan.planned_rounds + plan.closing if plan.kind.carries else config.rounds,
                participants=config.training.participants if plan.kind.carries else None,
                coordinates=materials.layout.size + (config.adaptive_clip(method) is not None),
                mode=settings.mode,
                grid_bits=settings.grid_bits,
                modulus_bits=settings.modulus_bits,
            )
        stream = SimStream(config.seed)
        history = NoiseHistory(lambda number: stream.child("round", number).child("noise"))
        return cls(config, plan, materials, trainer, stream, history, exchange)

    @property
    def sampling(self) -> Sampling:
        """How participants are drawn."""
        return self.config.sampling_of(self.config.methods[0])

    @property
    def adaptive(self) -> AdaptiveClip | None:
        """How the clip moves from round to round; None: not at all."""
        return self.config.adaptive_clip(self.config.methods[0])

    @property
    def optimizer(self) -> Optimizer:
        """How the sums move the model."""
        return Optimizer.of(self.config.training, self.plan, self.config.rounds)

    @property
    def repairing(self) -> bool:
        """Whether the shares of clients that drop out are taken out of the sum again."""
        protocol = self.config.protocol
        return self.plan.kind.shares_noise and protocol.dropout > 0.0 and protocol.mode == "repair"

    def without(self, plan: RoundPlan, absent: list[int]) -> RoundPlan:
        """The round without the uploads of these seats, repaired where that is done and clients agree to it.

        Where they would refuse, the protocol repairs around those who refuse; here nothing is repaired, which leaves
        more noise.
        """
        repaired = bool(absent) and self.repairing and can_repair(plan.plan, plan.graph, absent)
        return plan.with_lost(absent, repaired=repaired)


def begin_round(
    federation: Federation,
    weights: Tensor,
    ledger: Ledger,
    number: int,
    clip: float | None = None,
    server: ServerState = FRESH,
) -> OpenRound:
    """The first half of round `number` (from 0): who takes part, with which weight, and the noise that needs.

    `weights` are those of the global model; the clip is the plan's unless another is given; `server` is what the server
    remembers of earlier rounds. Nothing is charged yet; the ledger only says who can afford a round.
    """
    config, plan, clients = federation.config, federation.plan, federation.materials.clients
    # Noise and clip are in proportion: a round promises the same with any clip.
    plan = plan if clip is None else replace(plan, clip=clip)
    stream = federation.stream.child("round", number)

    # 1. The server invites clients whose budget has room for one more round.
    everyone, sampling, size = np.arange(len(clients)), federation.sampling, config.training.participants
    participants = choose_participants(
        number,
        sampling=sampling,
        size=size,
        eligible=ledger.room(everyone, plan.kind.planned_mu(plan, everyone, number, ledger.history)),
        stream=federation.stream.child("participants"),
        resting=ledger.history[max(len(ledger.history) - plan.separation + 1, 0) :],
    )
    # Where a secret draw finds nobody, noise is released: someone stands in whose update counts nothing.
    nobody = plan.kind.secret_draw and participants.size == 0
    if nobody:
        participants = everyone[:1]
    elif participants.size < 2 and not plan.kind.secret_draw:
        few = "were drawn" if sampling == "poisson" else "have budget left"
        raise PrivacyError(
            f"round {number + 1}: only {participants.size} clients {few}",
            hint="use fewer rounds, a larger epsilon or a higher privacy.participations",
        )

    # 2. Public weights, the share graph from a public beacon, and the noise that this graph needs.
    sizes = clients.sizes[participants]
    client_weights = aggregation_weights(
        sizes,
        rule=config.training.weights,
        cap=config.training.size_cap,
        expected=size if sampling == "poisson" else None,
    )
    # 3. Every client trains on its own data: these jobs are done before the second half.
    jobs = [
        Job(weights, clients.samples(int(client)), stream.child("client", int(client)))
        for client in participants
    ]
    opened = OpenRound(
        federation, plan, ledger, number, weights, participants, client_weights, None, jobs, server, nobody
    )
    return replace(opened, round_plan=federation.exchange.prepare(opened))


@dataclass(frozen=True)
class FinishedRound:
    """A round that is over.

    record          what its run remembers of it
    weights         of the global model after it
    server          what the server remembers, with the noise in the model, predicted
    zeroed_updates  participants whose training diverged and who contributed zero; no server knows that
    """

    record: RoundRecord
    weights: Tensor
    server: ServerState
    zeroed_updates: int


@dataclass(frozen=True)
class OpenRound:
    """A round whose clients are to be trained.

    plan            how the clients are protected, with the clip of this round
    number          of the round, from 0
    weights         of the global model that the clients start from
    participants    the clients, in ascending order; a client's place here is its seat
    public_weights  the public weight p_k of each seat in the sum
    round_plan      the noise of each seat and what it promises; None where the real protocol decides
    jobs            what each seat has to train
    server          what the server remembers of earlier rounds
    nobody          a secret draw found nobody: the update of the one seat counts nothing
    """

    federation: Federation
    plan: Plan
    ledger: Ledger
    number: int
    weights: Tensor
    participants: IntArray
    public_weights: FloatArray
    round_plan: RoundPlan | None
    jobs: list[Job]
    server: ServerState = FRESH
    nobody: bool = False

    @property
    def client_weights(self) -> FloatArray:
        """With which the update of each seat enters the sum."""
        return np.zeros(1) if self.nobody else self.public_weights

    @property
    def stream(self) -> SimStream:
        """Every random number of the round."""
        return self.federation.stream.child("round", self.number)

    def finish(self, uploads: Uploads) -> FinishedRound:
        """The second half: from the updates of the clients, a row per job, to the new global model.

        The rows are changed in place: first into bounded contributions, then into uploads. The ledger is charged.
        """
        config, plan, adaptive = self.federation.config, self.plan, self.federation.adaptive

        # 4. Every client bounds what it may reveal: x_k becomes p_k clip(x_k), with a bit that says whether it was
        #    short enough where the clip follows the norms.
        if adaptive is None:
            zeroed = uploads.bound(_clipping(plan), plan.clip, self.client_weights)
        else:
            uploads, zeroed = uploads.bound_with_bit(plan.clip, self.client_weights)

        # 5. Each client hides that in noise and uploads it, unless it drops out. The round is charged to its ledger
        #    before its upload leaves. The server sums what arrives, and repairs what dropouts left, where it may.
        absent = absent_seats(self.participants.size, config.protocol.dropout, self.stream.child("dropout"))
        summed = self.federation.exchange.play(self, uploads, absent, zeroed)
        total, record = summed.total, summed.record

        known: dict[str, Any] = {}
        if adaptive is not None:
            total, mean = total[:-1], float(total[-1])
            below = None if record.void else short_fraction(mean, plan.clip)
            known |= {"clip": plan.clip, "below_clip": below}

        # 6. The model moves by the sum, and is tested.
        optimizer, weights, server = self.federation.optimizer, self.weights, self.server
        if not record.void:
            moved, server = optimizer.step(server, total, self.number, record.noise)
            weights = weights + torch.from_numpy(moved).to(weights.dtype)
            # Where a sum moves the model in later rounds too, none of them takes out just what this one carried.
            if not optimizer.at_once:
                known["carried_variance"] = 0.0
        if (self.number + 1) % config.evaluate_every == 0 or self.number + 1 == config.rounds:
            tested = self.federation.trainer.evaluate(weights, *self.federation.materials.test)
            known |= {"accuracy": tested.accuracy, "loss": tested.loss}
        known["model_noise_variance"] = None if server.noise is None else server.noise.variance
        return FinishedRound(replace(record, **known), weights, server, summed.zeroed)

    @property
    def outlook(self) -> Outlook | None:
        """Whether a run of such rounds can learn anything; None where the noise of its rounds is not independent, or
        the server rescales coordinates. Rates and momentum of the server do as much to noise as to updates.
        """
        plan, rounds = self.round_plan, self.federation.config.rounds
        if plan is None or not plan.plan.private or plan.plan.unit != "client" or plan.plan.kind.whole_run:
            return None
        if self.federation.optimizer.adaptive:
            return None
        return outlook(
            parameters=len(self.weights), rounds=rounds, clip=plan.plan.clip, variance=plan.aggregate_variance
        )


def _clipping(plan: Plan) -> Clipping:
    """How an update is bounded; in the unit `record` its samples were, one by one."""
    if not plan.private or plan.unit == "record":
        return "none"
    return "l2" if plan.unit == "client" else "elements"
