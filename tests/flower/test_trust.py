"""What a node pins, what it takes on first use, and lies it does not fall for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from flwr.app import Message

from flower.grid import FIRST, FakeGrid, play
from niss.accounting import Plan
from niss.flower import NissStrategy
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity
from niss.protocol.messages import RoundOpen, decode, encode

NODES = 6
ODD = FIRST + 2
# Everyone with everyone: what a round costs does not depend on the graph that is drawn.
PLAN = Plan(clip=0.5, epsilon=8.0, participations=4, neighbours=NODES - 1, kappa=2.0)


def start(grid: FakeGrid, rounds: int = 2, **options) -> NissStrategy:
    return play(grid, rounds, **{"plan": PLAN, **options})[0]


def write_coalition(path: Path, members: dict[str, bytes]) -> Path:
    path.write_text(
        "".join(f'[[members]]\nname = "{name}"\nidentity = "{key.hex()}"\n' for name, key in members.items())
    )
    return path


def with_folders(grid: FakeGrid, folder: Path) -> dict[int, bytes]:
    """Give each node a state folder; returns the nodes' identities."""
    identities = {}
    for node, context in grid.contexts.items():
        home = folder / str(node)
        key = create_keyfile(home / "identity.key", Identity.generate(_entropy(node)))
        context.node_config["niss-state"] = str(home)
        identities[node] = key.identity.public
    return identities


def _entropy(node: int):
    import hashlib

    return lambda count: hashlib.shake_256(str(node).encode()).digest(count)


def letter(message: Message) -> RoundOpen | None:
    record = message.content.get("niss")
    return decode(record["body"]) if record is not None and record["stage"] == "round" else None


class TestLies:
    def test_a_relay_that_swaps_a_public_key_is_caught_by_the_servers_signature(self):
        grid = FakeGrid(NODES)

        def swap(message: Message) -> Message:
            opened = letter(message)
            if opened is not None and message.metadata.dst_node_id == ODD and opened.terms.round == 0:
                first, second = opened.participants[:2]
                people = (replace(first, prekey=second.prekey), second, *opened.participants[2:])
                message.content["niss"]["body"] = encode(replace(opened, participants=people))
            return message

        grid.tamper = swap
        strategy = start(grid)
        assert "signature for 'open'" in strategy.rounds[0].lost[str(ODD)]
        # It declined once and is asked again.
        assert [one.survivors for one in strategy.rounds] == [NODES - 1, NODES]

    def test_a_relay_that_swaps_keys_at_enrolment_is_caught(self):
        grid = FakeGrid(NODES)

        def swap(reply: Message) -> Message:
            body = reply.content["niss-upload"]["body"].numpy()
            if body.tobytes().startswith(b"niss enrolment") and reply.metadata.src_node_id == ODD:
                values = json.loads(body.tobytes()[16:])
                values["prekeys"] = [key[:20] + "00" + key[22:] for key in values["prekeys"]]
                forged = b"niss enrolment/1" + json.dumps(values).encode()
                reply.content["niss-upload"]["body"] = _packed(forged)
            return reply

        grid.mangle = swap
        strategy = start(grid)
        assert [one.survivors for one in strategy.rounds] == [NODES - 1, NODES - 1]
        assert any(f"Node {ODD} was left out: the signature" in one for one in strategy.statement.caveats)

    def test_a_server_that_seats_a_stranger_is_caught_by_the_coalition(self, tmp_path):
        """The relay is the server itself: it signs what it likes, but it cannot be somebody it is not."""
        grid = FakeGrid(NODES)
        identities = with_folders(grid, tmp_path)
        stranger = identities.pop(ODD)
        names = {str(node): key for node, key in identities.items()}
        coalition = write_coalition(tmp_path / "coalition.toml", names)
        for node in identities:
            grid.contexts[node].node_config["niss-coalition"] = str(coalition)
        strategy = start(grid, rounds=1)
        assert stranger.hex()
        lost = strategy.rounds[0].lost
        assert set(lost) == {str(node) for node in identities}
        assert all("not among the identities this client trusts" in why for why in lost.values())

    def test_a_server_with_the_coalition_leaves_the_unregistered_key_out(self, tmp_path):
        grid = FakeGrid(NODES)
        identities = with_folders(grid, tmp_path)
        del identities[ODD]
        coalition = write_coalition(tmp_path / "c.toml", {str(node): key for node, key in identities.items()})
        strategy = start(grid, coalition=coalition)
        assert [one.survivors for one in strategy.rounds] == [NODES - 1, NODES - 1]
        assert any("is not in the coalition" in caveat for caveat in strategy.statement.caveats)

    def test_an_enrolment_of_another_run_is_refused(self):
        grid = FakeGrid(NODES)
        start(grid, rounds=1)
        old = {reply.metadata.src_node_id: reply for reply in grid.received[:NODES]}
        again = FakeGrid(NODES)

        def replay(reply: Message) -> Message:
            if reply.metadata.src_node_id == ODD and "niss enrolment" in str(body_of(reply)[:16]):
                reply.content = old[ODD].content
            return reply

        again.mangle = replay
        strategy = start(again, rounds=1)
        assert strategy.rounds[0].participants == NODES - 1


class TestPins:
    def test_a_run_beyond_a_nodes_limits_goes_on_without_it(self):
        """Which limits there are is tested on them alone."""
        grid = FakeGrid(NODES)
        grid.contexts[ODD].node_config["niss-clip"] = 0.1
        strategy = start(grid, rounds=1)
        assert strategy.rounds[0].survivors == NODES - 1
        why = "clip = 0.5 is proposed, but this node allows at most 0.1"
        assert any(why in caveat for caveat in strategy.statement.caveats)

    def test_a_round_smaller_than_a_node_wants_is_refused(self):
        grid = FakeGrid(NODES, **{"niss-participants": NODES + 1})
        strategy = start(grid, rounds=1)
        assert strategy.rounds[0].survivors == 0
        assert all("requires at least 7" in why for why in strategy.rounds[0].lost.values())

    def test_pins_that_match_are_kept_and_the_statement_counts_what_is_on_trust(self, tmp_path):
        key = create_keyfile(tmp_path / "server.key", Identity.generate(_entropy(0)))
        grid = FakeGrid(
            NODES, **{"niss-server": key.identity.public.hex(), "niss-epsilon": 8.0, "niss-delta": 1e-5}
        )
        strategy = start(grid, key=tmp_path / "server.key")
        assert [one.survivors for one in strategy.rounds] == [NODES, NODES]
        trust = next(caveat for caveat in strategy.statement.caveats if "took on trust" in caveat)
        assert "the server's key" not in trust
        assert trust.startswith("All 6 clients")
        assert "the other clients' identities" in trust


def body_of(reply: Message) -> bytes:
    return reply.content["niss-upload"]["body"].numpy().tobytes()


def holds(reply: Message, kind: type) -> bool:
    """Whether a reply has a message of the protocol of this kind."""
    if reply.has_error() or body_of(reply).startswith(b"niss enrolment"):
        return False
    return isinstance(decode(body_of(reply)), kind)


def _packed(body: bytes):
    import numpy as np
    from flwr.app import Array

    return Array(np.frombuffer(body, dtype=np.uint8))
