"""A server that is killed goes on where it was: at every save, in every stage, with the nodes' books as they are."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAdam, FedAvg

from flower.grid import (
    FIRST,
    PRIVATE,
    WITHOUT_NOISE,
    FakeGrid,
    Killed,
    arrays,
    global_model,
    model_after,
    values,
)
from niss.accounting import LedgerFile
from niss.errors import ConfigError, PrivacyError, ProtocolError, RunFolderError
from niss.flower import NissStrategy, niss_mod
from niss.flower.state import ServerFolder
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity

ROUNDS, NODES = 3, 5
# A save when the run begins and one with the first evaluation; three a round.
SAVES = 3 * ROUNDS + 1


def renumbered(grid: FakeGrid, by: int = 5000) -> FakeGrid:
    """The same nodes after the SuperLink was restarted: other ids, and Contexts without memory."""
    other = FakeGrid(0)
    other.contexts = {node + by: context for node, context in grid.contexts.items()}
    for context in other.contexts.values():
        context.state.clear()
    return other


def strategy(folder: Path, inner=None, plan=WITHOUT_NOISE, **options) -> NissStrategy:
    inner = FedAvg(fraction_evaluate=0.0) if inner is None else inner
    return NissStrategy(inner, plan=plan, resume=folder, report=folder.parent / "report.json", **options)


def evaluate(number, arrays):
    return MetricRecord({"number": number, "sum": float(values(arrays).sum())})


def start(one: NissStrategy, grid: FakeGrid):
    return one.start(grid, global_model(), num_rounds=ROUNDS, timeout=1, evaluate_fn=evaluate)


def charged_rounds(folder: Path) -> list[list[int]]:
    """By node, the rounds in its ledger, counted from 1."""
    ledgers = [folder / str(FIRST + number) / "ledger.jsonl" for number in range(NODES)]
    return [
        [entry.basis["round"] + 1 for entry in LedgerFile.read(one).entries] if one.exists() else []
        for one in ledgers
    ]


def rounds_taken(folder: Path) -> list[int]:
    report = json.loads((folder / "report.json").read_text())
    assert [one["round"] for one in report["rounds"]] == list(range(1, ROUNDS + 1))
    return [one["round"] for one in report["rounds"] if one["survivors"]]


def check(tmp_path: Path, result, lost: set[int]) -> None:
    """Everything is as in a run without a kill, but for the rounds in `lost`."""
    taken = rounds_taken(tmp_path)
    assert set(taken) == set(range(1, ROUNDS + 1)) - lost
    np.testing.assert_allclose(
        values(result.arrays),
        model_after(dict.fromkeys(taken, range(FIRST, FIRST + NODES))),
        rtol=0,
        atol=1e-5,
    )
    for node in charged_rounds(tmp_path):
        assert node == sorted(set(node)), "no round is charged twice"
        assert set(taken) <= set(node) <= set(taken) | lost
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(result.evaluate_metrics_serverapp) >= set(taken)
    assert report["metrics"]["server"][str(ROUNDS)]["number"] == ROUNDS
    assert len(report["members"]) == NODES
    # The account of the server covers what the nodes have in their books.
    assert report["clients"]["participations"] == [ROUNDS] * NODES


def die_at(save, monkeypatch, *, after):
    """Have the server killed at its save of that number, before or after it is written; returns what was saved."""
    seen, write = [], ServerFolder.write

    def dying(folder, state):
        if len(seen) == save and not after:
            raise Killed
        write(folder, state)
        seen.append(copy.deepcopy(state))
        if len(seen) == save + 1:
            raise Killed

    monkeypatch.setattr(ServerFolder, "write", dying)
    return seen


@pytest.mark.parametrize("save", range(SAVES))
def test_killed_at_any_save_the_run_goes_on_and_nothing_is_charged_twice(tmp_path, monkeypatch, save):
    """In every order of model, state, report and ledgers on disk; what the session does then is tested without them."""
    grid, seen = FakeGrid(NODES).keep_state(tmp_path), die_at(save, monkeypatch, after=save % 2 == 0)
    with pytest.raises(Killed):
        start(strategy(tmp_path / "run"), grid)
    monkeypatch.undo()
    opened = seen[-1].session.pending if seen else None
    result = start(strategy(tmp_path / "run"), renumbered(grid))
    check(tmp_path, result, set() if opened is None else {opened.round})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FedAdam, {"eta": 0.01}),
        (flower.FedYogi, {"eta": 0.01}),
        (flower.FedAvgM, {"server_learning_rate": 0.5, "server_momentum": 0.9}),
    ],
)
def test_the_moments_of_the_wrapped_strategy_go_on(tmp_path, kind, options):
    def inner():
        return kind(fraction_evaluate=0.0, **options)

    whole = start(strategy(tmp_path / "whole", inner()), FakeGrid(NODES))
    grid = FakeGrid(NODES).keep_state(tmp_path)
    _killed_between_rounds(strategy(tmp_path / "run", inner()), grid)
    resumed = start(strategy(tmp_path / "run", inner()), grid)
    np.testing.assert_allclose(values(resumed.arrays), values(whole.arrays), rtol=0, atol=2e-5)


def _killed_between_rounds(one: NissStrategy, grid: FakeGrid, after: int = 2, model=None) -> None:
    def dying(number, arrays):
        if number == after:
            raise Killed
        return evaluate(number, arrays)

    with pytest.raises(Killed):
        one.start(grid, model or global_model(), num_rounds=ROUNDS, timeout=1, evaluate_fn=dying)


def test_dtypes_and_whole_numbers_go_on(tmp_path):
    def model():
        return arrays(
            {
                "weight": np.zeros(4, dtype=np.float32),
                "half": np.zeros(2, dtype=np.float16),
                "counter": np.array(7, dtype=np.int64),
            }
        )

    app = ClientApp(mods=[niss_mod])

    @app.train()
    def train(message, _context):
        got = {name: array.numpy() for name, array in message.content["arrays"].items()}
        assert [one.dtype for one in got.values()] == [array.numpy().dtype for array in model().values()]
        moved = {name: np.asarray(one + one.dtype.type(0.25)) for name, one in got.items()}
        return Message(RecordDict({"arrays": arrays(moved), "metrics": MetricRecord()}), reply_to=message)

    def inner():
        return flower.FedAvgM(fraction_evaluate=0.0, server_momentum=0.5)

    grid = FakeGrid(NODES, app=app).keep_state(tmp_path)
    _killed_between_rounds(strategy(tmp_path / "run", inner()), grid, model=model())
    result = strategy(tmp_path / "run", inner()).start(grid, model(), num_rounds=ROUNDS, timeout=1).arrays
    assert [(name, array.numpy().dtype) for name, array in result.items()] == [
        (name, array.numpy().dtype) for name, array in model().items()
    ]
    assert result["counter"].numpy() == 7
    # Steps of 0.25, and half of the step before: 0.25, 0.375 and 0.4375.
    np.testing.assert_allclose(result["weight"].numpy(), 1.0625, rtol=0, atol=1e-5)


def test_a_run_whose_only_round_was_lost_says_so(tmp_path):
    grid = FakeGrid(NODES).keep_state(tmp_path)
    with grid.killing(1):
        strategy(tmp_path / "run").start(grid, global_model(), num_rounds=1, timeout=1)
    with pytest.raises(ProtocolError, match="no round took place: the server ended while it was open"):
        strategy(tmp_path / "run").start(renumbered(grid), global_model(), num_rounds=1, timeout=1)


def test_a_strategy_of_somebody_elses_is_warned_about(tmp_path, caplog):
    class Mine(FedAvg):
        pass

    start(strategy(tmp_path / "run", Mine(fraction_evaluate=0.0)), FakeGrid(NODES))
    assert "of what Mine carries from round to round" in caplog.text


def test_the_report_is_there_after_every_round(tmp_path):
    seen = []

    def look(number, _arrays):
        path = tmp_path / "report.json"
        seen.append(len(json.loads(path.read_text())["rounds"]) if path.exists() else 0)
        return MetricRecord({"number": number})

    one = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=PRIVATE, report=tmp_path / "report.json")
    one.start(FakeGrid(NODES), global_model(), num_rounds=ROUNDS, timeout=1, evaluate_fn=look)
    assert seen == [0, 1, 2, 3]


def test_the_budgets_of_a_resumed_run_are_those_of_one_run(tmp_path):
    grid = FakeGrid(NODES).keep_state(tmp_path)
    del grid.contexts[FIRST].node_config["niss-uncalibrated"]
    _killed_between_rounds(strategy(tmp_path / "run", plan=PRIVATE), grid)
    again = strategy(tmp_path / "run", plan=PRIVATE)
    start(again, renumbered(grid))
    assert [one.survivors for one in again.rounds] == [NODES] * ROUNDS
    assert charged_rounds(tmp_path) == [[1, 2, 3]] * NODES
    assert again.statement.clients[0].epsilon_joint <= PRIVATE.epsilon * (1 + 1e-6)
    assert any(
        "Times that the server ended and the run went on: 1." in one for one in again.statement.caveats
    )


def test_a_finished_run_is_not_run_again(tmp_path):
    grid = FakeGrid(NODES).keep_state(tmp_path)
    first = start(strategy(tmp_path / "run"), grid)
    sent = len(grid.sent)
    second = start(strategy(tmp_path / "run"), grid)
    assert len(grid.sent) == sent
    np.testing.assert_array_equal(values(second.arrays), values(first.arrays))
    assert second.train_metrics_clientapp.keys() == {1, 2, 3}


def test_secrets_are_for_the_owner_alone_and_old_models_are_removed(tmp_path):
    start(strategy(tmp_path / "run"), FakeGrid(NODES).keep_state(tmp_path))
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["arrays-3.npz", "state.json"]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()} == {0o600}
    (tmp_path / "run").chmod(0o750)
    with pytest.raises(PrivacyError, match="have rights"):
        strategy(tmp_path / "run")


def test_a_key_file_is_not_copied_and_must_be_given_again(tmp_path):
    key = tmp_path / "server.key"
    secret = create_keyfile(key, Identity.generate(os.urandom)).secret_bytes()
    grid = FakeGrid(NODES).keep_state(tmp_path)
    _killed_between_rounds(strategy(tmp_path / "run", key=key), grid)
    assert secret.hex() not in (tmp_path / "run" / "state.json").read_text()
    with pytest.raises(ConfigError, match="other settings: server"):
        start(strategy(tmp_path / "run"), grid)
    check(tmp_path, start(strategy(tmp_path / "run", key=key), grid), set())


def test_other_settings_and_another_number_of_rounds_are_refused(tmp_path):
    grid = FakeGrid(NODES).keep_state(tmp_path)
    _killed_between_rounds(strategy(tmp_path / "run"), grid)
    sent = len(grid.sent)
    with pytest.raises(ConfigError, match="other settings: plan"):
        start(strategy(tmp_path / "run", plan=replace(WITHOUT_NOISE, clip=1.0)), grid)
    with pytest.raises(ConfigError, match="one of 3 rounds, not 4"):
        strategy(tmp_path / "run").start(grid, global_model(), num_rounds=4, timeout=1)
    assert len(grid.sent) == sent


def test_participations_that_followed_the_nodes_stay_as_they_were(tmp_path):
    """With fewer nodes a strategy asks each of them more often; what was promised is not planned anew."""
    plan = replace(PRIVATE, participations="planned")

    def sampling():
        return FedAvg(fraction_train=0.04, min_train_nodes=4, min_available_nodes=4, fraction_evaluate=0.0)

    grid = FakeGrid(100)
    first = strategy(tmp_path / "run", sampling(), plan)
    _killed_between_rounds(first, grid)
    promised = first.plan.participations
    assert promised < ROUNDS
    for node in list(grid.contexts)[6:]:
        del grid.contexts[node]
    second = strategy(tmp_path / "run", sampling(), plan)
    start(second, grid)
    assert second.plan.participations == promised
    assert len(second.rounds) == ROUNDS


def test_damage_is_said_without_showing_what_is_in_the_file(tmp_path):
    start(strategy(tmp_path / "run"), FakeGrid(NODES).keep_state(tmp_path))
    path = tmp_path / "run" / "state.json"
    whole = path.read_text()
    path.write_text(whole[:-20])
    with pytest.raises(RunFolderError, match="damaged"):
        strategy(tmp_path / "run")
    path.write_text(whole)
    (tmp_path / "run" / "arrays-3.npz").write_bytes(b"PK")
    with pytest.raises(RunFolderError, match="damaged"):
        start(strategy(tmp_path / "run"), FakeGrid(NODES))


def test_two_servers_do_not_go_on_with_one_run(tmp_path):
    second = strategy(tmp_path / "run")

    def meanwhile(_number, _arrays):
        start(second, FakeGrid(NODES))

    with pytest.raises(ConfigError, match="another server"):
        strategy(tmp_path / "run").start(
            FakeGrid(NODES), global_model(), num_rounds=ROUNDS, timeout=1, evaluate_fn=meanwhile
        )
