"""The client's half of a run: checks what a server asks, remembers and charges it, and lets no bare update out.

A round is answered in two steps. `Node.answer` checks signature, run, round and budget, remembers the round and charges
the ledger (the protocol's `Client` does); only then is anything trained, and `Training.upload` clips, hides and signs
the update. Every other request is answered at once.

What must be remembered is kept before the round is charged, and it is charged before anything is sent. A crash can
cost a client a round, but never makes it answer one twice or uncharged, as long as its state is not older than its
last reply. Against an older one each reply carries a step: the server repeats the last that it has seen, and a client
that is behind declines. A `Store` is where it is kept: in memory (`MemoryStore`, and Flower's Context), or in a folder
of the node.

**Runs are paid for when they are joined.** A server that sees a graph before it shows it could show only those on
which a client's bound on colluders fails. So the probability that it fails on any graph of a run's whole chain is
added up over all runs that were joined, shown or not, and stays within the part of delta that is set aside for it.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Account, Charge, ChargeableLedger, CommittedAccount, DrawnAccount, Ledger, Promise
from niss.errors import (
    ConfigError,
    LocalProtocolError,
    NissError,
    PrivacyError,
    ProtocolError,
    RemoteProtocolError,
)
from niss.protocol import (
    Client,
    Entropy,
    Identity,
    RevealRequest,
    RoundOpen,
    SecretBytes,
    Terms,
    decode,
    encode,
    rounds_answered,
)
from niss.redaction import printable
from niss.session.limits import Budget, Limits, Spent
from niss.session.metrics import NO_METRICS, NoisyMetrics
from niss.session.ports import Directory, Reply, Request, Stage, sign_refusal
from niss.session.proposal import Enrolment, Proposal, read_proposal
from niss.settings import check_json, to_values

FloatArray = NDArray[np.float64]
SELF = "self"
"""The name of the client in its own ledger."""
MOST_FAILING_RUNS = 1_000
"""Most runs that one identity joins whose bounds on colluders may fail."""
_MOST_RUNS = 64
_VERSION = 1
_NOT_ALLOWED = "this client's own limits or its ledger do not allow it"
_NO_HOLDER = "without a niss-holder of its own this node counts colluders as placed after the graph was drawn"


@dataclass
class JoinedRun:
    """What a client remembers of a run.

    proposal   that it agreed to, as the server signed it
    first_key  number of the first prekey that was made for it: none is taken from before
    step       how many of its requests were answered
    """

    proposal: bytes
    first_key: int
    step: int = 0


@dataclass
class ClientState:
    """What a client remembers of its runs.

    memory    of the protocol's machine, with its one-time keys: secret
    runs      by id in hex, in the order in which they were joined
    saves     how often this was written
    ledger    head of the ledger after the last charge; None before the first
    failures  with what probability any bound on colluders of a run that was joined may fail, at most
    failing   how many runs that is for
    """

    __pydantic_config__: ClassVar[Any] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}

    memory: bytes | None = None
    runs: dict[str, JoinedRun] = field(default_factory=dict)
    saves: int = 0
    ledger: str | None = None
    failures: float = 0.0
    failing: int = 0

    def __post_init__(self) -> None:
        self.memory = None if self.memory is None else SecretBytes(self.memory)

    def to_bytes(self) -> SecretBytes:
        """The state as it is kept: JSON, with bytes in base64."""
        values = dict.fromkeys(_KEPT) | to_values(self) | {"version": _VERSION}
        return SecretBytes(json.dumps(values).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> ClientState:
        """The state in `data`; raises `LocalProtocolError`, without showing any of it, if it is damaged."""
        data = SecretBytes(data)  # Not left for a traceback to show.
        state = cls._parse(data)
        if state is None:
            # Raised here, where no traceback finds the keys among the locals.
            raise LocalProtocolError(
                "this client's saved state is damaged, or another niss wrote it",
                hint="go on with the niss that wrote it; without its memory a client could answer a round twice",
            )
        return state

    @classmethod
    def _parse(cls, data: SecretBytes) -> ClientState | None:
        try:
            values = json.loads(data)
            whole = values["version"] == _VERSION and values.keys() >= _KEPT
            return check_json(cls, data) if whole else None
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None


_KEPT = {one.name for one in fields(ClientState)}


class Store(ABC):
    """Where a client keeps its identity, its state and its ledger."""

    identity: Identity
    state: ClientState

    @abstractmethod
    def save(self) -> None:
        """Keep `state`; durable when this returns, as far as the place allows."""

    @abstractmethod
    def spent(self, budget: Budget) -> Spent:
        """All that was charged; `budget` is what may be spent in all, where no earlier run has fixed it."""

    @abstractmethod
    def ledger(self, run: str, relation: str, budget: Budget) -> ChargeableLedger:
        """The ledger that the rounds of a run are charged to.

        run       id of the run, in hex
        relation  what the run hides, `zero-out` or `replace-one`
        budget    what may be spent in all, where no earlier run has fixed it; its ceiling holds in any case
        """

    def join(
        self, run: str, proposal: bytes, budget: Budget, *, failure: float, first_key: int, mu: float = 0.0
    ) -> bytes:
        """The proposal that was agreed to for a run: this one, unless it was joined before; kept with the next `save`.

        run        id of the run, in hex
        proposal   as the server signed it
        budget     what may be spent in all, where no earlier run has fixed it
        failure    with what probability a bound on colluders of any graph of the run may fail
        first_key  number of the next prekey to be made
        mu         what one round of it costs, at most

        Of many runs those joined first are forgotten, so that nobody fills the disk with them; a run that was
        forgotten counts as never joined, and its rounds stay answered in the protocol's memory. Raises `PrivacyError`
        where the budget does not cover another round, so that nobody waits for this client, and where the bounds on
        colluders of all runs together could fail too often.
        """
        spent, state = self.spent(budget), self.state
        spent.require_round(budget, mu)
        if run in state.runs:
            return state.runs[run].proposal
        if failure > 0.0:
            if state.failing >= MOST_FAILING_RUNS:
                raise PrivacyError(
                    f"this identity has joined {MOST_FAILING_RUNS} runs whose bounds on colluders may fail",
                    hint="a new niss-state folder and identity would be a new budget on the same data",
                )
            spent.require_run(budget, failure)
            state.failures, state.failing = state.failures + failure, state.failing + 1
        state.runs[run] = JoinedRun(proposal, first_key)
        for oldest in list(state.runs)[:-_MOST_RUNS]:
            del state.runs[oldest]
        return proposal


class MemoryStore(Store):
    """Keeps everything in this process.

    charged   ledger of this one client
    budget    what the first charge was made against; None before it
    failures  what the grids of all rounds cost in delta
    """

    def __init__(self, entropy: Entropy = os.urandom) -> None:
        self.identity, self.state = Identity.generate(entropy), ClientState()
        self.charged, self.failures = Ledger.empty(1), 0.0
        self.budget: Budget | None = None

    def save(self) -> None:
        self.state.saves += 1

    def spent(self, budget: Budget) -> Spent:
        failures = self.failures + self.state.failures
        return Spent(float(self.charged.joint_squared[0]), failures, self.budget or budget)

    def ledger(self, run: str, relation: str, budget: Budget) -> ChargeableLedger:
        del run, relation
        return _LedgerInMemory(self, budget)


@dataclass(frozen=True)
class _LedgerInMemory:
    """Charges a store, and saves it at once: what follows the charge may fail."""

    store: MemoryStore
    budget: Budget

    def charge(
        self, round: int, attempt: int, charges: Mapping[str, Charge], basis: Mapping[str, Any]
    ) -> None:
        del round, attempt, basis  # The protocol's memory knows which rounds were answered.
        store = self.store
        charge = store.spent(self.budget).require_room(self.budget, charges[SELF])
        store.budget = store.budget or self.budget
        store.charged.budget = np.array([store.budget.mu])
        store.charged.charge(np.zeros(1, dtype=np.int64), charge)
        store.failures += charge.grid_delta or 0.0
        store.save()


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
        if self._metrics.ranges:
            update = self._metrics.joined(update, metrics or {}, self.terms, self.participants)
        return Reply(encode(self._client.answer(update, self._entropy)), self._step, clear or {})


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
        joined = self.store.state.runs.get(request.run.hex())
        if joined is None:
            raise RemoteProtocolError("this client has not joined the run that the message belongs to")
        proposal = _read(joined.proposal)
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
        joined = self.store.state.runs.get(request.run.hex())
        return 0 if joined is None else joined.step

    def _count(self, request: Request) -> None:
        """Count this request; saved by the protocol's client together with what it does."""
        self.store.state.runs[request.run.hex()].step += 1

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
        if opened.terms.coordinates != coordinates + len(proposal.metrics.ranges):
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
        joined = proposal.schedule is not None and run in self.store.state.runs
        rounds = proposal.plan.chain_rounds or 0
        if proposal.schedule is not None:
            rounds = proposal.schedule.rounds
        if proposal.tracker:
            # The tracker must say of the run what the server says of it; its holder signed how long the chain is.
            rounds = self._tracker.rounds(proposal)
        return self.store.join(
            run,
            signed,
            limits.budget(proposal),
            failure=limits.failure(proposal) * proposal.plan.attempts * rounds,
            first_key=client.next_prekey,
            mu=0.0 if joined else proposal.round_mu,
        )

    def _client(self, proposal: Proposal) -> Client:
        """The protocol's client, which enforces the limits and charges the ledger; refuses a run beyond them."""
        if proposal.metrics.ranges:
            self._metrics.check(proposal.metrics)
        plan, store, limits, run = proposal.plan, self.store, self._limits, proposal.run.hex()
        joined = store.state.runs.get(run)
        policy = limits.policy(proposal, first_prekey=0 if joined is None else joined.first_key)
        budget = limits.budget(proposal)
        ledger = store.ledger(run, plan.relation, budget)
        promise = Promise.of(plan)
        if budget.ceiling is not None:
            promise = replace(promise, delta=min(plan.delta, budget.ceiling.delta))

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
