"""Runs that hide single records, both halves in one process: what is summed, charged and refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from niss.accounting import Plan
from niss.mechanism import Slots
from niss.protocol.keys import Identity
from niss.randomness import SecretStream
from niss.records import LogisticRegression, Records, clipped_rows, draw_batch, reference_sum
from niss.session import node as node_module
from niss.session.limits import Limits
from niss.session.node import Node, Training
from niss.session.ports import Relay, Reply, Request
from niss.session.proposal import Setup
from niss.session.server import Session, drive
from niss.session.store import MemoryStore
from session.scene import refused
from support.protocol_round import seeded_entropy

FEATURES, SILOS, EACH, ROUNDS = 5, 5, 40, 3
SIZE = 2 * (FEATURES + 1)
PLAN = Plan(
    unit="record",
    batch=0.25,
    records=SILOS * EACH,
    clip=0.5,
    epsilon=4.0,
    participations=ROUNDS,
    chain_rounds=ROUNDS,
    neighbours=SILOS - 1.0,
    graph="complete",
    kappa=4.0,
)


def silo(number: int) -> Records:
    rng = np.random.default_rng(number)
    inputs = rng.normal(size=(EACH, FEATURES))
    return Records(LogisticRegression(FEATURES), (inputs, (inputs[:, 0] > 0).astype(int)))


class Silos:
    """A server and its silos; `limits` are those of every node."""

    def __init__(self, plan: Plan = PLAN, rounds: int = ROUNDS, **limits: Any) -> None:
        self.draw = seeded_entropy("silos")
        self.records = [silo(number) for number in range(SILOS)]
        self.stores = [MemoryStore(self.draw) for _ in self.records]
        self.limits = Limits(**limits)
        setup = Setup(plan=plan, rounds=rounds, participants=3)
        relay = Relay(entropy=self.draw)
        self.session = Session(
            setup, identity=Identity.generate(self.draw), coordinator=relay, entropy=self.draw
        )
        self.weights, self.replies = np.zeros(SIZE), list[Reply]()
        self.lost: set[int] = set()
        self.coins = seeded_entropy("coins")

    def node(self, number: int, dataset: str = "records") -> Node:
        return Node(self.stores[number], self.limits, _NoTracker(), entropy=self.coins, dataset=dataset)

    def deliver(self, requests: dict[int, Request]) -> dict[int, Reply | str]:
        replies: dict[int, Reply | str] = {}
        for number, request in requests.items():
            answer = self.node(number).answer(request, SIZE if request.stage == "round" else None)
            if isinstance(answer, Training):
                answer = answer.upload_records(self.records[number], self.weights)
                self.replies.append(answer)
                if number in self.lost:
                    continue
            replies[number] = answer
        return {number: replies.get(number, "lost") for number in requests}

    def play(self, number: int) -> Any:
        self.session.begin(number, range(SILOS), coordinates=SIZE)
        drive(self.session, self.deliver)
        if self.session.round is None or self.session.refused is not None:
            return None, self.session.books.rounds[-1]
        return self.session.finish()


class _NoTracker:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_a_run_learns_from_all_records_and_its_slots_are_charged(mode: str) -> None:
    plan = replace(PLAN, mode=mode)
    silos = Silos(plan)
    for number in range(ROUNDS):
        total, record = silos.play(number)
        assert record.survivors == SILOS
        assert record.exact
        silos.weights = silos.weights + 2.0 * total
        assert record.mu_joint == pytest.approx(
            float(plan.round_mu(np.zeros(1, dtype=np.int64))[0]), rel=0.05
        )
    for store in silos.stores:
        taken = store.charged.spent(0)
        assert isinstance(taken, Slots)
        assert taken.size == ROUNDS
        assert taken.epsilon(plan.gaussian_delta) <= 4.0
    # Another round is nobody's: all slots are taken, and the server knows it too.
    total, record = silos.play(ROUNDS)
    assert total is None
    assert "5 can pay for no more" in record.skipped


def test_the_sum_is_that_of_the_clipped_gradients_downhill() -> None:
    """Every record in every batch, and noise of a hundredth: 6 deviations on 12 coordinates, false-alarm rate 3e-8."""
    plan = replace(PLAN, batch=1.0, epsilon=9.0, participations=1)
    silos = Silos(plan)
    total, record = silos.play(0)
    everyone = np.arange(EACH)
    wanted = -sum(reference_sum(one, silos.weights, everyone, plan.clip) for one in silos.records)
    deviation = math.sqrt(record.aggregate_variance_predicted)
    assert deviation < 0.02 * np.abs(wanted).max() / (SILOS * EACH)
    assert np.abs(total - wanted / (SILOS * EACH)).max() < 6.0 * deviation


def test_a_batch_beyond_the_largest_is_left_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record in every batch, noise of a hundredth; one silo plans for a record less. 6 deviations, as above."""
    plan = replace(PLAN, batch=1.0, epsilon=9.0, participations=1)
    silos, asked = Silos(plan), []
    short = silos.records[3]
    largest = Records.largest
    monkeypatch.setattr(Records, "largest", lambda self, q: EACH - 1 if self is short else largest(self, q))

    def noted(records: Records, weights: Any, rows: Any, clip: float, most: int) -> Any:
        asked.append((len(rows), most))
        return clipped_rows(records, weights, rows, clip, most)

    monkeypatch.setattr(node_module, "clipped_rows", noted)
    total, record = silos.play(0)
    assert sorted(asked) == [(0, EACH - 1)] + [(EACH, EACH)] * (SILOS - 1)
    others = [one for one in silos.records if one is not short]
    wanted = -sum(reference_sum(one, silos.weights, np.arange(EACH), plan.clip) for one in others)
    deviation = math.sqrt(record.aggregate_variance_predicted)
    assert np.abs(total - wanted / (SILOS * EACH)).max() < 6.0 * deviation
    assert {len(reply.body) for reply in silos.replies} == {len(silos.replies[0].body)}


def test_every_attempt_at_a_round_draws_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []

    def noted(count: int, probability: float, stream: Any) -> Any:
        assert (count, probability) == (EACH, 0.25)
        assert isinstance(stream, SecretStream)
        batch = draw_batch(count, probability, stream)
        drawn.append(tuple(batch))
        return batch

    monkeypatch.setattr(node_module, "draw_batch", noted)
    silos = Silos()
    for number in range(ROUNDS):
        silos.play(number)
    assert len(set(drawn)) == len(drawn) == ROUNDS * SILOS


def test_gradients_that_fail_altogether_are_an_empty_batch_and_nothing_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also halfway: what was summed until then is thrown away."""
    silos = Silos()

    def failing(records: Records, *arguments: Any) -> Any:
        yield next(iter(clipped_rows(records, *arguments)))
        if records is silos.records[2]:
            raise MemoryError("of patient 17")

    monkeypatch.setattr(node_module, "clipped_rows", failing)
    total, record = silos.play(0)
    assert total is not None
    assert record.survivors == SILOS
    assert len({len(reply.body) for reply in silos.replies}) == 1
    notes = [reply.note for reply in silos.replies]
    assert notes == ["", "", "the gradients failed (MemoryError): an empty batch was sent instead", "", ""]
    assert all("patient" not in str(vars(reply)) for reply in silos.replies)


def test_a_silo_that_is_lost_is_repaired_or_left_in_the_sum() -> None:
    for mode, exact in (("tolerate", False), ("repair", True)):
        silos = Silos(replace(PLAN, mode=mode))
        silos.lost = {3}
        _, record = silos.play(0)
        assert (record.survivors, record.exact) == (SILOS - 1, exact)
        # Whoever was asked may have answered, and has paid.
        assert all(store.charged.spent(0).size == 1 for store in silos.stores)


def test_a_node_joins_no_run_with_a_larger_batch_than_its_limit() -> None:
    silos = Silos(batch=0.2)
    silos.session.begin(0, range(SILOS), coordinates=SIZE)
    assert "batch = 0.25 is proposed" in refused(silos.node(0).answer(silos.session.requests()[0]))


def test_a_node_gives_its_records_to_runs_that_hide_them_and_to_no_others() -> None:
    whole = replace(PLAN, unit="client", batch=None, records=None)
    for plan, dataset, match in (
        (PLAN, "", "hides single records"),
        (whole, "records", "hides whole clients"),
    ):
        silos = Silos(plan)
        silos.session.begin(0, range(SILOS), coordinates=SIZE)
        assert match in refused(silos.node(0, dataset).answer(silos.session.requests()[0]))


def test_a_round_without_a_free_slot_is_refused_before_anything_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server takes it for the first of another run; the node's ledger knows better."""
    silos = Silos()
    for number in range(ROUNDS):
        silos.play(number)
    again = Silos()
    again.stores = silos.stores
    monkeypatch.setattr(node_module, "draw_batch", None)
    total, record = again.play(0)
    assert total is None
    assert "0 nodes could take part" in record.skipped


def test_a_batch_larger_than_the_plans_is_refused_and_costs_nothing() -> None:
    """The terms of a round come from the server: its plan said 0.25."""
    silos = Silos()
    made = silos.session._setup.terms

    def larger(*arguments: Any) -> Any:
        terms = made(*arguments)
        return replace(terms, records=replace(terms.records, batch=0.5))

    silos.session._terms = larger
    _, record = silos.play(0)
    assert record.survivors == 0
    assert all("allows 0.25" in why for why in record.lost.values())
    assert all(store.charged.participations[0] == 0 for store in silos.stores)
