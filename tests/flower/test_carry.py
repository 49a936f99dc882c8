"""Noise that is carried from round to round, on Flower: cohorts that take turns, nodes that do not come, resuming."""

from __future__ import annotations

import copy
import signal
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAdam, FedAvg

from flower.grid import (
    FIRST,
    FakeGrid,
    Killed,
    global_model,
    make_app,
    model_after,
    survivors,
    values,
)
from flower.test_tracker import Service, one_service, service  # noqa: F401
from niss.accounting import Plan
from niss.errors import ConfigError, PrivacyError, ProtocolError
from niss.flower import NissMod, NissStrategy
from niss.flower.state import ServerFolder
from niss.protocol.messages import decode
from niss.session.metrics import NOISE
from session.scene import stays

ROUNDS, NODES, SEPARATION = 3, 6, 2
SIZE = NODES // SEPARATION
WITHOUT_NOISE = Plan(tau2=0.0, clip=5.0, separation=SEPARATION)
PRIVATE = Plan(clip=0.5, epsilon=8.0, separation=SEPARATION)


def carried(plan: Plan = WITHOUT_NOISE, inner=None, **options) -> NissStrategy:
    inner = FedAvg(fraction_evaluate=0.0) if inner is None else inner
    return NissStrategy(inner, plan=plan, carry=True, **options)


def start(strategy: NissStrategy, grid: FakeGrid, rounds: int = ROUNDS):
    return strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)


def cohorts(grid: FakeGrid) -> dict[int, set[int]]:
    """By round, counted from 1, who was asked; every round was opened in one way alone."""
    sent: dict[bytes, set[int]] = {}
    for message in grid.sent:
        record = message.content["niss"]
        if record["stage"] == "round":
            sent.setdefault(record["body"], set()).add(message.metadata.dst_node_id)
    by_round = {decode(body).terms.round + 1: nodes for body, nodes in sent.items()}
    assert len(by_round) == len(sent), "a round was opened in two ways"
    return by_round


def test_one_message_a_round_and_one_a_run():
    grid = FakeGrid(NODES)
    start(carried(), grid)
    assert len(grid.sent) == NODES + ROUNDS * SIZE


def test_the_statement_covers_the_whole_run_and_the_nodes_books_agree(tmp_path):
    strategy, grid = carried(PRIVATE), FakeGrid(NODES).keep_state(tmp_path)
    for context in grid.contexts.values():
        del context.node_config["niss-uncalibrated"]
    start(strategy, grid, rounds=6)
    statement = strategy.statement
    assert "over a run of 6 committed rounds as a whole" in statement.words + str(statement.to_json())
    worst = max(one.epsilon_joint for one in statement.clients)
    assert worst == pytest.approx(PRIVATE.epsilon, rel=0.05)
    assert worst <= PRIVATE.epsilon
    for number, client in enumerate(statement.clients):
        ledger = grid.ledger(FIRST + number)
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


def test_too_few_nodes_are_said_with_what_to_do():
    with pytest.raises(ProtocolError, match="need 8 nodes, and 6 are there; plan rounds of at most 3"):
        start(carried(replace(WITHOUT_NOISE, participants=4)), FakeGrid(NODES))
    with pytest.raises(ConfigError, match="make rounds of 1, too few"):
        start(carried(), FakeGrid(3))


def test_settings_that_cannot_be_are_refused_at_once():
    inner = FedAvg(fraction_evaluate=0.0)
    with pytest.raises(ConfigError, match="gain nothing"):
        NissStrategy(inner, plan=replace(PRIVATE, separation=1), carry=True)
    with pytest.raises(PrivacyError, match="a repair needs 3 of 3 participants"):
        carried(replace(PRIVATE, mode="repair", collusion=0.3), participants=3)
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


# One when the run begins; each round as it is announced (two at first), opened and summed.
SAVES = 1 + (2 + 2) + (1 + 2) + 2


# With a tracker.


def test_with_a_tracker_that_is_restarted_and_a_server_that_is_killed(service: Service, tmp_path):  # noqa: F811
    grid = service.grid(NODES).keep_state(tmp_path)
    options = {"plan": WITHOUT_NOISE, "carry": True, "resume": tmp_path / "run"}
    first = service.strategy(**options)

    def killed(message: Message) -> None:
        if decode(message.content["niss"]["body"]).terms.round == 1:
            service.restart(signal.SIGKILL)
            raise Killed

    grid.on_request("round", killed, node=None)
    with pytest.raises(Killed):
        start(first, grid)
    grid.tamper = lambda message: message
    second = service.strategy(**options)
    start(second, grid)
    assert survivors(second) == [SIZE, 0, SIZE]
    assert set(cohorts(grid)) == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("save", range(SAVES))
def test_killed_at_any_save_with_a_tracker(service: Service, tmp_path, monkeypatch, save):  # noqa: F811
    grid = service.grid(NODES).keep_state(tmp_path)
    options = {"plan": WITHOUT_NOISE, "carry": True, "resume": tmp_path / "run"}
    seen, write = [], ServerFolder.write

    def dying(folder, state):
        if len(seen) == save:
            raise Killed
        write(folder, state)
        seen.append(copy.deepcopy(state))

    monkeypatch.setattr(ServerFolder, "write", dying)
    with pytest.raises(Killed):
        start(service.strategy(**options), grid)
    monkeypatch.undo()
    again = service.strategy(**options)
    result = start(again, grid)
    pending = seen[-1].session.pending if seen else None
    assert [one.round for one in again.rounds if not one.survivors] == (
        [] if pending is None else [pending.round]
    )
    if pending is None:
        np.testing.assert_allclose(values(result.arrays), model_after(cohorts(grid), SIZE), rtol=0, atol=1e-5)


def test_a_node_has_no_room_for_a_second_run_but_for_all_of_the_first(tmp_path):
    grid = FakeGrid(NODES).keep_state(tmp_path)
    for context in grid.contexts.values():
        context.node_config |= {"niss-epsilon": 8.0, "niss-delta": 1e-5}
        del context.node_config["niss-uncalibrated"]
    first = carried(PRIVATE)
    start(first, grid)
    assert survivors(first) == [SIZE] * ROUNDS
    with pytest.raises(ProtocolError, match="no round took place"):
        start(carried(PRIVATE), grid)
