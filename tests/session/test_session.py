"""What holds for every session, whatever carries its messages: sums, dropouts, repair, kills; carried or not."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import ConfigError, RemoteProtocolError
from niss.protocol.client import rounds_answered
from niss.protocol.messages import decode
from niss.session.ports import Stage
from niss.session.store import ClientState
from session.scene import COORDINATES, MOVED, Killed, Scene, stays, update_of


def test_the_last_model_is_that_of_all_uploads_without_noise(carried: bool) -> None:
    scene = Scene.of(carried).play()
    scene.check()
    assert [one.survivors for one in scene.records] == [4, 4, 4]
    assert all(one.exact for one in scene.records)
    assert not any(stays(scene.records))
    assert (scene.records[0].carried_variance > 1.0) == carried
    assert scene.records[-1].carried_variance == 0.0


@pytest.mark.parametrize("repair", [False, True])
def test_the_nodes_books_agree_with_the_statement(carried: bool, repair: bool) -> None:
    scene = Scene.of(carried, rounds=4, private=True, repair=repair).play()
    assert [one.survivors for one in scene.records] == [4] * 4
    clients = scene.session.books.statement.clients
    assert max(one.epsilon_joint for one in clients) <= 8.0 * (1.0 + 1e-9)
    assert max(one.epsilon_joint for one in clients) == pytest.approx(8.0, rel=0.06)
    for member in scene.session.members.by_node.values():
        ledger = scene.parties.store(member.node).charged
        assert ledger.participations[0] == clients[member.number].participations
        assert ledger.joint_squared[0] ** 0.5 == pytest.approx(clients[member.number].mu_joint, rel=1e-6)


def test_who_does_not_answer_leaves_noise_and_is_told_of(carried: bool) -> None:
    scene = Scene.of(carried, deaf=lambda stage, number, seat: (stage, number, seat) == (Stage.ROUND, 1, 2))
    scene.play()
    assert [one.survivors for one in scene.records] == [4, 3, 4]
    assert not scene.records[1].exact
    assert list(scene.records[1].lost.values()) == ["no answer in time"]
    said = float(np.sqrt(np.sum(np.square(stays(scene.records)))))
    # Six coordinates: a factor of 10 either way has a probability below 1e-5, and the seed is fixed.
    assert said / 10 < np.sqrt(np.mean((scene.model - scene.bare()) ** 2)) < 10 * said
    assert 0 < scene.records[1].uncancelled <= (10 if carried else 6)
    noisy = 1 + carried  # What the lost one had carried on is missing in the next round, too.
    assert any(
        f"Uploads lost or declined: 1; rounds in which noise was left uncancelled: {noisy}." in one
        for one in scene.session.books.statement.caveats
    )


def test_who_does_not_answer_is_repaired(carried: bool) -> None:
    """One is lost in each of two rounds that follow one another: what it shared, and what was carried, is taken out."""
    lost = {(1, 1), (2, 3), (4, 0)}
    scene = Scene.of(
        carried, rounds=5, repair=True, deaf=lambda _stage, number, seat: (number, seat) in lost
    ).play()
    assert [one.survivors for one in scene.records] == [4, 3, 3, 4, 3]
    assert all(one.exact and not one.problems for one in scene.records)
    assert not any(stays(scene.records))
    scene.check()


def test_more_losses_than_planned_are_noisy_and_cost_nobody_its_place(carried: bool) -> None:
    """Members would have to decline; they are not asked, and so not left out for it."""
    asked: list[Stage] = []
    scene = Scene.of(
        carried,
        rounds=4,
        repair=True,
        deaf=lambda _stage, number, seat: number == 1 and seat in (0, 1),
        heard=asked.append,
    ).play()
    assert [one.survivors for one in scene.records] == [4, 2, 4, 4]
    assert not scene.records[1].exact
    assert scene.records[1].masked == 2
    assert scene.records[-1].exact
    assert not scene.session.members.left_out


def test_a_member_that_is_silent_in_the_repair_does_not_spoil_it(carried: bool) -> None:
    """Three of four members are enough for the self-masks of all."""
    silent = (Stage.REVEAL, 1, 1)
    scene = Scene.of(carried, repair=True, deaf=lambda *request: request == silent).play()
    assert scene.records[1].exact
    assert any("no answer in time" in one for one in scene.records[1].problems)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("save", range(10))
def test_killed_at_any_save_the_run_goes_on_and_nothing_is_charged_twice(
    carried: bool, save: int, moved: bool, after: bool
) -> None:
    """One save when the run begins, one when a round is opened and one when it is summed; one for a cohort chosen."""
    if save >= (10 if carried else 7):
        return
    scene = Scene.of(carried)

    def die(saves: int) -> None:
        if saves == save + after:
            raise Killed

    setattr(scene, "saved_last" if after else "saving", die)
    with pytest.raises(Killed):
        scene.play()
    scene.saving = scene.saved_last = lambda _saves: None
    known = bool(scene.saves)
    pending = scene.saves[-1]["session"].get("pending") if known else None
    scene.offset = MOVED if moved else 0
    scene.play()
    lost = [one.round for one in scene.records if not one.survivors]
    assert lost == ([] if pending is None else [pending["round"]])
    if not (carried and lost):
        scene.check()
    assert scene.session.state.resumed == known
    assert [one.round for one in scene.records] == [1, 2, 3]


@pytest.mark.parametrize("stage", [Stage.ENROL, Stage.ROUND, Stage.REVEAL])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_killed_while_it_waits_in_any_stage(carried: bool, stage: Stage, number: int) -> None:
    scene, count = Scene.of(carried, repair=True), 0

    def die(heard: Stage) -> None:
        nonlocal count
        count += heard is stage
        if count == (2 if stage is Stage.ENROL else 4 * number + 2):
            raise Killed

    scene.heard = die
    with pytest.raises(Killed):
        scene.play()
    scene.heard, scene.offset = lambda _stage: None, MOVED
    scene.play()
    lost = set() if stage is Stage.ENROL else {number + 1}
    assert {one.round for one in scene.records if not one.survivors} == lost
    if lost:
        record = scene.records[number]
        assert "the server ended while it was open" in (record.skipped or "")
        carried_on = scene.records[number - 1].carried_variance if number else 0.0
        assert stays(scene.records)[number] == pytest.approx(carried_on**0.5)
        if carried and number < 2:
            assert not scene.records[number + 1].exact, "it took out what nobody had added"
    if not (carried and lost):
        scene.check()


def test_a_server_that_goes_on_from_an_old_copy_repeats_nothing(carried: bool) -> None:
    """The clients remember: a round that they answered is declined, and nothing is charged for it."""
    scene = Scene.of(carried).play()
    charged = scene.answered()
    first = next(place for place, state in enumerate(scene.saves) if state["done"] == 1)
    scene.saves = scene.saves[: first + 1]
    scene.opened.clear()
    scene.play()
    assert [one.survivors for one in scene.records] == [4, 0, 0]
    assert scene.answered() == charged


@pytest.mark.parametrize("moved", [False, True])
def test_a_client_with_an_older_state_does_not_come_back(carried: bool, moved: bool) -> None:
    """Known by its node, it is told what the server has seen, and declines; else the server sees it."""
    scene = Scene.of(carried, rounds=5)
    session = scene.start()
    scene.play_round(session)
    first = sorted(scene.asked[0])[0]
    store = scene.parties.store(first)
    older = ClientState.from_bytes(store.state.to_bytes())
    scene.play_round(session)
    if carried:
        scene.play_round(session)
    store.state, scene.offset = older, MOVED if moved else 0
    scene.play()
    (why,) = scene.session.members.left_out.values()
    assert ("its state is at step" if moved else "this client's state is at step") in why


def test_a_client_that_may_have_forgotten_what_it_spent_does_not_come_back(carried: bool) -> None:
    scene = Scene.of(carried, kept=False)
    session = scene.start()
    scene.play_round(session)
    scene.offset = MOVED
    del scene.parties.stores[0]
    scene.play()
    (why,) = scene.session.members.left_out.values()
    assert "niss-state" in why


def test_who_was_left_out_stays_out_under_another_id(carried: bool) -> None:
    scene = Scene.of(carried)
    session = scene.start()
    scene.play_round(session)
    session.members.leave_out(0, "a reason")
    session.save()
    scene.offset = MOVED
    scene.play()
    assert scene.session.members.left_out == {MOVED: "a reason"}


def test_other_settings_than_the_clients_agreed_to_are_refused(carried: bool) -> None:
    scene = Scene.of(carried)
    scene.play_round(scene.start())
    scene.plan = Scene.of(carried, repair=True).plan
    with pytest.raises(ConfigError, match="other settings"):
        scene.start()


def test_what_nobody_takes_out_of_a_round_to_which_nobody_comes_stays(carried: bool) -> None:
    scene = Scene.of(carried, rounds=4)
    scene.deaf = lambda stage, number, _seat: stage is Stage.ROUND and number == 1
    scene.play()
    assert [one.survivors for one in scene.records] == [4, 0, 4, 4]
    assert scene.records[1].void
    assert stays(scene.records)[1] == pytest.approx(scene.records[0].carried_variance ** 0.5)
    assert [one.exact for one in scene.records] == [True, not carried, not carried, True]


def test_a_closing_round_takes_out_the_rest() -> None:
    """Two rounds, and a third without data; where nothing is carried there is nothing to take out."""
    scene = Scene.of(True)
    scene.plan = replace(Scene.of(True, rounds=2).plan, closing=True)
    scene.play()
    assert [one.survivors for one in scene.records] == [4, 4, 4]
    last = sum((update_of(node, 2) for node in scene.asked[2]), np.zeros(COORDINATES))
    np.testing.assert_allclose(scene.model, scene.bare() - last / 4, rtol=0, atol=1e-5)


# Only where noise is carried from round to round.


def test_nodes_that_are_gone_keep_their_places_and_their_noise_stays() -> None:
    scene = Scene.of(True, rounds=4)
    session = scene.start()
    scene.play_round(session)
    following = {one.identity for one in decode(scene.opened[0]).cohorts.following}
    second = [node for node, one in session.members.by_node.items() if one.identity in following]
    scene.away = {second[0]}
    while scene.done < 4:
        scene.play_round(session)
    assert [one.survivors for one in scene.records] == [4, 3, 4, 3]
    assert [one.exact for one in scene.records] == [True, False, False, False]
    assert list(scene.records[1].lost.values()) == ["it is not connected"]


def test_what_the_committee_of_the_round_before_does_not_reveal_stays_and_is_said() -> None:
    scene = Scene.of(
        True,
        rounds=5,
        repair=True,
        deaf=lambda stage, number, seat: (stage, number, seat) == (Stage.ROUND, 2, 3) or stage is Stage.LATE,
    ).play()
    assert [one.exact for one in scene.records] == [True, True, False, True, True]
    assert len(scene.records[2].problems) == 4
    assert not scene.session.members.left_out
    assert stays(scene.records)[2] > 0.0


@pytest.mark.parametrize("repair", [False, True])
def test_members_keep_their_keys_until_their_next_round_and_no_longer_than_the_last(
    carried: bool, repair: bool
) -> None:
    scene = Scene.of(carried, repair=repair).play()
    for node in range(scene.nodes):
        memory = json.loads(scene.memory_of(node))["memory"]
        assert (memory["current"] is None) == (not repair or node in scene.asked[2])


def test_a_spare_node_takes_the_place_of_one_that_is_gone() -> None:
    scene = Scene.of(True, rounds=5, nodes=10)
    session = scene.start()
    scene.play_round(session)
    scene.away = {min(scene.asked[0])}
    while scene.done < 5:
        scene.play_round(session)
    # The third cohort was chosen while it was still there.
    assert [one.survivors for one in scene.records] == [4, 4, 4, 4, 4]
    assert all(scene.away.isdisjoint(asked) for number, asked in scene.asked.items() if number > 0)


@settings(max_examples=25)
@given(data=st.data())
def test_whoever_does_not_come_and_whenever_the_server_is_killed_the_report_is_right(
    carried: bool, data: st.DataObject
) -> None:
    """Nodes deaf in any round, one kill in any of them: what stays in the model is what the report says."""
    deaf = [data.draw(st.sets(st.integers(0, 3), max_size=2)) for _ in range(5)]
    killed = data.draw(st.none() | st.integers(1, 20))
    scene = Scene.of(carried, rounds=5, repair=data.draw(st.booleans()))
    if carried:
        scene.plan = replace(scene.plan, pattern=data.draw(st.sampled_from(("cyclic", "any"))))
    scene.deaf = lambda stage, number, seat: stage is Stage.ROUND and seat in deaf[number]
    heard = 0

    def weather(stage: Stage) -> None:
        nonlocal heard
        heard += stage is Stage.ROUND
        if heard == killed:
            raise Killed

    scene.heard = weather
    try:
        scene.play()
    except Killed:
        scene.heard = lambda _stage: None
        scene.play()
    assert set(scene.asked) == set(range(5))
    said = float(np.sqrt(np.sum(np.square(stays(scene.records)))))
    left = float(np.sqrt(np.mean((scene.model - scene.bare()) ** 2)))
    # Six normals: their mean square lies below 1e-4 of the variance with a probability of 5e-12, above 400 with less.
    assert left < 1e-5 + 20.0 * said
    assert left > 0.01 * said - 1e-5
    for node in range(scene.nodes):
        taken = rounds_answered(scene.memory_of(node))
        assert list(taken) == sorted(set(taken))
        if carried:
            assert all(after - before >= 2 for before, after in pairwise(taken))


def test_a_graph_that_is_unlucky_or_that_nobody_would_repair_on_is_drawn_again() -> None:
    """The noise is set before the graph is known; too little of it, and every client would decline."""
    for worse, more in ((True, 4.4), (False, 1.0)):
        scene = Scene.of(False, private=True)
        scene.plan = replace(scene.plan, attempts=3)
        session, seen = scene.start(), []
        honest = session.books.assess

        def unlucky_once(agreed, colluders, seen=seen, honest=honest, session=session, worse=worse):
            seen.append(agreed.terms)
            if len(seen) > 1:
                return honest(agreed, colluders)
            if worse:
                return 2.0 * session.proposal.round_mu
            raise RemoteProtocolError("a client has a single neighbour")

        session.books.assess = unlucky_once
        scene.play_round(session)
        assert list(dict.fromkeys(terms.attempt for terms in seen)) == [0, 1]
        assert seen[1].residual_variance == pytest.approx(more * seen[0].residual_variance)
        assert scene.records[0].survivors == 4
        keys = {one.prekey.number for one in decode(scene.opened[0]).participants}
        assert keys == {0}, "the keys of an attempt that nobody was told of are not used up"


def test_a_plan_that_no_graph_keeps_skips_the_round() -> None:
    scene = Scene.of(False, private=True)
    scene.plan = replace(scene.plan, attempts=3)
    session = scene.start()
    session.books.assess = lambda _agreed, _colluders: np.inf
    scene.play_round(session)
    assert not scene.asked
    skipped = scene.records[0].skipped or ""
    assert skipped.startswith("none of 3 graphs keeps the promise for every client")


def test_killed_between_two_rounds_what_was_carried_around_it_stays_and_is_said(carried: bool) -> None:
    """The pieces of the round before are gone with the server: one lost in the next round is not repaired whole."""
    lost = {(1, 1), (2, 2)}
    scene = Scene.of(carried, rounds=4, repair=True, deaf=lambda _stage, number, seat: (number, seat) in lost)
    scene.play_round(scene.start())
    scene.play()
    assert [one.survivors for one in scene.records] == [4, 3, 3, 4]
    assert [one.exact for one in scene.records] == [True, not carried, True, True]
    assert (stays(scene.records)[1] > 0.0) == carried


@pytest.mark.parametrize("pattern", ["cyclic", "any"])
@pytest.mark.parametrize("kappa", [1.0, 4.0, 7.0, 20.0])
@pytest.mark.parametrize("rounds", [3, 4])
def test_the_budget_of_every_node_covers_the_costliest_pattern_to_the_last_digit(
    carried: bool, rounds: int, kappa: float, pattern: str
) -> None:
    if not carried and pattern == "any":
        return
    scene = Scene.of(carried, rounds=rounds, private=True)
    scene.plan = replace(scene.plan, kappa=kappa, pattern=pattern)
    scene.play()
    assert [one.survivors for one in scene.records] == [4] * rounds
