"""Noise that is carried from round to round, on Flower: cohorts that take turns, nodes that do not come, resuming."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAdam, FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

from flower.grid import FIRST, SHAPES, FakeGrid, global_model, make_app, step_of
from flower.test_resume import Killed, renumbered
from flower.test_tracker import Service, service  # noqa: F401
from niss.accounting import LedgerFile, Plan
from niss.errors import ConfigError, ProtocolError, RemoteProtocolError
from niss.flower import Limits, NissMod, NissStrategy
from niss.flower.saving import ServerFolder
from niss.flower.state import open_store
from niss.protocol import MODES, decode
from niss.session.metrics import NOISE
from niss.session.proposal import read_proposal
from session.scene import stays

ROUNDS, NODES, SEPARATION = 3, 6, 2
SIZE = NODES // SEPARATION
WITHOUT_NOISE = Plan(tau2=0.0, clip=5.0, separation=SEPARATION)
PRIVATE = Plan(clip=0.5, epsilon=8.0, separation=SEPARATION)
REPAIRED = {"dropped": 1, "revealed": 1}


def carried(plan: Plan = WITHOUT_NOISE, inner=None, **options) -> NissStrategy:
    inner = FedAvg(fraction_evaluate=0.0) if inner is None else inner
    return NissStrategy(inner, plan=plan, carry=True, **options)


def start(strategy: NissStrategy, grid: FakeGrid, rounds: int = ROUNDS):
    return strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)


def nodes_with_state(folder: Path, nodes: int = NODES, **node_config) -> FakeGrid:
    grid = FakeGrid(nodes, **node_config)
    for number, context in enumerate(grid.contexts.values()):
        context.node_config["niss-state"] = str(folder / f"node-{number}")
    return grid


def values(arrays) -> np.ndarray:
    return np.concatenate([array.numpy().astype(np.float64).ravel() for array in arrays.values()])


def model_of(summed: dict[int, set[int]], size: int = SIZE) -> np.ndarray:
    """The model after those rounds, in which the nodes with these numbers were summed with weight 1 / size."""
    moved = values(global_model())
    for number, nodes in summed.items():
        for node in nodes:
            step = step_of(FIRST + node, number)
            moved = moved + np.concatenate([step[name].astype(np.float64).ravel() for name in SHAPES]) / size
    return moved


def openings(grid: FakeGrid) -> dict[bytes, set[int]]:
    """By message that opened a round: the numbers of the nodes that it was sent to."""
    sent: dict[bytes, set[int]] = {}
    for message in grid.sent:
        record = message.content.config_records.get("niss")
        if record is not None and record["stage"] == "round":
            sent.setdefault(record["body"], set()).add((message.metadata.dst_node_id - FIRST) % 5000)
    return sent


def cohorts(grid: FakeGrid) -> dict[int, set[int]]:
    """By round, counted from 1, who was asked; every round was opened in one way alone."""
    by_round = {decode(body).terms.round + 1: nodes for body, nodes in openings(grid).items()}
    assert len(by_round) == len(openings(grid)), "a round was opened in two ways"
    return by_round


def test_one_message_a_round_and_one_a_run():
    grid = FakeGrid(NODES)
    start(carried(), grid)
    assert len(grid.sent) == NODES + ROUNDS * SIZE


def test_the_statement_covers_the_whole_run_and_the_nodes_books_agree(tmp_path):
    strategy, grid = carried(PRIVATE), nodes_with_state(tmp_path)
    for context in grid.contexts.values():
        del context.node_config["niss-uncalibrated"]
    start(strategy, grid, rounds=6)
    statement = strategy.statement
    assert "over a run of 6 committed rounds as a whole" in statement.words + str(statement.to_json())
    worst = max(one.epsilon_joint for one in statement.clients)
    assert worst == pytest.approx(PRIVATE.epsilon, rel=0.05)
    assert worst <= PRIVATE.epsilon
    for number, client in enumerate(statement.clients):
        ledger = LedgerFile.read(tmp_path / f"node-{number}" / "ledger.jsonl")
        assert len(ledger.entries) == client.participations == 3
        assert ledger.spent("self") == pytest.approx(client.mu_joint, rel=1e-6)


def test_a_carried_run_leaves_less_noise_than_one_that_is_not():
    """Six rounds of the same size at the same epsilon: what stays in the model, and what is under way."""
    with_it = carried(PRIVATE)
    start(with_it, FakeGrid(NODES), rounds=6)
    left = sum(one**2 for one in stays(with_it.rounds))
    plain = NissStrategy(
        FedAvg(fraction_evaluate=0.0, fraction_train=1 / SEPARATION, min_train_nodes=SIZE),
        plan=replace(PRIVATE, separation=1, participations=3, kappa=4.0),
    )
    start(plain, FakeGrid(NODES), rounds=6)
    others = sum(one**2 for one in stays(plain.rounds))
    assert left < 0.8 * others, left / others


def test_a_strategy_that_asks_nobody_begins_no_run():
    strategy = carried(inner=FedAvg(fraction_train=0.0, fraction_evaluate=0.0))
    with pytest.raises(ProtocolError, match="asked no node to train"):
        start(strategy, FakeGrid(NODES))
    assert strategy._begun is None


def test_a_spare_node_takes_the_place_of_one_that_is_gone():
    strategy, grid = carried(replace(WITHOUT_NOISE, participants=3)), FakeGrid(NODES + 2)

    def away(message: Message) -> Message | None:
        record = message.content["niss"]
        if record["stage"] == "round" and decode(record["body"]).terms.round == 1:
            first = [FIRST + node for node in cohorts(grid)[1]]
            grid.dead.add(first[0])
        return message

    grid.tamper = away
    start(strategy, grid, rounds=5)
    assert [one.survivors for one in strategy.rounds[3:]] == [3, 3]
    assert all(len(one) == 3 for number, one in cohorts(grid).items() if number != 3)


def test_too_few_nodes_are_said_with_what_to_do():
    with pytest.raises(ProtocolError, match="need 8 nodes, and 6 are there; plan rounds of at most 3"):
        start(carried(replace(WITHOUT_NOISE, participants=4)), FakeGrid(NODES))
    with pytest.raises(ConfigError, match="too few against 0 colluders"):
        start(carried(), FakeGrid(3))


def test_settings_that_cannot_be_are_refused_at_once():
    inner = FedAvg(fraction_evaluate=0.0)
    with pytest.raises(ConfigError, match="gain nothing"):
        NissStrategy(inner, plan=replace(PRIVATE, separation=1), carry=True)
    with pytest.raises(ConfigError, match="all of a round repair it"):
        carried(replace(PRIVATE, **REPAIRED, colluders=1, committee=3), mode="repair")
    with pytest.raises(ConfigError, match="over 4 rounds is not one for 3"):
        start(carried(replace(PRIVATE, horizon=4, participations=2)), FakeGrid(NODES))
    with pytest.raises(ConfigError, match="rounds of 2, but the plan is for 3"):
        start(carried(replace(PRIVATE, participants=3), participants=2), FakeGrid(NODES))


def test_a_strategy_under_which_the_noise_does_not_cancel_is_warned_about(caplog):
    start(carried(inner=FedAdam(fraction_evaluate=0.0)), FakeGrid(NODES))
    assert "FedAdam divides by what it has seen" in caplog.text


def test_metrics_inside_the_uploads_say_how_noisy_they_are():
    ranges = {"loss": (0.0, 1.0)}
    strategy = carried(metrics=ranges)
    app = make_app([NissMod(metrics=ranges)])
    result = start(strategy, FakeGrid(NODES, app=app), rounds=40)
    found = [
        (record["loss"] - 0.5) / record["loss" + NOISE] for record in result.train_metrics_clientapp.values()
    ]
    # Forty standard normals but for their neighbours' correlation: beyond 6 with probability 1e-7, and wide.
    assert max(map(abs, found)) < 6.0
    assert np.mean(np.square(found)) > 0.05


# Repair.


def repaired(plan: Plan = WITHOUT_NOISE, **options) -> NissStrategy:
    return carried(replace(plan, **REPAIRED), mode="repair", **options)


def lose(strategy: NissStrategy, grid: FakeGrid, seats: dict[int, set[int]], *, mute: bool = False) -> None:
    """By round, counted from 1, these seats get no message; with `mute`, nobody is asked about the round before."""

    def away(message: Message) -> Message | None:
        stage, current = message.content["niss"]["stage"], strategy.session.round
        if stage == "enrol":
            return message
        if message.metadata.dst_node_id not in current.nodes:
            assert stage == "late"
            return None if mute else message
        seat = current.nodes.index(message.metadata.dst_node_id)
        return None if seat in seats.get(current.number + 1, ()) else message

    grid.tamper = away


def summed_in(strategy: NissStrategy, grid: FakeGrid) -> dict[int, set[int]]:
    """By round, the numbers of the nodes whose uploads were summed."""
    asked = cohorts(grid)
    return {
        one.round: {node for node in asked[one.round] if str(FIRST + node) not in one.lost}
        for one in strategy.rounds
    }


def test_a_repaired_run_ends_with_the_mean_of_those_who_came():
    """One is lost in each of the rounds 2, 3 and 5 of 6: what was carried by it, and to it, is taken out."""
    strategy, grid, size = repaired(), FakeGrid(10), 5
    lose(strategy, grid, {2: {1}, 3: {4}, 5: {0}})
    result = start(strategy, grid, rounds=6)
    assert [one.survivors for one in strategy.rounds] == [5, 4, 4, 5, 4, 5]
    assert all(one.exact and not one.problems for one in strategy.rounds)
    assert not any(stays(strategy.rounds))
    np.testing.assert_allclose(
        values(result.arrays), model_of(summed_in(strategy, grid), size), rtol=0, atol=1e-5
    )


# Resuming.


def check(tmp_path: Path, strategy: NissStrategy, grids: list[FakeGrid], result) -> None:
    """Every round was opened in one way and answered once; those that are in the model are there without noise."""
    asked: dict[int, set[int]] = {}
    bodies: dict[int, bytes] = {}
    for grid in grids:
        for body, nodes in openings(grid).items():
            number = decode(body).terms.round + 1
            assert bodies.setdefault(number, body) == body, "a round was opened in two ways"
            asked.setdefault(number, set()).update(nodes)
    assert set(asked) == set(range(1, ROUNDS + 1))
    summed = {one.round for one in strategy.rounds if one.survivors}
    lost = set(asked) - summed
    if not lost:
        np.testing.assert_allclose(values(result.arrays), model_of(asked), rtol=0, atol=1e-5)
    for number in range(NODES):
        path = tmp_path / f"node-{number}" / "ledger.jsonl"
        rounds = (
            [entry.basis["round"] + 1 for entry in LedgerFile.read(path).entries] if path.exists() else []
        )
        assert rounds == sorted(set(rounds)), "a round was charged twice"
        assert {one for one in summed if number in asked[one]} <= set(rounds)
    # The server's account counts everyone who had a seat: they may have been asked before it was killed.
    seats = [one.identity for body in bodies.values() for one in decode(body).participants]
    members = sorted(strategy.session.members.by_node.values(), key=lambda one: one.number)
    assert [one.participations for one in strategy.statement.clients] == [
        seats.count(one.identity) for one in members
    ]


# One when the run begins; each round as it is announced (two at first), opened and summed.
SAVES = 1 + (2 + 2) + (1 + 2) + 2


@pytest.mark.parametrize("number", [1, 2, 3])
def test_killed_while_a_round_is_under_way_it_is_over_and_the_next_takes_out_what_it_carried(
    tmp_path, number
):
    grid, count = nodes_with_state(tmp_path), 0

    def dying(reply):
        nonlocal count
        count += grid.sent[-1].content["niss"]["stage"] == "round"
        if count == (number - 1) * SIZE + 2:
            raise Killed
        return reply

    grid.mangle = dying
    with pytest.raises(Killed):
        start(carried(resume=tmp_path / "run"), grid)
    later = renumbered(grid)
    again = carried(resume=tmp_path / "run")
    result = start(again, later)
    check(tmp_path, again, [grid, later], result)
    assert [one.survivors for one in again.rounds] == [
        0 if one == number else SIZE for one in range(1, ROUNDS + 1)
    ]
    assert "the server ended while it was open" in (again.rounds[number - 1].skipped or "")
    if number < ROUNDS:
        assert not again.rounds[number].exact, "it took out what nobody had added"
    if number > 1:
        carried_on = again.rounds[number - 2].carried_variance ** 0.5
        assert stays(again.rounds)[number - 1] == pytest.approx(carried_on)
        assert carried_on > 0.0


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whoever_does_not_come_and_whenever_the_server_is_killed_the_report_is_right(data):
    """Nodes away in any round, one kill in any of them: what stays in the model is what the report says."""
    rounds, nodes, size = 5, 8, 4
    away = [data.draw(st.sets(st.integers(0, nodes - 1), max_size=3)) for _ in range(rounds)]
    killed = data.draw(st.none() | st.integers(1, rounds))
    pattern, mode = data.draw(st.sampled_from(("cyclic", "any"))), data.draw(st.sampled_from(MODES))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        grid = nodes_with_state(path, nodes)
        plan = replace(WITHOUT_NOISE, participants=size, pattern=pattern)
        plan = replace(plan, **REPAIRED) if mode == "repair" else plan
        current = [carried(plan, resume=path / "run", mode=mode)]
        due = killed

        def weather(message: Message) -> Message | None:
            nonlocal due
            record = message.content["niss"]
            if record["stage"] != "round":
                return message
            number = decode(record["body"]).terms.round + 1
            if number == due and len(openings(grid)) == number:
                due = None
                raise Killed
            return None if (message.metadata.dst_node_id - FIRST) in away[number - 1] else message

        grid.tamper = weather
        try:
            result = start(current[0], grid, rounds)
        except Killed:
            current.append(carried(plan, resume=path / "run", mode=mode))
            result = start(current[1], grid, rounds)
        strategy, asked = current[-1], cohorts(grid)
        assert set(asked) == set(range(1, rounds + 1))
        summed = {
            one.round: {node for node in asked[one.round] if str(FIRST + node) not in one.lost}
            for one in strategy.rounds
            if one.survivors
        }
        said = np.sqrt(sum(one**2 for one in stays(strategy.rounds)))
        left = np.sqrt(np.mean((values(result.arrays) - model_of(summed, size)) ** 2))
        # Sixteen coordinates: a factor of 5 either way has a probability of 1e-9.
        assert left < 1e-5 + 5.0 * said
        assert left > 0.2 * said - 1e-5
        for number in range(nodes):
            ledger = path / f"node-{number}" / "ledger.jsonl"
            taken = [one.basis["round"] for one in LedgerFile.read(ledger).entries] if ledger.exists() else []
            for before, after in pairwise(taken):
                assert after - before >= SEPARATION
                assert pattern == "any" or (after - before) % SEPARATION == 0


# With a tracker.


def test_with_a_tracker_that_is_restarted_and_a_server_that_is_killed(service: Service, tmp_path):  # noqa: F811
    grid = nodes_with_state(tmp_path, **{"niss-holder": service.holder})
    options = {"plan": WITHOUT_NOISE, "carry": True, "resume": tmp_path / "run"}
    first = service.strategy(**options)

    def killed(message: Message) -> Message:
        record = message.content["niss"]
        if record["stage"] == "round" and decode(record["body"]).terms.round == 1:
            service._processes.kill(service.process)
            service.start()
            raise Killed
        return message

    grid.tamper = killed
    with pytest.raises(Killed):
        start(first, grid)
    grid.tamper = lambda message: message
    second = service.strategy(**options)
    start(second, grid)
    assert [one.survivors for one in second.rounds] == [SIZE, 0, SIZE]
    assert set(cohorts(grid)) == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("save", range(SAVES))
def test_killed_at_any_save_with_a_tracker(service: Service, tmp_path, monkeypatch, save):  # noqa: F811
    grid = nodes_with_state(tmp_path, **{"niss-holder": service.holder})
    options = {"plan": WITHOUT_NOISE, "carry": True, "resume": tmp_path / "run"}
    seen, write = [], ServerFolder.write

    def dying(folder, state):
        if len(seen) == save:
            raise Killed
        write(folder, state)
        seen.append(state)

    monkeypatch.setattr(ServerFolder, "write", dying)
    with pytest.raises(Killed):
        start(service.strategy(**options), grid)
    monkeypatch.undo()
    again = service.strategy(**options)
    result = start(again, grid)
    lost = (
        None
        if not seen or seen[-1]["session"]["pending"] is None
        else seen[-1]["session"]["pending"]["round"]
    )
    assert [one.round for one in again.rounds if not one.survivors] == ([] if lost is None else [lost])
    if lost is None:
        np.testing.assert_allclose(values(result.arrays), model_of(cohorts(grid)), rtol=0, atol=1e-5)


# What a node does not agree to.


def proposed(plan: Plan = PRIVATE, **options) -> tuple[NissStrategy, FakeGrid, bytes]:
    strategy, grid = carried(plan, **options), FakeGrid(NODES)
    start(strategy, grid)
    (body,) = {one.content["niss"]["body"] for one in grid.sent if one.content["niss"]["stage"] == "enrol"}
    return strategy, grid, body


def changed(strategy: NissStrategy, body: bytes, **values) -> bytes:
    """The proposal with other values, signed again by its server."""
    text = json.dumps(json.loads(body[64:]) | values, sort_keys=True, separators=(",", ":")).encode()
    return strategy._identity.sign("flower proposal", text) + text


def test_the_schedule_travels_in_the_proposal():
    strategy, _, body = proposed()
    assert json.loads(body[64:])["schedule"]
    assert read_proposal(body) == strategy.session.proposal
    plain = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=Plan(clip=0.5, epsilon=8.0))
    text = json.loads(plain.session._proposed[64:])
    assert "schedule" not in text


@pytest.mark.parametrize(
    "name", ["residual_variance", "carried_variance", "unit_variance", "clip", "rounds", "participants"]
)
def test_a_schedule_that_does_not_keep_the_promise_is_declined(name):
    strategy, grid, body = proposed()
    schedule = json.loads(body[64:])["schedule"]
    weaker = 0 if isinstance(schedule[name], int) else 0.9 * schedule[name]
    with pytest.raises(RemoteProtocolError):
        Limits().check(
            read_proposal(changed(strategy, body, schedule={**schedule, name: weaker or schedule[name] + 1}))
        )
    Limits().check(read_proposal(body))
    del grid


def test_a_schedule_that_is_repaired_in_another_way_than_the_plan_says_is_declined():
    strategy, _, body = proposed(replace(PRIVATE, **REPAIRED), mode="repair")
    Limits().check(read_proposal(body))
    said = json.loads(body[64:])
    for values_of in (
        {"mode": "tolerate"},
        {"schedule": {**said["schedule"], "dropped": 0}},
        {
            "schedule": {
                **said["schedule"],
                "committee": 0,
                "threshold": 0,
                "self_variance": 0.0,
                "dropped": 0,
            }
        },
        {"plan": {**said["plan"], "dropped": 0}},
    ):
        with pytest.raises(RemoteProtocolError):
            Limits().check(read_proposal(changed(strategy, body, **values_of)))


def test_a_node_does_not_join_a_run_whose_committee_its_colluders_outvote():
    strategy, grid, body = proposed(replace(PRIVATE, **REPAIRED), mode="repair")
    said = json.loads(body[64:])
    weak = changed(strategy, body, schedule={**said["schedule"], "threshold": 1}, run="ab" * 16)
    (message,) = [one for one in grid.sent if one.content["niss"]["body"] == body][:1]
    message.content["niss"]["body"], message.content["niss"]["run"] = weak, bytes.fromhex("ab" * 16)
    (reply,) = grid.send_and_receive([message], timeout=1)
    assert b"threshold" in reply.content["niss-upload"]["body"].numpy().tobytes()


def test_a_node_has_no_room_for_a_second_run_but_for_all_of_the_first(tmp_path):
    grid = nodes_with_state(tmp_path)
    for context in grid.contexts.values():
        context.node_config |= {"niss-epsilon": 8.0, "niss-delta": 1e-5}
        del context.node_config["niss-uncalibrated"]
    first = carried(PRIVATE)
    start(first, grid)
    assert [one.survivors for one in first.rounds] == [SIZE] * ROUNDS
    with pytest.raises(ProtocolError, match="no round took place"):
        start(carried(PRIVATE), grid)


def test_what_a_node_keeps_between_its_rounds_is_erased_after_them():
    strategy, grid = carried(), FakeGrid(NODES)
    start(strategy, grid)
    for context in grid.contexts.values():
        with open_store(context, None) as store:
            assert json.loads(store.state.memory)["memory"]["current"] is None
