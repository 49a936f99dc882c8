"""Shamir's secret sharing (1979) of a 32-byte seed, and hash commitments to seeds and pieces.

The secret is f(0) and piece i is f(i) of a random polynomial f of degree `threshold - 1` over the integers modulo
2^256 + 297, the first prime above all seeds. Any `threshold` pieces give the seed back; fewer say nothing about it,
whatever computer looks at them (the coefficients are within 2^-254 of uniform each). Arithmetic on Python integers
does not take constant time: split and combine on a machine whose timing others cannot measure.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.keys import Entropy, Secret, SecretBytes, draw, length_prefixed

PRIME = 2**256 + 297
SECRET_BYTES = 32
VALUE_BYTES = 33
PIECE_BYTES = 4 + VALUE_BYTES
MOST_SHARES = 2**16 - 1
_COEFFICIENT_BYTES = 64
_COMMITMENT_TAG = b"niss.commitment.v1"


@dataclass(frozen=True, slots=True, repr=False)
class Piece(Secret):
    """One neighbour's piece: where the polynomial was evaluated (1, 2, ...), and its value (33 bytes).

    One that cannot be a piece is a `RemoteProtocolError`.
    """

    index: int
    value: bytes

    def __post_init__(self) -> None:
        # First of all hidden: not even a refusal may show it.
        object.__setattr__(self, "value", SecretBytes(self.value))
        if type(self.index) is not int or not 1 <= self.index <= MOST_SHARES:
            raise RemoteProtocolError(f"a piece's index must be 1 to {MOST_SHARES}, not {self.index!r}")
        if len(self.value) != VALUE_BYTES:
            raise RemoteProtocolError(f"a piece has {VALUE_BYTES} bytes, not {len(self.value)}")
        if int.from_bytes(self.value, "big") >= PRIME:
            raise RemoteProtocolError("a piece's value lies outside the field")

    def __repr__(self) -> str:
        return f"<Piece {self.index}: hidden>"

    def encode(self) -> SecretBytes:
        """37 bytes: index (big-endian), value."""
        return SecretBytes(self.index.to_bytes(4, "big") + self.value)

    @classmethod
    def decode(cls, encoded: bytes) -> Piece:
        """The piece that `encode` gave."""
        encoded = SecretBytes(encoded)
        if len(encoded) != PIECE_BYTES:
            raise RemoteProtocolError(f"an encoded piece has {PIECE_BYTES} bytes, not {len(encoded)}")
        return cls(int.from_bytes(encoded[:4], "big"), encoded[4:])


def split(secret: bytes, threshold: int, shares: int, entropy: Entropy) -> list[Piece]:
    """`shares` pieces, indices 1 to `shares`, of which any `threshold` give `secret` (32 bytes) back.

    64 bytes of entropy a coefficient, `threshold - 1` of them. A threshold below 2 or above `shares` is refused.
    """
    secret = SecretBytes(secret)
    if len(secret) != SECRET_BYTES:
        raise LocalProtocolError(f"a secret to split has {SECRET_BYTES} bytes, not {len(secret)}")
    _check_threshold(threshold)
    if not threshold <= shares <= MOST_SHARES:
        raise LocalProtocolError(
            f"cannot make {shares} pieces of which {threshold} are needed",
            hint=f"make at least {threshold} and at most {MOST_SHARES}",
        )
    # All entropy before any arithmetic: nothing below can fail and show a number in a traceback.
    drawn = draw(entropy, _COEFFICIENT_BYTES * (threshold - 1))
    return _evaluate(secret, drawn, shares)


def combine(pieces: Sequence[Piece], threshold: int) -> SecretBytes:
    """The secret behind `pieces`; surplus pieces must agree with it. Check it against its commitment.

    Too few are a `LocalProtocolError`, pieces of different secrets or with equal indices a `RemoteProtocolError`.
    """
    _check_threshold(threshold)
    if len({piece.index for piece in pieces}) != len(pieces):
        raise RemoteProtocolError("two pieces have the same index", hint="each neighbour holds one piece")
    if len(pieces) < threshold:
        raise LocalProtocolError(
            f"{len(pieces)} pieces are too few: the secret needs {threshold}",
            hint="wait for more; without them the self-mask stays in the sum",
        )
    secret = _interpolate(pieces, threshold)
    if secret is None:
        raise RemoteProtocolError(
            "the pieces do not belong together", hint="leave out those that do not match their commitment"
        )
    return secret


def commit(seed: bytes, context: bytes) -> bytes:
    """A hash that binds to `seed` and hides it, for one context. Also for pieces: `commit(piece.encode(), ...)`.

    SHA-256 binds because it is collision-resistant. It hides because a seed is 32 unpredictable bytes; anything
    shorter could be guessed, and is refused.
    """
    seed = SecretBytes(seed)
    if len(seed) < SECRET_BYTES:
        raise LocalProtocolError(f"a commitment hides at least {SECRET_BYTES} unpredictable bytes")
    return hashlib.sha256(length_prefixed(_COMMITMENT_TAG, context, seed)).digest()


def check_commitment(commitment: bytes, seed: bytes, context: bytes) -> None:
    """Raises `RemoteProtocolError` unless `commitment` was made for this seed and context; in constant time."""
    if not hmac.compare_digest(commit(seed, context), commitment):
        raise RemoteProtocolError(
            "what was revealed is not what was committed to",
            hint="leave it out; its sender is lying or broken",
        )


def _check_threshold(threshold: int) -> None:
    """At least two: no single neighbour may hold a secret."""
    if not 2 <= threshold <= MOST_SHARES:
        raise LocalProtocolError(
            f"the threshold must be 2 to {MOST_SHARES}, not {threshold}",
            hint="a threshold of 1 would hand the secret to every neighbour",
        )


def _evaluate(secret: bytes, drawn: SecretBytes, shares: int) -> list[Piece]:
    """The polynomial with these coefficients, the secret last, at 1 to `shares` (Horner's rule)."""
    size = _COEFFICIENT_BYTES
    highest_first = [
        int.from_bytes(drawn[start : start + size], "big") % PRIME for start in range(0, len(drawn), size)
    ]
    highest_first.append(int.from_bytes(secret, "big"))
    pieces = []
    for index in range(1, shares + 1):
        value = 0
        for coefficient in highest_first:
            value = (value * index + coefficient) % PRIME
        pieces.append(Piece(index, SecretBytes(value.to_bytes(VALUE_BYTES, "big"))))
    return pieces


def _interpolate(pieces: Sequence[Piece], threshold: int) -> SecretBytes | None:
    """The value at 0, by barycentric interpolation; None if it is not a secret or a surplus piece disagrees."""
    nodes = [(piece.index, int.from_bytes(piece.value, "big")) for piece in pieces[:threshold]]
    weights = [pow(math.prod(x - other for other, _ in nodes if other != x), -1, PRIME) for x, _ in nodes]

    def at(place: int) -> int:
        whole = math.prod(place - x for x, _ in nodes)
        terms = (w * y * pow(place - x, -1, PRIME) for w, (x, y) in zip(weights, nodes, strict=True))
        return whole * sum(terms) % PRIME

    for piece in pieces[threshold:]:
        if at(piece.index) != int.from_bytes(piece.value, "big"):
            return None
    secret = at(0)
    return SecretBytes(secret.to_bytes(SECRET_BYTES, "big")) if secret < 2**256 else None
