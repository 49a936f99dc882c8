"""What a client keeps, in its folder or in the Context, and what it does when that is not in order."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flower.grid import FIRST, NODES, ODD, PLAN, FakeGrid, body_of, start
from flower.test_before_training import Training, unchanged
from flower.test_own_books import played
from niss.accounting import Charge
from niss.errors import LocalProtocolError, PrivacyError
from niss.flower.mod import ContextStore
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.protocol.messages import decode
from niss.session.limits import Budget
from niss.session.store import ClientState, FolderStore

NOT_ALLOWED = "this client's own limits or its ledger do not allow it"


def test_memory_and_ledger_are_on_disk_and_for_the_owner_alone(tmp_path):
    grid = FakeGrid(NODES).keep_state(tmp_path)
    strategy = start(grid)
    assert (grid.home() / "notes").stat().st_mode & 0o777 == 0o600
    assert not grid.contexts[ODD].state
    assert grid.ledger().participations("self") == 2
    assert grid.ledger().spent("self") == pytest.approx(strategy.statement.clients[2].mu_joint)


def test_a_spent_budget_holds_in_the_next_run_too(tmp_path):
    grid, again = FakeGrid(NODES).keep_state(tmp_path), FakeGrid(NODES)
    start(grid, rounds=4)
    again.contexts[ODD].node_config["niss-state"] = str(grid.home())
    training = Training(unchanged)
    again.apps[ODD] = training.app
    strategy = start(again, rounds=3)
    assert NOT_ALLOWED in strategy.session.members.left_out[ODD]
    assert training.calls == []
    # It declined to join, and nobody waits for its upload.
    assert [(one.participants, one.survivors, one.exact) for one in strategy.rounds] == [
        (NODES - 1, NODES - 1, True)
    ] * 3


def test_a_round_is_answered_once_even_by_two_processes(tmp_path):
    """The same letter twice, each time handled from what is on disk."""
    grid, letters, _ = played(tmp_path)
    again = grid.app(letters[0], grid.contexts[ODD])
    assert "was answered before" in decode(body_of(again)).reason
    assert grid.ledger().participations("self") == 1


def test_a_folder_that_lost_its_memory_or_its_key_is_refused(tmp_path):
    _, _, home = played(tmp_path)
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
    grid = FakeGrid(NODES).keep_state(tmp_path)
    start(grid, rounds=1, plan=replace(PLAN, tau2=0.0))
    strategy = start(grid, rounds=1)
    assert strategy.rounds[0].survivors == 0
    assert all(NOT_ALLOWED in why for why in strategy.rounds[0].lost.values())


def spend(store: ContextStore, budget: Budget) -> None:
    store.ledger("run", "zero-out", budget).charge(0, 0, {"self": Charge.of(1.0, 0.1)}, {})


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
    kept = json.dumps({"version": 2, "runs": {"00": {"memory": "ab" * 20}}}).encode()
    with pytest.raises(LocalProtocolError, match="damaged") as caught:
        ClientState.from_bytes(kept)
    shown = [str(entry.locals) for entry in caught.traceback if entry.path.name == "store.py"]
    assert shown
    assert "abab" not in "".join(shown)
