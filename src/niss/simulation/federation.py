"""What stays the same over the rounds of a run, and what each round draws from it: who takes part and who drops out,
with which weights, the beacon, and what it is carried by the round before. All of it follows from the seed, the number
of the round and who took part before, so it is drawn again instead of kept.

shuffled   clients are shuffled and dealt out in whole cohorts, then shuffled anew, so that all take part equally often;
           a client may be dealt out last and first again, so nothing is promised about the time between
cyclic     shuffled once and dealt out over and over: fixed cohorts, and every client returns after exactly
           clients / participants rounds
uniform    a fresh random set each round, as in the paper; with a `separation`, among the clients that stayed out of the
           last separation - 1 rounds
poisson    every client on its own, with probability participants / clients: the number varies from round to round

Participants and weights are public and fixed before anything is uploaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan, RoundPlan
from niss.graph import ShareGraph
from niss.mechanism.clipping import AdaptiveClip
from niss.methods import CarriedEdges, NoiseHistory
from niss.randomness import SimStream
from niss.session.proposal import Setup
from niss.simulation.config import Config
from niss.simulation.exchange import Exchange, Played, Simulated
from niss.simulation.inputs import Inputs
from niss.simulation.sections import Sampling
from niss.simulation.server import Optimizer
from niss.simulation.training import Trainer, Work, local_work

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Federation:
    """What stays the same over the rounds of one run.

    config    the settings, with this run's method as the only one
    plan      how the clients are protected
    inputs    the clients with their data, the test data, the model
    trainer   trains clients and evaluates models
    exchange  how uploads become a sum: simulated, or by the parties of the real protocol
    stream    every random number of a simulated run
    history   what a trusted server remembers of its noise
    """

    config: Config
    plan: Plan
    inputs: Inputs
    trainer: Trainer
    exchange: Exchange
    stream: SimStream
    history: NoiseHistory

    @classmethod
    def of(cls, config: Config, inputs: Inputs, trainer: Trainer) -> Federation:
        """The federation of the config's one method."""
        (method,) = config.methods
        plan, stream = config.plan(method), SimStream(config.seed)
        exchange: Exchange = Simulated()
        # Where no noise is shared there is nothing to exchange.
        if config.exchange == "protocol" and plan.kind.has_protocol:
            trainer.ranks.require_one("the parties of the real protocol", field="exchange")
            size, carries = config.training.participants, plan.kind.carries
            setup = Setup(
                plan=plan,
                rounds=plan.planned_rounds + plan.closing if carries else config.rounds,
                # Two honest ones. What a small round costs is bounded by mu.
                participants=size if carries else plan.colluders + 2,
                mode=config.protocol.mode,
                coordinates=inputs.layout.size + (config.adaptive_clip(method) is not None),
                grid_bits=config.protocol.grid_bits,
                modulus_bits=config.protocol.modulus_bits,
            )
            exchange = Played(setup)
        history = NoiseHistory(lambda number: stream.child("round", number).child("noise"))
        return cls(config, plan, inputs, trainer, exchange, stream, history)

    @cached_property
    def sampling(self) -> Sampling:
        """How participants are drawn."""
        return self.config.sampling_of(self.config.methods[0])

    @cached_property
    def adaptive(self) -> AdaptiveClip | None:
        """How the clip moves from round to round; None: not at all."""
        return self.config.adaptive_clip(self.config.methods[0])

    @cached_property
    def optimizer(self) -> Optimizer:
        """How the sums move the model."""
        return Optimizer.of(self.config.training, self.plan, self.config.rounds)

    @cached_property
    def work(self) -> Work:
        """What a client does in a round; runs with the same work are trained together."""
        return local_work(self.config)

    @cached_property
    def repairing(self) -> bool:
        """Whether the shares of clients that drop out are taken out of the sum again."""
        protocol = self.config.protocol
        return self.plan.kind.shares_noise and protocol.dropout > 0.0 and protocol.mode == "repair"

    def stream_of(self, number: int) -> SimStream:
        """Every random number of round `number`, from 0."""
        return self.stream.child("round", number)

    def participants(
        self, number: int, history: Sequence[IntArray], eligible: NDArray[np.bool_] | None = None
    ) -> IntArray:
        """The clients of a round, in ascending order.

        history   the participants of all rounds before it
        eligible  who has budget left; None: everyone
        """
        return choose_participants(
            number,
            sampling=self.sampling,
            size=self.config.training.participants,
            eligible=np.ones(self.inputs.clients.sizes.size, dtype=bool) if eligible is None else eligible,
            stream=self.stream.child("participants"),
            resting=history[max(len(history) - self.plan.separation + 1, 0) :],
        )

    def absent(self, number: int, size: int) -> list[int]:
        """The seats that drop out of a round of that size."""
        return absent_seats(size, self.config.protocol.dropout, self.stream_of(number).child("dropout"))

    def beacon(self, number: int) -> bytes:
        """The public randomness of a simulated round."""
        return self.stream_of(number).child("beacon").generator().bytes(32)

    def without(self, plan: RoundPlan, absent: list[int]) -> RoundPlan:
        """The round without the uploads of these seats, repaired where that is done and clients agree to it.

        Where they would refuse, the protocol repairs around those who refuse; here nothing is repaired, which leaves
        more noise.
        """
        repaired = bool(absent) and self.repairing and can_repair(plan.plan, plan.graph, absent)
        return plan.with_lost(absent, repaired=repaired)

    def beside(self, plan: RoundPlan, history: Sequence[IntArray]) -> RoundPlan:
        """The round with what it needs to know of the rounds beside it; the same where nothing is carried.

        history  the participants of all rounds before
        """
        if not self.plan.kind.carries:
            return plan
        number, before, after = plan.number, None, None
        if number:
            participants = history[number - 1]
            absent = self.absent(number - 1, participants.size)
            repaired = self._was_repaired(number - 1, participants, absent)
            before = CarriedEdges(self._carried(number - 1), tuple(absent), repaired)
        if number + 1 < self.plan.planned_rounds + self.plan.closing:
            after = CarriedEdges(self._carried(number))
        return replace(plan, before=before, after=after, history=tuple(history))

    def _carried(self, number: int) -> SimStream:
        """What round `number` carries to the next is drawn from, by both."""
        return self.stream_of(number).child("noise").child("gap")

    def _was_repaired(self, number: int, participants: IntArray, absent: list[int]) -> bool:
        """Whether an earlier round, which lost these seats, was repaired."""
        if not absent or not self.repairing:
            return False
        plan = self.plan.for_round(
            participants,
            weights=1.0 / participants.size,
            records=1,
            beacon=self.beacon(number),
            number=number,
        )
        return self.without(plan, absent).repaired


def choose_participants(
    number: int,
    *,
    sampling: Sampling,
    size: int,
    eligible: NDArray[np.bool_],
    stream: SimStream,
    resting: Sequence[IntArray] = (),
) -> IntArray:
    """The participants of round `number` (counted from 0), in ascending order.

    size      how many take part (poisson: on average)
    eligible  the clients that have budget left; the others stay out
    resting   the participants of the latest rounds, who stay out too where they are drawn `uniform`
    """
    clients = eligible.size
    if sampling in ("shuffled", "cyclic"):
        shuffle, place = divmod(number, clients // size)
        # Cyclic cohorts are those of the first shuffle, again and again.
        shuffle = 0 if sampling == "cyclic" else shuffle
        order = stream.child("shuffle", shuffle).generator().permutation(clients)
        chosen = order[place * size : (place + 1) * size]
        chosen = chosen[eligible[chosen]]
    elif sampling == "poisson":
        drawn = stream.child("poisson", number).generator().random(clients) < size / clients
        chosen = np.flatnonzero(drawn & eligible)
    else:
        rested = eligible.copy()
        for participants in resting:
            rested[participants] = False
        pool = np.flatnonzero(rested)
        chosen = stream.child("uniform", number).generator().permutation(pool)[:size]
    return np.sort(chosen).astype(np.int64)


def absent_seats(size: int, share: float, stream: SimStream) -> list[int]:
    """The seats that drop out of a round, each with that probability; one always stays."""
    drawn = stream.generator().random(size) < share
    drawn[0] &= not drawn.all()
    return [int(seat) for seat in np.flatnonzero(drawn)]


def aggregation_weights(
    sizes: IntArray, *, rule: str, cap: int | None, expected: int | None = None
) -> FloatArray:
    """`p_k` of the participants: equal, or in proportion to declared dataset sizes, capped.

    Both are public and fixed before anything is uploaded; a weight that depended on private sizes would
    leak through everybody's upload. `expected` is what equal weights divide by where the number of participants is
    drawn in secret.
    """
    if rule == "equal":
        return np.full(sizes.size, 1.0 / (expected or sizes.size))
    declared = np.minimum(sizes, cap) if cap is not None else sizes
    return np.asarray(declared / declared.sum(), dtype=np.float64)


def can_repair(plan: Plan, graph: ShareGraph, absent: Sequence[int]) -> bool:
    """Whether clients agree to a repair of a round that lost these seats.

    They refuse where more are lost, or a client has more lost neighbours, than the plan has charged for.
    """
    if len(absent) > plan.dropped:
        return False
    lost = np.zeros(graph.size, dtype=bool)
    lost[list(absent)] = True
    joined = np.zeros((graph.size, graph.size), dtype=bool)
    joined[graph.senders, graph.receivers] = joined[graph.receivers, graph.senders] = True
    return int(joined[~lost][:, lost].sum(axis=1).max(initial=0)) <= plan.revealed
