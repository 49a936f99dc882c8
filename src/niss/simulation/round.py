"""One federated round, from top to bottom.

The server invites clients; each trains on its own data, clips what it learned and hides it in noise; the server sums
the uploads, in which what was shared cancels; the model moves by the sum.

A round is written as two halves, `begin_round` and `OpenRound.finish`, because training stands between them: in a
comparison the clients of all methods train as one cohort, which is many times as fast as one method after another.
So all methods begin a round, one call trains everybody, and each method finishes with the updates of its own clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.accounting import Charge, Ledger, Outlook, Plan, RoundPlan, outlook
from niss.errors import PrivacyError
from niss.learning import Job
from niss.mechanism.clipping import short_fraction
from niss.methods import mu_of
from niss.randomness import SimStream
from niss.records import draw_batch
from niss.runs import RoundRecord
from niss.simulation.federation import Federation, aggregation_weights
from niss.simulation.server import ServerState
from niss.simulation.uploads import Clipping, Uploads

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def begin_round(
    federation: Federation,
    weights: Tensor,
    ledger: Ledger,
    number: int,
    clip: float | None,
    server: ServerState,
) -> OpenRound:
    """The first half of round `number` (from 0): who takes part, with which weight, and the noise that needs.

    `weights` are those of the global model; the clip is the plan's where it is None; `server` is what the server
    remembers of earlier rounds. Nothing is charged yet; the ledger only says who can afford a round.
    """
    plan, clients, history = federation.plan, federation.inputs.clients, ledger.history
    # Noise and clip are in proportion: a round promises the same with any clip.
    plan = plan if clip is None else replace(plan, clip=clip)

    # 1. The server invites clients whose budget has room for one more round.
    everyone = np.arange(clients.sizes.size)
    planned = Charge.of(plan.kind.planned_mu(plan, everyone, number, history), batch=plan.batch)
    participants = federation.participants(number, history, ledger.room(everyone, planned))
    # Where a secret draw finds nobody, noise is released: someone stands in whose update counts nothing.
    nobody = plan.kind.secret_draw and participants.size == 0
    if nobody:
        participants = everyone[:1]
    elif participants.size < 2 and not plan.kind.secret_draw and federation.alone is None:
        few = "were drawn" if federation.sampling == "poisson" else "have budget left"
        raise PrivacyError(
            f"round {number + 1}: only {participants.size} clients {few}",
            hint="use fewer rounds, a larger epsilon or a higher privacy.participations",
        )

    # 2. Public weights, the share graph from a public beacon, and the noise that this graph needs.
    training = federation.config.training
    public_weights = aggregation_weights(
        clients.sizes[participants],
        rule=training.weights,
        cap=training.size_cap,
        divisor=plan.divisor(federation.size if federation.sampling == "poisson" else participants.size),
    )
    round_plan = None
    if not federation.exchange.real:
        round_plan = plan.for_round(
            participants,
            weights=public_weights,
            records=clients.sizes[participants],
            beacon=federation.beacon(number),
            number=number,
        )
        round_plan = federation.beside(round_plan, history)
    return OpenRound(
        federation, plan, ledger, number, weights, participants, public_weights, server, nobody, round_plan
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
    public_weights  the public weight p_k of each seat in the sum
    server          what the server remembers of earlier rounds
    nobody          a secret draw found nobody: the update of the one seat counts nothing
    round_plan      the noise of each seat and what it promises; None where the real protocol decides
    closing         one more round, without data, which takes out what the last one carried
    """

    federation: Federation
    plan: Plan
    ledger: Ledger
    number: int
    weights: Tensor
    participants: IntArray
    public_weights: FloatArray
    server: ServerState
    nobody: bool
    round_plan: RoundPlan | None
    closing: bool = False

    @property
    def stream(self) -> SimStream:
        """Every random number of the round."""
        return self.federation.stream_of(self.number)

    @property
    def jobs(self) -> list[Job]:
        """3. Every client trains on its own data: what each seat has to do before the second half.

        Where records are hidden, on a batch that it draws in secret, each record by a coin of its own; a node of the
        real protocol does both later, when it answers the round.
        """
        clients, stream, batch = self.federation.inputs.clients, self.stream, self.plan.batch
        jobs = []
        for client in self.participants.tolist():
            samples, own = clients.samples(client), stream.child("client", client)
            if self.trains_in_exchange:
                samples = samples[:0]
            elif batch is not None:
                samples = samples[torch.from_numpy(draw_batch(len(samples), batch, own.child("batch")))]
            jobs.append(Job(self.weights, samples, own))
        return jobs

    @property
    def trains_in_exchange(self) -> bool:
        """Whether nodes of the real protocol draw batches of their own and train on them."""
        return self.federation.exchange.real and self.plan.unit == "record"

    @property
    def sizes(self) -> IntArray:
        """How many examples each seat has."""
        return self.federation.inputs.clients.sizes[self.participants]

    @property
    def client_weights(self) -> FloatArray:
        """With which the upload of each seat enters the sum."""
        return np.zeros(1) if self.nobody else self.public_weights

    def finish(self, uploads: Uploads) -> FinishedRound:
        """The second half: from the updates of the clients, a row per job, to the new global model.

        The rows are changed in place: first into bounded contributions, then into uploads. The ledger is charged.
        """
        federation, plan, number = self.federation, self.plan, self.number
        config, optimizer, adaptive = federation.config, federation.optimizer, federation.adaptive
        ranks, exchange = federation.trainer.ranks, federation.exchange

        # 4. Every client bounds what it may reveal: x_k becomes p_k clip(x_k), with a bit that says whether it was
        #    short enough where the clip follows the norms. A sum over records has them clipped already, one by one. Who
        #    is late has learned nothing: a blank, which is hidden and summed like all others.
        learned, late = self.client_weights.copy(), federation.late(number, self.participants.size)
        learned[late] = 0.0
        if adaptive is None:
            by_unit: dict[str, Clipping] = {"client": "l2", "record": "none", "nbafl": "elements"}
            clipping = by_unit[plan.unit] if plan.private else "none"
            zeroed = uploads.bound(clipping, plan.clip, learned)
        else:
            uploads, zeroed = uploads.bound_with_bit(plan.clip, learned)

        # 5. Each client hides that in noise and uploads it, unless it drops out. The round is charged to its ledger
        #    before its upload leaves. The server sums what arrives, and repairs what dropouts left, where it may.
        absent = federation.absent(number, self.participants.size)
        summed = exchange.play(self, uploads, absent)
        record, noise = summed.record, summed.record.noise
        total, bare = summed.total, summed.bare
        if ranks.several:
            total, bare, diverged = ranks.pool(total, bare, np.array([float(zeroed)]))
            zeroed = int(diverged[0])
        if record.void:
            total, bare = np.zeros_like(total), np.zeros_like(total)
        measured = float(np.mean((total - bare) ** 2))
        carried = config.training.server_rate**2 * record.carried_variance
        if plan.closing and number + 1 == plan.planned_rounds:
            last = self._closing_round()
            size = last.participants.size
            closed = exchange.play(
                last, uploads.blank(ranks.seats(size)), federation.absent(number + 1, size)
            )
            total, noise, carried = (
                total + ranks.pool(closed.total)[0],
                noise.joined(closed.record.noise),
                0.0,
            )
        total = total * summed.scale
        below = None
        if adaptive is not None:
            total, mean = total[:-1], float(total[-1])
            below = None if record.void else short_fraction(mean, plan.clip)

        # 6. The model moves by the sum, and is tested.
        weights, server, tested = self.weights, self.server, None
        if not record.void:
            moved, server = optimizer.step(server, total, number, noise)
            weights = weights + torch.from_numpy(moved).to(weights.dtype)
            # Where a sum moves the model in later rounds too, none of them takes out just what this one carried.
            carried = carried if optimizer.at_once else 0.0
        if (number + 1) % config.evaluate_every == 0 or number + 1 == config.rounds:
            tested = federation.trainer.evaluate(weights, *federation.inputs.test)
        outsider = mu_of(
            plan.sensitivity(self.public_weights, self.sizes), record.aggregate_variance_predicted or 0.0
        )
        record = replace(
            record,
            aggregate_variance=measured,
            noise=noise,
            blanks=float(np.setdiff1d(late, absent).size) if config.training.late else None,
            carried_variance=carried,
            model_noise_variance=None if server.noise is None else server.noise.variance,
            mu_outsider=float(outsider.max()),
            clip=None if adaptive is None else plan.clip,
            below_clip=below,
            accuracy=None if tested is None else tested.accuracy,
            loss=None if tested is None else tested.loss,
        )
        return FinishedRound(record, weights, server, zeroed)

    def _closing_round(self) -> OpenRound:
        """One more round after this one, the last."""
        number, history = self.number + 1, self.ledger.history
        cohort, plan = self.federation.participants(number, history), self.round_plan
        if plan is not None:
            plan = self.federation.beside(replace(plan, participants=cohort, number=number), history)
        return replace(self, number=number, participants=cohort, round_plan=plan, closing=True)

    @property
    def outlook(self) -> Outlook | None:
        """Whether a run of such rounds can learn anything; None where the noise of its rounds is not independent, or
        the server rescales coordinates. Rates and momentum of the server do as much to noise as to updates.
        """
        plan, rounds = self.round_plan, self.federation.config.rounds
        if plan is None or not plan.plan.private or plan.plan.unit == "nbafl" or plan.plan.kind.whole_run:
            return None
        if self.federation.optimizer.adaptive:
            return None
        return outlook(
            parameters=len(self.weights),
            rounds=rounds,
            clip=plan.plan.clip,
            variance=plan.aggregate_variance,
            unit=plan.plan.unit,
        )
