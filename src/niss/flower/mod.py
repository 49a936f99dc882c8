"""The client's side on Flower: a mod that trains nothing itself and lets no bare update out.

    app = ClientApp(mods=[niss_mod])

It must be the first mod, so that nothing after it sees or sends the update. Messages of type `train` that do not
belong to NISS are refused: an app with this mod never uploads in the clear. `evaluate` and `query` pass untouched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import lru_cache

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from niss.accounting.assess import Assessor
from niss.errors import LocalProtocolError, NissError, RemoteProtocolError
from niss.flower.arrays import FloatArray, Model
from niss.flower.enrolment import Enrolment
from niss.flower.folder import keep_in_folder
from niss.flower.keeping import Keeper, keep_in_context
from niss.flower.letters import Answer, Letter, Stage, take_letter
from niss.flower.limits import Limits
from niss.flower.proposal import Proposal, read_proposal
from niss.flower.refusal import refusal
from niss.protocol.agreement import Agreed
from niss.protocol.client import Client
from niss.protocol.messages import Message as Said
from niss.protocol.messages import RevealRequest, RoundOpen, SurvivorClaim
from niss.protocol.wire import decode, encode

# Flower's own logger: what it shows is shown of this too.
LOG = logging.getLogger("flwr")
# Flower has no code of its own for "the client declines".
REFUSED = 901


class NissMod:
    """The mod with limits of its own, and with metrics that may travel in the clear.

    `limits` are what this client insists on; a node's own configuration goes before them. `clear_metrics` names
    metrics of `train` that are sent as they are, without any protection; no others leave the client.
    """

    def __init__(self, limits: Limits | None = None, *, clear_metrics: Collection[str] = ()) -> None:
        self._limits = Limits() if limits is None else limits
        self._clear = frozenset(clear_metrics)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        try:
            letter = take_letter(message.content)
            if letter is None:
                return _declined(message, "this client trains in NISS rounds only, and this is none")
            limits = self._limits.of_node(context.node_config)
            trained = self._train(message, context, call_next) if letter.stage is Stage.ROUND else None
            if isinstance(trained, Message):
                return trained
            with _keeper(limits, context) as keeper:
                return _Exchange(limits, keeper, letter).reply(message, trained)
        except NissError as error:
            # Without its own keeping in order a client cannot even sign that it declines.
            return _declined(message, error.message)

    def _train(
        self, message: Message, context: Context, call_next: ClientAppCallable
    ) -> tuple[FloatArray, MetricRecord | None] | Message:
        """The bare update, which does not leave this process, and the metrics that may."""
        model = Model.of(_only_arrays(message.content))
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        update = model.update_to(_only_arrays(reply.content))
        if not np.all(np.isfinite(update)):
            LOG.warning("niss: the trained weights are not finite; an update of zero is sent in their place")
            update = np.zeros_like(update)
        shown = {
            name: value
            for record in reply.content.metric_records.values()
            for name, value in record.items()
            if name in self._clear
        }
        return update, MetricRecord(shown) if shown else None


class _Exchange:
    """One letter and its answer."""

    def __init__(self, limits: Limits, keeper: Keeper, letter: Letter) -> None:
        self._limits, self._keeper, self._letter = limits, keeper, letter

    def reply(self, message: Message, trained: tuple[FloatArray, MetricRecord | None] | None) -> Message:
        """The answer, or a signed refusal that says why."""
        metrics = None if trained is None else trained[1]
        try:
            said = self._answer(None if trained is None else trained[0])
        except NissError as error:
            LOG.warning("niss: declined: %s", error)
            said, metrics = encode(refusal(self._keeper.identity, self._letter.digest, error.message)), None
            self._keeper.save()  # The step that the answer names.
        step = self._keeper.notes.steps.get(self._letter.run.hex(), 0)
        return Message(Answer(said, step, metrics).to_content(), reply_to=message)

    def _answer(self, update: FloatArray | None) -> bytes:
        self._check_fresh()
        if self._letter.stage is Stage.ENROL:
            return self._enrol()
        proposal = self._agreed_proposal()
        client = self._client(proposal)
        said = decode(self._letter.body)
        self._count()
        answer: Said
        if isinstance(said, RoundOpen) and update is not None:
            if said.terms.run != proposal.run:
                raise RemoteProtocolError("a round of another run than its letter says")
            answer = client.upload(said, update, os.urandom)
            self._stay_live(proposal)
            if proposal.mode == "tolerate":
                client.close_round()  # Nothing will be asked about this round again.
        elif isinstance(said, SurvivorClaim) and self._letter.stage is Stage.CLAIM:
            answer = client.judge(said)
        elif isinstance(said, RevealRequest) and self._letter.stage is Stage.REQUEST:
            answer = client.reveal(said)
            client.close_round()
        else:
            raise RemoteProtocolError("a message that does not belong to its stage")
        return encode(answer)

    def _enrol(self) -> bytes:
        proposal = read_proposal(self._letter.body)
        run = proposal.run.hex()
        if proposal.run != self._letter.run:
            raise RemoteProtocolError("a proposal of another run than its letter says")
        client = self._client(proposal)
        kept = self._keeper.notes.proposals.setdefault(run, self._letter.body)
        if read_proposal(kept) != proposal:
            raise RemoteProtocolError("the server proposes another plan for a run that was agreed on before")
        self._count()
        prekeys = client.enrol(proposal.prekeys, os.urandom)
        if proposal.tracker:
            from niss.flower.tracked import register

            register(proposal, self._keeper.identity, prekeys, ca=self._limits.tracker_ca)
        LOG.info("niss: joined run %s; pinned: %s", run[:8], ", ".join(self._limits.pinned) or "nothing")
        made = Enrolment.make(self._keeper.identity, proposal, prekeys, self._limits.pinned)
        return made.to_bytes()

    def _stay_live(self, proposal: Proposal) -> None:
        if not proposal.tracker:
            return
        from niss.flower.tracked import stay_live

        try:
            stay_live(proposal, self._keeper.identity, ca=self._limits.tracker_ca)
        except NissError as error:
            # The upload stands; whether this client is seated next time is the tracker's business.
            LOG.warning("niss: %s", error)

    def _check_fresh(self) -> None:
        """Fail closed on an old state: its charges and its memory of what was answered are not all there."""
        step = self._keeper.notes.steps.get(self._letter.run.hex(), 0)
        if step < self._letter.after:
            raise LocalProtocolError(
                f"this client's state is at step {step}, but the server has seen its step {self._letter.after}",
                hint="give the node a `niss-state` folder; this run goes on without it",
            )

    def _count(self) -> None:
        """The next step; saved by the machine together with what it does."""
        run = self._letter.run.hex()
        self._keeper.notes.steps[run] = self._keeper.notes.steps.get(run, 0) + 1

    def _agreed_proposal(self) -> Proposal:
        kept = self._keeper.notes.proposals.get(self._letter.run.hex())
        if kept is None:
            raise RemoteProtocolError("a round of a run that this client has not joined")
        return read_proposal(kept)

    def _client(self, proposal: Proposal) -> Client:
        plan = proposal.plan
        keeper = self._keeper

        def persist(memory: bytes) -> None:
            keeper.notes.memory = memory
            keeper.save()

        return Client(
            keeper.identity,
            self._limits.policy(proposal),
            assess=_assessor(plan.relation, plan.corruption.failure),
            charge=keeper.charges(
                proposal.run.hex(), plan.relation, self._limits.budget(proposal), plan.corruption.failure
            ),
            persist=persist,
            kept=keeper.notes.memory,
        )


@lru_cache(maxsize=8)
def _assessor(relation: str, failure: float) -> Callable[[Agreed, int], float]:
    """Shared by the clients of one process: the worst case of a round is the same for all of them."""
    return Assessor(relation=relation, failure=failure)


def _keeper(limits: Limits, context: Context) -> AbstractContextManager[Keeper]:
    return keep_in_context(context) if limits.state is None else keep_in_folder(limits.state)


def _only_arrays(content: RecordDict) -> ArrayRecord:
    records = list(content.array_records.values())
    if len(records) != 1:
        raise LocalProtocolError(f"{len(records)} records of arrays where the model should be alone")
    return records[0]


def _declined(message: Message, reason: str) -> Message:
    LOG.warning("niss: declined: %s", reason)
    return Message(Error(REFUSED, f"niss: {reason}"), reply_to=message)


niss_mod = NissMod()
"""The mod with nothing pinned but what the node's own configuration pins."""
