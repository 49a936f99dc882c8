"""A node's books, handed on to another identity: what `niss node` does to `niss-state` folders.

Deny by default. The folder that hands on is closed before the file is written, so that never two nodes spend the same
budget; the heir must have no books of its own, for two ledgers cannot be made one; and each step can be repeated after
a crash, with the same outcome.
"""

from __future__ import annotations

from pathlib import Path

from niss.accounting import LedgerFile
from niss.accounting.handover import HANDED_TO, Handover, owner_of
from niss.errors import ConfigError, PrivacyError
from niss.files import LEDGER, locked_folder, read_private, write_atomically
from niss.flower.state import NOTES, OWN_KEY, SELF, ClientState, FolderStore
from niss.protocol import PrekeyStore, check_public, fingerprint, load_identity
from niss.protocol.states import Memory, dump


def hand_over(folder: Path, heir: bytes) -> bytes:
    """Close the books of a node for good, in favour of the identity `heir`; returns the file to give to it.

    Asked again for the same heir, the same books. `PrivacyError` for a folder that is not in order, was handed to
    somebody else, or has no ledger.
    """
    check_public(heir)
    _require_folder(folder)
    with locked_folder(folder):
        store = FolderStore(folder, heir=heir)
        if heir == store.identity.public:
            raise ConfigError(
                "this is the folder's own identity", field="--to", hint="give that of the new node"
            )
        path = folder / LEDGER
        if not path.exists():
            raise PrivacyError(
                f"{folder} has no ledger: nothing was charged, so there is nothing to hand on",
                hint="start the new node with a folder of its own",
            )
        with LedgerFile.open(path) as ledger:
            if owner_of(ledger) != heir.hex():
                note = {HANDED_TO: heir.hex(), "failure": 0.0, "notes": store.state.saves}
                ledger.charge(len(ledger.entries), 0, {SELF: (0.0, 0.0)}, note)
            store.state.ledger = ledger.head
        store.save()
        state = store.state
        books = Handover(store.identity.public, heir, path.read_bytes(), state.failures, state.failing)
        return books.signed(store.identity).to_bytes()


def adopt(folder: Path, data: bytes, giver: bytes) -> LedgerFile:
    """Begin a node's folder with the books of another identity; returns the ledger as it stands there.

    folder  with the identity that the books were handed to, as `niss keys new` makes it, and nothing else
    data    the file that `hand_over` made
    giver   public key of the identity that handed on, from somewhere else than the file

    `PrivacyError` for a file that does not verify, that is for another identity, or a folder that has books already.
    """
    books = Handover.from_bytes(data)
    ledger = books.check(giver)
    if ledger.clients != (SELF,):
        raise PrivacyError("the ledger in the hand-over is not that of a node")
    _require_folder(folder)
    with locked_folder(folder):
        identity = load_identity(folder / OWN_KEY)
        if identity.public != books.heir:
            raise PrivacyError(
                f"the books were handed to {fingerprint(books.heir)}, but {folder} belongs to "
                f"{fingerprint(identity.public)}",
                hint="let the old node hand them to the identity of this folder, if it has not closed them yet",
            )
        path, notes = folder / LEDGER, folder / NOTES
        if notes.exists() or (path.exists() and read_private(path) != books.ledger):
            raise PrivacyError(
                f"{folder} has books of its own already",
                hint="two ledgers cannot be made one; hand over to a new identity, before it takes part in anything",
            )
        write_atomically(path, books.ledger)
        state = ClientState(
            memory=dump(Memory(), PrekeyStore().to_bytes()),
            saves=max(int(entry.basis.get("notes", 0)) for entry in ledger.entries),
            ledger=ledger.head,
            failures=books.failures,
            failing=books.failing,
        )
        write_atomically(notes, state.to_bytes(), temporary=folder / f".{NOTES}.new")
        FolderStore(folder)  # Everything is in order, or this raises.
    return LedgerFile.read(path)


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", hint="give the niss-state folder of a node")
