"""What goes wrong in a run: it goes on with the others, the sum stays right, and the statement says what happened."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flower.grid import FIRST, FakeGrid, global_model, make_app, step_of
from niss.accounting import Plan
from niss.errors import ProtocolError, RemoteProtocolError
from niss.flower import NissStrategy, niss_mod
from niss.protocol.wire import decode
from niss.session.requests import Stage

NODES = 8
ODD = FIRST + 3
REPAIRED = Plan(tau2=0.0, clip=5.0, participations=3, neighbours=4, dropped=1, revealed=2)
TOLERATED = Plan(clip=0.5, epsilon=8.0, participations=3, neighbours=3, kappa=2.0)


def run(grid: FakeGrid, strategy: NissStrategy, rounds: int = 3) -> np.ndarray:
    result = strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)
    return np.concatenate([array.numpy().ravel() for array in result.arrays.values()])


def expected(present: list[set[int]]) -> np.ndarray:
    """The weights after rounds in which these nodes were summed."""
    weights = {name: array.numpy().astype(np.float64) for name, array in global_model().items()}
    for number, nodes in enumerate(present, start=1):
        for name in weights:
            weights[name] = weights[name] + np.mean([step_of(node, number)[name] for node in nodes], axis=0)
    return np.concatenate([part.ravel() for part in weights.values()])


def everyone(grid: FakeGrid) -> set[int]:
    return set(grid.contexts)


def repairing() -> NissStrategy:
    return NissStrategy(FedAvg(fraction_evaluate=0.0), plan=REPAIRED, mode="repair")


def is_round(message: Message, number: int) -> bool:
    return (
        message.content["niss"]["stage"] == Stage.ROUND
        and message.content["config"]["server-round"] == number
    )


def check_goes_on(grid: FakeGrid, strategy: NissStrategy, lost_in: int, until: int) -> None:
    """Everyone is in the sum but the odd one, which misses the rounds from `lost_in` to before `until`."""
    present = [everyone(grid) - ({ODD} if lost_in <= number < until else set()) for number in range(1, 4)]
    np.testing.assert_allclose(run(grid, strategy), expected(present), rtol=0, atol=1e-5)
    assert [one.survivors for one in strategy.rounds] == [len(nodes) for nodes in present]
    assert all(one.exact for one in strategy.rounds)


def test_a_node_killed_before_its_upload_is_repaired():
    grid, strategy = FakeGrid(NODES), repairing()

    def kill(message: Message) -> Message:
        if is_round(message, 2):
            grid.dead.add(ODD)
        return message

    grid.tamper = kill
    check_goes_on(grid, strategy, lost_in=2, until=4)
    assert strategy.rounds[1].lost == {str(ODD): "Node unavailable"}
    assert strategy.rounds[2].participants == NODES - 1, "a node that is gone is not asked again"
    assert any("Uploads lost or declined: 1;" in caveat for caveat in strategy.statement.caveats)


def test_a_node_that_never_answers_is_repaired_in_each_round():
    grid, strategy = FakeGrid(NODES), repairing()
    grid.tamper = lambda message: (
        None
        if message.metadata.dst_node_id == ODD and message.content["niss"]["stage"] != "enrol"
        else message
    )
    check_goes_on(grid, strategy, lost_in=1, until=4)
    assert [one.lost for one in strategy.rounds] == [{str(ODD): "no answer in time"}] * 3


def test_a_node_that_never_joins_is_left_out_after_two_tries():
    grid, strategy = FakeGrid(NODES), repairing()
    grid.silent.add(ODD)
    check_goes_on(grid, strategy, lost_in=1, until=4)
    asked = [one for one in grid.sent if one.metadata.dst_node_id == ODD]
    assert len(asked) == 2
    assert any(f"Node {ODD} was left out: did not join" in caveat for caveat in strategy.statement.caveats)


def test_dropouts_that_are_tolerated_leave_the_noise_that_is_reported():
    grid = FakeGrid(NODES)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=TOLERATED)
    grid.tamper = lambda message: (
        None if message.metadata.dst_node_id == ODD and is_round_of(message) else message
    )
    run(grid, strategy, rounds=1)
    report = strategy.rounds[0]
    assert not report.exact
    assert 0 < report.uncancelled <= 6
    assert report.survivors == NODES - 1
    assert any("noise was left uncancelled: 1." in caveat for caveat in strategy.statement.caveats)


def is_round_of(message: Message) -> bool:
    return message.content["niss"]["stage"] == Stage.ROUND


def test_a_stale_context_fails_closed():
    """The Context is saved after the reply has left: a crash in between brings the old one back."""
    grid, strategy = FakeGrid(NODES), repairing()
    before: dict[str, RecordDict] = {}

    def restore(message: Message) -> Message:
        if message.metadata.dst_node_id == ODD:
            if is_round(message, 1):
                before["state"] = copy.deepcopy(grid.contexts[ODD].state)
            if is_round(message, 2):
                grid.contexts[ODD].state = before["state"]
        return message

    grid.tamper = restore
    check_goes_on(grid, strategy, lost_in=2, until=4)
    assert "state is at step 1" in strategy.rounds[1].lost[str(ODD)]
    assert any("left out: declined: this client's state" in caveat for caveat in strategy.statement.caveats)


def test_a_corrupted_reply_is_not_summed():
    grid, strategy = FakeGrid(NODES), repairing()

    def corrupt(reply: Message) -> Message:
        sent = next(one for one in grid.sent if one.metadata.message_id == reply.metadata.reply_to_message_id)
        if sent.metadata.dst_node_id == ODD and is_round_of(sent) and is_round(sent, 2):
            body = reply.content["niss-upload"]["body"].numpy().copy()
            body[60] ^= 1  # Somewhere in the vector.
            reply.content["niss-upload"] = ArrayRecord({"body": Array(body)})
        return reply

    grid.mangle = corrupt
    check_goes_on(grid, strategy, lost_in=2, until=3)
    assert "signature" in strategy.rounds[1].lost[str(ODD)]


def test_a_reply_of_something_else_is_not_summed():
    grid, strategy = FakeGrid(NODES), repairing()

    def replace_it(reply: Message) -> Message:
        sent = next(one for one in grid.sent if one.metadata.message_id == reply.metadata.reply_to_message_id)
        if sent.metadata.dst_node_id == ODD and is_round_of(sent) and is_round(sent, 2):
            reply.content = RecordDict(
                {"arrays": global_model(), "metrics": MetricRecord({"num-examples": 1})}
            )
        return reply

    grid.mangle = replace_it
    check_goes_on(grid, strategy, lost_in=2, until=3)
    assert "without NISS" in strategy.rounds[1].lost[str(ODD)]


def test_a_node_without_the_mod_is_left_out():
    grid, strategy = FakeGrid(NODES), repairing()
    grid.apps[ODD] = make_app(mods=[])
    check_goes_on(grid, strategy, lost_in=1, until=4)


def test_a_client_with_the_mod_never_trains_in_the_clear():
    grid = FakeGrid(NODES)
    plain = FedAvg(fraction_evaluate=0.0)
    result = plain.start(grid, global_model(), num_rounds=1, timeout=1)
    assert not result.arrays
    assert all("NISS rounds only" in reply.error.reason for reply in grid.received)


def test_weights_that_are_not_finite_become_an_update_of_zero():
    grid, strategy = FakeGrid(NODES), repairing()
    grid.apps[ODD] = _diverging()
    weights = run(grid, strategy, rounds=1)
    start = expected([])
    others = everyone(grid) - {ODD}
    wanted = start + (expected([others]) - start) * (NODES - 1) / NODES
    np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-5)


def test_an_exception_in_training_becomes_an_update_of_zero():
    grid, strategy = FakeGrid(NODES), repairing()
    grid.apps[ODD] = _failing()
    weights = run(grid, strategy, rounds=1)
    start, others = expected([]), everyone(grid) - {ODD}
    wanted = start + (expected([others]) - start) * (NODES - 1) / NODES
    np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-5)
    assert strategy.rounds[0].lost == {}


def test_a_node_lost_during_the_repair_does_not_spoil_it():
    grid, strategy = FakeGrid(NODES), repairing()
    gone = FIRST + 5

    def lose(message: Message) -> Message | None:
        node, now = message.metadata.dst_node_id, message.content["niss"]["stage"]
        lost = (node == ODD and now == Stage.ROUND) or (node == gone and now == Stage.REVEAL)
        return None if lost else message

    grid.tamper = lose
    run(grid, strategy, rounds=1)
    report = strategy.rounds[0]
    assert report.survivors == NODES - 1
    assert set(report.lost) == {str(ODD)}
    assert any(str(gone) in problem for problem in report.problems)


def test_rounds_that_lose_more_than_planned_cost_no_member_its_place():
    """Members would have to decline, and whoever declines twice is left out; so they are not asked."""
    grid, strategy = FakeGrid(NODES), repairing()
    gone = {FIRST + number for number in range(REPAIRED.dropped + 1)}

    def lose(message: Message) -> Message | None:
        early = is_round_of(message) and not is_round(message, 3)
        return None if early and message.metadata.dst_node_id in gone else message

    grid.tamper = lose
    run(grid, strategy)
    left = NODES - len(gone)
    assert [one.survivors for one in strategy.rounds] == [left, left, NODES]
    assert [one.masked for one in strategy.rounds] == [left, left, 0]
    assert not strategy.session.members.left_out


def test_too_few_nodes_skip_the_round_and_the_statement_says_so():
    grid = FakeGrid(NODES)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=REPAIRED, mode="repair", participants=9)
    with pytest.raises(ProtocolError, match="8 nodes could take part, at least 9 are needed"):
        strategy.start(grid, global_model(), num_rounds=2, timeout=1)
    assert all(one.skipped == "8 nodes could take part, at least 9 are needed" for one in strategy.rounds)
    assert any("Rounds that were skipped: 2;" in caveat for caveat in strategy.statement.caveats)


def test_a_node_that_comes_later_is_enrolled_then():
    grid, strategy = FakeGrid(NODES), repairing()
    late = grid.contexts.pop(ODD)

    def arrive(message: Message) -> Message:
        if is_round_of(message) and is_round(message, 1):
            grid.contexts[ODD] = late
        return message

    grid.tamper = arrive
    run(grid, strategy)
    assert [one.survivors for one in strategy.rounds] == [NODES - 1, NODES, NODES]


def _diverging() -> ClientApp:
    app = ClientApp(mods=[niss_mod])

    @app.train()
    def train(message, context):  # noqa: ARG001
        worse = {
            name: Array(array.numpy() * np.float32(np.inf))
            for name, array in message.content["arrays"].items()
        }
        return Message(RecordDict({"arrays": ArrayRecord(worse)}), reply_to=message)

    return app


def _failing() -> ClientApp:
    app = ClientApp(mods=[niss_mod])

    @app.train()
    def train(message, context):  # noqa: ARG001
        raise MemoryError("out of memory")

    return app


def test_an_unlucky_graph_is_drawn_again_before_anyone_is_asked():
    """The noise is set before the graph is known; too little of it, and every client would decline."""
    grid = FakeGrid(NODES)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=TOLERATED)
    session, seen = strategy.session, []
    honest = session.books.assess

    def unlucky_once(agreed, colluders):
        seen.append(agreed.terms)
        return 2.0 * session.proposal.round_mu if len(seen) == 1 else honest(agreed, colluders)

    session.books.assess = unlucky_once
    config = ConfigRecord()
    messages = strategy.configure_train(1, global_model(), config, grid)
    strategy.aggregate_train(1, grid.send_and_receive(messages, timeout=1))
    assert list(dict.fromkeys(terms.attempt for terms in seen)) == [0, 1]
    assert seen[1].residual_variance == pytest.approx(4.4 * seen[0].residual_variance)
    assert strategy.rounds[0].survivors == NODES
    keys = [decode(message.content["niss"]["body"]).participants[0].prekey.number for message in messages]
    assert set(keys) == {0}, "the keys of an attempt that nobody was told of are not used up"


def test_a_plan_no_graph_keeps_skips_the_round():
    grid = FakeGrid(NODES)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=TOLERATED)
    strategy.session.books.assess = lambda _agreed, _colluders: np.inf
    assert strategy.configure_train(1, global_model(), ConfigRecord(), grid) == []
    assert strategy.rounds[0].skipped.startswith("none of 3 graphs keeps the promise for every client")


def test_a_graph_nobody_would_repair_on_is_drawn_again():
    grid = FakeGrid(NODES)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=TOLERATED)
    seen, honest = [], strategy.session.books.assess

    def refused_once(agreed, colluders):
        seen.append(agreed.terms)
        if len(seen) == 1:
            raise RemoteProtocolError("a client has a single neighbour")
        return honest(agreed, colluders)

    strategy.session.books.assess = refused_once
    assert strategy.configure_train(1, global_model(), ConfigRecord(), grid)
    assert list(dict.fromkeys(terms.attempt for terms in seen)) == [0, 1]
    assert seen[1].residual_variance == seen[0].residual_variance
