"""The client's half of a run: checks what a server asks, remembers and charges it, and lets no bare update out.

A round is answered in two steps. `Node.answer` checks signature, run, round and budget, remembers the round and charges
the ledger (the protocol's `Client` does); only then is anything trained, and `Training.upload` clips, hides and signs
the update. Every other request is answered at once.

What must be remembered is kept before the round is charged, and it is charged before anything is sent. A crash can
cost a client a round, but never makes it answer one twice or uncharged, as long as its state is not older than its
last reply. Against an older one each reply carries a step: the server repeats the last that it has seen, and a client
that is behind declines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Account, CommittedAccount, DrawnAccount, Promise
from niss.errors import LocalProtocolError, NissError, ProtocolError, RemoteProtocolError
from niss.protocol import (
    Client,
    Entropy,
    RevealRequest,
    RoundOpen,
    Terms,
    decode,
    encode,
    rounds_answered,
)
from niss.redaction import printable
from niss.session.coordinator import Directory
from niss.session.limits import Limits
from niss.session.metrics import NO_METRICS, NoisyMetrics
from niss.session.proposal import Enrolment, Proposal, read_proposal
from niss.session.requests import Reply, Request, Stage, sign_refusal
from niss.session.store import SELF, Store

FloatArray = NDArray[np.float64]
_NOT_ALLOWED = "this client's own limits or its ledger do not allow it"
_NO_HOLDER = "without a niss-holder of its own this node counts colluders as placed after the graph was drawn"


@dataclass(frozen=True)
class Training:
    """A round that is checked and charged: only now may an app train.

    terms         of the round
    participants  how many there are
    """

    terms: Terms
    participants: int
    _client: Client
    _metrics: NoisyMetrics
    _step: int
    _entropy: Entropy

    def upload(
        self,
        update: FloatArray,
        metrics: Mapping[str, object] | None = None,
        clear: Mapping[str, object] | None = None,
    ) -> Reply:
        """The reply to the round, once. Changes no state.

        update   the bare update, finite; it does not leave this process
        metrics  what the app reported; those that the run's proposal names are hidden with the update
        clear    what may travel unprotected beside it
        """
        joined = self._metrics.joined(update, metrics or {}, self.terms, self.participants)
        return Reply(encode(self._client.answer(joined, self._entropy)), self._step, clear or {})


class Node:
    """One client, over all its runs.

    store    its identity, memory and ledger
    limits   what its owner insists on
    tracker  how it speaks to the tracker of a run
    metrics  those that it agrees to send inside an upload
    """

    def __init__(
        self,
        store: Store,
        limits: Limits,
        tracker: Directory,
        *,
        metrics: NoisyMetrics = NO_METRICS,
        entropy: Entropy = os.urandom,
    ) -> None:
        self.store, self._limits, self._tracker = store, limits, tracker
        self._metrics, self._entropy = metrics, entropy

    def answer(self, request: Request, coordinates: int | None = None) -> Reply | Training:
        """The reply to a request, or a signed refusal that says why; a round that is charged is to be trained.

        coordinates  of the model that a round was sent with; None in the other stages
        """
        try:
            return self._answer(request, coordinates)
        except NissError as error:
            body = encode(sign_refusal(self.store.identity, request.digest, _reason(error)))
            self.store.save()  # The step that the reply names.
            return Reply(body, self._step(request), note=f"declined: {shown(error)}")

    def _answer(self, request: Request, coordinates: int | None) -> Reply | Training:
        """The answer; raises `NissError` where the request must be declined."""
        # Fail closed on an old state: its charges and its memory of what was answered are not all there.
        if (step := self._step(request)) < request.after:
            raise LocalProtocolError(
                f"this client's state is at step {step}, but the server has seen step {request.after}",
                hint="set `niss-state` to give the node a folder of its own; this run goes on without it",
            )
        if request.stage is Stage.ENROL:
            return self._enrol(request)
        agreed_to = self.store.state.proposals.get(request.run.hex())
        if agreed_to is None:
            raise RemoteProtocolError("this client has not joined the run that the message belongs to")
        proposal = _read(agreed_to)
        client, message = self._client(proposal), decode(request.body)
        if isinstance(message, RoundOpen) and coordinates is not None:
            return self._accept(request, client, proposal, message, coordinates)
        self._count(request)
        if not isinstance(message, RevealRequest) or request.stage not in (Stage.REVEAL, Stage.LATE):
            raise RemoteProtocolError(f"unexpected {type(message).__name__} in stage {request.stage}")
        answer = client.reveal(message)
        if self._asked_again(proposal):
            self.store.save()  # The step that the reply names.
        else:
            client.close_round()
        return Reply(encode(answer), self._step(request))

    def _step(self, request: Request) -> int:
        """How many requests of this run were answered, as far as this client's state knows."""
        return self.store.state.steps.get(request.run.hex(), 0)

    def _count(self, request: Request) -> None:
        """Count this request; saved by the protocol's client together with what it does."""
        self.store.state.steps[request.run.hex()] = self._step(request) + 1

    def _asked_again(self, proposal: Proposal) -> bool:
        """Whether a member may be asked once more about its round, after the next one: where it carried noise on.

        Then its keys are erased with its next round.
        """
        if proposal.schedule is None:
            return False
        last = max(rounds_answered(self.store.state.memory, proposal.run), default=0)
        return last + 1 < proposal.schedule.rounds

    def _accept(
        self, request: Request, client: Client, proposal: Proposal, opened: RoundOpen, coordinates: int
    ) -> Training:
        """Check the round, remember it and charge it; what is left to do needs the update and nothing on disk."""
        if opened.terms.run != proposal.run:
            raise RemoteProtocolError("the round belongs to another run than its message says")
        if opened.terms.coordinates != coordinates + len(proposal.metrics):
            raise RemoteProtocolError(
                "the round has another number of coordinates than the model sent with it"
            )
        self._count(request)
        try:
            client.accept(opened, self._entropy)
        except RemoteProtocolError as error:
            if proposal.plan.failure > self._limits.failure(proposal):
                raise RemoteProtocolError(f"{error.message}; {_NO_HOLDER}", hint=error.hint) from None
            raise
        if opened.terms.mode != "repair" or not client.awaits_repair:
            client.close_round()  # Nothing will be asked about this round again.
        if proposal.tracker:
            self._tracker.stay_live(proposal)
        step, size = self._step(request), len(opened.participants)
        return Training(opened.terms, size, client, proposal.metrics, step, self._entropy)

    def _enrol(self, request: Request) -> Reply:
        """Join a run, or hand over more keys in a run that was joined before under the same proposal."""
        proposal, identity, pinned = _read(request.body), self.store.identity, self._limits.pinned
        if proposal.run != request.run:
            raise RemoteProtocolError("the proposal belongs to another run than its message says")
        client = self._client(proposal)
        if _read(self._join(client, proposal, request.body)) != proposal:
            raise RemoteProtocolError("the server proposed another plan for a run that this client joined")
        self._count(request)
        prekeys = client.enrol(proposal.prekeys, self._entropy)
        if proposal.tracker:
            self._tracker.register(proposal, prekeys)
        note = f"joined run {request.run.hex()[:8]}; pinned: {', '.join(pinned) or 'nothing'}"
        body = Enrolment(identity.public, prekeys, pinned).signed(identity, proposal).to_bytes()
        return Reply(body, self._step(request), note=note)

    def _join(self, client: Client, proposal: Proposal, signed: bytes) -> bytes:
        """Agree to a run that there is room for; the proposal that was agreed to, which is this one or one before."""
        run, limits = proposal.run.hex(), self._limits
        # What a run that carries noise over may still cost is part of what was left for it when it was joined.
        joined = proposal.schedule is not None and run in self.store.state.proposals
        rounds = proposal.plan.chain_rounds or 0
        if proposal.schedule is not None:
            rounds = proposal.schedule.rounds
        if proposal.tracker:
            # The tracker must say of the run what the server says of it; its holder signed how long the chain is.
            rounds = self._tracker.rounds(proposal)
        return self.store.join(
            run,
            signed,
            failure=limits.failure(proposal) * proposal.plan.attempts * rounds,
            first_key=client.next_prekey,
            budget=limits.budget(proposal),
            ceiling=limits.ceiling_for(proposal.plan),
            mu=0.0 if joined else proposal.round_mu,
        )

    def _client(self, proposal: Proposal) -> Client:
        """The protocol's client, which enforces the limits and charges the ledger; refuses a run beyond them."""
        self._metrics.check(proposal.metrics)
        plan, store, limits, run = proposal.plan, self.store, self._limits, proposal.run.hex()
        policy = limits.policy(proposal, first_prekey=store.state.first_keys.get(run, 0))
        budget, ceiling = limits.budget(proposal), limits.ceiling_for(plan)
        ledger = store.ledger(run, plan.relation, budget, ceiling)
        promise = Promise.of(plan)
        if ceiling is not None:
            promise = replace(promise, delta=min(plan.delta, ceiling.delta))

        def persist(memory: bytes) -> None:
            store.state.memory = memory
            store.save()

        kept = store.state.memory
        account: Account
        if proposal.schedule is None:
            account = _account(plan.relation, limits.failure(proposal), promise)
        else:
            account = CommittedAccount(
                proposal.schedule,
                relation=plan.relation,
                colluders=policy.colluders,
                promise=promise,
                budget=proposal.run_mu,
                failure=limits.failure(proposal),
                earlier=rounds_answered(kept, proposal.run),
            )
        charge = account.charging(ledger, SELF)
        return Client(store.identity, policy, assess=account, charge=charge, persist=persist, kept=kept)


@lru_cache(maxsize=8)
def _read(proposal: bytes) -> Proposal:
    """A node reads the proposal of its run with every request, and many nodes of one process read the same."""
    return read_proposal(proposal)


@lru_cache(maxsize=8)
def _account(relation: str, failure: float, promise: Promise) -> DrawnAccount:
    """Shared by the clients of one process: the worst case of a round is the same for all of them."""
    return DrawnAccount(relation=relation, failure=failure, promise=promise)


def shown(error: NissError) -> str:
    """An error as this node's own log has it; parts of it may be words of the server."""
    return printable(error.message) + ("" if error.hint is None else f" ({printable(error.hint)})")


def _reason(error: NissError) -> str:
    """What a server is told: what it did wrong itself, but not what a node's files or books look like."""
    return error.message if isinstance(error, ProtocolError) else _NOT_ALLOWED
