"""Budgets are not spent on rounds that come to nothing: who can pay is known before a round, and waste has a bound."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from niss.accounting import Charge
from niss.errors import RemoteProtocolError
from niss.protocol.messages import Refusal, decode
from niss.session import InProcess
from niss.session.limits import Budget, Spent
from niss.session.node import Node
from niss.session.ports import Reply, Request, Stage
from niss.session.proposal import Enrolment
from niss.session.server import drive
from session.scene import COORDINATES, Scene

ROUNDS = 8


def charged(scene: Scene) -> list[int]:
    """By node, how many rounds of the run it was charged for."""
    return [scene.parties.store(node).charged.participations.item() for node in range(scene.nodes)]


def spend(scene: Scene, node: int, left: float) -> None:
    """Charge a node for earlier runs, so that it can pay for so many rounds of this one."""
    store, proposal = scene.parties.store(node), scene.session.proposal
    budget = scene.parties.limits.budget(proposal)
    store.budget = budget
    store.charged.charge(
        np.zeros(1, dtype=np.int64), Charge.of(math.sqrt(budget.most**2 - left * proposal.round_mu**2))
    )
    store.charged.participations[0] = 0


def play(scene: Scene) -> None:
    while scene.done < scene.rounds:
        scene.play_round(scene.session)


def test_a_round_is_not_opened_with_too_few_who_can_pay_for_it() -> None:
    """Two of four have room for two rounds of eight; before, they joined and declined from the third on."""
    scene = Scene.of(False, rounds=ROUNDS, private=True, fewest=4)
    session = scene.start()
    for node in (2, 3):
        spend(scene, node, left=2.5)
    assert not session.over(scene.present())
    play(scene)
    assert [one.survivors for one in scene.records] == [4, 4, *[0] * 6]
    assert charged(scene) == [2, 2, 2, 2]
    assert {one.skipped for one in scene.records[2:]} == {
        "2 nodes could take part, at least 4 are needed: `participants`, or the fewest that collusion and dropouts of "
        "the plan leave noise to share; 2 can pay for no more"
    }
    assert not session.members.left_out
    assert session.over(scene.present())
    assert not session.over([*scene.present(), 40, 41]), "two more could join"


def test_the_others_go_on_without_those_who_can_pay_no_more() -> None:
    scene = Scene.of(False, rounds=ROUNDS, private=True)
    session = scene.start()
    for node in (2, 3):
        spend(scene, node, left=2.5)
    play(scene)
    assert [one.participants for one in scene.records] == [4, 4, *[2] * 6]
    assert all(one.exact and not one.lost for one in scene.records)
    assert charged(scene) == [8, 8, 2, 2]
    assert not session.over(scene.present()) or session.books.with_room(session.members.by_node) == []


@pytest.mark.parametrize("most", [1, 3])
def test_a_client_that_uploads_alone_stops_paying_for_it(carried: bool, most: int) -> None:
    """All others are deaf. Before, it paid for every round of the run."""
    scene = Scene.of(carried, rounds=ROUNDS, private=True, fewest=4)
    scene.parties.limits = replace(scene.parties.limits, wasted_rounds=most)
    session = scene.start()
    deliver = scene.deliver

    def heard_by_one(requests):  # type: ignore[no-untyped-def]
        lost = {node for node, one in requests.items() if one.stage is Stage.ROUND and node != 0}
        replies = deliver({node: one for node, one in requests.items() if node not in lost})
        return {**replies, **dict.fromkeys(lost, "it did not come")}

    while scene.done < scene.rounds:
        here = scene.present()
        session.begin(scene.done, here, connected=here, coordinates=COORDINATES)
        drive(session, heard_by_one)
        if session.refused is None:
            session.finish()
        scene.done += 1
    assert sum(charged(scene)) == charged(scene)[0] == min(most, 4 if carried else ROUNDS)
    if charged(scene)[0] == most:
        assert f"paid for {most} rounds of this run of which there is no sum" in str(
            [one.lost.get("0") for one in scene.records]
        )


def test_rounds_with_a_sum_are_no_waste_and_those_without_are_counted_over_the_run() -> None:
    """In rounds 2, 4 and 6 one client is heard alone, and one upload is no sum; it declines the seventh."""
    scene = Scene.of(
        False,
        rounds=ROUNDS,
        private=True,
        deaf=lambda stage, number, seat: stage is Stage.ROUND and number in (1, 3, 5) and seat != 0,
    ).play()
    assert [one.survivors for one in scene.records] == [4, 0, 4, 0, 4, 0, 3, 3]
    assert charged(scene) == [6, 5, 5, 5]
    assert "no sum" in scene.records[6].lost["0"]


def asked(scene: Scene) -> Request:
    return Request(Stage.ENROL, scene.session.state.proposal, run=scene.session.proposal.run)


def told(scene: Scene, node: int) -> int:
    reply = scene.parties.node(node).answer(asked(scene))
    assert isinstance(reply, Reply)
    return Enrolment.from_bytes(reply.body).rounds


@pytest.mark.parametrize(
    ("left", "said"), [(1.0, 1), (1.9, 1), (2.0, 2), (3.9, 2), (4.0, 4), (7.9, 4), (8.0, 8)]
)
def test_what_a_server_is_told_of_a_ledger_is_a_power_of_two_once_a_run(left: float, said: int) -> None:
    scene = Scene.of(False, rounds=ROUNDS, private=True)
    scene.start()
    if left < ROUNDS:
        spend(scene, 0, left)
    assert told(scene, 0) == said
    scene.play_round(scene.session)
    assert charged(scene)[0] == 1
    # Asked again with less left: the same, so that no second look narrows it down.
    if left >= 2.0:
        assert told(scene, 0) == said


def test_no_run_makes_a_ledger_with_room_for_more_tell_of_it() -> None:
    for most in (1, 3, 5, 64, 100_000):
        spent = Spent(0.0, 0.0, Budget(10.0, 1e-5, 0.0))
        assert spent.rounds(spent.first, Charge.of(1e-4), most) == most
        assert spent.rounds(spent.first, Charge.of(6.0), most) == min(most, 2)
        assert spent.rounds(spent.first, Charge.of(math.inf), most) == most


@pytest.mark.parametrize("claimed", [10**30, 2, 0, -1, -(10**30)])
def test_what_a_server_claims_of_sums_can_waste_a_budget_and_nothing_else(claimed: int) -> None:
    """A claim that is too high is believed, as any is: what it costs is bounded by the ledger, as without it."""
    scene = Scene.of(False, rounds=4, private=True)
    scene.parties.limits = replace(scene.parties.limits, wasted_rounds=1)
    session = scene.start()
    scene.play_round(session)
    session.begin(1, scene.present(), connected=scene.present(), coordinates=COORDINATES)
    drive(session, scene.deliver, until=Stage.ROUND)
    request = replace(session.requests()[0], summed=claimed)
    reply = scene.parties.with_updates(lambda _node, _training: np.zeros(COORDINATES), COORDINATES)(
        {0: request}
    )[0]
    assert isinstance(reply, Reply)
    assert isinstance(decode(reply.body), Refusal) == (claimed < 1)
    assert charged(scene)[0] == 1 + (claimed >= 1)


@pytest.mark.parametrize("rounds", [0, -1, 100_001, 2**70, True, "8", 2.5, None])
def test_an_enrolment_that_says_nonsense_is_refused(rounds: object) -> None:
    scene = Scene.of(False, private=True)
    scene.start()
    body = scene.parties.node(0).answer(asked(scene)).body  # type: ignore[union-attr]
    assert b'"rounds": 3' in body
    changed = body.replace(b'"rounds": 3', b'"rounds": ' + json.dumps(rounds).encode())
    with pytest.raises(RemoteProtocolError):
        Enrolment.from_bytes(changed)
    another = Enrolment.from_bytes(body.replace(b'"rounds": 3', b'"rounds": 2'))
    with pytest.raises(RemoteProtocolError, match="signature"):
        another.check(scene.session.proposal)


@pytest.mark.parametrize(("epsilon", "said"), [(0.01, "next to nothing is learned"), (20.0, "")])
def test_a_node_hears_what_will_become_of_a_run_before_it_pays_for_it(epsilon: float, said: str) -> None:
    scene = Scene.of(False, rounds=2, private=True)
    scene.plan = replace(scene.plan, epsilon=epsilon)
    scene.parties.limits = replace(scene.parties.limits, epsilon=epsilon, delta=1e-5)
    heard: list[tuple[str, int]] = []
    store = scene.parties.store(0)

    def node(number: int) -> Node:
        def warn(words: str) -> None:
            heard.append((words, int(store.charged.participations[0])))

        own = scene.parties.store(number)
        return Node(
            own, scene.parties.limits, InProcess(), warn=warn if own is store else lambda _words: None
        )

    scene.parties.node = node  # type: ignore[method-assign]
    scene.play()
    assert store.charged.participations[0] == 2
    assert [paid for _, paid in heard] == ([0] if said else [])
    assert all(said in words for words, _ in heard)
