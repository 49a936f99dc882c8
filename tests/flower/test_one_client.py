"""One client must not end the run: not with keys nobody can use, and not by making the others decline."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, Message
from flwr.serverapp.strategy import FedAvg

from flower.grid import FIRST, FakeGrid, global_model
from flower.test_trust import _entropy, with_folders, write_coalition
from niss.accounting import Plan
from niss.flower import NissStrategy
from niss.protocol import keys
from niss.protocol.messages import Prekey, Reveal
from niss.protocol.wire import decode, encode, signed_part
from niss.session.coordinator import Relay
from niss.session.members import SPOILED
from niss.session.proposal import Enrolment, Proposal, read_proposal
from niss.session.server import LIED

NODES = 8
ODD = FIRST + 3
PLAN = Plan(clip=0.5, epsilon=8.0, participations=6, neighbours=NODES - 1, kappa=2.0)
ORDER_8 = 0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F
LOW_ORDER = [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18, 2**255, 2**255 + 1, ORDER_8, ORDER_8 + 2**255]


def start(grid: FakeGrid, rounds: int = 4, **options) -> NissStrategy:
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), **{"plan": PLAN, **options})
    strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)
    return strategy


def survivors(strategy: NissStrategy) -> list[int]:
    return [one.survivors for one in strategy.rounds]


def degenerate(identity: keys.Identity, public: int) -> Prekey:
    """A one-time key of small order, correctly signed."""
    point = public.to_bytes(32, "little")
    return Prekey(0, point, identity.sign("prekey", keys._prekey_statement(identity.public, 0, point)))


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


@pytest.mark.parametrize("public", LOW_ORDER)
def test_every_spelling_of_a_point_of_small_order_is_refused(public: int) -> None:
    identity = keys.Identity.generate(_entropy(1))
    with pytest.raises(keys.RemoteProtocolError, match="degenerate"):
        keys.check_prekey(degenerate(identity, public), identity.public)


def test_honest_keys_pass_the_check_for_small_order() -> None:
    identity = keys.Identity.generate(_entropy(2))
    for one in keys.PrekeyStore().batch(20, identity, _entropy(3)):
        keys.check_prekey(one, identity.public)


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


def test_a_client_that_declined_once_is_asked_again() -> None:
    grid = FakeGrid(NODES)

    def damage(message: Message) -> Message:
        record = message.content["niss"]
        first = record["stage"] == "round" and message.content["config"]["server-round"] == 1
        if message.metadata.dst_node_id == ODD and first:
            record["body"] = record["body"][:-1] + bytes([record["body"][-1] ^ 1])
        return message

    grid.tamper = damage
    strategy = start(grid, rounds=3)
    assert survivors(strategy) == [NODES - 1, NODES, NODES]
    assert strategy.session.members.left_out == {}


def test_a_client_that_always_declines_is_left_out_alone() -> None:
    grid = FakeGrid(NODES)

    def damage(message: Message) -> Message:
        record = message.content["niss"]
        if message.metadata.dst_node_id == ODD and record["stage"] == "round":
            record["body"] = record["body"][:-1] + bytes([record["body"][-1] ^ 1])
        return message

    grid.tamper = damage
    strategy = start(grid)
    assert survivors(strategy) == [NODES - 1] * 4
    assert [one.participants for one in strategy.rounds] == [NODES, NODES, NODES - 1, NODES - 1]
    assert set(strategy.session.members.left_out) == {ODD}


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


def test_a_liar_in_the_repair_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    lie_in_repair(grid)
    flower = logging.getLogger("flwr")
    flower.addHandler(caplog.handler)
    try:
        strategy = start(grid, rounds=3, mode="repair", plan=replace(PLAN, dropped=1, revealed=2))
    finally:
        flower.removeHandler(caplog.handler)
    assert survivors(strategy) == [NODES, NODES - 1, NODES - 1]
    assert strategy.session.members.left_out == {ODD: LIED}
    assert f"node {ODD}: {LIED}" in strategy.rounds[0].problems
    assert [one.problems for one in strategy.rounds[1:]] == [(), ()]
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
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


def test_a_copy_of_another_clients_key_costs_that_one_nothing() -> None:
    """Whoever sits beside a copy of its own key declines."""
    relay = Relay()
    relay.start_run(b"run", 4)
    victim, copier = (keys.Identity.generate(_entropy(number)) for number in (1, 2))
    stores = {one: keys.PrekeyStore() for one in (victim, copier)}
    first, second = stores[victim].batch(2, victim, _entropy(3))
    own = stores[copier].batch(2, copier, _entropy(4))

    def copy_of(public: bytes, number: int) -> Prekey:
        statement = keys._prekey_statement(copier.public, number, public)
        return Prekey(number, public, copier.sign("prekey", statement))

    relay.enrolled(victim.public, (first, second))
    relay.enrolled(copier.public, (copy_of(first.public, 7), own[0], copy_of(second.public, 8), own[1]))
    for number, (mine, theirs) in enumerate(zip((first, second), own, strict=True)):
        seated = relay.seat(number, 0, (copier.public, victim.public), 2)
        assert [one.prekey for one in seated] == [theirs, mine]
        # Nor while the other one sits in a round with it.
        relay.replenish(copier.public, (copy_of(mine.public, 9 + number),))
        assert relay.ready(copier.public) == (number == 0)


def test_nobody_fills_the_servers_memory_with_keys() -> None:
    relay, identity, store = Relay(), keys.Identity.generate(_entropy(5)), keys.PrekeyStore()
    for number in range(10):
        relay.enrolled(identity.public, store.batch(64, identity, _entropy(100 + number)))
    assert len(relay._prekeys[identity.public]) == len(relay._publics) == 256
    assert relay._prekeys[identity.public][-1].number == 639
