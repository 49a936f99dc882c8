"""One client must not end the run: not with keys nobody can use, and not by making the others decline."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, Message

from flower.grid import FIRST, FakeGrid, play
from flower.test_trust import _entropy, with_folders, write_coalition
from niss.accounting import Plan
from niss.flower import NissStrategy
from niss.protocol import keys
from niss.protocol.messages import Reveal, decode, encode, signed_part
from niss.session.members import SPOILED
from niss.session.proposal import Enrolment, Proposal, read_proposal
from niss.session.server import LIED
from session.test_keys import ORDER_8, degenerate

NODES = 8
ODD = FIRST + 3
PLAN = Plan(clip=0.5, epsilon=8.0, participations=6, neighbours=NODES - 1, kappa=2.0)


def start(grid: FakeGrid, rounds: int = 4, **options) -> NissStrategy:
    return play(grid, rounds, **{"plan": PLAN, **options})[0]


def survivors(strategy: NissStrategy) -> list[int]:
    return [one.survivors for one in strategy.rounds]


def enrol_with(grid: FakeGrid, public: int) -> None:
    """The odd node joins with one degenerate key among its own."""
    identity = keys.Identity.generate(_entropy(ODD))

    def swap(reply: Message) -> Message:
        if reply.metadata.src_node_id != ODD or "niss-upload" not in reply.content:
            return reply
        body = reply.content["niss-upload"]["body"].numpy().tobytes()
        if body.startswith(b"niss enrolment/1"):
            proposal: Proposal = read_proposal(grid.sent[0].content["niss"]["body"])
            honest = Enrolment.from_bytes(body)
            bad = replace(honest, prekeys=(degenerate(identity, public), *honest.prekeys[1:]))
            forged = bad.signed(identity, proposal).to_bytes()
            reply.content["niss-upload"]["body"] = Array(np.frombuffer(forged, dtype=np.uint8))
        return reply

    grid.mangle = swap


@pytest.mark.parametrize("public", [0, ORDER_8])
def test_a_degenerate_key_at_enrolment_costs_nobody_else_anything(tmp_path: Path, public: int) -> None:
    """Before, every neighbour declined and was left out for good: no round of the run took place."""
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    enrol_with(grid, public)
    strategy = start(grid, rounds=2)
    assert survivors(strategy) == [NODES - 1, NODES - 1]
    assert "degenerate" in strategy.session.members.left_out[ODD]
    assert set(strategy.session.members.left_out) == {ODD}


def test_whoever_all_others_decline_because_of_is_left_out_not_they(tmp_path: Path) -> None:
    """The others do not trust the odd one, and the server does not know: all of them decline the first round."""
    grid = FakeGrid(NODES)
    identities = with_folders(grid, tmp_path)
    del identities[ODD]
    trusted = write_coalition(tmp_path / "trusted.toml", {str(node): key for node, key in identities.items()})
    for node in identities:
        grid.contexts[node].node_config["niss-coalition"] = str(trusted)
    strategy = start(grid)
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

    def damage(message: Message) -> Message:
        record = message.content["niss"]
        if message.metadata.dst_node_id == ODD and record["stage"] == "round":
            flipped = message.content["config"]["server-round"] in rounds
            record["body"] = record["body"][:-1] + bytes([record["body"][-1] ^ flipped])
        return message

    grid.tamper = damage
    strategy = start(grid)
    assert survivors(strategy) == summed
    assert [one.participants for one in strategy.rounds] == asked
    assert set(strategy.session.members.left_out) == ({ODD} if len(rounds) > 1 else set())


def lie_in_repair(grid: FakeGrid) -> None:
    """The odd node reveals more than it was asked for, under its signature: noticed whoever else answers."""
    identity = keys.Identity.generate(_entropy(ODD))

    def swap(reply: Message) -> Message:
        body = reply.content["niss-upload"]["body"].numpy().tobytes()
        if reply.metadata.src_node_id == ODD and not body.startswith(b"niss enrolment/1"):
            message = decode(body)
            if isinstance(message, Reveal):
                rubbish = tuple(replace(one, points=one.points + bytes(32)) for one in message.partials)
                bare = replace(message, partials=rubbish, signature=b"")
                lie = encode(replace(bare, signature=identity.sign("reveal", signed_part(bare))))
                reply.content["niss-upload"]["body"] = Array(np.frombuffer(lie, dtype=np.uint8))
        return reply

    grid.mangle = swap


def test_a_liar_in_the_repair_is_named_and_left_out(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    lie_in_repair(grid)
    strategy = start(grid, rounds=3, mode="repair", plan=replace(PLAN, dropped=1, revealed=2))
    assert survivors(strategy) == [NODES, NODES - 1, NODES - 1]
    assert strategy.session.members.left_out == {ODD: LIED}
    assert f"node {ODD}: {LIED}" in strategy.rounds[0].problems
    assert [one.problems for one in strategy.rounds[1:]] == [(), ()]
    said = [one.getMessage() for one in flower_log.records if one.levelno >= logging.WARNING]
    assert any(str(ODD) in text and LIED in text for text in said)
    assert all(one.exact for one in strategy.rounds)


def test_a_name_that_cannot_be_encoded_is_that_nodes_failure() -> None:
    grid = FakeGrid(NODES)

    def swap(reply: Message) -> Message:
        body = reply.content["niss-upload"]["body"].numpy().tobytes()
        if body.startswith(b"niss enrolment/1") and reply.metadata.src_node_id == ODD:
            values = json.loads(body[16:])
            values["pinned"] = ["\ud800"]
            forged = b"niss enrolment/1" + json.dumps(values).encode()
            reply.content["niss-upload"]["body"] = Array(np.frombuffer(forged, dtype=np.uint8))
        return reply

    grid.mangle = swap
    assert survivors(start(grid, rounds=2)) == [NODES - 1, NODES - 1]
