"""What a node pins, what it takes on first use, and lies it does not fall for."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from flwr.app import Message

from flower.grid import NODES, ODD, FakeGrid, start, survivors, with_body
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.protocol.keys import Identity
from niss.protocol.messages import decode, encode


def write_coalition(path: Path, grid: FakeGrid) -> str:
    """All nodes but the odd one."""
    members = [node for node in grid.contexts if node != ODD]
    keys = {node: load_identity(grid.home(node) / "identity.key").public.hex() for node in members}
    path.write_text("".join(f'[[members]]\nname = "{node}"\nidentity = "{keys[node]}"\n' for node in members))
    return str(path)


class TestLies:
    def test_a_relay_that_swaps_a_public_key_is_caught_by_the_servers_signature(self):
        grid = FakeGrid(NODES)

        def swapped(body: bytes) -> bytes:
            opened = decode(body)
            first, second = opened.participants[:2]
            people = (replace(first, prekey=second.prekey), second, *opened.participants[2:])
            return encode(replace(opened, participants=people)) if opened.terms.round == 0 else body

        grid.on_request("round", with_body(swapped))
        strategy = start(grid)
        assert "signature for 'open'" in strategy.rounds[0].lost[str(ODD)]
        # It declined once and is asked again.
        assert survivors(strategy) == [NODES - 1, NODES]

    def test_a_relay_that_swaps_keys_at_enrolment_is_caught(self):
        grid = FakeGrid(NODES)

        def forged(body: bytes) -> bytes:
            values = json.loads(body[16:])
            values["prekeys"] = [key[:20] + "00" + key[22:] for key in values["prekeys"]]
            return b"niss enrolment/1" + json.dumps(values).encode()

        grid.on_reply("enrol", with_body(forged))
        strategy = start(grid)
        assert survivors(strategy) == [NODES - 1, NODES - 1]
        assert any(f"Node {ODD} was left out: the signature" in one for one in strategy.statement.caveats)

    def test_a_server_with_the_coalition_leaves_the_unregistered_key_out(self, tmp_path):
        grid = FakeGrid(NODES).keep_state(tmp_path)
        strategy = start(grid, coalition=write_coalition(tmp_path / "c.toml", grid))
        assert survivors(strategy) == [NODES - 1, NODES - 1]
        assert any("is not in the coalition" in caveat for caveat in strategy.statement.caveats)

    def test_an_enrolment_of_another_run_is_refused(self):
        grid, again = FakeGrid(NODES), FakeGrid(NODES)
        start(grid, rounds=1)
        (old,) = [one for one in grid.received[:NODES] if one.metadata.src_node_id == ODD]

        def replay(reply: Message) -> None:
            reply.content = old.content

        again.on_reply("enrol", replay)
        assert start(again, rounds=1).rounds[0].participants == NODES - 1


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
        strategy = start(FakeGrid(NODES, **{"niss-participants": NODES + 1}), rounds=1)
        assert strategy.rounds[0].survivors == 0
        assert all("requires at least 7" in why for why in strategy.rounds[0].lost.values())

    def test_pins_that_match_are_kept_and_the_statement_counts_what_is_on_trust(self, tmp_path):
        key = create_keyfile(tmp_path / "server.key", Identity.generate(os.urandom)).public.hex()
        grid = FakeGrid(NODES, **{"niss-server": key, "niss-epsilon": 8.0, "niss-delta": 1e-5})
        strategy = start(grid, rounds=4, key=tmp_path / "server.key")
        assert survivors(strategy) == [NODES] * 4, "all of a budget that is pinned can be spent"
        trust = next(caveat for caveat in strategy.statement.caveats if "took on trust" in caveat)
        assert "the server's key" not in trust
        assert trust.startswith("All 6 clients")
        assert "the other clients' identities" in trust
