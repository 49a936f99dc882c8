"""Identities sign for one purpose; prekeys are signed, used once and really erased.

A prekey can be listed only by someone who knows it: no keys made of those of others.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol import keys
from niss.protocol.client import Memory, dump, restore
from niss.protocol.keys import (
    Identity,
    PrekeyStore,
    _prekey_statement,
    check_prekey,
    check_public,
    decode_prekey,
    encode_prekey,
    fingerprint,
    verify,
    x25519_public,
)
from niss.protocol.messages import Prekey
from niss.protocol.wire import length_prefixed
from niss.redaction import SecretBytes
from support.fixed_entropy import FixedEntropy
from support.protocol_round import seeded_entropy

# RFC 8032, section 7.1, test 1.
RFC_SECRET = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
RFC_PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")

PREKEY = (
    "000000000000000076dc740bcedde75b71d37674980293b22ff0d48b6eed96ae"
    "9647dbe8c9a7fa428d0db2abca87b49d87c6ac70e660dd1fc12ec7e3c3610cd7"
    "7312f0ba958d97668adc9ca474dcd39597d4084b1030725c0555a5c55553a40c"
    "098610f5f5d52b0b"
)

BASE = keys.times_base(keys.to_scalar(1))

NORTH, SOUTH = Identity.generate(FixedEntropy("north")), Identity.generate(FixedEntropy("south"))


def test_an_identity_is_an_ed25519_key() -> None:
    identity = Identity(RFC_SECRET)
    assert identity.public == RFC_PUBLIC
    assert identity.secret_bytes() == RFC_SECRET


def test_what_is_signed_never_changes() -> None:
    signature = Identity(RFC_SECRET).sign("upload", b"message")
    digest = hashlib.sha256(b"message").digest()
    signed = length_prefixed(b"niss.signature.v1", b"upload", digest)
    Ed25519PublicKey.from_public_bytes(RFC_PUBLIC).verify(signature, signed)
    assert signed == b"\0\0\0\x11niss.signature.v1\0\0\0\x06upload\0\0\0\x20" + digest


def test_fingerprints_never_change() -> None:
    assert fingerprint(RFC_PUBLIC) == "2974-7ae6-0e93-c946-3d46-dc59-7aa7-e905"


@given(purpose=st.text("abc/", min_size=1, max_size=8), message=st.binary(max_size=50))
def test_signatures_verify_for_their_purpose_message_and_signer_only(purpose: str, message: bytes) -> None:
    signature = NORTH.sign(purpose, message)
    verify(NORTH.public, purpose, message, signature)
    for public, other_purpose, other_message in (
        (SOUTH.public, purpose, message),
        (NORTH.public, purpose + "a", message),
        (NORTH.public, purpose, message + b"a"),
    ):
        with pytest.raises(RemoteProtocolError, match="signature"):
            verify(public, other_purpose, other_message, signature)


@given(bit=st.integers(0, 64 * 8 - 1))
def test_any_flipped_bit_of_a_signature_is_refused(bit: int) -> None:
    signature = bytearray(NORTH.sign("upload", b"message"))
    signature[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        verify(NORTH.public, "upload", b"message", bytes(signature))


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_signature_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(NORTH.public, "upload", b"message", bytes(length))


def test_characters_cannot_move_between_purpose_and_message() -> None:
    with pytest.raises(RemoteProtocolError):
        verify(NORTH.public, "a", b"bc", NORTH.sign("ab", b"c"))


def _degenerate_keys() -> list[bytes]:
    """All spellings of the eight points whose order divides 8, from the equation of the curve."""
    prime = 2**255 - 19
    d = -121665 * pow(121666, -1, prime) % prime
    root = pow(2, (prime - 1) // 4, prime)

    def square_root(square: int) -> int | None:
        candidate = pow(square, (prime + 3) // 8, prime)
        return next((r for r in (candidate, candidate * root % prime) if r * r % prime == square), None)

    # Doubling a point of order 8 gives y = 0: d y^4 + 2 y^2 - 1 = 0.
    half = square_root((1 + d) % prime)
    assert half is not None
    squares = [(sign * half - 1) * pow(d, -1, prime) % prime for sign in (1, -1)]
    roots = [y for y in map(square_root, squares) if y is not None]
    eighth = [y for root in roots for y in (root, prime - root)]
    assert len(eighth) == 2
    ys = [0, 1, prime - 1, prime, prime + 1, *eighth]
    return [(y | sign << 255).to_bytes(32, "little") for y in ys for sign in (0, 1)]


@pytest.mark.parametrize("public", _degenerate_keys(), ids=bytes.hex)
def test_keys_under_which_anyone_can_sign_are_refused(public: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="degenerate"):
        check_public(public)
    # S = 0 and R = A is such a signature for every eighth message or more.
    with pytest.raises(RemoteProtocolError, match="degenerate"):
        verify(public, "upload", b"", public + bytes(32))


def test_secrets_and_publics_of_other_lengths_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="32 bytes"):
        Identity(bytes(31))
    with pytest.raises(RemoteProtocolError, match="32 bytes"):
        verify(bytes(31), "upload", b"", bytes(64))


@pytest.mark.parametrize("entropy", [lambda n: bytes(n - 1), bytearray, str])
def test_a_broken_source_of_entropy_is_refused(entropy: object) -> None:
    with pytest.raises(LocalProtocolError, match="entropy"):
        Identity.generate(entropy)  # type: ignore[arg-type]


def test_a_batch_is_signed_numbered_and_verifies() -> None:
    store, entropy = PrekeyStore(), FixedEntropy()
    batch = store.batch(3, NORTH, entropy) + store.batch(2, NORTH, entropy)
    assert [prekey.number for prekey in batch] == [0, 1, 2, 3, 4]
    assert len({prekey.public for prekey in batch}) == 5
    assert {number: x25519_public(store.private(number)) for number in store.privates} == {
        prekey.number: prekey.public for prekey in batch
    }
    for prekey in batch:
        check_prekey(prekey, NORTH.public)
        assert decode_prekey(encode_prekey(prekey)) == prekey
        copied = signed_by_identity_alone(SOUTH, prekey.number, prekey.public)
        for lie, owner in (
            (prekey, SOUTH),
            (copied, SOUTH),
            (replace(prekey, number=prekey.number + 1), NORTH),
            (replace(prekey, public=x25519_public(SecretBytes(hashlib.sha256(b"another").digest()))), NORTH),
        ):
            with pytest.raises(RemoteProtocolError):
                check_prekey(lie, owner.public)


def test_prekeys_never_change() -> None:
    (prekey,) = PrekeyStore().batch(1, Identity(RFC_SECRET), FixedEntropy("prekey"))
    assert encode_prekey(prekey).hex() == PREKEY


@given(bit=st.integers(0, 104 * 8 - 1))
def test_any_flipped_bit_of_a_prekey_is_refused(bit: int) -> None:
    (prekey,) = PrekeyStore().batch(1, NORTH, FixedEntropy())
    encoded = bytearray(encode_prekey(prekey))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        check_prekey(decode_prekey(bytes(encoded)), NORTH.public)


@pytest.mark.parametrize(
    ("id", "public", "signature"),
    [
        (-1, bytes(32), bytes(64)),
        (2**64, bytes(32), bytes(64)),
        (True, bytes(32), bytes(64)),
        (0, bytes(31), bytes(64)),
        (0, bytes(32), bytes(65)),
    ],
)
def test_malformed_prekeys_are_refused(id: int, public: bytes, signature: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        encode_prekey(Prekey(id, public, signature))
    with pytest.raises(RemoteProtocolError):
        decode_prekey(bytes(103))


def test_an_erased_prekey_is_gone_from_the_store() -> None:
    store = PrekeyStore()
    store.batch(3, NORTH, FixedEntropy())
    gone = bytes(store.private(1))
    assert gone in store.privates.values()
    store.erase(1)
    assert gone not in store.privates.values()
    assert 1 not in store
    assert len(store) == 2
    for unknown in (1, 3, -1):
        with pytest.raises(LocalProtocolError, match="erased"):
            store.private(unknown)
        with pytest.raises(LocalProtocolError, match="erased"):
            store.erase(unknown)


@given(count=st.integers(1, 6), erased=st.sets(st.integers(0, 5)))
def test_a_store_survives_being_kept_and_never_gives_a_number_twice(count: int, erased: set[int]) -> None:
    store, entropy = PrekeyStore(), FixedEntropy()
    store.batch(count, NORTH, entropy)
    for number in erased & set(range(count)):
        store.erase(number)
    _, again = restore(dump(Memory(), store))
    assert (again.next_number, again.privates) == (store.next_number, store.privates)
    assert again.batch(1, NORTH, entropy)[0].number == count


def test_damaged_stores_are_refused() -> None:
    key = bytes(32)
    for count, privates in ((1, {1: key}), (1, {-1: key}), (0, {0: key}), (1, {0: key[1:]}), (1, {0: b""})):
        with pytest.raises(LocalProtocolError, match="damaged"):
            PrekeyStore(count, privates)
    assert list(PrekeyStore(9, {7: key, 2: key}).privates) == [2, 7]


def test_a_batch_that_fails_leaves_the_store_as_it_was() -> None:
    store = PrekeyStore()
    with pytest.raises(LocalProtocolError):
        store.batch(2, NORTH, lambda count: bytes(count - 1))
    assert (store.next_number, store.privates) == (0, {})


# Possession.


def u_coordinate(point: bytes) -> bytes:
    """`(1 + y) / (1 - y)`: the prekey that `lift` makes this point of."""
    y = int.from_bytes(point, "little") & (2**255 - 1)
    return ((1 + y) * pow(1 - y, -1, keys.FIELD) % keys.FIELD).to_bytes(32, "little")


def made(label: str) -> tuple[Identity, Prekey, SecretBytes]:
    entropy = seeded_entropy(label)
    identity, store = Identity.generate(entropy), PrekeyStore()
    (prekey,) = store.batch(1, identity, entropy)
    return identity, prekey, store.private(prekey.number)


def signed_by_identity_alone(identity: Identity, number: int, public: bytes) -> Prekey:
    """As an identity signs anything else; without the private half there is nothing better."""
    return Prekey(
        number,
        public,
        identity.sign("prekey with possession", _prekey_statement(identity.public, number, public)),
    )


def test_a_key_related_to_that_of_another_is_refused() -> None:
    """A_j = A_k + B: a committee's `x_i A_j` less the public `x_i B` would be what i and k share."""
    _, victim, _ = made("victim")
    _, honest, private = made("honest")
    attacker, _, _ = made("attacker")
    related = u_coordinate(keys.total((keys.lift(victim.public), BASE)))
    # The attack itself, were such a key listed: partials on it give the secret of two honest clients.
    scalar = keys.scalar_of(private)
    for sign in (1, -1):
        less = keys.times(keys.to_scalar(-sign), keys.lift(honest.public))
        lifted = keys.total((keys.lift(victim.public), keys.times(keys.to_scalar(sign), BASE)))
        given = keys.times(scalar, lifted)
        assert keys.total((given, less)) == keys.times(scalar, keys.lift(victim.public))
    with pytest.raises(RemoteProtocolError):
        check_prekey(signed_by_identity_alone(attacker, 0, related), attacker.public)


def test_a_key_that_cancels_the_identity_is_refused() -> None:
    """If the weight were not a hash of both keys, `A = (yB - I) / h` would be signed for with y alone."""
    owner, _, _ = made("owner")
    minus = keys.times(keys.to_scalar(-1), owner.public)
    chosen = keys.total((keys.times_base(keys.to_scalar(77)), minus))
    public = u_coordinate(chosen)
    with pytest.raises(RemoteProtocolError):
        check_prekey(signed_by_identity_alone(owner, 0, public), owner.public)


def test_a_key_off_the_curve_or_with_a_part_of_small_order_is_refused() -> None:
    owner, prekey, _ = made("owner")
    small = (0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7).to_bytes(32, "little")
    half = (keys.FIELD - 1).to_bytes(32, "little")  # Of order 2: what CVE-2025-69277 let pass.
    mixed = [keys.total((keys.lift(prekey.public), one)) for one in (small, half)]
    for point in mixed:
        with pytest.raises(RemoteProtocolError):
            keys.times(keys.to_scalar(3), point)
    twist = next(
        u for u in range(2, 100) if pow(u**3 + 486662 * u**2 + u, (keys.FIELD - 1) // 2, keys.FIELD) != 1
    )
    for public in (
        *(u_coordinate(point) for point in mixed),
        twist.to_bytes(32, "little"),
        (keys.FIELD + 9).to_bytes(32, "little"),
    ):
        with pytest.raises(RemoteProtocolError):
            check_prekey(Prekey(prekey.number, public, prekey.signature), owner.public)


def test_scalars_and_points_agree_with_x25519() -> None:
    for number in range(8):
        _, one, own = made(f"one {number}")
        assert keys.times_base(keys.scalar_of(own)) == keys.lift(one.public)
