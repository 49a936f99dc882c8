"""Prekeys as they travel in messages, and as the key store knows them."""

from __future__ import annotations

from niss.protocol.messages import Prekey
from niss.protocol.prekeys import SignedPrekey


def published(prekeys: tuple[SignedPrekey, ...]) -> tuple[Prekey, ...]:
    """Signed prekeys of a store, as a message carries them."""
    return tuple(Prekey(one.id, one.public, one.signature) for one in prekeys)


def check_prekey(prekey: Prekey, identity: bytes) -> None:
    """Refuse a prekey that this identity did not sign."""
    SignedPrekey(prekey.number, prekey.public, prekey.signature).verify(identity)
