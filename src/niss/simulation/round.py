"""One federated round, from top to bottom.

The server invites clients; each trains on its own data, clips what it learned and hides it in noise; the server sums
the uploads, in which what was shared cancels; the model moves by the sum.

A round is written as two halves, `begin_round` and `OpenRound.finish`, because training stands between them: in a
comparison the clients of all methods train as one cohort, which is many times as fast as one method after another.
So all methods begin a round, one call trains everybody, and each method finishes with the updates of its own clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.accounting import Ledger, Outlook, Plan, RoundPlan, outlook
from niss.errors import PrivacyError
from niss.learning import Job
from niss.mechanism.adaptive import AdaptiveClip, short_fraction
from niss.mechanism.shares import SomeEdges
from niss.methods import NoiseHistory, mu_of
from niss.randomness import SimStream
from niss.runs import RoundRecord, SumNoise
from niss.simulation.carried_exchange import CarriedExchange
from niss.simulation.carrying import beacon_of, carrying_of, close_run, next_cohort, repair
from niss.simulation.clipping import adaptive_clip
from niss.simulation.config import Config
from niss.simulation.exchange import Exchanged, ProtocolExchange
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
    exchange   the parties of the real protocol; None where the exchange is simulated
    """

    config: Config
    plan: Plan
    materials: Materials
    trainer: Trainer
    stream: SimStream
    history: NoiseHistory
    exchange: ProtocolExchange | CarriedExchange | None

    @classmethod
    def of(cls, config: Config, materials: Materials, trainer: Trainer) -> Federation:
        """The federation of the config's one method."""
        (method,) = config.methods
        plan, settings = config.plan(method), config.protocol
        exchange: ProtocolExchange | CarriedExchange | None = None
        # Where no noise is shared there is nothing to exchange.
        if config.exchange == "protocol" and plan.kind.has_protocol:
            size = materials.layout.size + (adaptive_clip(config, method) is not None)
            trainer.ranks.require_one("the parties of the real protocol", field="exchange")
            shared: dict[str, Any] = {
                "coordinates": size,
                "mode": settings.mode,
                "grid_bits": settings.grid_bits,
                "modulus_bits": settings.modulus_bits,
            }
            if plan.kind.carries:
                exchange = CarriedExchange(plan, participants=config.training.participants, **shared)
            else:
                exchange = ProtocolExchange(plan, rounds=config.rounds, **shared)
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
        return adaptive_clip(self.config, self.config.methods[0])

    @property
    def optimizer(self) -> Optimizer:
        """How the sums move the model."""
        return Optimizer.of(self.config.training, self.plan, self.config.rounds)

    @property
    def repairing(self) -> bool:
        """Whether the shares of clients that drop out are taken out of the sum again."""
        protocol = self.config.protocol
        return self.plan.kind.shares_noise and protocol.dropout > 0.0 and protocol.mode == "repair"

    def repaired_edges(self, plan: RoundPlan, absent: list[int]) -> SomeEdges | None:
        """The edges that are left after a repair; None where nothing was to be repaired, or could be."""
        return repair(plan, absent) if self.repairing and absent else None


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
    if isinstance(federation.exchange, CarriedExchange):
        federation.exchange.require_next(number)

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
    round_plan = None
    if federation.exchange is None:  # else its parties agree on both
        round_plan = plan.for_round(
            participants,
            weights=client_weights,
            records=sizes,
            beacon=beacon_of(federation, number),
            number=number,
        )
        carrying = carrying_of(federation, number, ledger.history)
        round_plan = replace(round_plan, carrying=carrying)
    if nobody:
        client_weights = np.zeros(1)

    # 3. Every client trains on its own data: these jobs are done before the second half.
    jobs = [
        Job(weights, clients.samples(int(client)), stream.child("client", int(client)))
        for client in participants
    ]
    return OpenRound(
        federation, plan, ledger, number, weights, participants, client_weights, round_plan, jobs, server
    )


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
    client_weights  the public weight p_k of each seat in the sum
    round_plan      the noise of each seat and what it promises; None where the real protocol decides
    jobs            what each seat has to train
    server          what the server remembers of earlier rounds
    """

    federation: Federation
    plan: Plan
    ledger: Ledger
    number: int
    weights: Tensor
    participants: IntArray
    client_weights: FloatArray
    round_plan: RoundPlan | None
    jobs: list[Job]
    server: ServerState = FRESH

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
        absent = absent_seats(self.participants.size, config.protocol.dropout, self._stream.child("dropout"))
        if self.round_plan is not None:
            total, record, zeroed = self._sum_simulated(self.round_plan, uploads, absent, zeroed)
        else:
            total, record = self._sum_by_protocol(uploads, absent)

        if adaptive is not None:
            total, mean = total[:-1], float(total[-1])
            below = None if record.void else short_fraction(mean, plan.clip)
            record = replace(record, clip=plan.clip, below_clip=below)

        # 6. The model moves by the sum, and is tested.
        optimizer, weights, server = self.federation.optimizer, self.weights, self.server
        if not record.void:
            moved, server = optimizer.step(server, total, self.number, record.noise)
            weights = weights + torch.from_numpy(moved).to(weights.dtype)
            # Where a sum moves the model in later rounds too, none of them takes out just what this one carried.
            if not optimizer.at_once:
                record = replace(record, carried_variance=0.0)
        if (self.number + 1) % config.evaluate_every == 0 or self.number + 1 == config.rounds:
            tested = self.federation.trainer.evaluate(weights, *self.federation.materials.test)
            record = replace(record, accuracy=tested.accuracy, loss=tested.loss)
        left = None if server.noise is None else server.noise.variance
        return FinishedRound(replace(record, model_noise_variance=left), weights, server, zeroed)

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

    @property
    def _stream(self) -> SimStream:
        return self.federation.stream.child("round", self.number)

    def _sum_simulated(
        self, plan: RoundPlan, uploads: Uploads, absent: list[int], zeroed: int
    ) -> tuple[FloatArray, RoundRecord, int]:
        """The sum, standing for all participants, with noise drawn from the seed; and the zeroed updates of all ranks.

        A dropout changes no charge: the server might only pretend it. Of a round that is repaired, the shares to lost
        clients are never drawn; it is charged as one in which the server was given them.
        """
        federation, method, noise = self.federation, plan.plan.kind, self._stream.child("noise")
        ranks, rate = federation.trainer.ranks, federation.config.training.server_rate
        here = np.delete(np.arange(plan.participants.size), absent)
        without_noise = uploads.total(here)
        edges = federation.repaired_edges(plan, absent)
        repaired = edges is not None

        # Each client adds its shares, the negatives of its neighbours' and its distortion (or what its method says).
        plan = method.add_client_noise(uploads, plan, noise, edges)
        # What that costs each client is on record before anything is summed.
        joint_mu = method.joint_mu(plan, repairing=federation.repairing)
        self.ledger.charge(plan.participants, joint_mu, plan.marginal_mu)
        # In the sum of the uploads the shares cancel; a trusted server may add noise of its own.
        total = uploads.total(here)
        if ranks.first:
            method.add_server_noise(total, plan, noise, federation.history)
        total, without_noise, diverged = ranks.pool(total, without_noise, np.array([float(zeroed)]))

        predicted = method.left_over_variance(plan, absent, repaired=repaired)
        covariances = method.earlier_covariances(plan, absent, repaired=repaired)
        lost = method.loses(plan, absent, repaired=repaired)
        if lost:
            total, without_noise, predicted = np.zeros_like(total), np.zeros_like(total), 0.0
        # Those who are left stand for all: dividing by their weight instead is post-processing. Not where it would
        # tell how many were drawn in secret, nor where noise is taken out again in another round.
        scale = 1.0
        if absent and not lost and federation.sampling != "poisson" and not method.whole_run:
            scale = float(self.client_weights.sum() / self.client_weights[here].sum())
        balance = plan.balance()
        record = RoundRecord(
            round=self.number + 1,
            participants=plan.participants.size,
            survivors=here.size,
            exact=not (absent and method.shares_noise) or repaired,
            tau2=float(plan.tau2.mean()),
            aggregate_variance=float(np.mean((total - without_noise) ** 2)),
            aggregate_variance_predicted=predicted,
            noise=SumNoise(scale**2 * predicted, tuple(covariances.tolist())),
            carried_variance=rate**2 * method.under_way(plan, absent, repaired=repaired),
            mu_joint=float(joint_mu.max()),
            mu_marginal=float(plan.marginal_mu.max()),
            mu_outsider=plan.outsider_mu(predicted),
            balance=None if balance is None else asdict(balance),
            void=lost,
        )
        if plan.plan.closing and self.number + 1 == plan.plan.planned_rounds:
            closed, closing, missing = close_run(federation, plan, uploads)
            total += closed
            repaired = federation.repaired_edges(closing, missing) is not None
            extra = SumNoise(
                method.left_over_variance(closing, missing, repaired=repaired),
                tuple(method.earlier_covariances(closing, missing, repaired=repaired).tolist()),
            )
            record = replace(record, noise=record.noise.joined(extra), carried_variance=0.0)
        return total * scale, record, int(diverged[0])

    def _sum_by_protocol(self, uploads: Uploads, absent: list[int]) -> tuple[FloatArray, RoundRecord]:
        """The sum, standing for all participants, by the parties of the real protocol; every p_k is 1 / m."""
        plan, size = self.plan, self.participants.size
        rows = uploads.rows()

        def charge(joint: float | FloatArray, marginal: float, attempt: int) -> None:
            mus = np.broadcast_to(np.asarray(joint, dtype=np.float64), size)
            self.ledger.charge(self.participants, mus, np.full(size, marginal), attempt)

        exchanged, closed = self._exchanged(rows, absent, charge)
        survivors, total = list(exchanged.outcome.survivors), exchanged.outcome.total
        without_noise = rows[survivors].sum(axis=0, dtype=np.float64)
        predicted = exchanged.predicted_variance
        moved = self.federation.config.training.server_rate
        record = RoundRecord(
            round=self.number + 1,
            participants=size,
            survivors=len(survivors),
            exact=exchanged.outcome.exact,
            tau2=exchanged.tau2,
            aggregate_variance=float(np.mean((total - without_noise) ** 2)),
            aggregate_variance_predicted=predicted,
            noise=exchanged.noise,
            carried_variance=moved**2 * exchanged.outcome.under_way,
            mu_joint=exchanged.mu,
            mu_marginal=exchanged.marginal_mu,
            mu_outsider=float(mu_of(plan.sensitivity(1.0 / size, 1.0), predicted)),
            attempts=exchanged.attempts,
            grid_delta=exchanged.grid_delta,
            public=exchanged.public,
        )
        if closed is not None:
            total = total + closed.outcome.total
            record = replace(record, noise=record.noise.joined(closed.noise), carried_variance=0.0)
        return total * exchanged.scale, record

    def _exchanged(
        self, rows: NDArray[np.floating[Any]], absent: list[int], charge: Callable[..., None]
    ) -> tuple[Exchanged, Exchanged | None]:
        """The round as the parties of the protocol play it, and a closing one after the last, where there is one."""
        federation, size = self.federation, self.participants.size
        exchange, number, clients = federation.exchange, self.number, self.participants
        assert exchange is not None
        if not isinstance(exchange, CarriedExchange):
            return exchange.play(
                number,
                clients,
                lambda seat: rows[seat] * size,
                charge=charge,
                absent=absent,
                clip=self.plan.clip,
                kept=rows.shape[1] - len(self.weights),
            ), None
        history, rounds = [*self.ledger.history, clients], exchange.schedule.rounds
        nobody = np.zeros(0, dtype=np.int64)
        following = next_cohort(federation, number + 1, history) if number + 1 < rounds else nobody
        played = exchange.play(
            number,
            clients,
            lambda seat: rows[seat] * size,
            following=following,
            charge=charge,
            absent=absent,
        )
        if number + 1 != exchange.schedule.horizon or number + 1 == rounds:
            return played, None
        stream, dropout = federation.stream.child("round", number + 1), federation.config.protocol.dropout
        zero = np.zeros_like(rows[0])
        closed = exchange.play(
            number + 1,
            following,
            lambda _seat: zero,
            following=nobody,
            charge=charge,
            absent=absent_seats(following.size, dropout, stream.child("dropout")),
        )
        return played, closed


def _clipping(plan: Plan) -> Clipping:
    """How an update is bounded; in the unit `record` its samples were, one by one."""
    if not plan.private or plan.unit == "record":
        return "none"
    return "l2" if plan.unit == "client" else "elements"
