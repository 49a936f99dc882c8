"""The client's side on Flower: a mod that trains nothing itself and lets no bare update out.

    app = ClientApp(mods=[niss_mod])

It must be the first mod, so that no other one sees the update on its way out. Messages of type `train` that do not
belong to NISS are refused: an app with this mod never uploads in the clear. `evaluate` and `query` pass untouched.

What happens to a round: `take_request` takes our record out of the message, the app trains, and the difference of the
weights goes to the protocol's `Client`, which checks the round, charges the ledger, clips, adds noise and signs.

What must be remembered is kept before the round is charged, and it is charged before anything is sent. A crash can
cost a client a round, but never makes it answer one twice or uncharged, as long as its state is not older than its
last reply. Against an older one each reply carries a step: the server repeats the last that it has seen, and a client
that is behind declines.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from functools import lru_cache

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from niss.accounting import Assessor, charge_to
from niss.errors import LocalProtocolError, NissError, RemoteProtocolError
from niss.flower.limits import Limits
from niss.flower.proposal import Enrolment, Proposal, read_proposal
from niss.flower.state import SELF, StateStore, open_store
from niss.flower.transport import FloatArray, Model, Reply, Request, Stage, sign_refusal, take_request
from niss.protocol import Agreed, Client, Prekey, RevealRequest, RoundOpen, SurvivorClaim, decode, encode
from niss.protocol import Message as ProtocolMessage
from niss.tracker.client import TrackerClient

# Flower's own logger, so that its settings decide what is shown.
LOG = logging.getLogger("flwr")
# Flower has no code of its own for "the client declines".
REFUSED = 901


class NissMod:
    """A mod for a ClientApp, with limits of its own and with metrics that may travel unprotected.

    limits         what this client insists on; the node's own configuration takes precedence
    clear_metrics  names of metrics of `train` that are sent as they are, without any protection; no others are sent
    """

    def __init__(self, limits: Limits | None = None, *, clear_metrics: Collection[str] = ()) -> None:
        self._limits = Limits() if limits is None else limits
        self._clear = frozenset(clear_metrics)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message of Flower's; `call_next` is the app, or the mod after this one."""
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        try:
            request = take_request(message.content)
            if request is None:
                return _decline(message, "this client trains in NISS rounds only, and this is not one")
            limits = self._limits.of_node(context.node_config)
            update, metrics = None, None
            if request.stage is Stage.ROUND:
                model = Model.of(_only_arrays(message.content))
                trained = call_next(message, context)
                if trained.has_error():
                    return trained
                update, metrics = _update(model, trained.content), self._clear_metrics(trained.content)
            with open_store(context, limits.state) as store:
                reply = _Exchange(limits, store, request).reply(update, metrics)
            return Message(reply.to_content(), reply_to=message)
        except NissError as error:
            # Without its own state in order a client cannot even sign that it declines.
            return _decline(message, error.message)

    def _clear_metrics(self, content: RecordDict) -> MetricRecord | None:
        """The metrics that may travel unprotected, if there are any."""
        records = content.metric_records.values()
        metrics = {name: record[name] for record in records for name in record if name in self._clear}
        return MetricRecord(metrics) if metrics else None


class _Exchange:
    """One request of the server and the client's reply to it."""

    def __init__(self, limits: Limits, store: StateStore, request: Request) -> None:
        self._limits, self._store, self._request = limits, store, request
        self._run = request.run.hex()

    def reply(self, update: FloatArray | None, metrics: MetricRecord | None) -> Reply:
        """The reply to the request, or a signed refusal that says why.

        update   the bare update of a round; None in the other stages
        metrics  what may travel unprotected beside it; not sent with a refusal
        """
        try:
            body = self._answer(update)
        except NissError as error:
            LOG.warning("niss: declined: %s", error)
            body = encode(sign_refusal(self._store.identity, self._request.digest, error.message))
            metrics = None
            self._store.save()  # The step that the reply names.
        return Reply(body, self._step, metrics)

    @property
    def _step(self) -> int:
        """How many requests of this run were answered, as far as this client's state knows."""
        return self._store.state.steps.get(self._run, 0)

    def _answer(self, update: FloatArray | None) -> bytes:
        """The protocol's answer, encoded; raises `NissError` where the request must be declined."""
        # Fail closed on an old state: its charges and its memory of what was answered are not all there.
        if self._step < self._request.after:
            raise LocalProtocolError(
                f"this client's state is at step {self._step}, but the server has seen step {self._request.after}",
                hint="set `niss-state` to give the node a folder of its own; this run goes on without it",
            )
        if self._request.stage is Stage.ENROL:
            return self._enrol()
        agreed_to = self._store.state.proposals.get(self._run)
        if agreed_to is None:
            raise RemoteProtocolError("this client has not joined the run that the message belongs to")
        proposal = read_proposal(agreed_to)
        client = self._client(proposal)
        message = decode(self._request.body)
        self._count_step()
        answer: ProtocolMessage
        if isinstance(message, RoundOpen) and update is not None:
            if message.terms.run != proposal.run:
                raise RemoteProtocolError("the round belongs to another run than its message says")
            answer = client.upload(message, update, os.urandom)
            if proposal.tracker:
                self._stay_live(proposal)
            if proposal.mode == "tolerate":
                client.close_round()  # Nothing will be asked about this round again.
        elif isinstance(message, SurvivorClaim) and self._request.stage is Stage.CLAIM:
            answer = client.judge(message)
        elif isinstance(message, RevealRequest) and self._request.stage is Stage.REQUEST:
            answer = client.reveal(message)
            client.close_round()
        else:
            raise RemoteProtocolError(f"unexpected {type(message).__name__} in stage {self._request.stage}")
        return encode(answer)

    def _enrol(self) -> bytes:
        """Join a run, or hand over more keys in a run that was joined before under the same proposal."""
        proposal, identity = read_proposal(self._request.body), self._store.identity
        if proposal.run != self._request.run:
            raise RemoteProtocolError("the proposal belongs to another run than its message says")
        client = self._client(proposal)
        agreed_to = self._store.state.proposals.setdefault(self._run, self._request.body)
        if read_proposal(agreed_to) != proposal:
            raise RemoteProtocolError("the server proposed another plan for a run that this client joined")
        self._count_step()
        prekeys = client.enrol(proposal.prekeys, os.urandom)
        if proposal.tracker:
            self._register(proposal, prekeys)
        pinned = self._limits.pinned
        LOG.info("niss: joined run %s; pinned: %s", self._run[:8], ", ".join(pinned) or "nothing")
        return Enrolment(identity.public, prekeys, pinned).signed(identity, proposal).to_bytes()

    def _register(self, proposal: Proposal, prekeys: tuple[Prekey, ...]) -> None:
        """Register keys with the tracker of the run, which must say of the run what the server says of it."""
        with TrackerClient(proposal.tracker, self._store.identity, ca=self._limits.tracker_ca) as tracker:
            described = tracker.describe(proposal.run)
            if (described.holder, described.anchor) != (proposal.holder, proposal.anchor):
                raise RemoteProtocolError("the tracker has another holder or another chain for this run")
            tracker.register(prekeys)

    def _stay_live(self, proposal: Proposal) -> None:
        """Tell the tracker that this client is still there."""
        identity, ca = self._store.identity, self._limits.tracker_ca
        try:
            with TrackerClient(proposal.tracker, identity, ca=ca, retries=1) as tracker:
                tracker.heartbeat()
        except NissError as error:
            # The upload stands; whether this client is seated next time is the tracker's business.
            LOG.warning("niss: %s", error)

    def _count_step(self) -> None:
        """Count this request; saved by the protocol's client together with what it does."""
        self._store.state.steps[self._run] = self._step + 1

    def _client(self, proposal: Proposal) -> Client:
        """The protocol's client, which enforces the limits and charges the ledger; refuses a run beyond them."""
        plan, store, failure = proposal.plan, self._store, proposal.plan.corruption.failure
        policy = self._limits.policy(proposal)
        ledger = store.ledger(self._run, plan.relation, self._limits.budget(proposal), failure)

        def persist(memory: bytes) -> None:
            store.state.memory = memory
            store.save()

        return Client(
            store.identity,
            policy,
            assess=_assessor(plan.relation, failure),
            charge=charge_to(ledger, SELF, relation=plan.relation),
            persist=persist,
            kept=store.state.memory,
        )


@lru_cache(maxsize=8)
def _assessor(relation: str, failure: float) -> Callable[[Agreed, int], float]:
    """Shared by the clients of one process: the worst case of a round is the same for all of them."""
    return Assessor(relation=relation, failure=failure)


def _update(model: Model, trained: RecordDict) -> FloatArray:
    """The bare update, which does not leave this process; all zeros where training diverged."""
    update = model.update_to(_only_arrays(trained))
    if np.all(np.isfinite(update)):
        return update
    LOG.warning("niss: the trained weights are not finite; sending an update of zeros instead")
    return np.zeros_like(update)


def _only_arrays(content: RecordDict) -> ArrayRecord:
    """The record of arrays in a message, which must be the model and nothing else."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise LocalProtocolError(f"expected one record of arrays, the model, but got {len(records)}")
    return records[0]


def _decline(message: Message, reason: str) -> Message:
    """An error in Flower's terms, unsigned: there is no identity yet to sign with, or no run to refuse."""
    LOG.warning("niss: declined: %s", reason)
    return Message(Error(REFUSED, f"niss: {reason}"), reply_to=message)


niss_mod = NissMod()
"""The mod with nothing pinned but what the node's own configuration pins."""
