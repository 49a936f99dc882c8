"""What an earlier niss wrote is refused with what to do about it: nothing is begun anew beside it, or in its place."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import ConfigRecord

from flower.grid import FIRST, NODES, ODD, FakeGrid, start
from flower.test_own_books import played
from niss.accounting import LedgerFile
from niss.accounting.ledger_file import seal
from niss.errors import ConfigError, LocalProtocolError, NissError, PrivacyError, RunFolderError
from niss.flower.mod import ContextStore
from niss.flower.state import ServerFolder
from niss.protocol.keyfile import load_identity
from niss.session.store import FolderStore
from niss.tracker.databases import SqliteStore


def _ledger(home: Path, change: Callable[[dict], object]) -> None:
    """A ledger that is whole, with one of its records changed and all after it sealed anew."""
    path, lines, previous = home / "ledger.jsonl", [], None
    for text in path.read_text().splitlines():
        record = json.loads(text)
        del record["hash"]
        if previous is not None:
            record["previous"] = previous
        change(record)
        line, previous = seal(record)
        lines.append(line + b"\n")
    path.write_bytes(b"".join(lines))


def _notes(home: Path, change: Callable[[dict], object]) -> None:
    values = json.loads((home / "notes").read_text())
    change(values)
    (home / "notes").write_text(json.dumps(values))


def _without(name: str) -> Callable[[dict], object]:
    return lambda record: record["basis"].pop(name) if "basis" in record else None


NODE = {
    "notes without what runs may fail with": (_notes, lambda notes: notes.pop("failures"), "another niss"),
    "notes without the number of saves": (_notes, lambda notes: notes.pop("saves"), "another niss"),
    "notes of another version": (_notes, lambda notes: notes.update(version=0), "another niss"),
    "a ledger of an earlier format": (
        _ledger,
        lambda record: record.update(format="niss-ledger/1") if "format" in record else None,
        "format is 'niss-ledger/1', not 'niss-ledger/3'",
    ),
    "charges that name no notes": (_ledger, _without("notes"), "did not write"),
    "charges that do not say what their grid costs": (
        _ledger,
        lambda record: record["each"].pop("grid_delta") if "charges" in record else None,
        "did not write",
    ),
}


@pytest.mark.parametrize("case", NODE)
def test_a_node_with_an_earlier_folder_answers_nothing_and_changes_nothing(tmp_path, case):
    _, _, home = played(tmp_path)
    write, change, said = NODE[case]
    write(home, change)
    if write is _ledger:
        _notes(home, lambda notes: notes.update(ledger=None))
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    with pytest.raises((PrivacyError, LocalProtocolError), match=said) as refused:
        FolderStore(home)
    assert refused.value.hint
    grid = FakeGrid(NODES)
    grid.contexts[ODD].node_config["niss-state"] = str(home)
    assert start(grid, rounds=1).rounds[0].survivors == NODES - 1
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before


def test_a_context_that_counted_less_is_refused():
    grid = FakeGrid(NODES)
    start(grid, rounds=1)
    context = grid.contexts[FIRST]
    values = dict(context.state["niss"].items())
    del values["failures"]
    context.state["niss"] = ConfigRecord(values)
    with pytest.raises(LocalProtocolError, match="failures") as refused:
        ContextStore(context)
    assert refused.value.hint


def _state(folder: Path) -> None:
    (folder / "state.json").write_text('{"version": 0}')
    (folder / "state.json").chmod(0o600)
    ServerFolder(folder).read()


def _store(folder: Path) -> None:
    path = folder / "tracker.db"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 7")
    SqliteStore(path)


def _key(folder: Path) -> None:
    (folder / "identity.key").write_bytes(b"niss-keyfile/0\n" + bytes(96))
    (folder / "identity.key").chmod(0o600)
    load_identity(folder / "identity.key")


def _book(folder: Path) -> None:
    line, _ = seal({"format": "niss-ledger/0", "run": "before"})
    (folder / "ledger.jsonl").write_bytes(line + b"\n")
    LedgerFile.open(folder / "ledger.jsonl")


@pytest.mark.parametrize(
    ("read", "error", "said"),
    [
        (_state, RunFolderError, "another version of niss"),
        (_store, ConfigError, "another version of niss"),
        (_key, NissError, "key file"),
        (_book, PrivacyError, "format is 'niss-ledger/0'"),
    ],
)
def test_other_files_of_an_earlier_version_are_refused(tmp_path, read, error, said):
    tmp_path.chmod(0o700)
    with pytest.raises(error, match=said) as refused:
        read(tmp_path)
    assert refused.value.hint
