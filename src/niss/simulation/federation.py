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
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan, RoundPlan
from niss.accounting.assumed import fewest_participants
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.methods import CarriedEdges, NoiseHistory
from niss.randomness import SimStream
from niss.session.proposal import Setup
from niss.simulation import Config
from niss.simulation.inputs import Inputs
from niss.simulation.sections import Drawing
from niss.simulation.server import Optimizer
from niss.simulation.training import Trainer, local_work
from niss.simulation.uploads import Exchange, Played, Simulated

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Federation:
    """What stays the same over the rounds of one run.

    config     the settings, with this run's method as the only one
    inputs     the clients with their data, the test data, the model
    trainer    trains clients and evaluates models
    alone      the client that trains by itself, the one with most data; None: all of them train together
    plan       how the clients are protected
    stream     every random number of a simulated run
    sampling   how participants are drawn
    size       how many take part in a round
    adaptive   how the clip moves from round to round; None: not at all
    optimizer  how the sums move the model
    work       what a client does in a round; runs with the same work are trained together
    repairing  whether the shares of clients that drop out are taken out of the sum again
    history    what a trusted server remembers of its noise
    exchange   how uploads become a sum: simulated, or by the parties of the real protocol
    """

    def __init__(self, config: Config, inputs: Inputs, trainer: Trainer) -> None:
        (method,) = config.methods
        self.config, self.inputs, self.trainer = config, inputs, trainer
        self.stream, self.sampling = SimStream(config.seed), config.sampling_of(method)
        self.size = config.participants
        sizes = inputs.clients.sizes
        self.alone = int(sizes.argmax()) if self.sampling == "alone" else None
        records = config.privacy.records or int(sizes.sum())
        self.plan = plan = config.plan(method, records if self.alone is None else int(sizes[self.alone]))
        self.adaptive = config.adaptive_clip(method)
        self.optimizer = Optimizer.of(config.training, plan, config.rounds)
        self.work = local_work(config)
        self.repairing = plan.kind.shares_noise and plan.settled_mode == "repair"
        self.history = NoiseHistory(lambda number: self.stream_of(number).child("noise"))
        # Where no noise is shared there is nothing to exchange.
        real = config.exchange == "protocol" and plan.kind.has_protocol
        self.exchange: Exchange = self._protocol() if real else Simulated()

    def _protocol(self) -> Played:
        config, plan, ranks = self.config, self.plan, self.trainer.ranks
        if ranks.several:
            raise ConfigError(
                f"the parties of the real protocol are in one process, and there are {ranks.count}",
                field="exchange",
                hint="run it without torchrun, on one GPU or the processor",
            )
        carries = plan.kind.carries
        setup = Setup(
            plan=plan,
            rounds=plan.planned_rounds + plan.closing if carries else config.rounds,
            # Two honest ones. What a small round costs is bounded by mu.
            participants=self.size if carries else fewest_participants(plan),
            coordinates=self.inputs.layout.size + (self.adaptive is not None),
            grid_bits=config.protocol.grid_bits,
            modulus_bits=config.protocol.modulus_bits,
        )
        return Played(setup)

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
        if self.alone is not None:
            return np.array([self.alone])
        return choose_participants(
            number,
            sampling=self.sampling,
            size=self.size,
            eligible=np.ones(self.inputs.clients.sizes.size, dtype=bool) if eligible is None else eligible,
            stream=self.stream.child("participants"),
            resting=history[max(len(history) - self.plan.separation + 1, 0) :],
        )

    def absent(self, number: int, size: int) -> list[int]:
        """The seats that drop out of a round of that size."""
        return absent_seats(size, self.plan.dropout, self.stream_of(number).child("dropout"))

    def late(self, number: int, size: int) -> IntArray:
        """The seats that upload a blank in a round of that size, unless they drop out."""
        drawn = self.stream_of(number).child("late").generator().random(size)
        return np.flatnonzero(drawn < self.config.training.late)

    def beacon(self, number: int) -> bytes:
        """The public randomness of a simulated round."""
        return self.stream_of(number).child("beacon").generator().bytes(32)

    def repairs(self, graph: ShareGraph, absent: Sequence[int]) -> bool:
        """Whether a round that lost these seats is repaired: where that is done, and clients agree to it.

        Where they would refuse, the protocol repairs around those who refuse; here nothing is repaired, which leaves
        more noise.
        """
        return bool(absent) and self.repairing and can_repair(self.plan, graph, absent)

    def beside(self, plan: RoundPlan, history: Sequence[IntArray]) -> RoundPlan:
        """The round with what it needs to know of the rounds beside it; the same where nothing is carried.

        history  the participants of all rounds before
        """
        if not self.plan.kind.carries:
            return plan
        number, before, after = plan.number, None, None
        if number:
            size = history[number - 1].size
            absent = self.absent(number - 1, size)
            repaired = self.repairs(ShareGraph.complete(size), absent)
            before = CarriedEdges(self._carried(number - 1), tuple(absent), repaired)
        if number + 1 < self.plan.planned_rounds + self.plan.closing:
            after = CarriedEdges(self._carried(number))
        return replace(plan, before=before, after=after, history=tuple(history))

    def _carried(self, number: int) -> SimStream:
        """What round `number` carries to the next is drawn from, by both."""
        return self.stream_of(number).child("noise").child("gap")


def choose_participants(
    number: int,
    *,
    sampling: Drawing,
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


def aggregation_weights(sizes: IntArray, *, rule: str, cap: int | None, divisor: float) -> FloatArray:
    """`p_k` of the participants: equal, `1 / divisor`, or in proportion to declared dataset sizes, capped.

    Both are public and fixed before anything is uploaded; a weight that depended on private sizes, or on how many were
    drawn in secret, would leak through everybody's upload.
    """
    if rule == "equal":
        return np.full(sizes.size, 1.0 / divisor)
    declared = np.minimum(sizes, cap) if cap is not None else sizes
    return np.asarray(declared / declared.sum(), dtype=np.float64)


def can_repair(plan: Plan, graph: ShareGraph, absent: Sequence[int]) -> bool:
    """Whether clients agree to a repair of a round that lost these seats.

    They refuse where more are lost, or a client has more lost neighbours, than the plan has charged for.
    """
    assumed = plan.assumed(graph.size)
    if len(absent) > assumed.dropped:
        return False
    lost = np.zeros(graph.size, dtype=bool)
    lost[list(absent)] = True
    joined = np.zeros((graph.size, graph.size), dtype=bool)
    joined[graph.senders, graph.receivers] = joined[graph.receivers, graph.senders] = True
    return int(joined[~lost][:, lost].sum(axis=1).max(initial=0)) <= assumed.revealed
