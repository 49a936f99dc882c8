"""A prekey can be listed only by someone who knows it: no keys made of those of others."""

from __future__ import annotations

import hashlib

import pytest

from niss.errors import RemoteProtocolError
from niss.protocol import curve
from niss.protocol.keys import (
    Identity,
    PrekeyStore,
    SecretBytes,
    _prekey_statement,
    check_prekey,
    x25519_public,
)
from niss.protocol.messages import Prekey
from tests.support.protocol_round import seeded_entropy

BASE = curve.times_base(curve.to_scalar(1))


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
    related = bytes(curve.u_coordinate(curve.total((curve.lift(victim.public), BASE))))
    # The attack itself, were such a key listed: partials on it give the secret of two honest clients.
    scalar = curve.scalar_of(private)
    for sign in (1, -1):
        less = curve.times(curve.to_scalar(-sign), curve.lift(honest.public))
        lifted = curve.total((curve.lift(victim.public), curve.times(curve.to_scalar(sign), BASE)))
        given = curve.times(scalar, lifted)
        assert curve.total((given, less)) == curve.times(scalar, curve.lift(victim.public))
    with pytest.raises(RemoteProtocolError):
        check_prekey(signed_by_identity_alone(attacker, 0, related), attacker.public)


def test_the_prekey_of_another_is_refused_as_ones_own() -> None:
    owner, prekey, _ = made("owner")
    thief, _, _ = made("thief")
    check_prekey(prekey, owner.public)
    with pytest.raises(RemoteProtocolError):
        check_prekey(prekey, thief.public)
    with pytest.raises(RemoteProtocolError):
        check_prekey(signed_by_identity_alone(thief, prekey.number, prekey.public), thief.public)


def test_the_signature_holds_for_its_number_and_key_alone() -> None:
    owner, prekey, _ = made("owner")
    with pytest.raises(RemoteProtocolError):
        check_prekey(Prekey(prekey.number + 1, prekey.public, prekey.signature), owner.public)
    other = x25519_public(SecretBytes(hashlib.sha256(b"another").digest()))
    with pytest.raises(RemoteProtocolError):
        check_prekey(Prekey(prekey.number, other, prekey.signature), owner.public)


def test_a_key_that_cancels_the_identity_is_refused() -> None:
    """If the weight were not a hash of both keys, `A = (yB - I) / h` would be signed for with y alone."""
    owner, _, _ = made("owner")
    minus = curve.times(curve.to_scalar(-1), owner.public)
    chosen = curve.total((curve.times_base(curve.to_scalar(77)), minus))
    public = bytes(curve.u_coordinate(chosen))
    with pytest.raises(RemoteProtocolError):
        check_prekey(signed_by_identity_alone(owner, 0, public), owner.public)


def test_a_key_off_the_curve_or_with_a_part_of_small_order_is_refused() -> None:
    owner, prekey, _ = made("owner")
    small = (0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7).to_bytes(32, "little")
    half = (curve.FIELD - 1).to_bytes(32, "little")  # Of order 2: what CVE-2025-69277 let pass.
    mixed = [curve.total((curve.lift(prekey.public), one)) for one in (small, half)]
    for point in mixed:
        with pytest.raises(RemoteProtocolError):
            curve.times(curve.to_scalar(3), point)
    twist = next(
        u for u in range(2, 100) if pow(u**3 + 486662 * u**2 + u, (curve.FIELD - 1) // 2, curve.FIELD) != 1
    )
    for public in (
        *(bytes(curve.u_coordinate(point)) for point in mixed),
        twist.to_bytes(32, "little"),
        (curve.FIELD + 9).to_bytes(32, "little"),
    ):
        with pytest.raises(RemoteProtocolError):
            check_prekey(Prekey(prekey.number, public, prekey.signature), owner.public)


def test_scalars_and_points_agree_with_x25519() -> None:
    for number in range(8):
        _, one, own = made(f"one {number}")
        assert curve.times_base(curve.scalar_of(own)) == curve.lift(one.public)
