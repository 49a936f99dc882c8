"""Both ends derive the same seed; any difference in what names it gives another."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import Context, carried_context, round_context
from niss.protocol.keys import x25519_public
from niss.protocol.shares import derive_seed, edge_key, pair_secret
from niss.protocol.wire import length_prefixed
from niss.redaction import SecretBytes
from support.fixed_entropy import ROUND, FixedEntropy, context

ALICE, BOB = (SecretBytes(FixedEntropy(name)(32)) for name in ("alice", "bob"))
ALICE_PUBLIC, BOB_PUBLIC = x25519_public(ALICE), x25519_public(BOB)
A, B = bytes([1]) * 32, bytes([2]) * 32
SHARED = SecretBytes(range(16))
CARRIED = {"run": b"run", "round": 3} | {
    name: name[:1].encode() * 32 for name in ("plan", "beacon", "terms", "senders", "receivers")
}
GOLDEN_PAIR = "c36d448d1d5dd4f7168ba302c636cbae3723269e0f74594149e2993036a0b86f"
GOLDEN_SEED = "39dd044a1216127fa64083f46db077f7b0490f336dfc620055553152cc205b81"
GOLDEN_DIGEST = "fa79489b44fb4f85ce580600608e53ce8ef614f37072c1600bd38c570537b1d1"


def test_the_pair_secret_is_the_hashed_agreement_and_never_changes() -> None:
    agreed = X25519PrivateKey.from_private_bytes(ALICE).exchange(
        X25519PublicKey.from_public_bytes(BOB_PUBLIC)
    )
    low, high = min(ALICE_PUBLIC, BOB_PUBLIC), max(ALICE_PUBLIC, BOB_PUBLIC)
    by_hand = hashlib.sha256(length_prefixed(b"niss.pair.v1", agreed, low, high)).digest()
    assert pair_secret(ALICE, BOB_PUBLIC) == by_hand
    assert by_hand.hex() == GOLDEN_PAIR


def _by_hand(info: bytes) -> bytes:
    """HKDF-SHA256 as RFC 5869 writes it, for one block and no salt."""
    extracted = hmac.digest(bytes(32), bytes(SHARED), "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def test_a_seed_is_hkdf_over_everything_that_names_it_and_never_changes() -> None:
    fields = [b"niss.seed.v1", b"run 1", (7).to_bytes(8, "big"), bytes(8), b"beacon output"]
    fields += [ROUND["participants_hash"], ROUND["graph_hash"], A, B, b"share"]
    info = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    seed = derive_seed(SHARED, context(), A, B)
    assert bytes(seed) == _by_hand(info)
    assert seed.hex() == GOLDEN_SEED
    assert len(seed) == 32


def test_a_context_is_encoded_as_ever() -> None:
    assert context().digest().hex() == GOLDEN_DIGEST


def test_a_carried_seed_does_not_change_from_release_to_release() -> None:
    seed = derive_seed(SHARED, carried_context(**CARRIED), b"a" * 32, b"b" * 32)
    assert seed.hex() == "dcb604a19697712e62bd0b3f5d7473c93a920695fde41e8d8b826d332af77779"


def contexts(make: Callable[..., Context], values: dict[str, Any]) -> list[Context]:
    """As it is, and with each field changed in turn."""
    others = {
        name: value + 1 if isinstance(value, int) else b"x" * len(value) for name, value in values.items()
    }
    return [make(**values), *(make(**{**values, name: other}) for name, other in others.items())]


def test_everything_is_bound() -> None:
    """Of a round, and of what is carried from one to the next: both lists, the schedule, beacon, terms, the run."""
    seeds, digests = [], []
    for found in (contexts(round_context, ROUND), contexts(carried_context, CARRIED)):
        one = found[0]
        seeds += [derive_seed(SHARED, each, A, B) for each in found]
        seeds += [derive_seed(SHARED, one, *ends) for ends in ((B, A), (A, bytes(32)), (bytes(32), B))]
        seeds.append(derive_seed(SecretBytes(bytes(16)), one, A, B))
        digests += [each.digest() for each in found]
    assert len({bytes(seed) for seed in seeds}) == len(seeds) == 7 + 8 + 2 * 4
    assert len(set(digests)) == len(digests)


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_different_fields_encode_differently(one: list[bytes], other: list[bytes]) -> None:
    assert (length_prefixed(*one) == length_prefixed(*other)) == (one == other)


@given(st.binary(min_size=1, max_size=9), st.binary(min_size=1, max_size=9))
def test_bytes_cannot_move_between_run_and_beacon(run: bytes, beacon: bytes) -> None:
    whole = context(run=run, beacon=beacon)
    moved = context(run=run + beacon[:1], beacon=beacon[1:] or b"x")
    assert whole.digest() != moved.digest()


@given(one=st.binary(min_size=32, max_size=32), other=st.binary(min_size=32, max_size=32))
def test_both_ends_derive_the_same_seed(one: bytes, other: bytes) -> None:
    public, other_public = x25519_public(SecretBytes(one)), x25519_public(SecretBytes(other))
    if public == other_public:
        return
    assert pair_secret(one, other_public) == pair_secret(other, public)
    here = derive_seed(edge_key(pair_secret(one, other_public), context(), A, B), context(), A, B)
    there = derive_seed(edge_key(pair_secret(other, public), context(), B, A), context(), A, B)
    assert here == there


# Points of small order on Curve25519 and on its twist, and other spellings of them.
DEGENERATE = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


@pytest.mark.parametrize("public", DEGENERATE)
def test_all_zero_agreements_are_refused(public: str) -> None:
    with pytest.raises(RemoteProtocolError, match="degenerate"):
        pair_secret(ALICE, bytes.fromhex(public))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_keys_of_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        pair_secret(ALICE, bytes(length))
    with pytest.raises(LocalProtocolError):
        pair_secret(SecretBytes(length), BOB_PUBLIC)


def test_our_own_prekey_sent_back_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="own prekey"):
        pair_secret(ALICE, ALICE_PUBLIC)


def test_malformed_ends_and_secrets_are_refused() -> None:
    for sender, receiver in ((A, A), (A, B[:31]), (bytearray(A), B)):
        with pytest.raises(LocalProtocolError):
            derive_seed(SHARED, context(), sender, receiver)
    for shared in (b"", bytes(31), bytes(33)):
        with pytest.raises(LocalProtocolError, match="edge_key"):
            derive_seed(shared, context(), A, B)
