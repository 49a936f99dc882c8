"""What a client keeps, in its folder or in the Context, and what it does when that is not in order."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from flwr.app import Message

from flower.grid import FIRST, FakeGrid
from flower.test_trust import NODES, ODD, PLAN, body_of, letter, start, with_folders
from niss.accounting.ledger_file import LedgerFile
from niss.errors import LocalProtocolError, PrivacyError
from niss.flower.state import ContextStore, FolderStore
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.protocol.wire import decode
from niss.session.limits import Budget
from niss.session.store import ClientState

NOT_ALLOWED = "this client's own limits or its ledger do not allow it"


def test_memory_and_ledger_are_on_disk_and_for_the_owner_alone(tmp_path):
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    strategy = start(grid)
    home = tmp_path / str(ODD)
    assert (home / "notes").stat().st_mode & 0o777 == 0o600
    assert not grid.contexts[ODD].state
    ledger = LedgerFile.read(home / "ledger.jsonl")
    assert ledger.participations("self") == 2
    worst = strategy.statement.clients[2].mu_joint
    assert ledger.spent("self") == pytest.approx(worst)


def test_a_spent_budget_holds_in_the_next_run_too(tmp_path):
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    start(grid, rounds=4)
    again = FakeGrid(NODES)
    again.contexts[ODD].node_config["niss-state"] = grid.contexts[ODD].node_config["niss-state"]
    strategy = start(again, rounds=3)
    assert [one.survivors for one in strategy.rounds] == [NODES - 1] * 3
    assert NOT_ALLOWED in strategy.session.members.left_out[ODD]
    assert [one.participants for one in strategy.rounds] == [NODES - 1] * 3


def test_the_server_spares_clients_a_round_their_plan_does_not_cover():
    strategy = start(FakeGrid(NODES), rounds=6)
    assert [one.survivors for one in strategy.rounds] == [NODES] * 4 + [0, 0]
    assert "0 of 6 nodes could take part" in strategy.rounds[-1].skipped
    assert strategy.statement.epsilon_joint == pytest.approx(8.0, rel=0.01)
    assert strategy.statement.epsilon_joint <= 8.0


def test_old_notes_put_back_fail_closed(tmp_path):
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    notes = tmp_path / str(ODD) / "notes"
    kept: dict[str, bytes] = {}

    def restore(message: Message) -> Message:
        opened = letter(message)
        if opened is not None and message.metadata.dst_node_id == ODD:
            if opened.terms.round == 0:
                kept["notes"] = notes.read_bytes()
            else:
                notes.write_bytes(kept["notes"])
        return message

    grid.tamper = restore
    strategy = start(grid)
    assert "this node cannot answer" in strategy.rounds[1].lost[str(ODD)]


def test_a_round_is_answered_once_even_by_two_processes(tmp_path):
    """The same letter twice, each time handled from what is on disk."""
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    letters: list[Message] = []

    def keep(message: Message) -> Message:
        if letter(message) is not None and message.metadata.dst_node_id == ODD:
            letters.append(copy.deepcopy(message))
        return message

    grid.tamper = keep
    start(grid, rounds=1)
    again = grid.app(letters[0], grid.contexts[ODD])
    said = decode(body_of(again))
    assert "was answered before" in said.reason
    assert LedgerFile.read(tmp_path / str(ODD) / "ledger.jsonl").participations("self") == 1


def test_a_folder_that_lost_its_memory_or_its_key_is_refused(tmp_path):
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    start(grid, rounds=1)
    home = tmp_path / str(ODD)
    identity = load_identity(home / "identity.key")
    (home / "notes").rename(home / "gone")
    with pytest.raises(PrivacyError, match="lost its memory"):
        FolderStore(home)
    (home / "gone").rename(home / "notes")
    (home / "identity.key").unlink()
    with pytest.raises(PrivacyError, match="no identity"):
        FolderStore(home)
    create_keyfile(home / "identity.key", identity)
    (home / "notes").chmod(0o644)
    with pytest.raises(PrivacyError, match="can be read by others"):
        FolderStore(home)


def test_a_ledger_begun_without_a_budget_cannot_promise_one_later(tmp_path):
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    start(grid, rounds=1, plan=replace(PLAN, tau2=0.0))
    strategy = start(grid, rounds=1)
    assert strategy.rounds[0].survivors == 0
    assert all(NOT_ALLOWED in why for why in strategy.rounds[0].lost.values())


def spend(store: ContextStore, budget: Budget) -> None:
    store.ledger("run", "zero-out", budget).charge(0, 0, {"self": (1.0, 0.1)}, {})


def test_what_a_client_spends_is_in_its_context_at_once():
    """Not only at the end of the message: what follows the charge may fail."""
    context = FakeGrid(1).contexts[FIRST]
    budget = Budget(1.2, 1e-5, 0.0)
    store = ContextStore(context)
    store.save()
    spend(store, budget)
    with pytest.raises(PrivacyError, match="overspend"):
        spend(ContextStore(context), budget)


def test_a_second_run_in_the_same_context_does_not_bring_a_larger_budget():
    grid = FakeGrid(NODES)
    start(grid, rounds=4)
    strategy = start(grid, rounds=1, plan=replace(PLAN, epsilon=100.0))
    assert strategy.rounds[0].survivors == 0
    assert all(NOT_ALLOWED in why for why in strategy.rounds[0].lost.values())


def test_damaged_notes_are_refused_without_showing_them():
    kept = json.dumps({"version": 1, "memory": "ab" * 20}).encode()
    with pytest.raises(LocalProtocolError, match="damaged") as caught:
        ClientState.from_bytes(kept)
    shown = [str(entry.locals) for entry in caught.traceback if entry.path.name == "store.py"]
    assert shown
    assert "abab" not in "".join(shown)
