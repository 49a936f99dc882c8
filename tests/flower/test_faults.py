"""What goes wrong in a run: it goes on with the others, the sum stays right, and the statement says what happened."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from flower.grid import (
    ODD,
    WITHOUT_NOISE,
    FakeGrid,
    global_model,
    make_app,
    model_after,
    survivors,
    values,
    with_body,
)
from niss.flower import NissStrategy

NODES = 8
REPAIRED = replace(WITHOUT_NOISE, neighbours=4, mode="repair")


def run(grid: FakeGrid, strategy: NissStrategy, rounds: int = 3) -> np.ndarray:
    return values(strategy.start(grid, global_model(), num_rounds=rounds, timeout=1).arrays)


def repairing() -> NissStrategy:
    return NissStrategy(FedAvg(fraction_evaluate=0.0), plan=REPAIRED)


def number_of(message: Message) -> object:
    return message.content["config"]["server-round"]


def check_goes_on(grid: FakeGrid, strategy: NissStrategy, lost_in: int, until: int) -> None:
    """Everyone is in the sum but the odd one, which misses the rounds from `lost_in` to before `until`."""
    present = {
        number: set(grid.contexts) - ({ODD} if lost_in <= number < until else set()) for number in range(1, 4)
    }
    np.testing.assert_allclose(run(grid, strategy), model_after(present), rtol=0, atol=1e-5)
    assert survivors(strategy) == [len(nodes) for nodes in present.values()]
    assert all(one.exact for one in strategy.rounds)


def test_a_node_killed_before_its_upload_is_repaired():
    grid, strategy = FakeGrid(NODES), repairing()

    def kill(message: Message) -> None:
        if number_of(message) == 2:
            grid.dead.add(ODD)

    grid.on_request("round", kill, node=None)
    check_goes_on(grid, strategy, lost_in=2, until=4)
    assert strategy.rounds[1].lost == {str(ODD): "Node unavailable"}
    assert strategy.rounds[2].participants == NODES - 1, "a node that is gone is not asked again"
    assert any("Uploads lost or declined: 1;" in caveat for caveat in strategy.statement.caveats)


def test_a_node_that_never_joins_is_left_out_after_two_tries():
    grid, strategy = FakeGrid(NODES), repairing()
    grid.silent.add(ODD)
    check_goes_on(grid, strategy, lost_in=1, until=4)
    asked = [one for one in grid.sent if one.metadata.dst_node_id == ODD]
    assert len(asked) == 2
    assert any(f"Node {ODD} was left out: did not join" in caveat for caveat in strategy.statement.caveats)


def test_a_stale_context_fails_closed():
    """The Context is saved after the reply has left: a crash in between brings the old one back."""
    grid, strategy = FakeGrid(NODES), repairing()
    before: dict[str, RecordDict] = {}

    def restore(message: Message) -> None:
        if number_of(message) == 1:
            before["state"] = copy.deepcopy(grid.contexts[ODD].state)
        if number_of(message) == 2:
            grid.contexts[ODD].state = before["state"]

    grid.on_request("round", restore)
    check_goes_on(grid, strategy, lost_in=2, until=4)
    assert "state is at step 1" in strategy.rounds[1].lost[str(ODD)]
    assert any("left out: declined: this client's state" in caveat for caveat in strategy.statement.caveats)


# Somewhere in the vector.
_corrupted = with_body(lambda body: body[:60] + bytes([body[60] ^ 1]) + body[61:])


def _bare(reply: Message) -> None:
    reply.content = RecordDict({"arrays": global_model(), "metrics": MetricRecord({"num-examples": 1})})


@pytest.mark.parametrize(("spoil", "why"), [(_corrupted, "signature"), (_bare, "without NISS")])
def test_a_reply_that_is_not_what_the_node_sent_is_not_summed(spoil, why):
    grid, strategy = FakeGrid(NODES), repairing()

    def second(reply: Message) -> None:
        if number_of(grid.sent[-1]) == 2:
            spoil(reply)

    grid.on_reply("round", second)
    check_goes_on(grid, strategy, lost_in=2, until=3)
    assert why in strategy.rounds[1].lost[str(ODD)]


def test_a_node_without_the_mod_is_left_out():
    grid, strategy = FakeGrid(NODES), repairing()
    grid.apps[ODD] = make_app(mods=[])
    check_goes_on(grid, strategy, lost_in=1, until=4)


def test_a_node_that_comes_later_is_enrolled_then():
    grid, strategy = FakeGrid(NODES), repairing()
    late = grid.contexts.pop(ODD)

    def arrive(message: Message) -> None:
        if number_of(message) == 1:
            grid.contexts[ODD] = late

    grid.on_request("round", arrive, node=None)
    run(grid, strategy)
    assert survivors(strategy) == [NODES - 1, NODES, NODES]
