"""What is sealed opens for its receiver, in its round, for its purpose; nothing else opens at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.keys import SecretBytes
from niss.protocol.shares import LONGEST_PLAINTEXT, OVERHEAD_BYTES, open_sealed, seal
from support.fixed_entropy import FixedEntropy, context

SHARED = SecretBytes(range(32))
A, B = bytes([1]) * 32, bytes([2]) * 32
SEED = bytes(range(100, 132))
GOLDEN = (
    "b54ff7255705a71ee2925e4a3e30e41aed489a579d5595e0df13e32e1e4dd202d5ade60ce0910d38d865ddf5f01eb5cc"
    "ccddda5c8b5163d25f536dd6f0ab8bf64c32189eea205ee6e06244b3fbe32fc2"
)


def sealed(plaintext: bytes = SEED, purpose: str = "seal", label: str = "test") -> bytes:
    return seal(SHARED, context(), A, B, purpose, plaintext, entropy=FixedEntropy(label))


@settings(deadline=None)
@given(plaintext=st.binary(max_size=200), purpose=st.sampled_from(["seal", "piece"]))
def test_what_is_sealed_opens(plaintext: bytes, purpose: str) -> None:
    message = sealed(plaintext, purpose)
    assert len(message) == len(plaintext) + OVERHEAD_BYTES
    opened = open_sealed(SHARED, context(), A, B, purpose, message)
    assert isinstance(opened, SecretBytes)
    assert bytes(opened) == plaintext


def test_the_format_never_changes() -> None:
    assert sealed().hex() == GOLDEN
    assert open_sealed(SHARED, context(), A, B, "seal", bytes.fromhex(GOLDEN)) == SEED


@settings(deadline=None)
@given(bit=st.integers(0, (32 + OVERHEAD_BYTES) * 8 - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    message = bytearray(sealed())
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError, match="does not open"):
        open_sealed(SHARED, context(), A, B, "seal", bytes(message))


@settings(deadline=None)
@given(length=st.integers(0, 32 + OVERHEAD_BYTES - 1))
def test_anything_cut_off_is_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        open_sealed(SHARED, context(), A, B, "seal", sealed()[:length])


def test_anything_added_is_refused() -> None:
    for message in (sealed() + b"\0", bytes(OVERHEAD_BYTES + LONGEST_PLAINTEXT + 1)):
        with pytest.raises(RemoteProtocolError):
            open_sealed(SHARED, context(), A, B, "seal", message)


@pytest.mark.parametrize(
    "change",
    [
        {"run": b"run 2"},
        {"round": 8},
        {"attempt": 1},
        {"beacon": b"other"},
        {"participants_hash": bytes(32)},
        {"graph_hash": bytes(32)},
    ],
)
def test_it_does_not_open_in_another_round(change: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        open_sealed(SHARED, context(**change), A, B, "seal", sealed())


def test_it_does_not_open_for_others_backwards_or_for_another_purpose() -> None:
    for shared, sender, receiver, purpose in (
        (SecretBytes(32), A, B, "seal"),
        (SHARED, B, A, "seal"),
        (SHARED, A, bytes(32), "seal"),
        (SHARED, bytes(32), B, "seal"),
        (SHARED, A, B, "piece"),
    ):
        with pytest.raises(RemoteProtocolError):
            open_sealed(shared, context(), sender, receiver, purpose, sealed())


def test_sealing_again_in_the_same_round_uses_another_key() -> None:
    """A client that restarted seals another seed: the keystreams must differ, or both seeds are lost."""
    first, second = sealed(bytes(32), label="before"), sealed(SEED, label="after")
    difference = bytes(a ^ b for a, b in zip(first[32:64], second[32:64], strict=True))
    assert difference != SEED
    assert sealed(bytes(32), label="before") == first


def test_too_much_is_refused() -> None:
    sealed(bytes(LONGEST_PLAINTEXT))
    with pytest.raises(LocalProtocolError, match="at most"):
        sealed(bytes(LONGEST_PLAINTEXT + 1))
