"""Handing a ledger on to another identity, so that a new key is not a new budget on the same data.

The node that hands on appends one record to its ledger, which costs nothing and names the heir. By that record its own
folder is closed for good, and the ledger belongs to the heir: whoever keeps books takes the last such record of a
ledger for its owner. The file that travels holds the whole ledger, and what the notes of the node add to it, under the
signature of the identity that hands on:

    {"format": "niss-handover/1", "from": hex, "to": hex, "ledger": text, "failures": number, "failing": number,
     "signature": hex}

It holds no keys. What it shows is the ledger: when, in which run and at what cost a node took part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from niss.accounting.ledger_chain import canonical
from niss.accounting.ledger_file import LedgerFile
from niss.errors import PrivacyError, RemoteProtocolError
from niss.protocol import PUBLIC_BYTES, SIGNATURE_BYTES, Identity, fingerprint, verify

FORMAT = "niss-handover/1"
HANDED_TO = "handed_to"
"""The entry of a charge's basis that names the identity, in hex, which the ledger belongs to from there on."""
_PURPOSE = "ledger hand-over"
_LARGEST = 1 << 28
_REFUSED = "take the file from the node that hands on, anew, and start no round without it"


def owner_of(ledger: LedgerFile) -> str | None:
    """The identity, in hex, that a ledger was last handed to; None where it was never handed on."""
    owners = [str(entry.basis[HANDED_TO]) for entry in ledger.entries if HANDED_TO in entry.basis]
    return owners[-1] if owners else None


def require_owner(ledger: LedgerFile, owners: Sequence[str]) -> None:
    """Raise `PrivacyError` for a ledger that was handed to somebody who is not among these identities."""
    owner = owner_of(ledger)
    if owner is not None and owner not in owners:
        raise PrivacyError(
            f"{ledger.path} was handed on to {owner[:16]}...: nothing more is charged here",
            hint="go on with the node that it was handed to",
        )


@dataclass(frozen=True)
class Handover:
    """A ledger on its way.

    giver      public key of the identity that hands on
    heir       public key of the one that goes on
    ledger     the file, whose last record names the heir
    failures   with what probability bounds on colluders of the runs that were joined may fail, from the giver's notes
    failing    how many runs that is for
    signature  the giver's, under all of it
    """

    giver: bytes
    heir: bytes
    ledger: bytes
    failures: float
    failing: int
    signature: bytes = b""

    def signed(self, identity: Identity) -> Self:
        """This hand-over under the signature of its giver."""
        return replace(self, signature=identity.sign(_PURPOSE, canonical(self._body())))

    def to_bytes(self) -> bytes:
        """The file that travels."""
        return json.dumps({**self._body(), "signature": self.signature.hex()}, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The hand-over in a file, not yet checked; `PrivacyError` where the file is not one."""
        try:
            if len(data) > _LARGEST:
                raise ValueError("size")
            values = json.loads(data)
            if values["format"] != FORMAT:
                raise ValueError("format")
            failures, failing = values["failures"], values["failing"]
            if type(failures) is not float or type(failing) is not int:
                raise ValueError("type")
            if not (0.0 <= failures < math.inf and failing >= 0):
                raise ValueError("range")
            return cls(
                _key(values["from"], PUBLIC_BYTES),
                _key(values["to"], PUBLIC_BYTES),
                str(values["ledger"]).encode("ascii"),
                failures,
                failing,
                _key(values["signature"], SIGNATURE_BYTES),
            )
        except (KeyError, TypeError, ValueError, RecursionError):
            raise PrivacyError(
                "this is not a hand-over file of niss, or it is damaged", hint=_REFUSED
            ) from None

    def check(self, giver: bytes) -> LedgerFile:
        """The ledger, for reading, if all is as the giver with this public key signed it; `PrivacyError` if not.

        Checked are the signature, the ledger's chain from its first byte to its last, and that its last record hands
        it to the heir.
        """
        if self.giver != giver:
            raise PrivacyError(
                f"the file is from {fingerprint(self.giver)}, not from {fingerprint(giver)}", hint=_REFUSED
            )
        try:
            verify(self.giver, _PURPOSE, canonical(self._body()), self.signature)
        except RemoteProtocolError as error:
            raise PrivacyError(f"the hand-over: {error.message}", hint=_REFUSED) from None
        ledger = LedgerFile.parse(self.ledger, Path("the ledger in the hand-over"))
        if ledger.torn or not ledger.entries or HANDED_TO not in ledger.entries[-1].basis:
            raise PrivacyError("the ledger does not end with a record that hands it on", hint=_REFUSED)
        if owner_of(ledger) != self.heir.hex():
            raise PrivacyError("the ledger was handed to another identity than the file says", hint=_REFUSED)
        return ledger

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "from": self.giver.hex(),
            "to": self.heir.hex(),
            "ledger": self.ledger.decode("ascii"),
            "failures": self.failures,
            "failing": self.failing,
        }


def _key(text: Any, length: int) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != length:
        raise ValueError("length")
    return value
