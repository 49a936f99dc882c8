"""The client's half of a run: checks what a server asks, remembers and charges it, and lets no bare update out.

A round is answered in two steps. `Node.answer` checks signature, run, round and budget, remembers the round and charges
the ledger (the protocol's `Client` does); only then is anything trained, and `Training.upload` clips, hides and signs
the update. Every other request is answered at once.

Who has nothing to upload, since its app failed or is late, uploads a **blank** (`Training.blank`): zeros with exactly
its noise, an update like any other. Shares cancel, the charge is the same, nothing is revealed or repaired, and in runs
that carry noise over nothing is left behind. No clock runs here: whoever trains keeps the deadline.

What must be remembered is kept before the round is charged, and it is charged before anything is sent. A crash can
cost a client a round, but never makes it answer one twice or uncharged, as long as its state is not older than its
last reply. Against an older one each reply carries a step: the server repeats the last that it has seen, and a client
that is behind declines. A `Store` (`niss.session.store`) is where it is kept.

**A run is answered from what was agreed and remembered in it.** One look-up by the run that a request names gives a
`_RunOfNode`: proposal, server, terms, keys and memory of that run. Whoever answers has nothing else at hand, so that
the server of another run, whatever it signs, reaches none of it.

**Runs are paid for when they are joined.** A server that sees a graph before it shows it could show only those on
which a client's bound on colluders fails. So the probability that it fails on any graph of a run's whole chain is
added up over all runs that were joined, shown or not, and stays within the part of delta that is set aside for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Account, Charge, CommittedAccount, DrawnAccount, Promise, outlook
from niss.errors import (
    LocalProtocolError,
    NissError,
    ProtocolError,
    RemoteProtocolError,
)
from niss.mechanism.blocks import Blocks
from niss.protocol.client import Client, move_prekey, rounds_answered
from niss.protocol.keys import Entropy
from niss.protocol.messages import RevealRequest, RoundOpen, Terms, decode, encode
from niss.randomness import SecretStream
from niss.records import Records, clipped_rows, draw_batch
from niss.redaction import SecretBytes, printable
from niss.session.limits import Budget, Limits
from niss.session.metrics import NO_METRICS, NoisyMetrics
from niss.session.ports import Directory, Reply, Request, Stage, sign_refusal
from niss.session.proposal import LARGEST, SMALLEST, Enrolment, Proposal, read_proposal
from niss.session.store import SELF, JoinedRun, Store

FloatArray = NDArray[np.float64]
Rows = Iterator[tuple[FloatArray, int]]
_NOT_ALLOWED = "this client's own limits or its ledger do not allow it"
_NO_HOLDER = "without a niss-holder of its own this node counts colluders as placed after the graph was drawn"


@dataclass(frozen=True)
class Training:
    """A round that is checked and charged: only now may an app train.

    terms         of the round
    participants  how many there are
    deadline      seconds from now, after which a blank is to be uploaded; None: there is none
    """

    terms: Terms
    participants: int
    deadline: float | None
    _client: Client
    _metrics: NoisyMetrics
    _step: int
    _entropy: Entropy

    def upload_records(
        self, records: Records, weights: FloatArray, paced: Callable[[Rows], Rows] = lambda rows: rows
    ) -> Reply:
        """The reply to a round that hides records, once: the negated sum of the gradients of a secret batch.

        records  of this client; the batch is drawn here, from its own entropy, anew for every attempt at a round
        weights  where the gradients are taken
        paced    given the clipped gradients as they are made, hands them on, or raises where that takes too long

        Every round is the same work (`niss.records`), so that no deadline depends on the batch; one too large for it is
        left out whole, which delta pays for. What goes wrong with a record is that record's zero. Anything else, a full
        memory or a missed deadline, gives an empty batch: a round without an upload would say that it happened. Changes
        no state.
        """
        terms, entropy, note = self.terms, self._entropy, ""
        assert terms.records is not None
        probability = terms.records.batch
        batch = draw_batch(len(records), probability, SecretStream.fresh(entropy))
        most = records.largest(probability)
        if batch.size > most:
            batch = batch[:0]
        try:
            made = paced(clipped_rows(records, weights, batch, terms.clip, most))
            rows = ((-some, real) for some, real in made)
            upload = self._client.answer(rows, entropy)
        except Exception as error:
            note = f"the gradients failed ({type(error).__name__}): an empty batch was sent instead"
            upload = self._client.answer((), entropy)
        return Reply(encode(upload), self._step, note=note)

    def upload(
        self,
        update: FloatArray | Blocks,
        metrics: Mapping[str, object] | None = None,
        clear: Mapping[str, object] | None = None,
    ) -> Reply:
        """The reply to the round, once. Changes no state.

        update   the bare update, finite; it does not leave this process, and blocks are released
        metrics  what the app reported; those that the run's proposal names are hidden with the update
        clear    what may travel unprotected beside it
        """
        if self._metrics.ranges:
            update = self._metrics.joined(Blocks.of(update), metrics or {}, self.terms, self.participants)
        return Reply(encode(self._client.answer(update, self._entropy)), self._step, clear or {})

    def blank(self) -> Reply:
        """The reply of who has no update: of the same form and size, at the same charge, with zeros in its place."""
        size = self.terms.coordinates - len(self._metrics.ranges)
        zeros = Blocks(size, lambda start, stop: np.zeros(stop - start))
        update = self._metrics.joined(zeros, {}, self.terms, self.participants, blank=True)
        nothing = update if self.terms.records is None else ()
        return Reply(encode(self._client.answer(nothing, self._entropy)), self._step)


class Node:
    """One client, over all its runs.

    store    its identity, memory and ledger
    limits   what its owner insists on
    tracker  how it speaks to the tracker of a run
    metrics  those that it agrees to send inside an upload
    dataset  the name of the data whose records it hides, where a run hides records
    warn     told, before it pays for the first round of a run, what its owner should know
    """

    def __init__(
        self,
        store: Store,
        limits: Limits,
        tracker: Directory,
        *,
        metrics: NoisyMetrics = NO_METRICS,
        entropy: Entropy = os.urandom,
        dataset: str = "",
        warn: Callable[[str], None] = lambda _words: None,
    ) -> None:
        self._dataset, self._warn = dataset, warn
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
        message = decode(request.body)
        if isinstance(message, RoundOpen) and coordinates is not None:
            self._limits.require_sums(joined.paid - request.summed)
            self._lend_key(joined, message)
            run = self._run(joined)
            if not joined.paid and (words := run.foreseen(message, coordinates)):
                self._warn(words)
            return run.accept(message, coordinates)
        run = self._run(joined)
        joined.step += 1
        if not isinstance(message, RevealRequest) or request.stage not in (Stage.REVEAL, Stage.LATE):
            raise RemoteProtocolError(f"unexpected {type(message).__name__} in stage {request.stage}")
        return run.reveal(message)

    def _step(self, request: Request) -> int:
        """How many requests of this run were answered, as far as this client's state knows."""
        joined = self.store.state.runs.get(request.run.hex())
        return 0 if joined is None else joined.step

    def _enrol(self, request: Request) -> Reply:
        """Join a run, or hand over more keys in a run that was joined before under the same proposal."""
        proposal = _read(request.body)
        if proposal.run != request.run:
            raise RemoteProtocolError("the proposal belongs to another run than its message says")
        self._check(proposal)
        joined = self._join(proposal, request.body)
        if _read(joined.proposal) != proposal:
            raise RemoteProtocolError("the server proposed another plan for a run that this client joined")
        joined.step += 1
        return self._run(joined).enrol(self._limits.pinned)

    def _join(self, proposal: Proposal, signed: bytes) -> JoinedRun:
        """Agree to a run that there is room for; the proposal that was agreed to is this one or one before."""
        run, limits = proposal.run.hex(), self._limits
        # What a run that carries noise over may still cost is part of what was left for it when it was joined.
        joined = proposal.schedule is not None and run in self.store.state.runs
        rounds = proposal.plan.possible_rounds
        if proposal.schedule is not None:
            rounds = proposal.schedule.rounds
        if proposal.tracker:
            # The tracker must say of the run what the server says of it; its holder signed how long the chain is.
            rounds = self._tracker.rounds(proposal)
        return self.store.join(
            run,
            signed,
            self._budget(proposal),
            failure=limits.failure(proposal) * proposal.plan.attempts * rounds,
            # What a run costs that carries noise over is there for all of it.
            rounds=proposal.plan.turns if proposal.schedule is None else proposal.schedule.rounds,
            charge=None if joined else Charge.of(proposal.round_mu, batch=proposal.plan.batch),
        )

    def _lend_key(self, joined: JoinedRun, opened: RoundOpen) -> None:
        """A tracker hands out a client's keys to any run there: one that was made for another becomes this run's.

        It must have been made since this run was joined: a graph drawn with an older one may have been looked at before
        the run was proposed. A key that another round has used stays where it is.
        """
        tracker, own = _read(joined.proposal).tracker, self.store.identity.public
        listed = [one.prekey.number for one in opened.participants if one.identity == own]
        if not tracker or len(listed) != 1 or listed[0] < joined.first_key:
            return
        for other in self.store.state.runs.values():
            if other is joined or _read(other.proposal).tracker != tracker:
                continue
            if other.memory is not None and joined.memory is not None:
                other.memory, joined.memory = move_prekey(listed[0], other.memory, joined.memory)

    def _check(self, proposal: Proposal) -> None:
        """Refuse a run beyond the limits, of another unit, or with metrics that were not agreed to."""
        if (proposal.plan.unit == "record") != bool(self._dataset):
            raise RemoteProtocolError(
                "the run hides whole clients, and this node trains on single records alone"
                if self._dataset
                else "the run hides single records, and this node has not said which: its app's training is not called",
                hint="a node gives its records to runs that hide them: NissMod(records=...)",
            )
        self._limits.check(proposal)
        if proposal.metrics.ranges:
            self._metrics.check(proposal.metrics)

    def _run(self, joined: JoinedRun) -> _RunOfNode:
        """A run that was joined, with all that it takes to answer in it."""
        proposal = _read(joined.proposal)
        self._check(proposal)
        budget = self._budget(proposal)
        return _RunOfNode(proposal, joined, self.store, self._limits, budget, self._tracker, self._entropy)

    def _budget(self, proposal: Proposal) -> Budget:
        """What the limits allow; of this node's data where records are hidden, and else of all that it has."""
        budget = self._limits.budget(proposal)
        return replace(budget, dataset=self._dataset) if budget.unit == "record" else budget


class _RunOfNode:
    """A run that a node joined, as it answers in it: with agreement, keys and memory of this run alone."""

    def __init__(
        self,
        proposal: Proposal,
        joined: JoinedRun,
        store: Store,
        limits: Limits,
        budget: Budget,
        tracker: Directory,
        entropy: Entropy,
    ) -> None:
        self._proposal, self._joined, self._save = proposal, joined, store.save
        self._identity, self._tracker, self._entropy = store.identity, tracker, entropy
        self._vouched = limits.failure(proposal)
        plan, run, state = proposal.plan, proposal.run.hex(), store.state
        policy, promise = limits.policy(proposal), Promise.of(plan)
        if budget.ceiling is not None:
            promise = replace(promise, delta=min(plan.delta, budget.ceiling.delta))
        account: Account
        if proposal.schedule is None:
            account = _account(plan.relation, self._vouched, promise)
        else:
            account = CommittedAccount(
                proposal.schedule,
                relation=plan.relation,
                colluders=policy.colluders(proposal.schedule.participants),
                promise=promise,
                budget=proposal.run_mu,
                failure=self._vouched,
                earlier=rounds_answered(joined.memory),
            )

        def persist(memory: bytes) -> None:
            joined.memory, joined.answered = SecretBytes(memory), client.last is not None
            state.next_key = client.next_prekey
            state.note(run, joined)
            store.save()

        client = self._client = Client(
            store.identity,
            policy,
            assess=account,
            charge=account.charging(store.ledger(run, plan.relation, budget), SELF),
            persist=persist,
            kept=joined.memory,
            next_prekey=state.next_key,
        )

    def enrol(self, pinned: tuple[str, ...]) -> Reply:
        """Hand over one-time keys; `pinned` are the limits that the owner has set."""
        proposal, identity = self._proposal, self._identity
        prekeys = self._client.enrol(proposal.prekeys, self._entropy)
        if proposal.tracker:
            self._tracker.register(proposal, prekeys)
        note = f"joined run {proposal.run.hex()[:8]}; pinned: {', '.join(pinned) or 'nothing'}"
        enrolment = Enrolment(identity.public, prekeys, pinned, self._joined.rounds)
        return Reply(enrolment.signed(identity, proposal).to_bytes(), self._joined.step, note=note)

    def foreseen(self, opened: RoundOpen, coordinates: int) -> str:
        """What will come of such rounds, in the server's own numbers, where it is not good; empty where it is."""
        plan, terms, size = self._proposal.plan, opened.terms, len(opened.participants)
        variance, numbers = size * terms.residual_variance, (terms.clip, terms.residual_variance)
        if coordinates < 1 or not all(SMALLEST <= number <= LARGEST for number in numbers):
            return ""  # It is refused, or nothing is promised.
        judged = outlook(
            parameters=coordinates,
            rounds=plan.planned_rounds,
            clip=terms.clip,
            variance=variance,
            unit=plan.unit,
        )
        return "" if judged.verdict == "good" else judged.words

    def accept(self, opened: RoundOpen, coordinates: int) -> Training:
        """Check the round, remember it and charge it; what is left to do needs the update and nothing on disk."""
        proposal, client = self._proposal, self._client
        if opened.terms.coordinates != coordinates + len(proposal.metrics.ranges):
            raise RemoteProtocolError(
                "the round has another number of coordinates than the model sent with it"
            )
        self._joined.step += 1
        self._joined.paid += 1  # Kept with the round, before it is charged.
        try:
            client.accept(opened, self._entropy)
        except NissError as error:
            self._joined.paid -= 1
            if isinstance(error, RemoteProtocolError) and proposal.plan.failure > self._vouched:
                raise RemoteProtocolError(f"{error.message}; {_NO_HOLDER}", hint=error.hint) from None
            raise
        if opened.terms.mode != "repair" or not client.awaits_repair:
            client.close_round()  # Nothing will be asked about this round again.
        if proposal.tracker:
            self._tracker.stay_live(proposal)
        size, step = len(opened.participants), self._joined.step
        return Training(opened.terms, size, proposal.deadline, client, proposal.metrics, step, self._entropy)

    def reveal(self, request: RevealRequest) -> Reply:
        """A member's part of a repair.

        Where its round carried noise on it may be asked once more, after the next one: its keys are erased with its
        next round. Else they are erased now.
        """
        answer, schedule = self._client.reveal(request), self._proposal.schedule
        last = max(rounds_answered(self._joined.memory), default=0)
        if schedule is not None and last + 1 < schedule.rounds:
            self._save()  # The step that the reply names.
        else:
            self._client.close_round()
        return Reply(encode(answer), self._joined.step)


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
