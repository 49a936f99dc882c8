"""The client's side on Flower: a mod that trains nothing itself and lets no bare update out.

    app = ClientApp(mods=[niss_mod])

It must be the first mod, so that no other one sees the update on its way out. Whatever is not a round of NISS does not
reach the app: `evaluate` at weights of the server's choice gives a gradient by differences, and so does any other door.
`NissMod(allow=("evaluate",))` opens one knowingly; `NissMod(metrics=...)` sends metrics inside the upload instead.

What happens to a round: `take_request` takes our record out of the message, and the protocol's `Client` checks
signature, run, round and budget, remembers the round and charges the ledger. Only then the app trains, and the
difference of the weights is clipped, noised and signed. An app that fails, however it fails, uploads zeros like any
other update: what it says about its data in an exception, an error or a NaN does not leave.

What must be remembered is kept before the round is charged, and it is charged before anything is sent. A crash can
cost a client a round, but never makes it answer one twice or uncharged, as long as its state is not older than its
last reply. Against an older one each reply carries a step: the server repeats the last that it has seen, and a client
that is behind declines.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from niss.accounting import Assessor, CarriedAccount, Promise, charge_to
from niss.errors import ConfigError, LocalProtocolError, NissError, ProtocolError, RemoteProtocolError
from niss.flower.limits import Limits
from niss.flower.metrics import NoisyMetrics
from niss.flower.proposal import Enrolment, Proposal, read_proposal
from niss.flower.state import SELF, StateStore, open_store
from niss.flower.transport import (
    FloatArray,
    Model,
    Reply,
    Request,
    Stage,
    records_of,
    sign_refusal,
    take_request,
)
from niss.mechanism import l2_norm
from niss.protocol import (
    Agreed,
    Client,
    Prekey,
    RevealRequest,
    RoundOpen,
    decode,
    encode,
    rounds_answered,
)
from niss.redaction import printable
from niss.tracker.client import USELESS, TrackerClient

# Flower's own logger, so that its settings decide what is shown.
LOG = logging.getLogger("flwr")
# Flower has no code of its own for "the client declines".
REFUSED = 901

Metrics = Mapping[str, object]
"""What an app reported, by name; nothing says yet that it is a number."""

_DOORS = ("evaluate", "query")
"""What may be opened; `train` never is, and message types of Flower's past are not known to any app that has a mod."""
_ONLY_ROUNDS = "this client answers NISS rounds only"
_NOT_ALLOWED = "this client's own limits or its ledger do not allow it"
_NO_HOLDER = "without a niss-holder of its own this node counts colluders as placed after the graph was drawn"
_OUT_OF_ORDER = "this node cannot answer; its own log says why"


class NissMod:
    """A mod for a ClientApp, with limits of its own and with what may pass beside NISS.

    limits         what this client insists on; the node's own configuration takes precedence
    allow          other messages that reach the app and are answered without any protection: `evaluate`, `query`
    metrics        by name the ranges (least, greatest) of metrics of `train` that may travel inside the upload, hidden
                   and charged with it (`niss.flower.metrics`); a run that wants others, or other ranges, is declined
    clear_metrics  names of metrics of `train` that are sent as they are, without any protection; no others are sent

    Raises `ConfigError` for a name that cannot be allowed, and for a range that is empty or not finite.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        allow: Collection[str] = (),
        metrics: Mapping[str, tuple[float, float]] | None = None,
        clear_metrics: Collection[str] = (),
    ) -> None:
        self._limits = Limits() if limits is None else limits
        self._metrics, self._clear = NoisyMetrics.of(metrics), frozenset(clear_metrics)
        if both := self._clear & set(self._metrics.names):
            raise ConfigError(f"{min(both)!r} is hidden as well", field="clear_metrics", hint="choose one")
        self._allow = frozenset((allow,) if isinstance(allow, str) else allow)
        if unknown := self._allow - set(_DOORS):
            raise ConfigError(
                f"{min(unknown)!r} cannot be opened", field="allow", hint="use some of: " + ", ".join(_DOORS)
            )

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message of Flower's; `call_next` is the app, or the mod after this one."""
        kind = message.metadata.message_type.partition(".")[0]
        if kind in self._allow:
            return call_next(message, context)
        request = None
        try:
            if kind == "train":
                request = take_request(message.content)
            if request is None:
                return _decline(message, _ONLY_ROUNDS)
            limits = self._limits.of_node(context.node_config)
            with open_store(context, limits.state) as store:
                exchange = _Exchange(limits, self._metrics, store, request)
                model = exchange.model(message.content)
                reply = exchange.reply(model)
            if reply is None:
                assert model is not None
                reply = exchange.upload(*self._train(model, message, context, call_next))
            return Message(reply.to_content(), reply_to=message)
        except ProtocolError as error:
            return _decline(message, error.message)
        except Exception as error:
            # Without its own state in order a client cannot even sign that it declines. What is wrong with it, down to
            # the names of its files, is nobody else's business.
            LOG.warning("niss: %s", _shown(error) if isinstance(error, NissError) else type(error).__name__)
            return _decline(message, _OUT_OF_ORDER)

    def _train(
        self, model: Model, message: Message, context: Context, call_next: ClientAppCallable
    ) -> tuple[FloatArray, Metrics, MetricRecord | None]:
        """The app's bare update and metrics, which do not leave this process, and what may leave it in the clear.

        Whatever goes wrong, zeros and no metrics.
        """
        try:
            trained = call_next(message, context).content  # An error in place of content raises.
            update = model.update_to(_only_arrays(trained))
            if np.all(np.isfinite(update)):
                records = records_of(trained, MetricRecord).values()
                metrics = {name: value for record in records for name, value in record.items()}
                clear = {name: value for name, value in metrics.items() if name in self._clear}
                return update, metrics, MetricRecord(clear) if clear else None
            LOG.warning("niss: the trained weights are not finite; sending an update of zeros instead")
        except Exception as error:
            LOG.warning(
                "niss: the app failed (%s); sending an update of zeros instead. Flower's log has more at level DEBUG",
                _shown(error) if isinstance(error, NissError) else type(error).__name__,
            )
            LOG.debug("niss: how the app failed", exc_info=True)
        return np.zeros(model.size), {}, None


class _Exchange:
    """One request of the server and the client's reply to it."""

    def __init__(self, limits: Limits, metrics: NoisyMetrics, store: StateStore, request: Request) -> None:
        """`metrics` are those that the client agrees to send inside an upload."""
        self._limits, self._metrics, self._store, self._request = limits, metrics, store, request
        self._run = request.run.hex()
        self._accepted: tuple[Client, Proposal, RoundOpen] | None = None

    def model(self, content: RecordDict) -> Model | None:
        """The model that a round sends along, decoded before anything is charged; None in the other stages."""
        if self._request.stage is not Stage.ROUND:
            return None
        try:
            return Model.of(_only_arrays(content))
        except NissError:
            raise
        except Exception:
            # An array of somebody else's making can raise anything.
            raise RemoteProtocolError("the arrays of the message cannot be read") from None

    def reply(self, model: Model | None) -> Reply | None:
        """The reply to the request, or a signed refusal that says why; None: the round is charged, and to be trained.

        model  what a round sends along; None in the other stages
        """
        try:
            body = self._answer(model)
        except NissError as error:
            LOG.warning("niss: declined: %s", _shown(error))
            body = encode(sign_refusal(self._store.identity, self._request.digest, _reason(error)))
            self._store.save()  # The step that the reply names.
        return None if body is None else Reply(body, self._step)

    def upload(self, update: FloatArray, metrics: Metrics, clear: MetricRecord | None) -> Reply:
        """The reply to a round that was charged; `clear` may travel unprotected beside it. Changes no state.

        Of `metrics` those that the run's proposal names are hidden with the update, and the others stay here.
        """
        assert self._accepted is not None
        client, proposal, opened = self._accepted
        # For the owner alone, who may want to know whether the clip fits; never sent.
        LOG.info("niss: the update has norm %.3g, the clip is %g", l2_norm(update), opened.terms.clip)
        joined = proposal.metrics.joined(update, metrics, opened.terms, len(opened.participants))
        return Reply(encode(client.answer(joined, os.urandom)), self._step, clear)

    @property
    def _step(self) -> int:
        """How many requests of this run were answered, as far as this client's state knows."""
        return self._store.state.steps.get(self._run, 0)

    def _answer(self, model: Model | None) -> bytes | None:
        """The protocol's answer, encoded, or None for a round that was accepted and charged.

        Raises `NissError` where the request must be declined.
        """
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
        if isinstance(message, RoundOpen) and model is not None:
            self._accept(client, proposal, message, model)
            return None
        self._count_step()
        if not isinstance(message, RevealRequest) or self._request.stage is not Stage.REQUEST:
            raise RemoteProtocolError(f"unexpected {type(message).__name__} in stage {self._request.stage}")
        answer = client.reveal(message)
        if self._asked_again(proposal):
            self._store.save()  # The step that the reply names.
        else:
            client.close_round()
        return encode(answer)

    def _asked_again(self, proposal: Proposal) -> bool:
        """Whether a member may be asked once more about its round, after the next one: where it carried noise on.

        Then its keys are erased with its next round.
        """
        if proposal.schedule is None:
            return False
        return (
            max(rounds_answered(self._store.state.memory, proposal.run), default=0) + 1
            < proposal.schedule.rounds
        )

    def _accept(self, client: Client, proposal: Proposal, opened: RoundOpen, model: Model) -> None:
        """Check the round, remember it and charge it; what is left to do needs the update and nothing on disk."""
        if opened.terms.run != proposal.run:
            raise RemoteProtocolError("the round belongs to another run than its message says")
        if opened.terms.coordinates != model.size + len(proposal.metrics):
            raise RemoteProtocolError(
                "the round has another number of coordinates than the model sent with it"
            )
        self._count_step()
        try:
            client.accept(opened, os.urandom)
        except RemoteProtocolError as error:
            if proposal.plan.failure > self._limits.failure(proposal):
                raise RemoteProtocolError(f"{error.message}; {_NO_HOLDER}", hint=error.hint) from None
            raise
        self._accepted = client, proposal, opened
        if not client.awaits_repair:
            client.close_round()  # Nothing will be asked about this round again.
        if proposal.tracker:
            self._stay_live(proposal)

    def _enrol(self) -> bytes:
        """Join a run, or hand over more keys in a run that was joined before under the same proposal."""
        proposal, identity = read_proposal(self._request.body), self._store.identity
        if proposal.run != self._request.run:
            raise RemoteProtocolError("the proposal belongs to another run than its message says")
        client = self._client(proposal)
        # What a run that carries noise over may still cost is part of what was left for it when it was joined.
        joined = proposal.schedule is not None and self._run in self._store.state.proposals
        failure = self._limits.failure(proposal) * proposal.plan.attempts * self._rounds(proposal)
        agreed_to = self._store.join(
            self._run,
            self._request.body,
            failure=failure,
            first_key=client.next_prekey,
            budget=self._limits.budget(proposal),
            ceiling=self._limits.ceiling_for(proposal.plan),
            mu=0.0 if joined else proposal.round_mu,
        )
        if read_proposal(agreed_to) != proposal:
            raise RemoteProtocolError("the server proposed another plan for a run that this client joined")
        self._count_step()
        prekeys = client.enrol(proposal.prekeys, os.urandom)
        if proposal.tracker:
            self._register(proposal, prekeys)
        pinned = self._limits.pinned
        LOG.info("niss: joined run %s; pinned: %s", self._run[:8], ", ".join(pinned) or "nothing")
        return Enrolment(identity.public, prekeys, pinned).signed(identity, proposal).to_bytes()

    def _rounds(self, proposal: Proposal) -> int:
        """How many rounds the chain of the run has.

        The tracker must say of the run what the server says of it; its holder signed how long the chain is.
        """
        most = proposal.plan.chain_rounds or 0
        if proposal.schedule is not None:
            most = proposal.schedule.rounds
        if not proposal.tracker:
            return most
        with self._tracker(proposal) as tracker:
            described = tracker.describe(proposal.run)
            if (described.holder, described.anchor) != (proposal.holder, proposal.anchor):
                raise RemoteProtocolError("the tracker has another holder or another chain for this run")
            assert described.rounds is not None
            if proposal.plan.chain_rounds is not None and described.rounds > most:
                raise RemoteProtocolError(f"the chain is for {described.rounds} rounds, the plan for {most}")
            return described.rounds

    def _register(self, proposal: Proposal, prekeys: tuple[Prekey, ...]) -> None:
        """Register these keys with the tracker of the run, and none that were made before this client joined it."""
        with self._tracker(proposal) as tracker:
            tracker.leave()
            tracker.register(prekeys)

    def _stay_live(self, proposal: Proposal) -> None:
        """Tell the tracker that this client is still there."""
        # The upload stands; whether this client is seated next time is the tracker's business.
        with suppress(RemoteProtocolError), self._tracker(proposal, retries=1) as tracker:
            tracker.heartbeat()

    @contextmanager
    def _tracker(self, proposal: Proposal, *, retries: int = 6) -> Iterator[TrackerClient]:
        """The tracker of the run. Whatever goes wrong with it is one constant `RemoteProtocolError`.

        The server chose the address, and must not learn from a reason what is there; this node's log says it.
        """
        identity, ca = self._store.identity, self._limits.tracker_ca
        try:
            with TrackerClient(proposal.tracker, identity, ca=ca, retries=retries) as tracker:
                yield tracker
        except NissError as error:
            LOG.warning("niss: %s", _shown(error))
            raise RemoteProtocolError(USELESS) from None

    def _count_step(self) -> None:
        """Count this request; saved by the protocol's client together with what it does."""
        self._store.state.steps[self._run] = self._step + 1

    def _client(self, proposal: Proposal) -> Client:
        """The protocol's client, which enforces the limits and charges the ledger; refuses a run beyond them."""
        self._metrics.check(proposal.metrics)
        plan, store, limits = proposal.plan, self._store, self._limits
        policy = limits.policy(proposal, first_prekey=store.state.first_keys.get(self._run, 0))
        budget, ceiling = limits.budget(proposal), limits.ceiling_for(plan)
        ledger = store.ledger(self._run, plan.relation, budget, ceiling)
        promise = Promise.of(plan)
        if ceiling is not None:
            promise = replace(promise, delta=min(plan.delta, ceiling.delta))

        def persist(memory: bytes) -> None:
            store.state.memory = memory
            store.save()

        kept = store.state.memory
        if proposal.schedule is None:
            assess = _assessor(plan.relation, limits.failure(proposal), promise)
            charge = charge_to(ledger, SELF, relation=plan.relation, promise=promise)
        else:
            account = CarriedAccount(
                proposal.schedule,
                relation=plan.relation,
                colluders=policy.colluders,
                promise=promise,
                budget=proposal.run_mu,
                failure=limits.failure(proposal),
                earlier=rounds_answered(kept, proposal.run),
            )
            assess, charge = account.assess, account.charging(ledger, SELF)
        return Client(store.identity, policy, assess=assess, charge=charge, persist=persist, kept=kept)


@lru_cache(maxsize=8)
def _assessor(relation: str, failure: float, promise: Promise) -> Callable[[Agreed, int], float]:
    """Shared by the clients of one process: the worst case of a round is the same for all of them."""
    return Assessor(relation=relation, failure=failure, promise=promise)


def _only_arrays(content: RecordDict) -> ArrayRecord:
    """The record of arrays in a message, which must be the model and nothing else."""
    records = list(records_of(content, ArrayRecord).values())
    if len(records) != 1:
        raise LocalProtocolError(f"expected one record of arrays, the model, but got {len(records)}")
    return records[0]


def _shown(error: NissError) -> str:
    """An error as this node's own log has it; parts of it may be words of the server."""
    return printable(error.message) + ("" if error.hint is None else f" ({printable(error.hint)})")


def _reason(error: NissError) -> str:
    """What a server is told: what it did wrong itself, but not what a node's files or books look like."""
    return error.message if isinstance(error, ProtocolError) else _NOT_ALLOWED


def _decline(message: Message, reason: str) -> Message:
    """An error in Flower's terms, unsigned: there is no identity yet to sign with, or no run to refuse."""
    LOG.warning("niss: declined: %s", printable(reason))
    return Message(Error(REFUSED, f"niss: {reason}"), reply_to=message)


niss_mod = NissMod()
"""The mod with nothing pinned but what the node's own configuration pins."""
