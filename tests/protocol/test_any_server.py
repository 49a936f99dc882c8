"""Against a server that sends any well-formed messages in any order, the charge covers what truly left the client.

The server holds the beacon, has one of the clients on its side, opens rounds of several runs on terms of its making
with lists of its choice (also the same list, with the same prekeys, again and again), tells everyone different survivor
sets and asks each for any reveal, over several rounds and restarts. Whatever comes out of the partials that were given,
in any round, run or version, lies in one pool and is tried on every edge of every list; what is left then is computed
in `support.what_left`, with nothing of the package's accountant.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from niss.accounting import DrawnAccount, LedgerFile, LedgerHeader, Plan, make_terms
from niss.errors import NissError
from niss.protocol.agreement import Agreed, agree
from niss.protocol.keys import PrekeyStore, link_of
from niss.protocol.messages import Beacon, Participant, RevealRequest, RoundOpen, Terms, encode
from niss.redaction import SecretBytes
from support.protocol_round import Federation, resigned
from support.what_left import Held, Pool, effective_variance, spoilt

SIZE, COORDINATES = 8, 3
COLLUDER = SIZE - 1
BUDGET = 2.5
SPOILT = [field.name for field in fields(Terms) if field.name not in ("run", "round", "attempt", "mode")]
DEGREES = (1.0, 1.0, 1.5, 2.0, 3.0, 7.0)

seats = st.integers(0, SIZE - 1)
some_seats = st.sets(seats, max_size=3)
picks = st.integers(0, 1_000)


@lru_cache(maxsize=256)
def planned(size: int, mode: str, degree: float, colluders: int) -> Terms:
    """The terms of an honest server; with `repair`, for one dropout of as many as can be repaired."""
    size = max(size, 4) if mode == "repair" else size
    plan = Plan(
        clip=1.0,
        epsilon=3.0,
        kappa=4.0,
        neighbours=min(math.ceil(degree), size - 1),
        collusion=colluders / size,
        # So rarely that in a million rounds none loses two.
        dropout=1e-4,
        mode=mode,
    )
    terms = make_terms(plan, participants=size, coordinates=COORDINATES, run=b"run", number=1)
    return replace(terms, neighbours=min(degree, size - 1.0))


class Clients(Federation):
    """Eight clients with policies, assessors and ledger files of their own, and a holder that obeys the server."""

    def __init__(self, label: str, folder: Path, colluders: int) -> None:
        super().__init__(SIZE, label, colluders=colluders, participants=4, clip=1.0, mu=1.0)
        self.colluding = frozenset([COLLUDER] if colluders else [])
        # A key of the server's own, listed as that of a client that knows nothing of it.
        made_up = PrekeyStore()
        (self.made_up,) = made_up.batch(1, self.server._identity, self.entropy)
        self.known = made_up.privates
        self.paths = [folder / f"{seat}.jsonl" for seat in range(SIZE)]
        self.ledgers: list[LedgerFile] = []
        for seat, path in zip(self.seats, self.paths, strict=True):
            ledger = LedgerFile.create(path, LedgerHeader(run="any", budgets={"self": BUDGET}, delta=1e-5))
            self.ledgers.append(ledger)
            seat.assess = DrawnAccount()
            seat.book = DrawnAccount(relation="zero-out").charging(ledger, "self")
            seat.restart()

    def restart_with_ledger(self, number: int) -> None:
        self.ledgers[number].close()
        self.ledgers[number] = LedgerFile.open(self.paths[number])
        self.seats[number].book = DrawnAccount(relation="zero-out").charging(self.ledgers[number], "self")
        self.seats[number].restart()

    def opening(
        self, listed: list[int], terms: Terms, keys: dict[int, int], made_up: Collection[int] = ()
    ) -> RoundOpen | None:
        """A round of these clients, signed by all who must; None where the wire or the chain cannot carry it."""
        participants = tuple(
            Participant(
                self.clients[number].public,
                self.made_up if number in made_up else self.prekeys[number][keys.get(number, -1)],
            )
            for number in listed
        )
        try:
            encode(RoundOpen(terms, participants, Beacon(1, bytes(32), bytes(64)), bytes(64)))
            if link_of(terms.round, terms.attempt) >= len(self.chain._links):
                return None
        except NissError:
            return None
        opened = RoundOpen(terms, participants, self.beacon(participants, terms))
        signed: RoundOpen = resigned(self.server, opened, "open")
        return signed


class Server:
    """Sends what it likes, and keeps what it is given, by the context of each round."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.who = {one.public: number for number, one in enumerate(clients.clients)}
        self.held: dict[bytes, Held] = {}
        self.pool = Pool()

    def number_at(self, held: Held, seat: int) -> int:
        return self.who[held.opened.participants[seat].identity]

    def open(self, opened: RoundOpen, told: Iterable[int], *, dying: Iterable[int] = ()) -> Held | None:
        """Tell these clients of a round; those in `dying` end after they have accepted it, and start again.

        So does a client without an update of that many coordinates.
        """
        try:
            digest = agree(opened).digest
        except NissError:
            digest = b""
        else:
            colluding = {self.clients.clients[number].public for number in self.clients.colluding}
            known = [
                seat
                for seat, one in enumerate(opened.participants)
                if one.identity in colluding or one.prekey == self.clients.made_up
            ]
            self.held.setdefault(
                digest,
                Held(opened, known, pool=self.pool, privates=lambda seat: self.privates(opened, seat)),
            )
        for number in told:
            client = self.clients.clients[number]
            # It joined every run, and keeps its keys for all of them: a server could do no more.
            client.policy = replace(client.policy, run=opened.terms.run)
            try:
                client.accept(opened, self.clients.entropy)
            except NissError:
                continue
            assert digest, "a round that nobody can agree on was accepted"
            if number in dying or opened.terms.coordinates != COORDINATES:
                self.clients.restart_with_ledger(number)
                continue
            upload = client.answer(np.ones(COORDINATES), self.clients.entropy)
            self.clients.prekeys[number] += upload.fresh_prekeys
            self.held[digest].take_upload(upload)
        return self.held.get(digest)

    def privates(self, opened: RoundOpen, seat: int) -> Mapping[int, SecretBytes]:
        listed = opened.participants[seat]
        if listed.prekey == self.clients.made_up:
            return self.clients.known
        return self.clients.seats[self.who[listed.identity]].privates

    def ask(self, held: Held, seat: int, survivors: tuple[int, ...], stray: Held | None = None) -> None:
        """Ask a member for all that follows from this set; `stray`: with pieces of another round."""
        if seat not in held.agreed.committee:
            return
        source = held if stray is None or seat not in stray.agreed.committee else stray
        here = tuple(one for one in survivors if one in source.uploads)
        request = RevealRequest(held.agreed.digest, here, source.pieces_for(seat, here))
        try:
            request = resigned(self.clients.server, request, "request")
            held.take_reveal(self.clients.clients[self.number_at(held, seat)].reveal(request), here)
        except NissError:
            return

    def tell(self, held: Held, stories: dict[int, tuple[int, ...]]) -> None:
        """By seat, the story it is told."""
        for seat, survivors in stories.items():
            self.ask(held, seat, survivors)

    def repair(self, held: Held) -> None:
        """As an honest server would: all members are told who uploaded."""
        here = tuple(sorted(held.uploads))
        self.tell(held, dict.fromkeys(here, here))

    def check(self) -> None:
        """The ledger of every honest client covers what is known of it, over all rounds."""
        squares = dict.fromkeys(set(range(SIZE)) - self.clients.colluding, 0.0)
        for held in self.held.values():
            for seat, mu in held.true_mu().items():
                squares[self.number_at(held, seat)] += mu**2
        for number, square in squares.items():
            assert math.sqrt(square) <= self.clients.ledgers[number].spent("self") * (1.0 + 1e-9)


def all_but(held: Held, *lost: int) -> tuple[int, ...]:
    return tuple(seat for seat in range(len(held.opened.participants)) if seat not in lost)


def pair_stories(held: Held, one: int, other: int) -> dict[int, tuple[int, ...]]:
    """Two neighbours hear that their other neighbours dropped out, in two stories.

    Each is told to the neighbours of those that it calls dropped, and to those that the other story calls dropped.
    """
    near = held.agreed.neighbours
    stories: dict[int, tuple[int, ...]] = {}
    sides = [set(near(one)) - {other}, set(near(other)) - {one}]
    for lost, elsewhere, told in ((*sides, one), (*sides[::-1], other)):
        for seat in (told, *elsewhere, *(seat for gone in lost for seat in near(gone))):
            stories.setdefault(seat, all_but(held, *lost))
    return stories


class AnyServer(RuleBasedStateMachine):
    """Every rule is something that the server may do next."""

    @initialize(label=picks, colluders=st.integers(0, 1))
    def start(self, label: int, colluders: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clients = Clients(f"any server {label}", Path(self.folder.name), colluders)
        self.server = Server(self.clients)
        self.colluders, self.when, self.rounds = colluders, (1, 0), 0

    def a_round(self, pick: int) -> Held | None:
        """Mostly the last one."""
        rounds = list(self.server.held.values())
        return rounds[-1 - (pick // 3) % len(rounds) * (pick % 3 == 0)] if rounds else None

    @precondition(lambda self: self.rounds < 5)
    @rule(
        mode=st.sampled_from(["tolerate", "repair", "repair", "repair"]),
        degree=st.sampled_from(DEGREES),
        tilt=st.sampled_from([1.0, 0.5, 0.2, 4.0]),
        spoil=st.one_of(st.just([]), st.lists(st.tuples(st.sampled_from(SPOILT), picks), max_size=2)),
        missing=st.sets(seats, max_size=2),
        order=st.permutations(range(SIZE)),
        when=st.sampled_from(["next", "next", "next", "attempt", "again", "back", "far"]),
        deaf=st.sets(seats, max_size=1),
        dying=st.sets(seats, max_size=1),
        keys=st.dictionaries(seats, st.integers(-3, 1), max_size=1),
        made_up=st.one_of(st.just(set()), st.sets(seats, max_size=2)),
        split=st.booleans(),
        run=st.sampled_from([b"run", b"run", b"other"]),
    )
    def open(
        self,
        mode: str,
        degree: float,
        tilt: float,
        spoil: list[tuple[str, int]],
        missing: set[int],
        order: list[int],
        when: str,
        deaf: set[int],
        dying: set[int],
        keys: dict[int, int],
        made_up: set[int],
        split: bool,
        run: bytes,
    ) -> None:
        """Any list, any terms, any run, any time; `tilt` moves noise between the residual and the self-mask.

        With `split` half of the clients are told other terms for the same round.
        """
        self.rounds += 1
        number, attempt = self.when
        self.when = {"attempt": (number, attempt + 1), "again": self.when, "far": (number + 9, 0)}.get(
            when, (number + 1, 0)
        )
        asked = (number - 1, attempt) if when == "back" else self.when
        listed = [one for one in order if one not in missing]
        base = planned(len(listed), mode, degree, self.colluders)
        terms = replace(
            base, run=run, round=asked[0], attempt=asked[1], residual_variance=tilt * base.residual_variance
        )
        if mode == "repair":
            terms = replace(terms, self_variance=base.self_variance + 2.0 * base.residual_variance / tilt)
        for name, pick in spoil:
            values = spoilt(base, name)
            terms = replace(terms, **{name: values[pick % len(values)]})
        told = [one for one in listed if one not in deaf]
        halves = [(terms, told)]
        if split:
            other = replace(terms, residual_variance=terms.residual_variance * 1.5)
            halves = [(terms, told[::2]), (other, told[1::2])]
        for half, some in halves:
            opened = self.clients.opening(listed, half, keys, made_up)
            if opened is not None:
                self.server.open(opened, some, dying=dying)

    @precondition(lambda self: self.rounds < 5)
    @rule(degree=st.sampled_from([2.0, 7.0, 7.0]), deaf=seats)
    def open_to_all_but_one(self, degree: float, deaf: int) -> None:
        """A round of an honest server but for that: so that something comes out of its repair."""
        self.rounds += 1
        self.when = (self.when[0] + 1, 0)
        terms = replace(planned(SIZE, "repair", degree, self.colluders), round=self.when[0])
        opened = self.clients.opening(list(range(SIZE)), terms, {})
        if opened is not None:
            self.server.open(opened, [one for one in range(SIZE) if one != deaf])

    @rule(pick=picks, told=some_seats)
    def open_again(self, pick: int, told: set[int]) -> None:
        held = self.a_round(pick)
        if held is not None:
            self.server.open(held.opened, told)

    @rule(pick=picks)
    def repair(self, pick: int) -> None:
        held = self.a_round(pick)
        if held is not None:
            self.server.repair(held)

    @rule(
        pick=picks,
        mode=st.sampled_from(["tolerate", "repair"]),
        when=st.sampled_from(["next", "attempt", "version", "run"]),
    )
    def list_again(self, pick: int, mode: str, when: str) -> None:
        """The same clients with the same prekeys, told to whoever has not answered the list before.

        First the committee is asked for all that an honest server would ask for.
        """
        missed = [one for one in self.server.held.values() if 0 < len(one.uploads) < len(all_but(one))]
        if not missed:
            return
        held = missed[pick % len(missed)]
        self.server.repair(held)
        listed = [self.server.number_at(held, seat) for seat in all_but(held)]
        told = [self.server.number_at(held, seat) for seat in all_but(held) if seat not in held.uploads]
        (number, attempt), old = self.when, held.opened.terms
        self.when = {"next": (number + 1, 0), "attempt": (number, attempt + 1)}.get(when, self.when)
        asked = self.when if when in ("next", "attempt") else (old.round, old.attempt)
        run = b"another" if when == "run" else old.run
        base = planned(len(listed), mode, DEGREES[pick % len(DEGREES)], self.colluders)
        terms = replace(base, run=run, round=asked[0], attempt=asked[1])
        keys = {
            self.who(one.identity): self.clients.prekeys[self.who(one.identity)].index(one.prekey)
            for one in held.opened.participants
        }
        opened = self.clients.opening(listed, terms, keys)
        if opened is not None:
            self.server.open(opened, told)

    def who(self, identity: bytes) -> int:
        return self.server.who[identity]

    @rule(pick=picks, seat=seats, lost=some_seats, stray=st.booleans())
    def ask(self, pick: int, seat: int, lost: set[int], stray: bool) -> None:
        held = self.a_round(pick)
        if held is not None:
            other = self.a_round(3 * pick) if stray else None
            self.server.ask(held, seat % len(held.opened.participants), all_but(held, *lost), other)

    @rule(pick=picks, first=some_seats, second=some_seats, side=st.sets(seats))
    def two_stories(self, pick: int, first: set[int], second: set[int], side: set[int]) -> None:
        held = self.a_round(pick)
        if held is not None:
            stories = {seat: first if seat in side else second for seat in all_but(held)}
            self.server.tell(held, {seat: all_but(held, *lost) for seat, lost in stories.items()})

    @rule(pick=picks, order=st.permutations(range(SIZE)))
    def stories_by_region(self, pick: int, order: list[int]) -> None:
        """Around each client another one is said to have dropped out."""
        held = self.a_round(pick)
        if held is not None:
            near = {seat: held.agreed.neighbours(seat) for seat in all_but(held)}
            lost = {seat: min(near[seat], key=order.index) for seat in near}
            self.server.tell(held, {seat: all_but(held, lost[seat]) for seat in near})

    @rule(pick=picks, edge=picks)
    def isolate_a_pair(self, pick: int, edge: int) -> None:
        held = self.a_round(pick)
        if held is not None:
            one = edge % len(held.opened.participants)
            near = held.agreed.neighbours(one)
            self.server.tell(held, pair_stories(held, one, near[edge % len(near)]))

    @rule(number=seats)
    def restart(self, number: int) -> None:
        self.clients.restart_with_ledger(number)

    @invariant()
    def charged_for_what_left(self) -> None:
        if hasattr(self, "server"):
            self.server.check()

    def teardown(self) -> None:
        if hasattr(self, "clients"):
            for path, ledger in zip(self.clients.paths, self.clients.ledgers, strict=True):
                ledger.close()
                assert LedgerFile.read(path).spent("self") == ledger.spent("self")
            self.folder.cleanup()


def explore(examples: int, steps: int, *, seeded: bool) -> None:
    run_state_machine_as_test(
        AnyServer,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=seeded,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_charge_covers_what_left_the_client() -> None:
    explore(25, 12, seeded=True)


@pytest.mark.slow
def test_the_charge_covers_what_left_the_client_over_many_runs() -> None:
    explore(400, 20, seeded=False)


@pytest.mark.parametrize(("mode", "checked"), [("tolerate", True), ("repair", True), ("tolerate", False)])
def test_a_made_up_key_is_refused_by_whoever_shares_with_it_and_shows_nothing_of_the_others(
    mode: str, checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client checks no keys but those that it uses: that they are checked is what its charge rests on."""
    if not checked:
        monkeypatch.setattr(Agreed, "relied_on", lambda *_: [])
    clients = Clients("made up", tmp_path, 0)
    server, made_up = Server(clients), 5
    terms = planned(SIZE, mode, 1.0, 0)
    terms = replace(terms, committee=3, threshold=3) if mode == "repair" else terms
    answered = set()
    for number in range(1, 7):
        opened = clients.opening(list(range(SIZE)), replace(terms, round=number), {}, [made_up])
        assert opened is not None
        held = server.open(opened, range(SIZE))
        assert held is not None
        near = {made_up, *held.agreed.neighbours(made_up)}
        everyone = made_up in held.agreed.committee
        answered |= held.uploads.keys()
        if checked:
            assert set(held.uploads) == (set() if everyone else set(range(SIZE)) - near)
    if checked:
        assert answered
        server.check()
    else:
        with pytest.raises(AssertionError):
            server.check()


def test_stories_by_region_isolate_nobody(tmp_path: Path) -> None:
    """On a ring two clients next to each other are told that their other neighbour dropped out, a different one each.

    Either story is told to all neighbours of whom it calls dropped. Were the word of a few members enough, the server
    would know every share of the pair but the one between them.
    """
    clients = Clients("regions", tmp_path, 0)
    server = Server(clients)
    held = a_ring(clients, server)
    assert len(held.uploads) == SIZE
    server.tell(held, pair_stories(held, 0, held.agreed.neighbours(0)[0]))
    server.check()


def a_ring(clients: Clients, server: Server) -> Held:
    """A round whose graph is one ring."""
    base = planned(SIZE, "repair", 1.0, 0)
    terms = replace(
        base, residual_variance=base.residual_variance / 5.0, self_variance=4.0 * base.residual_variance
    )
    for number in range(1, 40):
        opened = clients.opening(list(range(SIZE)), replace(terms, round=number), {})
        assert opened is not None
        try:
            agreed = agree(opened)
        except NissError:  # Some seat has a single neighbour.
            continue
        ring = [0, agreed.neighbours(0)[0]]
        while (following := next(one for one in agreed.neighbours(ring[-1]) if one != ring[-2])) != 0:
            ring.append(following)
        if len(ring) == SIZE:
            held = server.open(opened, range(SIZE))
            assert held is not None
            return held
    raise AssertionError("no ring among these graphs")


def test_what_is_left_agrees_with_the_inverse() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        size = int(rng.integers(2, 9))
        shared = np.triu(rng.exponential(size=(size, size)) * (rng.random((size, size)) < 0.5), 1)
        shared, own = shared + shared.T, rng.exponential(size=size)
        inverse: Any = np.linalg.inv(np.diag(own + shared.sum(axis=0)) - shared)
        for row in range(size):
            assert effective_variance(shared, own, row) == pytest.approx(1.0 / inverse[row, row], rel=1e-9)
