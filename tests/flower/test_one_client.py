"""One client must not end the run: not with keys nobody can use, and not by making the others decline."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Message

from flower.grid import ODD, PLAN, FakeGrid, start, survivors, with_body
from flower.test_trust import write_coalition
from niss.protocol.messages import Reveal, decode, encode, signed_part
from niss.session.members import SPOILED
from niss.session.proposal import Enrolment, read_proposal
from niss.session.server import LIED
from session.test_keys import ORDER_8, degenerate

NODES = 8
PLAN = replace(PLAN, participations=6, neighbours=NODES - 1)


@pytest.mark.parametrize("public", [0, ORDER_8])
def test_a_degenerate_key_at_enrolment_costs_nobody_else_anything(tmp_path: Path, public: int) -> None:
    """Before, every neighbour declined and was left out for good: no round of the run took place."""
    grid = FakeGrid(NODES).keep_state(tmp_path)

    def forged(body: bytes) -> bytes:
        proposal, honest = read_proposal(grid.sent[0].content["niss"]["body"]), Enrolment.from_bytes(body)
        bad = replace(honest, prekeys=(degenerate(grid.identity(), public), *honest.prekeys[1:]))
        return bad.signed(grid.identity(), proposal).to_bytes()

    grid.on_reply("enrol", with_body(forged))
    strategy = start(grid, plan=PLAN)
    assert survivors(strategy) == [NODES - 1, NODES - 1]
    assert "degenerate" in strategy.session.members.left_out[ODD]
    assert set(strategy.session.members.left_out) == {ODD}


def test_whoever_all_others_decline_because_of_is_left_out_not_they(tmp_path: Path) -> None:
    """The others do not trust the odd one, and the server does not know: all of them decline the first round.

    The relay is the server itself: it signs what it likes, but it cannot be somebody it is not.
    """
    grid = FakeGrid(NODES).keep_state(tmp_path)
    trusted = write_coalition(tmp_path / "trusted.toml", grid)
    for node in grid.contexts.keys() - {ODD}:
        grid.contexts[node].node_config["niss-coalition"] = trusted
    strategy = start(grid, rounds=4, plan=PLAN)
    lost = strategy.rounds[0].lost
    assert set(lost) == {str(node) for node in grid.contexts.keys() - {ODD}}
    assert all("not among the identities this client trusts" in why for why in lost.values())
    # Nor is the one upload of the first round passed on as if it were a sum.
    assert survivors(strategy) == [0, NODES - 1, NODES - 1, NODES - 1]
    assert strategy.session.members.left_out == {ODD: SPOILED}


@pytest.mark.parametrize(
    ("rounds", "summed", "asked"),
    [
        ({1}, [NODES - 1, NODES, NODES, NODES], [NODES] * 4),
        ({1, 2, 3, 4}, [NODES - 1] * 4, [NODES, NODES, NODES - 1, NODES - 1]),
    ],
    ids=["once", "always"],
)
def test_a_client_that_declines_is_asked_once_more_and_then_left_out_alone(rounds, summed, asked) -> None:
    grid = FakeGrid(NODES)

    def damage(message: Message) -> None:
        flipped = message.content["config"]["server-round"] in rounds
        with_body(lambda body: body[:-1] + bytes([body[-1] ^ flipped]))(message)

    grid.on_request("round", damage)
    strategy = start(grid, rounds=4, plan=PLAN)
    assert survivors(strategy) == summed
    assert [one.participants for one in strategy.rounds] == asked
    assert set(strategy.session.members.left_out) == ({ODD} if len(rounds) > 1 else set())


def test_a_liar_in_the_repair_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It reveals more than it was asked for, under its signature: noticed whoever else answers."""
    grid = FakeGrid(NODES).keep_state(tmp_path)

    def lie(body: bytes) -> bytes:
        message = decode(body)
        assert isinstance(message, Reveal)
        rubbish = tuple(replace(one, points=one.points + bytes(32)) for one in message.partials)
        bare = replace(message, partials=rubbish, signature=b"")
        return encode(replace(bare, signature=grid.identity().sign("reveal", signed_part(bare))))

    grid.on_reply("reveal", with_body(lie))
    strategy = start(grid, rounds=3, plan=replace(PLAN, mode="repair"))
    assert survivors(strategy) == [NODES, NODES - 1, NODES - 1]
    assert strategy.session.members.left_out == {ODD: LIED}
    assert f"node {ODD}: {LIED}" in strategy.rounds[0].problems
    assert [one.problems for one in strategy.rounds[1:]] == [(), ()]
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert any(str(ODD) in text and LIED in text for text in said)
    assert all(one.exact for one in strategy.rounds)


def test_a_name_that_cannot_be_encoded_is_that_nodes_failure() -> None:
    grid = FakeGrid(NODES)

    def forged(body: bytes) -> bytes:
        return b"niss enrolment/1" + json.dumps(json.loads(body[16:]) | {"pinned": ["\ud800"]}).encode()

    grid.on_reply("enrol", with_body(forged))
    assert survivors(start(grid, plan=PLAN)) == [NODES - 1, NODES - 1]
