"""A client's own books: budget over all runs, ledger and notes, whatever a server or a restored copy says."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Message
from typer.testing import CliRunner

from flower.grid import FIRST, NODES, ODD, PLAN, FakeGrid, holds, start, survivors
from niss.accounting import Charge
from niss.cli import app
from niss.errors import PrivacyError
from niss.flower import Limits
from niss.flower.mod import ContextStore
from niss.mechanism import Slots
from niss.protocol.messages import Upload
from niss.session.limits import Budget, Ceiling
from niss.session.store import FolderStore, Store

GENEROUS = Budget(100.0, 1e-5, 1e-6)


def played(folder: Path, rounds: int = 1) -> tuple[FakeGrid, list[Message], Path]:
    """A run, the letters of its rounds to the odd one, and that one's folder."""
    grid = FakeGrid(NODES).keep_state(folder)
    letters = grid.kept("round")
    start(grid, rounds=rounds)
    return grid, letters, grid.home()


def replay(grid: FakeGrid, message: Message) -> Message:
    """The message again, from a server that does not say what it has seen."""
    again = copy.deepcopy(message)
    again.content["niss"]["after"] = 0
    return grid.app(again, grid.contexts[ODD])


class TestThePinCounts:
    @pytest.mark.parametrize("kind", ["folder", "context"])
    def test_a_pin_set_after_the_ledger_was_begun_holds(self, tmp_path, kind):
        grid = FakeGrid(NODES)
        if kind == "folder":
            grid.keep_state(tmp_path)
        start(grid, rounds=1, plan=replace(PLAN, participations=400))
        for context in grid.contexts.values():
            context.node_config.update({"niss-epsilon": 1.0, "niss-delta": 1e-5})
        small = replace(PLAN, epsilon=0.8, participations=1)
        survivors = [start(grid, rounds=1, plan=small).rounds[0].survivors for _ in range(3)]
        assert survivors == [NODES, 0, 0]
        if kind == "folder":
            assert grid.ledger().epsilon(grid.ledger().spent("self")) <= 1.0


class TestWhichLimitBinds:
    """In epsilon, and by the name of the setting: in the node's log, and from `niss account` on its folder."""

    @pytest.mark.parametrize(
        ("before", "limits", "plan", "logged", "account"),
        [
            (
                {"niss-epsilon": 8.0, "niss-delta": 1e-5},
                {"niss-epsilon": 6.0, "niss-delta": 1e-5},
                replace(PLAN, epsilon=6.0, participations=2),
                "what binds is niss-epsilon, epsilon 6 at delta 1e-5",
                ("Limit: niss-epsilon, epsilon 6 at delta 1e-5; 5.", "What binds is niss-epsilon."),
            ),
            (
                {"niss-epsilon": 8.0, "niss-delta": 1e-5},
                {"niss-epsilon": 20.0, "niss-delta": 1e-5},
                PLAN,
                "what binds is the budget that the ledger was begun with, epsilon 8 at delta 1e-5; a larger one "
                "(niss-epsilon, epsilon 20 at delta 1e-5) does not raise it",
                (
                    "What binds is the budget that the ledger was begun with.",
                    "a larger niss-epsilon does not raise it",
                ),
            ),
            (
                {},
                {},
                replace(PLAN, epsilon=10.0),
                "epsilon 10 at delta 1e-5",
                ("the limit of a node without an niss-epsilon of its own",),
            ),
        ],
        ids=["a lowered one", "a raised one", "none of its own"],
    )
    def test_it_is_named(self, tmp_path, caplog, before, limits, plan, logged, account):
        begun = PLAN if before else plan
        start(
            FakeGrid(NODES, **before).keep_state(tmp_path), rounds=2 if plan.epsilon == 6.0 else 4, plan=begun
        )
        grid = FakeGrid(NODES, **limits).keep_state(tmp_path)
        strategy = start(grid, plan=plan)
        assert not any(survivors(strategy))
        assert logged in caplog.text
        outcome = CliRunner().invoke(app, ["account", str(grid.home())])
        assert outcome.exit_code == 0, outcome.output
        for words in account:
            assert words in " ".join(outcome.output.split())


class TestLedgerAndNotesNameEachOther:
    def test_a_ledger_rolled_back_or_deleted_is_noticed(self, tmp_path):
        _, _, home = played(tmp_path, rounds=2)
        ledger = home / "ledger.jsonl"
        ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
        with pytest.raises(PrivacyError, match="no longer in it"):
            FolderStore(home)
        ledger.unlink()
        with pytest.raises(PrivacyError, match="ledger"):
            FolderStore(home)

    @pytest.mark.parametrize("which", ["before the first round", "before the second round"])
    def test_notes_rolled_back_answer_no_round_again(self, tmp_path, which):
        grid, kept, letters = FakeGrid(NODES).keep_state(tmp_path), [], []
        home = grid.home()

        def keep(message: Message) -> None:
            kept.append((home / "notes").read_bytes())
            letters.append(copy.deepcopy(message))

        grid.on_request("round", keep)
        start(grid, rounds=2)
        number = 0 if which == "before the first round" else 1
        (home / "notes").write_bytes(kept[number])
        answer = replay(grid, letters[number])
        assert not holds(answer, Upload)
        assert "this node cannot answer" in answer.error.reason
        assert grid.ledger().participations("self") == 2

    def test_a_round_in_the_ledger_is_not_charged_again(self, tmp_path):
        store = a_store("folder", tmp_path)
        ledger = store.ledger("run", "zero-out", GENEROUS)
        ledger.charge(3, 1, {"self": Charge.of(0.1, 0.1)}, {})
        with pytest.raises(PrivacyError, match="charged before"):
            ledger.charge(3, 1, {"self": Charge.of(0.1, 0.1)}, {})
        ledger.charge(3, 2, {"self": Charge.of(0.1, 0.1)}, {})
        store.ledger("another", "zero-out", GENEROUS).charge(3, 1, {"self": Charge.of(0.1, 0.1)}, {})


@pytest.mark.parametrize("kind", ["folder", "context"])
class TestFailuresAreSummed:
    def test_runs_that_may_fail_differently_are_added_up(self, kind, tmp_path):
        store = a_store(kind, tmp_path)
        spend(store, "first", 9e-7)
        again = a_store(kind, tmp_path, store)
        with pytest.raises(PrivacyError, match="has room for 1e-6"):
            spend(again, "second", 2e-7)
        spend(again, "second", 1e-7)
        with pytest.raises(PrivacyError, match="has room for 1e-6"):
            spend(a_store(kind, tmp_path, again), "third", 1e-9)

    def test_a_run_is_paid_for_when_it_is_joined_whether_it_shows_a_round_or_not(self, kind, tmp_path):
        """Else a server would look at the graphs of many runs, and show a round of the one it likes."""
        store = a_store(kind, tmp_path)
        for number in range(4):
            joined(store, f"run {number}", 2.5e-7)
            store.save()
        joined(store, "run 0", 2.5e-7)  # Once.
        again = a_store(kind, tmp_path, store)
        assert again.state.failures == pytest.approx(1e-6)
        with pytest.raises(PrivacyError, match="may fail with probability"):
            joined(again, "one more", 1e-8)
        assert "one more" not in again.state.runs
        joined(again, "one that cannot fail", 0.0)

    def test_runs_that_may_fail_are_counted_and_capped(self, kind, tmp_path, monkeypatch):
        monkeypatch.setattr("niss.session.store.MOST_FAILING_RUNS", 2)
        store = a_store(kind, tmp_path)
        for number in range(5):
            joined(store, f"cannot fail {number}", 0.0)
        joined(store, "first", 1e-9)
        joined(store, "second", 1e-9)
        store.save()
        with pytest.raises(PrivacyError, match="has joined 2 runs") as refused:
            joined(a_store(kind, tmp_path, store), "third", 1e-9)
        assert "a new budget on the same data" in str(refused.value.hint)

    def test_what_grids_cost_counts_too(self, kind, tmp_path):
        store = a_store(kind, tmp_path)
        if kind == "context":
            store.failures = 9e-7
        else:
            ledger = store.ledger("earlier", "zero-out", GENEROUS)
            with ledger._open() as file:
                file.charge(
                    0, 0, {"self": Charge(1e-4, 1e-4, grid_delta=9e-7)}, {"run": "earlier", "notes": 0}
                )
                store.state.ledger = file.head
        store.save()
        with pytest.raises(PrivacyError, match="has room for 1e-6"):
            joined(a_store(kind, tmp_path, store), "later", 2e-7)

    def test_and_count_against_the_delta_that_is_pinned(self, kind, tmp_path):
        limits = Limits(epsilon=1.0, delta=5e-7)
        store = a_store(kind, tmp_path)
        spend(store, "first", 4e-7, ceiling=limits.ceiling_for(PLAN))
        with pytest.raises(
            PrivacyError, match="whole delta with bounds that may fail, and what binds is niss-epsilon"
        ):
            spend(store, "second", 4e-7, ceiling=limits.ceiling_for(PLAN))


class TestModes:
    def test_a_folder_that_others_may_enter_is_refused(self, tmp_path):
        _, _, home = played(tmp_path)
        for mode in (0o755, 0o750, 0o701):
            home.chmod(mode)
            with pytest.raises(PrivacyError, match="others"):
                FolderStore(home)

    def test_the_ledger_is_for_its_owner_alone_whatever_the_umask(self, tmp_path):
        before = os.umask(0o022)
        try:
            _, _, home = played(tmp_path)
        finally:
            os.umask(before)
        assert (home / "ledger.jsonl").stat().st_mode & 0o777 == 0o600
        for mode in (0o644, 0o660, 0o602):
            (home / "ledger.jsonl").chmod(mode)
            with pytest.raises(PrivacyError, match="others"):
                FolderStore(home)

    def test_a_client_that_was_killed_before_it_closed_its_ledger_closes_it_now(self, tmp_path):
        _, _, home = played(tmp_path)
        notes = json.loads((home / "notes").read_text())
        (home / "notes").write_text(json.dumps({**notes, "ledger": None}))
        (home / "ledger.jsonl").chmod(0o644)
        FolderStore(home)
        assert (home / "ledger.jsonl").stat().st_mode & 0o777 == 0o600
        (home / "ledger.jsonl").chmod(0o666)
        with pytest.raises(PrivacyError, match="others"):
            FolderStore(home)


class TestNotesDoNotGrow:
    def test_with_enrolments_in_the_same_run(self):
        grid = FakeGrid(NODES)
        asked = grid.kept("enrol")
        start(grid, rounds=1)
        sizes = []
        for _ in range(200):
            grid.app(copy.deepcopy(asked[0]), grid.contexts[ODD])
            sizes.append(len(grid.contexts[ODD].state["niss"]["notes"]))
        assert sizes[-1] <= sizes[100] + 16


def a_store(kind: str, folder: Path, before: Store | None = None) -> Store:
    """A store that remembers something; opened again from what `before` wrote."""
    if kind == "folder":
        home = folder / "home"
        home.mkdir(mode=0o700, exist_ok=True)
        store: Store = FolderStore(home)
    else:
        context = FakeGrid(1).contexts[FIRST] if before is None else before._context
        store = ContextStore(context)
    if before is None:
        store.save()
    return store


def joined(store: Store, run: str, failure: float, ceiling: Ceiling | None = None) -> None:
    store.join(run, b"proposal", replace(GENEROUS, ceiling=ceiling), failure=failure)


def spend(store: Store, run: str, failure: float, ceiling: Ceiling | None = None) -> None:
    """Join a run and answer a round of it."""
    joined(store, run, failure, ceiling)
    store.ledger(run, "zero-out", replace(GENEROUS, ceiling=ceiling)).charge(
        0, 0, {"self": Charge.of(0.01, 0.01)}, {}
    )


SLOT = (0.05, 2.0)
RECORDS = Budget(Slots.of((*SLOT, 2)), 1e-5, 1e-6, unit="record", dataset="scans")
ROUND = {"self": Charge(0.25, slot=SLOT, grid_delta=1e-8)}


@pytest.mark.parametrize("kind", ["folder", "context"])
class TestBooksOfRecords:
    def test_slots_are_one_budget_for_all_runs(self, tmp_path, kind):
        store = a_store(kind, tmp_path)
        store.ledger("one", "zero-out", RECORDS).charge(0, 0, ROUND, {})
        larger = replace(RECORDS, most=Slots.of((*SLOT, 9)))
        again = a_store(kind, tmp_path, store)
        again.ledger("two", "zero-out", larger).charge(0, 0, ROUND, {})
        again = a_store(kind, tmp_path, again)
        assert again.spent(larger).amount == Slots.of((*SLOT, 2))
        with pytest.raises(PrivacyError, match=r"none of its 0 free slots \(of 2\)"):
            again.ledger("two", "zero-out", larger).charge(1, 0, ROUND, {})
        with pytest.raises(PrivacyError, match="0 free slots"):
            again.join("3", b"proposal", larger, failure=0.0, charge=ROUND["self"])

    def test_the_owners_limit_of_today_holds_too(self, tmp_path, kind):
        """One round costs epsilon 0.18, two 0.22."""
        store, ceiling = a_store(kind, tmp_path), Ceiling(0.2, 1e-5)
        store.ledger("one", "zero-out", replace(RECORDS, ceiling=ceiling)).charge(0, 0, ROUND, {})
        with pytest.raises(PrivacyError, match="would overspend: all runs together would cost epsilon"):
            store.ledger("one", "zero-out", replace(RECORDS, ceiling=ceiling)).charge(1, 0, ROUND, {})

    def test_one_unit_and_one_dataset(self, tmp_path, kind):
        """A round that hides clients would cost a record twice its mu; one that hides records hides no client."""
        store = a_store(kind, tmp_path)
        store.ledger("one", "zero-out", RECORDS).charge(0, 0, ROUND, {})
        again = a_store(kind, tmp_path, store)
        of_client = {"self": Charge.of(0.01, 0.01, grid_delta=0.0)}
        with pytest.raises(
            PrivacyError, match="a round that hides whole clients cannot be charged"
        ) as caught:
            again.ledger("two", "zero-out", GENEROUS).charge(0, 0, of_client, {})
        assert "one unit and one dataset" in caught.value.hint
        with pytest.raises(
            PrivacyError, match="about the dataset 'scans', and the run about 'letters'"
        ) as caught:
            again.ledger("two", "zero-out", replace(RECORDS, dataset="letters")).charge(0, 0, ROUND, {})
        assert "a niss-state folder and an identity of their own" in caught.value.hint
        (tmp_path / "other").mkdir()
        other = a_store(kind, tmp_path / "other")
        spend(other, "one", 0.0)
        with pytest.raises(PrivacyError, match="a round that hides records cannot be charged"):
            other.ledger("two", "zero-out", RECORDS).charge(0, 0, ROUND, {})


def test_niss_account_on_the_folder_of_a_silo(tmp_path):
    store = a_store("folder", tmp_path)
    few = replace(RECORDS, most=Slots.of((*SLOT, 2)), ceiling=Ceiling(3.0, 1e-5))
    for number in range(2):
        store.ledger("one", "zero-out", few).charge(number, 0, ROUND, {})
    shown = CliRunner().invoke(app, ["account", str(tmp_path / "home")])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "unit record of scans, zero-out, delta 1e-5" in text
    assert "slots taken" in text
    assert "if all became known, epsilon would be" in text
    assert "A person with several records" in text
    assert "Limit: the budget that the ledger was begun with" in text
