"""Several versions of niss in one federation: the older side is told what to do, before anything is charged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flower.grid import FIRST, NODES, ODD, PLAN, FakeGrid, global_model, make_app, start, survivors, with_body
from niss.errors import ProtocolError
from niss.flower import NissStrategy, niss_mod
from niss.protocol import messages as wire
from niss.session import limits, node, proposal
from niss.version import __version__


def speaking(module: Any, name: str, version: int) -> ClientApp:
    """A node whose niss has another version of something."""

    def mod(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, version)
            node._read.cache_clear()  # What other nodes of this process have read.
            return niss_mod(message, context, call_next)

    return make_app([mod])


def test_an_older_node_says_that_it_must_be_upgraded_and_pays_nothing(tmp_path):
    grid = FakeGrid(NODES).keep_state(tmp_path)
    grid.apps[ODD] = speaking(proposal, "VERSION", 0)
    strategy = start(grid)
    why = strategy.session.members.left_out[ODD]
    assert f"the proposal has version {proposal.VERSION}" in why
    assert f"this node (niss {__version__}) reads 0: upgrade niss on this node" in why
    assert survivors(strategy) == [NODES - 1] * 2
    assert not (grid.home() / "ledger.jsonl").exists()
    assert (grid.home(FIRST) / "ledger.jsonl").exists()


def test_an_older_server_is_told_so_by_every_node(tmp_path):
    grid = FakeGrid(NODES).keep_state(tmp_path)
    grid.apps = dict.fromkeys(grid.contexts, speaking(proposal, "VERSION", proposal.VERSION + 1))
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=PLAN)
    with pytest.raises(ProtocolError, match=r"has version 1, .* reads 2: upgrade niss on the server"):
        strategy.start(grid, global_model(), num_rounds=2, timeout=1)
    assert not list(tmp_path.rglob("ledger.jsonl"))


@pytest.mark.parametrize(("speaks", "older"), [(0, "this node"), (3, "the server")])
def test_a_node_that_could_not_read_the_rounds_does_not_join(tmp_path, speaks, older):
    """The proposal says which version the messages of its rounds have: nobody is seated only to be lost."""
    grid = FakeGrid(NODES).keep_state(tmp_path)
    grid.apps[ODD] = speaking(limits, "WIRE_VERSION", speaks)
    strategy = start(grid)
    why = strategy.session.members.left_out[ODD]
    assert f"the wire format has version {wire.VERSION}" in why
    assert why.endswith(f"reads {speaks}: upgrade niss on {older}")
    assert [one.participants for one in strategy.rounds] == [NODES - 1] * 2
    assert all(one.exact for one in strategy.rounds)
    assert not (grid.home() / "ledger.jsonl").exists()


def test_a_newer_node_is_left_out_with_what_to_do():
    grid = FakeGrid(NODES)
    newer = with_body(lambda body: body.replace(b"niss enrolment/1", b"niss enrolment/2", 1))
    grid.on_reply("enrol", newer)
    strategy = start(grid)
    assert "the enrolment has version 2" in strategy.session.members.left_out[ODD]
    assert strategy.session.members.left_out[ODD].endswith("reads 1: upgrade niss on the server")
    assert survivors(strategy) == [NODES - 1] * 2


def test_a_stage_that_a_node_does_not_know():
    grid = FakeGrid(NODES)
    grid.on_request("enrol", lambda message: message.content["niss"].update(stage="negotiate"))
    why = start(grid).session.members.left_out[ODD]
    assert f"niss {__version__} on this node does not know: upgrade it" in why
