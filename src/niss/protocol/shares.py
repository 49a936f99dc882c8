"""From two prekeys to the noise of an upload: shared secrets, the seeds derived from them, sealed pieces, noise.

**Seeds.** Two neighbours agree on a secret (X25519, RFC 7748) and derive from it, by HKDF-SHA256 (RFC 5869) over
everything that names a share, the same seed at both ends; nobody else can. Any difference in run, round, attempt,
beacon, participants, graph, direction or purpose gives an unrelated seed; the same context twice gives the same seeds,
which is why a client answers each context at most once.

**Sealing** (ChaCha20-Poly1305, RFC 8439) carries pieces of self-mask seeds past a server that must not read them. *Why
the nonce is fixed:* the cipher fails when one key meets one nonce twice. Here each message has a key of its own: HKDF
over the pair's secret and the round, attempt, direction and purpose, salted with 32 fresh bytes that travel with the
message. A key that is used once cannot repeat its nonce, and since the salt is fresh this holds even for a client
that crashed, restarted, and seals another piece in the same round.

**Noise.** A client adds to its rounded update the shares of its edges, fresh residual noise and, in mode `repair`, its
self-mask (Bonawitz et al., 2017, mask twice for the same reason: a late upload must not be bared by a repair). All of
it is on the grid and modulo 2^64, so that what both ends of an edge add cancels to the last bit. Shares and self-masks
are Gaussian or, where the terms say so, uniform (`add_noises`); the residual noise is always Gaussian.

**Commitments.** In mode `repair` an upload commits to every piece and, for each neighbour, to the seeds of the shares
with it, before anyone knows who drops out; the server checks each reveal against them (`server`). They are hashes
of at least 256 unpredictable bits, which hide them, cut to 16 bytes. That is enough: the true value is fixed by its
owner or by both ends' keys, so to pass another one off for it takes a second preimage (2^128 hashes), not a collision.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.mechanism.rounding import round_randomly
from niss.protocol.agreement import Agreed, RoundContext
from niss.protocol.keys import (
    PUBLIC_BYTES,
    SECRET_BYTES,
    Entropy,
    Secret,
    SecretBytes,
    draw,
    length_prefixed,
    purpose_bytes,
)
from niss.protocol.messages import SHORT_BYTES, SealedPiece
from niss.protocol.shamir import Piece, commit, split
from niss.randomness import SecretStream, add_gaussians, add_uniforms

SEED_BYTES = 32
SALT_BYTES = 32
TAG_BYTES = 16
OVERHEAD_BYTES = SALT_BYTES + TAG_BYTES
LONGEST_PLAINTEXT = 2**16
_PAIR_TAG = b"niss.pair.v1"
_SEED_TAG = b"niss.seed.v1"
_SEAL_TAG = b"niss.seal.v1"
_NONCE = bytes(12)

Steps = NDArray[np.int64]


def pair_secret(own_prekey_private: bytes, their_prekey_public: bytes) -> SecretBytes:
    """What two prekeys share: the X25519 agreement, hashed with both public keys, the same at both ends.

    A key that would make the agreement all zero, or that is our own sent back, is a `RemoteProtocolError`.
    """
    own_prekey_private = SecretBytes(own_prekey_private)
    if len(own_prekey_private) != SECRET_BYTES:
        raise LocalProtocolError(f"a prekey's private half has {SECRET_BYTES} bytes")
    own = X25519PrivateKey.from_private_bytes(own_prekey_private)
    own_public = own.public_key().public_bytes_raw()
    if own_public == their_prekey_public:
        raise RemoteProtocolError("the other side sent our own prekey back", hint="do not use it")
    try:
        agreed = SecretBytes(own.exchange(X25519PublicKey.from_public_bytes(their_prekey_public)))
    except (ValueError, TypeError):
        raise RemoteProtocolError(
            "the other side's prekey is degenerate: it would make the shared secret known to all",
            hint="do not use it",
        ) from None
    first, second = sorted((own_public, their_prekey_public))
    return SecretBytes(hashlib.sha256(length_prefixed(_PAIR_TAG, agreed, first, second)).digest())


def derive_seed(
    shared: bytes, context: RoundContext, sender: bytes, receiver: bytes, purpose: str
) -> SecretBytes:
    """The 32-byte seed of what `sender` shares with `receiver`; the way back has another one.

    `shared` is their `pair_secret`; `sender` and `receiver` are identities; `purpose` is "share" for noise.
    """
    shared = SecretBytes(shared)
    return expand(_SEED_TAG, shared, context, sender, receiver, purpose)


def expand(
    tag: bytes,
    shared: bytes,
    context: RoundContext,
    sender: bytes,
    receiver: bytes,
    purpose: str,
    salt: bytes | None = None,
) -> SecretBytes:
    """32 bytes of HKDF-SHA256 over the pair's secret, bound to context, direction and purpose.

    `tag` keeps seeds, which repair may reveal, apart from sealing keys; `salt` makes a sealing key fresh.
    """
    shared = SecretBytes(shared)
    for name, identity in (("sender", sender), ("receiver", receiver)):
        if not isinstance(identity, bytes) or len(identity) != PUBLIC_BYTES:
            raise LocalProtocolError(f"{name}: must be the {PUBLIC_BYTES} bytes of an identity")
    if sender == receiver:
        raise LocalProtocolError("sender and receiver are the same", hint="no client is its own neighbour")
    if len(shared) != SEED_BYTES:
        raise LocalProtocolError(f"a shared secret has {SEED_BYTES} bytes, as `pair_secret` returns it")
    info = length_prefixed(tag, *context.fields(), sender, receiver, purpose_bytes(purpose))
    return SecretBytes(HKDF(SHA256(), SEED_BYTES, salt, info).derive(shared))


def seal(
    shared: bytes,
    context: RoundContext,
    sender: bytes,
    receiver: bytes,
    purpose: str,
    plaintext: bytes,
    *,
    entropy: Entropy,
) -> bytes:
    """`plaintext` for `receiver` alone, 48 bytes longer; opens only with the same context, ends and purpose.

    `shared` is their `pair_secret`, `purpose` is "piece" for a piece of a self-mask; at most 2^16 bytes.
    """
    shared, plaintext = SecretBytes(shared), SecretBytes(plaintext)
    if len(plaintext) > LONGEST_PLAINTEXT:
        raise LocalProtocolError(f"at most {LONGEST_PLAINTEXT} bytes are sealed, not {len(plaintext)}")
    salt = bytes(draw(entropy, SALT_BYTES))
    key = expand(_SEAL_TAG, shared, context, sender, receiver, purpose, salt)
    bound = _associated(context, sender, receiver, purpose)
    return salt + ChaCha20Poly1305(key).encrypt(_NONCE, plaintext, bound)


def open_sealed(
    shared: bytes, context: RoundContext, sender: bytes, receiver: bytes, purpose: str, sealed: bytes
) -> SecretBytes:
    """What `sender` sealed with the same context, ends and purpose; anything else is a `RemoteProtocolError`."""
    shared = SecretBytes(shared)
    if not OVERHEAD_BYTES <= len(sealed) <= OVERHEAD_BYTES + LONGEST_PLAINTEXT:
        raise RemoteProtocolError(f"{len(sealed)} bytes cannot be a sealed message")
    key = expand(_SEAL_TAG, shared, context, sender, receiver, purpose, sealed[:SALT_BYTES])
    bound = _associated(context, sender, receiver, purpose)
    try:
        return SecretBytes(ChaCha20Poly1305(key).decrypt(_NONCE, sealed[SALT_BYTES:], bound))
    except InvalidTag:
        raise RemoteProtocolError(
            f"a sealed {purpose!r} does not open",
            hint="it was changed in transit, or made for another round, neighbour or purpose",
        ) from None


def _associated(context: RoundContext, sender: bytes, receiver: bytes, purpose: str) -> bytes:
    return length_prefixed(_SEAL_TAG, context.digest(), sender, receiver, purpose_bytes(purpose))


class PairSecrets(Secret):
    """What the client in one seat of a round shares with each other client, agreed on once.

    agreed, seat    the round, and where this client sits in it
    private         the private half of the prekey it is listed with
    """

    __slots__ = ("_private", "_secrets", "_shares", "agreed", "seat")

    def __init__(self, agreed: Agreed, seat: int, private: SecretBytes) -> None:
        self.agreed, self.seat, self._private = agreed, seat, private
        self._secrets: dict[int, SecretBytes] = {}
        self._shares = {(sender, receiver) for sender, receiver, _ in agreed.edges_of(seat)}

    def secret(self, other: int) -> SecretBytes:
        """The `pair_secret` with the client in that seat; refuses a prekey with which none can be shared."""
        if other not in self._secrets:
            self._secrets[other] = pair_secret(self._private, self.agreed.participants[other].prekey.public)
        return self._secrets[other]

    def check_neighbours(self) -> None:
        """Refuse a neighbour's prekey with which no secret can be shared, before anything is charged."""
        for other in self.agreed.neighbours(self.seat):
            self.secret(other)

    def edge_seed(self, sender: int, receiver: int) -> SecretBytes:
        """The seed of the share from `sender` to `receiver`, this client being one of the two."""
        shared = self.secret(receiver if self.seat == sender else sender)
        return derive_seed(shared, self.agreed.context, *self.ends(sender, receiver), "share")

    def seeds_with(self, other: int) -> dict[tuple[int, int], SecretBytes]:
        """By sender and receiver, the seeds of the shares with a neighbour: of the one sent, of the one received."""
        pairs = (self.seat, other), (other, self.seat)
        return {pair: self.edge_seed(*pair) for pair in pairs if pair in self._shares}

    def ends(self, sender: int, receiver: int) -> tuple[bytes, bytes]:
        """The identities in two seats."""
        people = self.agreed.participants
        return people[sender].identity, people[receiver].identity


def round_update(agreed: Agreed, weighted: NDArray[np.float64], entropy: Entropy) -> Steps:
    """`p_k x_k` in grid steps, rounded at random, of norm at most `clip / participants`.

    The coins are fresh and for this upload alone: no noise is drawn from their stream.
    """
    bound = Fraction(agreed.terms.clip) / len(agreed.participants)
    return round_randomly(agreed.grid, weighted, bound, SecretStream.fresh(entropy))


def self_mask_pieces(
    secrets: PairSecrets, entropy: Entropy
) -> tuple[bytes, tuple[SealedPiece, ...], SecretBytes]:
    """A fresh self-mask seed: its commitment, its pieces sealed to the neighbours, and the seed itself.

    Piece i (from 1) goes to the i-th neighbour; `Agreed.threshold` of them give the seed back.
    """
    agreed, seat = secrets.agreed, secrets.seat
    mask = draw(entropy, SEED_BYTES)
    neighbours = agreed.neighbours(seat)
    sealed = []
    for other, piece in zip(
        neighbours, split(mask, agreed.threshold(seat), len(neighbours), entropy), strict=True
    ):
        shared, ends = secrets.secret(other), secrets.ends(seat, other)
        text = seal(shared, agreed.context, *ends, "piece", piece.encode(), entropy=entropy)
        promised = piece_commitment(agreed, seat, other, piece)
        promised += edge_commitment(agreed, seat, other, secrets.seeds_with(other))
        sealed.append(SealedPiece(other, text + promised))
    return commit(mask, agreed.mask_context(seat)), tuple(sealed), mask


def open_piece(secrets: PairSecrets, sealed: SealedPiece, owner: int) -> Piece:
    """The piece of the self-mask of `owner` that was sealed to this client; else `RemoteProtocolError`.

    Refused too is one that its owner did not commit to: whoever passed that on would look like a liar.
    """
    agreed, seat = secrets.agreed, secrets.seat
    shared, ends = secrets.secret(owner), secrets.ends(owner, seat)
    piece = Piece.decode(open_sealed(shared, agreed.context, *ends, "piece", sealed.sealed))
    if piece_commitment(agreed, owner, seat, piece) != sealed.commitment:
        raise RemoteProtocolError("the sealed piece is not the one that its owner committed to")
    return piece


def piece_commitment(agreed: Agreed, owner: int, holder: int, piece: Piece) -> bytes:
    """16 bytes that bind the owner of a self-mask to the piece that `holder` is given."""
    people = agreed.participants
    context = b"piece" + agreed.digest + people[owner].identity + people[holder].identity
    return commit(piece.encode(), context)[:SHORT_BYTES]


def edge_commitment(agreed: Agreed, one: int, other: int, seeds: Mapping[tuple[int, int], bytes]) -> bytes:
    """16 bytes that bind to the seeds of all shares between two seats; the same at both ends.

    `seeds` holds them by sender and receiver: of both directions, or of the only one that the graph has.
    """
    low, high = sorted((one, other))
    people = agreed.participants
    context = b"edge" + agreed.digest + people[low].identity + people[high].identity
    whole = SecretBytes(b"".join(seeds[pair] for pair in ((low, high), (high, low)) if pair in seeds))
    return commit(whole, context)[:SHORT_BYTES]


def masked_upload(
    secrets: PairSecrets, steps: Steps, mask: SecretBytes | None, entropy: Entropy
) -> NDArray[np.uint64]:
    """`p_k x_k + shares sent - shares received + residual (+ self-mask)`, in grid steps modulo 2^64.

    `steps` is the rounded update, `mask` the seed of the self-mask where there is one.
    """
    agreed, terms = secrets.agreed, secrets.agreed.terms
    vector = steps.astype(np.int64).view(np.uint64)
    noises = [
        (SecretStream(secrets.edge_seed(sender, receiver)), deviation, 1 if sender == secrets.seat else -1)
        for sender, receiver, deviation in agreed.edges_of(secrets.seat)
    ]
    if terms.residual_variance:
        # Never from a seed anyone else could replay.
        noises.append((SecretStream.fresh(entropy), agreed.grid.deviation_steps(terms.residual_variance), 1))
    if mask is not None:
        noises.append((SecretStream(mask), agreed.grid.deviation_steps(terms.self_variance), 1))
    add_noises(vector, noises, terms.modulus_bits)
    return vector


def add_noises(
    target: NDArray[np.uint64], noises: Iterable[tuple[SecretStream, float, int]], modulus_bits: int
) -> None:
    """Expand seeds: `target += sign * noise` for each (stream, deviation in grid steps, sign), modulo 2^modulus_bits.

    Gaussian noise; where the deviation is infinite, the limit of it: uniform on all residues.
    """
    listed = list(noises)
    masks = [(stream, sign) for stream, deviation, sign in listed if deviation == math.inf]
    add_gaussians(target, [one for one in listed if one[1] < math.inf])
    add_uniforms(target, masks, bits=modulus_bits)
