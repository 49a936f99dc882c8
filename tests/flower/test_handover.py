"""A node with a new identity goes on with the books of the old one; whoever has not got them all is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest

from flower.grid import FakeGrid
from flower.test_trust import NODES, ODD, start, with_folders, write_coalition
from niss.accounting import LedgerFile
from niss.accounting.handover import Handover, owner_of
from niss.errors import ConfigError, NissError, PrivacyError, RemoteProtocolError
from niss.flower.handover import adopt, hand_over
from niss.flower.state import FolderStore
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.protocol.keys import Identity
from support.protocol_round import seeded_entropy

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from niss.cli.node import app


def new_node(folder: Path, name: str = "new") -> bytes:
    """A folder with an identity alone; returns its public key."""
    identity = Identity.generate(seeded_entropy(name))
    return create_keyfile(folder / "identity.key", identity).identity.public


@pytest.fixture
def spent(tmp_path: Path) -> Path:
    """The folder of a node that took part in two of the four rounds of its budget."""
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path / "old")
    start(grid, rounds=2)
    return tmp_path / "old" / str(ODD)


def giver_of(folder: Path) -> bytes:
    return load_identity(folder / "identity.key").public


def test_the_heir_goes_on_with_what_is_left(tmp_path: Path, spent: Path) -> None:
    before = LedgerFile.read(spent / "ledger.jsonl")
    home = tmp_path / "new"
    heir = new_node(home)
    ledger = adopt(home, hand_over(spent, heir), giver_of(spent))
    assert ledger.spent("self") == before.spent("self") > 0
    assert ledger.budget("self") == before.budget("self")
    assert owner_of(ledger) == heir.hex()
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path / "others")
    grid.contexts[ODD].node_config["niss-state"] = str(home)
    strategy = start(grid, rounds=4)
    assert [one.survivors for one in strategy.rounds] == [NODES, NODES, NODES - 1, NODES - 1]
    assert LedgerFile.read(home / "ledger.jsonl").participations("self") == 2 + 1 + 2


def test_the_old_folder_answers_nothing_more(tmp_path: Path, spent: Path) -> None:
    hand_over(spent, new_node(tmp_path / "new"))
    with pytest.raises(PrivacyError, match="handed on to"):
        FolderStore(spent)
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path / "others")
    grid.contexts[ODD].node_config["niss-state"] = str(spent)
    strategy = start(grid, rounds=1)
    assert strategy.rounds[0].survivors == NODES - 1


def test_handing_over_again_gives_the_same_books_to_the_same_heir_and_none_to_another(
    tmp_path: Path, spent: Path
) -> None:
    heir, other = new_node(tmp_path / "new"), new_node(tmp_path / "other", "other")
    books = Handover.from_bytes(hand_over(spent, heir))
    assert Handover.from_bytes(hand_over(spent, heir)) == books
    with pytest.raises(PrivacyError, match="handed on to"):
        hand_over(spent, other)


def test_a_crash_between_ledger_and_notes_can_be_repeated(tmp_path: Path, spent: Path) -> None:
    home = tmp_path / "new"
    books = hand_over(spent, new_node(home))
    adopt(home, books, giver_of(spent))
    (home / "notes").unlink()
    with pytest.raises(PrivacyError, match="lost its memory"):
        FolderStore(home)
    adopt(home, books, giver_of(spent))
    FolderStore(home)


def test_what_the_notes_say_of_bounds_that_may_fail_goes_along(tmp_path: Path, spent: Path) -> None:
    store = FolderStore(spent)
    store.state.failures, store.state.failing = 3e-7, 2
    store.save()
    home = tmp_path / "new"
    adopt(home, hand_over(spent, new_node(home)), giver_of(spent))
    state = FolderStore(home).state
    assert (state.failures, state.failing) == (3e-7, 2)


def test_books_for_another_identity_are_refused(tmp_path: Path, spent: Path) -> None:
    books = hand_over(spent, new_node(tmp_path / "new"))
    new_node(tmp_path / "other", "other")
    with pytest.raises(PrivacyError, match="were handed to"):
        adopt(tmp_path / "other", books, giver_of(spent))
    assert not (tmp_path / "other" / "ledger.jsonl").exists()


def test_books_of_somebody_else_than_expected_are_refused(tmp_path: Path, spent: Path) -> None:
    home = tmp_path / "new"
    books = hand_over(spent, new_node(home))
    with pytest.raises(PrivacyError, match="the file is from"):
        adopt(home, books, Identity.generate(seeded_entropy("stranger")).public)


def test_a_folder_that_has_books_already_is_refused(spent: Path) -> None:
    other = spent.parent / str(ODD + 1)
    books = hand_over(spent, giver_of(other))
    before = (other / "ledger.jsonl").read_bytes()
    with pytest.raises(PrivacyError, match="books of its own"):
        adopt(other, books, giver_of(spent))
    assert (other / "ledger.jsonl").read_bytes() == before


def _cheaper(values: dict) -> None:
    lines = values["ledger"].splitlines()
    values["ledger"] = "\n".join([lines[0], lines[-1]]) + "\n"


def _cut(values: dict) -> None:
    values["ledger"] = "\n".join(values["ledger"].splitlines()[:-1]) + "\n"


@pytest.mark.parametrize(
    "change",
    [
        _cheaper,
        _cut,
        lambda values: values.update(failures=0.5),
        lambda values: values.update(failing=7),
        lambda values: values.update(signature="00" * 64),
        lambda values: values.update(to="11" * 32),
        lambda values: values.update(failures="NaN"),
        lambda values: values.update(format="niss-handover/9"),
        lambda values: values.pop("ledger"),
    ],
)
def test_books_that_were_changed_on_the_way_are_refused(tmp_path: Path, spent: Path, change) -> None:
    home = tmp_path / "new"
    values = json.loads(hand_over(spent, new_node(home)))
    change(values)
    with pytest.raises(PrivacyError):
        adopt(home, json.dumps(values).encode(), giver_of(spent))
    assert sorted(path.name for path in home.iterdir()) == ["identity.key"]


def test_a_giver_that_cuts_its_own_ledger_breaks_the_chain(tmp_path: Path, spent: Path) -> None:
    """Signed, but by a giver whose file lacks a line."""
    home = tmp_path / "new"
    books = Handover.from_bytes(hand_over(spent, new_node(home)))
    lines = books.ledger.splitlines(keepends=True)
    shorter = Handover(books.giver, books.heir, b"".join([lines[0], *lines[2:]]), 0.0, 0)
    signed = shorter.signed(load_identity(spent / "identity.key"))
    with pytest.raises(PrivacyError, match="does not follow"):
        adopt(home, signed.to_bytes(), giver_of(spent))


def test_without_charges_there_is_nothing_to_hand_on(tmp_path: Path) -> None:
    home = tmp_path / "unused"
    public = new_node(home)
    with pytest.raises(PrivacyError, match="nothing was charged"):
        hand_over(home, new_node(tmp_path / "new", "another"))
    with pytest.raises(ConfigError, match="own identity"):
        hand_over(home, public)


def command(*words: str | Path):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_commands(tmp_path: Path, spent: Path) -> None:
    home, books = tmp_path / "new", tmp_path / "books.json"
    heir, giver = new_node(home), giver_of(spent)
    assert command("hand-over", spent, "--to", heir.hex(), "--out", books).exit_code == 0
    assert books.stat().st_mode & 0o777 == 0o600
    coalition = write_coalition(tmp_path / "coalition.toml", {"North": giver})
    shown = command("verify", books, "--coalition", coalition, "--json")
    assert shown.exit_code == 0, shown.output
    values = json.loads(shown.stdout)
    assert (values["name"], values["to"], values["charges"]) == ("North", heir.hex(), 2)
    assert 0 < values["epsilon_spent"] < values["epsilon_claim"] <= 8.0
    strangers = write_coalition(tmp_path / "strangers.toml", {"South": heir})
    assert isinstance(command("verify", books, "--coalition", strangers).exception, RemoteProtocolError)
    adopted = command("adopt", home, books, "--from", giver.hex())
    assert adopted.exit_code == 0, adopted.output
    assert "chain verified" in adopted.stdout
    assert isinstance(command("adopt", home, books, "--from", giver.hex()).exception, NissError)
    shutil.rmtree(home)
    assert isinstance(command("adopt", home, books, "--from", giver.hex()).exception, ConfigError)


def test_no_secret_is_in_the_books(tmp_path: Path, spent: Path) -> None:
    secret = load_identity(spent / "identity.key").secret_bytes()
    books = hand_over(spent, new_node(tmp_path / "new"))
    assert bytes(secret) not in books
    assert bytes(secret).hex().encode() not in books
    assert b"prekeys" not in books
