"""Keys, and what is signed with them: identities (Ed25519), one-time prekeys that agree (X25519), the beacon's links.

An identity signs for one purpose at a time: a signature made for an upload verifies as nothing else (RFC 8032, with
the purpose and a hash of the message under a domain tag). Prekeys are signed by their identity, used in one round and
erased when it can no longer need them. Once a prekey is erased at both ends, nothing that is still stored can derive
its round's seeds again (forward secrecy). Numbers are never given twice, not even after all keys were erased.

**Possession.** Nobody lists a key without knowing its private half, such as a copy of another's, or that plus the
base point. No promise rests on it alone: a repair brings out keys of single edges and never a product with a prekey
(`niss.protocol.committee`). A prekey is signed by identity and prekey together, by an Ed25519 signature that verifies
under

    identity + h * lift(prekey),        h a hash of both,

of which only someone who knows both private halves knows the logarithm (two answers to different h give both; key
aggregation as in MuSig, Maxwell et al. 2019, with one signer for both keys). It costs no bytes beside the signature.

**The beacon** is a hash chain, committed to before the first round; each attempt at a round has its own link. The
anchor is the end of the chain, `H^n(seed)`. Link i hashes to the anchor in i steps, so nobody can choose it later, and
nobody but the holder of the seed can know it earlier. The holder (the tracker) signs each link together with the
participants it was drawn for; the assumption is that it does not collude with the server. Which link belongs to which
attempt is fixed (`link_of`) and each is released once: a server cannot ask for links until it likes a graph. Hash
chains for one-time values are Lamport's (1981).

**The curve.** Sharing a key in the exponent needs scalars and points of Curve25519 beyond X25519 (libsodium, PyNaCl).
The public half of a prekey is the u-coordinate of a point, which is there up to its sign. The same point on the Edwards
form has `y = (u - 1) / (u + 1)`; `lift` takes the one with an even x, and `scalar_of` the scalar with which the base
point gives exactly that one, negated where needed (XEdDSA does the same), so that up to a sign

    u(scalar_of(a) * lift(u(b * B))) = X25519(a, u(b * B)).

Points are 32 bytes as RFC 8032 encodes them. libsodium multiplies, in constant time, and refuses whatever is not of the
prime order L; sums and products of scalars modulo L are Python integers, whose timing others must not be able to
measure. Scalars that are secret are `SecretBytes`, lowest byte first, and integers only in functions that cannot fail.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType

import nacl.bindings as sodium
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from nacl.exceptions import CryptoError

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.messages import Beacon, Prekey
from niss.protocol.wire import is_uint64, length_prefixed, uint64
from niss.redaction import Secret, SecretBytes

# Gives that many fresh, unpredictable bytes; `os.urandom` outside of tests.
Entropy = Callable[[int], bytes]

PUBLIC_BYTES = SECRET_BYTES = POINT_BYTES = SCALAR_BYTES = 32
SIGNATURE_BYTES = 64
ORDER = 2**252 + 27742317777372353535851937790883648493
FIELD = 2**255 - 19

_SIGNATURE_TAG = b"niss.signature.v1"
_FINGERPRINT_TAG = b"niss.fingerprint.v1"
_PREKEY_PURPOSE = "prekey with possession"
_POSSESSION_TAG = b"niss.possession.v1"
_NONCE_TAG = b"niss.possession-nonce.v1"

# The y of the points of order 8.
_OF_ORDER_8 = (
    0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
    0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,
)
# The y of all whose order divides 8. Under such a key, signatures can be made for any message without a secret, so it
# identifies nobody.
_SMALL_ORDER = frozenset({0, 1, FIELD - 1, *_OF_ORDER_8})
# Their u, and those on the twist: with such a key everyone agrees on zero, and so on nothing.
_AGREES_ON_ZERO = {0, 1, FIELD - 1, *((1 + y) * pow(1 - y, -1, FIELD) % FIELD for y in _OF_ORDER_8)}
# Their spellings as bytes: X25519 ignores the highest bit and reduces modulo the field's prime.
DEGENERATE = frozenset(
    (spelt + high).to_bytes(32, "little")
    for point in _AGREES_ON_ZERO
    for spelt in (point, point + FIELD)
    if spelt < 2**255
    for high in (0, 2**255)
)


def draw(entropy: Entropy, count: int) -> SecretBytes:
    """`count` bytes from an entropy source, hidden at once; a source that gives anything else is broken."""
    content = entropy(count)
    if not isinstance(content, bytes) or len(content) != count:
        content = b""  # Not left for a traceback to show.
        raise LocalProtocolError(f"the entropy source did not give {count} bytes", hint="pass os.urandom")
    return SecretBytes(content)


class Identity(Secret):
    """Who a client is: a long-lived Ed25519 key. It shows the fingerprint of its public half only.

    `public` is its 32-byte public key, by which everyone else knows it.
    """

    __slots__ = ("_key", "_secret", "public")

    public: bytes

    def __init__(self, secret: bytes) -> None:
        """From the 32 bytes of `secret_bytes`; `Identity.generate` makes a new one."""
        secret = self._secret = SecretBytes(secret)
        if len(secret) != SECRET_BYTES:
            raise LocalProtocolError(f"an identity's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls, entropy: Entropy) -> Identity:
        """A new identity from 32 bytes of `entropy`."""
        return cls(draw(entropy, SECRET_BYTES))

    def sign(self, purpose: str, message: bytes | Iterable[bytes]) -> bytes:
        """64 bytes that `verify` accepts for this purpose and message, and for no other."""
        return self._key.sign(_signed_bytes(purpose, message))

    def sign_prekey(self, number: int, private: SecretBytes) -> Prekey:
        """The prekey with this private half, signed with it and with the identity."""
        public = x25519_public(private)
        message = _signed_bytes(_PREKEY_PURPOSE, _prekey_statement(self.public, number, public))
        weight = _possession_weight(self.public, public)
        return Prekey(number, public, _sign_jointly(self._secret, private, weight, message))

    def secret_bytes(self) -> SecretBytes:
        """The secret itself, for the key file and what a server keeps."""
        return self._secret

    def __repr__(self) -> str:
        # A traceback may ask before there is a key.
        return f"<Identity {fingerprint(self.public)}>" if hasattr(self, "public") else super().__repr__()


def verify(public: bytes, purpose: str, message: bytes | Iterable[bytes], signature: bytes) -> None:
    """Passes if the owner of `public` signed `message` for `purpose`, else raises `RemoteProtocolError`.

    Degenerate keys are refused before the signature is looked at. What was signed may come in several pieces.
    """
    check_public(public)
    signed = _signed_bytes(purpose, message)
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError):
        raise RemoteProtocolError(
            f"the signature for {purpose!r} is not by {fingerprint(public)}",
            hint="the message was changed in transit, or someone else sent it; do not use it",
        ) from None


def check_public(public: bytes) -> None:
    """Refuses what cannot identify anyone: wrong lengths, other spellings of a key, points of small order.

    One key has one spelling (y below the field's prime), so that a list of identities has no hidden duplicates.
    """
    if not isinstance(public, bytes) or len(public) != PUBLIC_BYTES:
        raise RemoteProtocolError(f"an identity has {PUBLIC_BYTES} bytes")
    y = int.from_bytes(public, "little") & (2**255 - 1)
    if y >= FIELD or y in _SMALL_ORDER:
        raise RemoteProtocolError(
            "this identity is a degenerate key, under which anyone can sign",
            hint="ask its owner for the key that `niss keys show` prints",
        )


def fingerprint(public: bytes) -> str:
    """128 bits of a hash of a public key, in groups, for people to compare."""
    digest = hashlib.sha256(length_prefixed(_FINGERPRINT_TAG, public)).hexdigest()[:32]
    return "-".join(digest[start : start + 4] for start in range(0, 32, 4))


def _signed_bytes(purpose: str, message: bytes | Iterable[bytes]) -> bytes:
    # The hash of the message: Ed25519 itself would hash a long upload three times, with a slower hash.
    digest = hashlib.sha256()
    for part in (message,) if isinstance(message, bytes) else message:
        digest.update(part)
    return length_prefixed(_SIGNATURE_TAG, purpose.encode("ascii"), digest.digest())


def check_prekey(prekey: Prekey, identity: bytes) -> None:
    """Refuse (`RemoteProtocolError`) a prekey that this identity did not make, does not know, or that is degenerate."""
    _check_sizes(prekey)
    if prekey.public in DEGENERATE:
        # Whoever sits beside such a key could not hide an update behind it, and would have to decline the round.
        raise RemoteProtocolError(
            "this prekey is a degenerate key, with which no secret can be agreed on",
            hint="its owner must make another",
        )
    check_public(identity)
    try:
        verify_prekey(identity, prekey)
    except RemoteProtocolError:
        raise RemoteProtocolError(
            f"the signature for 'prekey' is not by {fingerprint(identity)}, or was made without the prekey",
            hint="it was changed in transit, or made by someone else; do not use it",
        ) from None


@lru_cache(maxsize=16_384)
def verify_prekey(identity: bytes, prekey: Prekey) -> None:
    """What was valid once in this process stays so; what is refused is not remembered."""
    weight = to_scalar(_possession_weight(identity, prekey.public))
    joint = total((identity, times(weight, lift(prekey.public))))
    verify(
        joint, _PREKEY_PURPOSE, _prekey_statement(identity, prekey.number, prekey.public), prekey.signature
    )


def _check_sizes(prekey: Prekey) -> None:
    if not is_uint64(prekey.number):
        raise RemoteProtocolError("a prekey's number must fit into 64 bits")
    if not isinstance(prekey.public, bytes) or len(prekey.public) != PUBLIC_BYTES:
        raise RemoteProtocolError(f"a prekey has {PUBLIC_BYTES} bytes")
    if not isinstance(prekey.signature, bytes) or len(prekey.signature) != SIGNATURE_BYTES:
        raise RemoteProtocolError(f"a prekey's signature has {SIGNATURE_BYTES} bytes")


def encode_prekey(prekey: Prekey) -> bytes:
    """104 bytes: number (big-endian), public key, signature; one of other sizes is refused."""
    _check_sizes(prekey)
    return uint64(prekey.number) + prekey.public + prekey.signature


def decode_prekey(encoded: bytes) -> Prekey:
    """The prekey that `encode_prekey` gave; its signature is not yet verified."""
    end = 8 + PUBLIC_BYTES
    if len(encoded) != end + SIGNATURE_BYTES:
        raise RemoteProtocolError(f"a signed prekey has {end + SIGNATURE_BYTES} bytes, not {len(encoded)}")
    return Prekey(int.from_bytes(encoded[:8], "big"), bytes(encoded[8:end]), bytes(encoded[end:]))


MOST_PREKEYS = 256
"""How many unused prekeys a client keeps: whoever asks for ever more of them does not fill its disk."""


class PrekeyStore(Secret):
    """The private halves of a client's prekeys; a client's memory keeps them.

    next_number   of the next prekey to be made; all earlier ones are below it
    privates      by number, ascending, of those that can still be used

    `number in store` says whether that prekey can still be used, `len(store)` how many can. What cannot have been kept
    of a store is a `LocalProtocolError`.
    """

    __slots__ = ("next_number", "privates")

    def __init__(self, next_number: int = 0, privates: Mapping[int, bytes] = MappingProxyType({})) -> None:
        kept = {number: SecretBytes(privates[number]) for number in sorted(privates)}
        del privates  # Not left for a traceback to show.
        self.next_number, self.privates = next_number, kept
        for number, private in self.privates.items():
            if len(private) != SECRET_BYTES or not 0 <= number < next_number:
                raise LocalProtocolError("the stored prekeys are damaged", hint="enrol with a new identity")

    def batch(self, count: int, identity: Identity, entropy: Entropy) -> tuple[Prekey, ...]:
        """`count` new prekeys, signed by `identity`, to be published; 32 bytes of entropy each.

        Save the store before they leave: a public half whose private half was lost is of no use.
        """
        drawn = draw(entropy, SECRET_BYTES * count)
        privates = {
            self.next_number + place: drawn[SECRET_BYTES * place : SECRET_BYTES * (place + 1)]
            for place in range(count)
        }
        signed = tuple(identity.sign_prekey(number, private) for number, private in privates.items())
        self.privates |= privates
        self.next_number += count
        return signed

    def private(self, id: int) -> SecretBytes:
        """The private half; one erased or never made is a `LocalProtocolError`."""
        if id not in self.privates:
            raise LocalProtocolError(
                f"prekey {id!r} is erased or was never made here",
                hint="a prekey serves one round; name a fresh one",
            )
        return self.privates[id]

    def erase(self, id: int) -> None:
        """Forget a prekey for good. Save the store afterwards: until then its file still has it."""
        self.private(id)
        del self.privates[id]

    def keep_newest(self, count: int, *, besides: int | None) -> None:
        """Forget the oldest beyond `count` or `MOST_PREKEYS`, but not the one with the number `besides`."""
        excess = len(self) - max(count, MOST_PREKEYS)
        for number in [one for one in self.privates if one != besides][: max(0, excess)]:
            self.erase(number)

    def erase_before(self, number: int) -> None:
        """Forget all prekeys made before the one with that number."""
        for older in [one for one in self.privates if one < number]:
            self.erase(older)

    def __len__(self) -> int:
        return len(self.privates)

    def __contains__(self, id: object) -> bool:
        return id in self.privates


def x25519_public(private: SecretBytes) -> bytes:
    """The public half of a prekey."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _prekey_statement(identity_public: bytes, number: int, public: bytes) -> bytes:
    """What an identity signs to say that a prekey is its own."""
    return length_prefixed(identity_public, uint64(number), public)


def _possession_weight(identity_public: bytes, public: bytes) -> int:
    return hash_to_number(_POSSESSION_TAG, identity_public, public)


def _sign_jointly(identity: SecretBytes, private: SecretBytes, weight: int, message: bytes) -> bytes:
    """A signature (RFC 8032) under the sum of both keys, the second one `weight` times.

    The nonce is a hash of both secrets and the message, as in Ed25519 itself: never the same for two messages.
    """
    own = to_number(clamped(hashlib.sha512(identity).digest()[:SECRET_BYTES]))
    scalar = own + weight * to_number(scalar_of(private))
    nonce = hash_to_number(_NONCE_TAG, identity, private, message)
    seen, public = times_base(to_scalar(nonce)), times_base(to_scalar(scalar))
    asked = int.from_bytes(hashlib.sha512(seen + public + message).digest(), "little")
    return seen + bytes(to_scalar(nonce + asked * scalar))


# How many attempts at one round there can be.
LINKS_PER_ROUND = 4
_LONGEST = 1_000_000


def link_of(round_number: int, attempt: int) -> int:
    """The number of the link that belongs to an attempt at a round; both count from 0, links from 1.

    `round_number * LINKS_PER_ROUND + attempt + 1`; an attempt beyond the last one is a `RemoteProtocolError`.
    """
    if not 0 <= attempt < LINKS_PER_ROUND:
        raise RemoteProtocolError(f"attempt {attempt}: a round can be tried {LINKS_PER_ROUND} times")
    return round_number * LINKS_PER_ROUND + attempt + 1


def _link_after(value: bytes) -> bytes:
    return hashlib.sha256(b"niss.beacon.v1" + value).digest()


class BeaconChain:
    """The holder's side of the beacon: a chain, and how far it has been released.

    rounds      links are made for all attempts at rounds 0 to `rounds` - 1
    holder      the identity that signs each link
    entropy     32 bytes of it are the seed of the chain
    """

    def __init__(self, rounds: int, *, holder: Identity, entropy: Entropy) -> None:
        most = _LONGEST // LINKS_PER_ROUND
        if not 1 <= rounds <= most:
            raise LocalProtocolError(f"a chain can serve 1 to {most} rounds, not {rounds}")
        links = [entropy(32)]
        for _ in range(rounds * LINKS_PER_ROUND):
            links.append(_link_after(links[-1]))
        # links[0] is the seed and the last link to be released; the anchor is public from the start.
        self._links = links[::-1]
        self._holder = holder
        self._released = 0

    @property
    def anchor(self) -> bytes:
        """The end of the chain: what clients are told before the first round."""
        return self._links[0]

    def release(self, round_number: int, attempt: int, commitment: bytes) -> Beacon:
        """The signed link of an attempt, for its `commitment_of`: once, and in order."""
        index = link_of(round_number, attempt)
        if index <= self._released:
            raise RemoteProtocolError(
                f"the link of round {round_number}, attempt {attempt} or a later one was released before",
                hint="open a later attempt or round",
            )
        if index >= len(self._links):
            raise LocalProtocolError(
                "the beacon chain is used up", hint="start a new run with a longer chain"
            )
        self._released, value = index, self._links[index]
        return Beacon(index, value, self._holder.sign("beacon", _signed_link(index, value, commitment)))


def verify_beacon(
    beacon: Beacon, commitment: bytes, *, expected: int, anchor: bytes, holder: bytes, after: int
) -> None:
    """Refuse (`RemoteProtocolError`) a link that is not the right one.

    expected        the number it must have: `link_of` this attempt
    commitment      what it must have been released for: `commitment_of` the round
    anchor, holder  the end of the chain, and the identity that must have signed
    after           the last link seen before: an older one is a replay
    """
    if beacon.index != expected:
        raise RemoteProtocolError(f"beacon link {beacon.index}, but this attempt has link {expected}")
    if not after < beacon.index <= _LONGEST:
        raise RemoteProtocolError(f"beacon link {beacon.index} does not come after link {after}")
    # First the signature: a server alone cannot make clients walk a long chain.
    verify(holder, "beacon", _signed_link(beacon.index, beacon.value, commitment), beacon.signature)
    value = beacon.value
    for _ in range(beacon.index):
        value = _link_after(value)
    if value != anchor:
        raise RemoteProtocolError("the beacon is not a link of the chain that was committed to")


def _signed_link(index: int, value: bytes, commitment: bytes) -> bytes:
    return struct.pack("<Q", index) + value + commitment


if not sodium.has_crypto_core_ed25519:
    raise LocalProtocolError(
        "the installed PyNaCl was built with a minimal libsodium, which cannot add points",
        hint="install PyNaCl from its wheels",
    )

# What libsodium's binding raises for a point or a product that is none.
_REFUSED = (CryptoError, ValueError, RuntimeError)


def to_scalar(number: int) -> SecretBytes:
    """A number modulo L as libsodium takes it."""
    return SecretBytes((number % ORDER).to_bytes(SCALAR_BYTES, "little"))


def to_number(scalar: bytes) -> int:
    """The number behind a scalar."""
    return int.from_bytes(scalar, "little")


def hash_to_number(*fields: bytes) -> int:
    """A number below L that nobody can tell from a random one: SHA-512 over the fields, modulo L."""
    return int.from_bytes(hashlib.sha512(length_prefixed(*fields)).digest(), "little") % ORDER


def times(scalar: bytes, point: bytes) -> bytes:
    """`scalar * point`; a point that is not of prime order, or a product that is zero, is a `RemoteProtocolError`."""
    try:
        product: bytes = sodium.crypto_scalarmult_ed25519_noclamp(scalar, point)
    except _REFUSED:
        raise RemoteProtocolError("a point is not on the curve, or not of prime order") from None
    return product


def times_base(scalar: bytes) -> bytes:
    """`scalar * B`; zero is a `RemoteProtocolError`."""
    try:
        product: bytes = sodium.crypto_scalarmult_ed25519_base_noclamp(scalar)
    except _REFUSED:
        raise RemoteProtocolError("a scalar is zero") from None
    return product


def total(points: Iterable[bytes]) -> bytes:
    """The sum of one or more points; what is not on the curve is a `RemoteProtocolError`."""
    rest = iter(points)
    found = next(rest)
    try:
        for point in rest:
            found = sodium.crypto_core_ed25519_add(found, point)
    except _REFUSED:
        raise RemoteProtocolError("a point is not on the curve") from None
    return found


def lift(public: bytes) -> bytes:
    """The point with an even x whose u-coordinate is this public half of a prekey.

    One key has one spelling, below the field's prime. Whether it is on the curve and of prime order shows when it is
    multiplied.
    """
    u = int.from_bytes(public, "little")
    if len(public) != POINT_BYTES or u >= FIELD - 1:
        raise RemoteProtocolError("a prekey is spelt in another way than it must be", hint="do not use it")
    return ((u - 1) * pow(u + 1, -1, FIELD) % FIELD).to_bytes(POINT_BYTES, "little")


def clamped(private: bytes) -> SecretBytes:
    """The scalar that X25519 and Ed25519 make of 32 bytes (RFC 7748, decodeScalar25519)."""
    first, last = private[0] & 248, private[31] & 127 | 64
    return SecretBytes(b"".join((bytes([first]), private[1:31], bytes([last]))))


def scalar_of(private: bytes) -> SecretBytes:
    """The scalar of a prekey's private half, with the sign for which `scalar * B` is `lift` of its public half."""
    scalar = to_scalar(to_number(clamped(private)))
    return scalar if times_base(scalar)[-1] < 128 else to_scalar(-to_number(scalar))
