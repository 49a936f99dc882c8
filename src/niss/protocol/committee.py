"""Repair by a committee: each upload's secret, shared among a few members who can use it together and never see it.

For each upload client i draws a number r, uses it and forgets it. With it the upload *seals* the key of each of the
client's edges, and makes its self-mask. It shares r among the n members of the round's committee (Shamir, modulo the
order of the curve): member number c = 1..n gets f(c) of a polynomial of degree t - 1 with `f(0) = r`. With its piece a
member can make the *partial* `f(c) P` of a point P; any t partials give `r P`, by interpolation in the exponent, fewer
nothing (Desmedt and Frankel, 1989; Naor, Pinkas and Reingold, 1999). All points come from hashes:

    P = T_k   of the round and a place k: a hash of `r P` is what hides the key of i's edge to k, if k dropped out
    P = H_i   of the round and i: a hash of `r P` is the seed of i's own mask, if i survived

For each client members give the one or the other, as follows from the survivor set; nobody learns r. One-time keys are
never multiplied with anything for the server: a key that comes out is that of one edge in one context.

**Dealing** (`deal`). The pieces travel under pads that member c derives from its prekey and a fresh key that the client
makes for this upload and forgets. *Why not from the secret that the two prekeys share:* a client whose memory was set
back would put two secrets under the same pads. The pieces of the first t - 1 members *are* their pads,
which with `f(0) = r` fixes f, and is as random as any choice of coefficients; only the other n - t + 1 are sent, each
with its pad added. To add something to such a piece adds a known multiple of P to the partial: it tells a server
nothing.

**Proofs.** The client publishes `R = r B`, and `S_c = f(c) B` for each member. A member's partials of i carry a proof
that one number takes B to S_c and each P to its partial (Chaum and Pedersen, 1992; several points at once under weights
from a hash; made non-interactive by Fiat and Shamir, 1986). A member checks its piece against S_c before it uses it, so
an honest one is never caught with a false partial. That the S_c belong to R is checked on those that are interpolated.

An upload with v edges has 32 (2n - t + 3) + 16 v bytes for it: the fresh key, R, n points, n - t + 1 pieces under their
pads, v seals in the order of `Agreed.edge_places`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache

from niss.errors import RemoteProtocolError
from niss.protocol.agreement import Agreed
from niss.protocol.keys import (
    ORDER,
    POINT_BYTES,
    SCALAR_BYTES,
    SECRET_BYTES,
    Entropy,
    draw,
    hash_to_number,
    times,
    times_base,
    to_number,
    to_scalar,
    total,
    x25519_public,
)
from niss.protocol.messages import Partials
from niss.protocol.points import BASE, ZERO, cut, hash_to_point, of_prime_order, sums
from niss.protocol.shares import EDGE_KEY_BYTES, EdgeKeys, pair_secret
from niss.protocol.wire import length_prefixed, uint64
from niss.redaction import SecretBytes

CHALLENGE_BYTES = 16
PROOF_BYTES = CHALLENGE_BYTES + SCALAR_BYTES
_PAD_TAG = b"niss.committee-pad.v1"
_MASK_POINT_TAG = b"niss.mask-point.v1"
_EDGE_POINT_TAG = b"niss.edge-point.v1"
_MASK_TAG = b"niss.mask-seed.v2"
_SEAL_TAG = b"niss.edge-seal.v1"
_COMMITMENT_TAG = b"niss.commitment.v1"
_WEIGHT_TAG = b"niss.partials.v1"
_CARRIED_WEIGHT_TAG = b"niss.carried-partials.v1"
_NONCE_TAG = b"niss.partials-nonce.v1"
_PROOF_TAG = b"niss.partials-proof.v1"


def pieces_size(agreed: Agreed, seat: int) -> int:
    """Bytes of the pieces and seals that the client in this seat deals."""
    terms = agreed.terms
    dealt = SCALAR_BYTES * (2 * terms.committee - terms.threshold + 3)
    return dealt + EDGE_KEY_BYTES * len(agreed.edge_places(seat))


def deal(keys: EdgeKeys, entropy: Entropy) -> tuple[SecretBytes, bytes]:
    """The seed of the client's self-mask, and `Upload.pieces`: a secret in pieces, and the keys it seals.

    entropy   gives the 64 bytes of the secret and the 32 of a fresh key, both of which are forgotten here
    """
    agreed, seat = keys.agreed, keys.seat
    secret = to_scalar(to_number(draw(entropy, 2 * SECRET_BYTES)))
    fresh = draw(entropy, SECRET_BYTES)
    pads = [
        _pad(agreed, seat, member, pair_secret(fresh, agreed.participants[member].prekey.public))
        for member in agreed.committee
    ]
    pieces, padded = _split(secret, pads, agreed.terms.threshold)
    points = (times_base(number) for number in (secret, *pieces))
    places = zip(agreed.edge_places(seat), keys.agree_with_all(), strict=True)
    seals = (
        _sealed(agreed, seat, place, times(secret, edge_point(agreed, place)), key) for place, key in places
    )
    mask = mask_seed(agreed, seat, times(secret, mask_point(agreed, seat)))
    return mask, b"".join((x25519_public(fresh), *points, *padded, *seals))


def _pad(agreed: Agreed, owner: int, member: int, shared: SecretBytes) -> SecretBytes:
    """What hides the piece of `owner` that `member` gets; for the first members it is their piece."""
    people = agreed.participants
    ends = people[owner].identity, people[member].identity
    return to_scalar(hash_to_number(_PAD_TAG, agreed.digest, *ends, shared))


def _split(
    scalar: SecretBytes, pads: list[SecretBytes], threshold: int
) -> tuple[list[SecretBytes], list[bytes]]:
    """All pieces of a secret, and those beyond the first `threshold - 1` with their pads added."""
    values = [to_number(scalar), *(to_number(pad) for pad in pads[: threshold - 1])]
    places = tuple(range(threshold))
    pieces, padded = pads[: threshold - 1], []
    for index in range(threshold, len(pads) + 1):
        value = sum(a * b for a, b in zip(coefficients(places, index), values, strict=True))
        pieces.append(to_scalar(value))
        padded.append(bytes(to_scalar(value + to_number(pads[index - 1]))))
    return pieces, padded


@lru_cache(maxsize=4_096)
def coefficients(places: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Lagrange's: what the values of a polynomial at `places` count in its value at another place, modulo L."""
    whole = [
        (
            math.prod(at - other for other in places if other != place),
            math.prod(place - other for other in places if other != place),
        )
        for place in places
    ]
    return tuple(above * pow(below, -1, ORDER) % ORDER for above, below in whole)


@lru_cache(maxsize=4_096)
def small_coefficients(places: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Lagrange's at 0 as fractions with one denominator, which are much shorter than numbers modulo L."""
    whole = [
        math.prod((Fraction(other, other - place) for other in places if other != place), start=Fraction(1))
        for place in places
    ]
    shared = math.lcm(*(one.denominator for one in whole))
    return tuple(int(one * shared) for one in whole), shared


def commitments(agreed: Agreed, pieces: bytes) -> list[bytes]:
    """R and the points S_c of a dealing, by the member's number from 1."""
    return cut(pieces[POINT_BYTES : POINT_BYTES * (2 + agreed.terms.committee)])


def _piece_bytes(agreed: Agreed, member: int) -> int:
    """Bytes that a member needs of each client: its fresh key, the member's point, and a piece if it is sent one."""
    return 2 * POINT_BYTES + (0 if _follows(agreed, member) else SCALAR_BYTES)


def piece_for(agreed: Agreed, member: int, pieces: bytes) -> bytes:
    """What that member needs of a dealing."""
    place = agreed.committee.index(member)
    own = pieces[:POINT_BYTES] + commitments(agreed, pieces)[place + 1]
    if _follows(agreed, member):
        return own
    start = POINT_BYTES * (2 + agreed.terms.committee) + SCALAR_BYTES * (place - agreed.terms.threshold + 1)
    return own + pieces[start : start + SCALAR_BYTES]


def _follows(agreed: Agreed, member: int) -> bool:
    """Whether the pieces of this member are its pads."""
    return agreed.committee.index(member) < agreed.terms.threshold - 1


def _open(agreed: Agreed, owner: int, member: int, private: SecretBytes, given: bytes) -> SecretBytes:
    """The piece in what `piece_for` gave; one that its owner did not commit to is a `RemoteProtocolError`."""
    fresh, point, padded = given[:POINT_BYTES], given[POINT_BYTES : 2 * POINT_BYTES], given[2 * POINT_BYTES :]
    piece = _pad(agreed, owner, member, pair_secret(private, fresh))
    if padded:
        piece = to_scalar(to_number(padded) - to_number(piece))
    if times_base(piece) != point:
        raise RemoteProtocolError("a piece is not the one that its owner committed to")
    return piece


_hashed_point = lru_cache(maxsize=65_536)(hash_to_point)


def mask_point(agreed: Agreed, seat: int) -> bytes:
    """H_i: what a client's secret is multiplied with to give its self-mask."""
    return _hashed_point(_MASK_POINT_TAG, agreed.digest, agreed.participants[seat].identity)


def edge_point(agreed: Agreed, place: int) -> bytes:
    """T_k: what is multiplied with a client's secret to seal the key of its edge to this place in `Agreed.everyone`."""
    return _hashed_point(_EDGE_POINT_TAG, agreed.digest, uint64(place))


def mask_seed(agreed: Agreed, seat: int, point: bytes) -> SecretBytes:
    """The seed of the self-mask that belongs to the point `r H_i`, as it is encoded."""
    hashed = length_prefixed(_MASK_TAG, agreed.digest, agreed.participants[seat].identity, point)
    return SecretBytes(hashlib.sha256(hashed).digest())


def _sealed(agreed: Agreed, owner: int, place: int, point: bytes, key: bytes) -> bytes:
    """A key under what the point `r T_k` gives, or the other way round."""
    identity = agreed.participants[owner].identity
    hashed = length_prefixed(_SEAL_TAG, agreed.digest, identity, uint64(place), point)
    pad = int.from_bytes(hashlib.sha256(hashed).digest()[:EDGE_KEY_BYTES], "big")
    return (pad ^ int.from_bytes(key, "big")).to_bytes(EDGE_KEY_BYTES, "big")


def open_seals(
    agreed: Agreed, owner: int, points: Mapping[int, bytes], pieces: bytes
) -> dict[int, SecretBytes]:
    """The keys of edges of `owner`, by place in `Agreed.everyone`, from the `r T_k` there and what `owner` dealt."""
    places = agreed.edge_places(owner)
    seals = pieces[-EDGE_KEY_BYTES * len(places) :]
    starts = {place: EDGE_KEY_BYTES * number for number, place in enumerate(places)}
    return {
        place: SecretBytes(
            _sealed(agreed, owner, place, point, seals[starts[place] : starts[place] + EDGE_KEY_BYTES])
        )
        for place, point in points.items()
    }


def commit_mask(agreed: Agreed, seat: int, seed: bytes) -> bytes:
    """A hash that binds a client to the seed of its self-mask and hides it, as the seed cannot be guessed."""
    context = agreed.digest + agreed.participants[seat].identity
    return hashlib.sha256(length_prefixed(_COMMITMENT_TAG, context, seed)).digest()


def lost_edges(
    agreed: Agreed,
    survivors: Iterable[int],
    *,
    before: Iterable[int] = (),
    after: Iterable[int] | None = None,
) -> dict[int, list[int]]:
    """By survivor, those called dropped with whom it has an edge: whose shares with it are to come out.

    before   seats of the round before that were called dropped there, and carried nothing to this one
    after    where a member is asked once more: seats of the next round that were called dropped there; of these alone

    They are places in `Agreed.everyone`, ascending.
    """
    here, size = frozenset(survivors), len(agreed.participants)
    gone = {seat for seat in range(size) if seat not in here} | {size + seat for seat in before}
    if after is not None:
        gone = {agreed.first_after + seat for seat in after}
    lost = {seat: [place for place in agreed.edge_places(seat) if place in gone] for seat in sorted(here)}
    return lost if after is None else {seat: places for seat, places in lost.items() if places}


def check_survivors(agreed: Agreed, seat: int, survivors: tuple[int, ...]) -> None:
    """Refuse, as the member in `seat`, a set that is malformed, lacks that member or exceeds the caps."""
    size, terms = len(agreed.participants), agreed.terms
    if list(survivors) != sorted(set(survivors)) or not all(0 <= one < size for one in survivors):
        raise RemoteProtocolError("the survivor set is not a list of seats")
    if seat not in survivors:
        raise RemoteProtocolError("the server says this client dropped out, though it uploaded")
    dropped = size - len(survivors)
    if dropped > terms.dropped:
        raise RemoteProtocolError(f"{dropped} clients dropped, at most {terms.dropped} can be repaired")
    # Of every seat, not of this one alone: the members decide for all.
    most = max(len(others) for others in lost_edges(agreed, survivors).values())
    if most > terms.revealed:
        raise RemoteProtocolError(f"{most} edges to reveal, at most {terms.revealed} were agreed on")


def take_apart(agreed: Agreed, member: int, survivors: Sequence[int], given: bytes) -> dict[int, bytes]:
    """By survivor, `piece_for` this member, from all of them one after another; else a `RemoteProtocolError`."""
    size = _piece_bytes(agreed, member)
    if len(given) != size * len(survivors):
        raise RemoteProtocolError("the request does not hold one piece of each survivor")
    return {owner: given[size * place : size * (place + 1)] for place, owner in enumerate(survivors)}


def answer(
    agreed: Agreed,
    member: int,
    private: SecretBytes,
    lost: Mapping[int, Sequence[int]],
    given: Mapping[int, bytes],
    *,
    masks: bool = True,
) -> tuple[Partials, ...]:
    """The partials of a member for a survivor set.

    private   of the prekey it is listed with
    lost      `lost_edges` of the set
    given     by survivor, `piece_for` this member
    masks     whether self-masks are to come out; not where a member is asked once more

    Whoever dealt it a false piece is left out: a liar may not silence this member.
    """
    opened: dict[int, tuple[SecretBytes, bytes, list[bytes]]] = {}
    for owner, others in lost.items():
        try:
            piece = _open(agreed, owner, member, private, given[owner])
            made = [times(piece, point) for point in _points(agreed, owner, others, masks)]
        except RemoteProtocolError:
            continue
        opened[owner] = piece, given[owner][POINT_BYTES : 2 * POINT_BYTES], made
    statement = MemberStatement(
        agreed, member, {owner: b"".join(made) for owner, (_, _, made) in opened.items()}, lost, masks=masks
    )
    return tuple(
        Partials(owner, statement.points[owner], statement.prove(owner, piece, point, private))
        for owner, (piece, point, _) in opened.items()
    )


def _points(agreed: Agreed, owner: int, others: Iterable[int], masks: bool) -> list[bytes]:
    """What a member multiplies with its piece of `owner`: the point of its mask, then those of its lost neighbours."""
    edges = [edge_point(agreed, other) for other in others]
    return [mask_point(agreed, owner), *edges] if masks else edges


class MemberStatement:
    """What a member says with its partials, all of which go into the weights of the proofs.

    points   by owner, the partials one after another
    lost     by survivor, its lost neighbours
    masks    whether the first partial of each owner is that of its mask
    """

    def __init__(
        self,
        agreed: Agreed,
        member: int,
        points: Mapping[int, bytes],
        lost: Mapping[int, Sequence[int]],
        *,
        masks: bool = True,
    ) -> None:
        self.agreed, self.member, self.points, self.lost, self.masks = agreed, member, points, lost, masks
        said = (part for owner, made in sorted(points.items()) for part in (uint64(owner), made))
        tag = _WEIGHT_TAG if masks else _CARRIED_WEIGHT_TAG
        self._said = hashlib.sha512(length_prefixed(tag, agreed.digest, uint64(member), *said)).digest()
        self._weighted: dict[int, bytes] = {}
        self._joint: dict[tuple[int, ...], bytes] = {}

    @cached_property
    def sound(self) -> bool:
        """Whether all partials are of prime order, and no proof has to see to that."""
        return of_prime_order(b"".join(self.points.values()))

    def _weight(self, other: int) -> int:
        """128 bits for each lost client; the point of the mask counts once."""
        return to_number(hashlib.sha256(self._said + uint64(other)).digest()[:16])

    def _joint_point(self, owner: int) -> bytes:
        """All that is multiplied with a piece of `owner`, as one point."""
        lost = tuple(self.lost[owner])
        if lost and lost not in self._joint:
            for other in lost:
                if other not in self._weighted:
                    weight = to_scalar(self._weight(other))
                    self._weighted[other] = times(weight, edge_point(self.agreed, other))
            self._joint[lost] = total(self._weighted[other] for other in lost)
        edges = (self._joint[lost],) if lost else ()
        return total((mask_point(self.agreed, owner), *edges) if self.masks else edges)

    def _challenge(self, owner: int, *points: bytes) -> bytes:
        hashed = length_prefixed(_PROOF_TAG, self._said, uint64(owner), *points)
        return hashlib.sha256(hashed).digest()[:CHALLENGE_BYTES]

    def prove(self, owner: int, piece: SecretBytes, point: bytes, private: SecretBytes) -> bytes:
        """The proof for one owner; its nonce follows from the piece, the member's prekey and all that is said."""
        joint = self._joint_point(owner)
        made = times(piece, joint)
        nonce = to_scalar(hash_to_number(_NONCE_TAG, private, piece, self._said, uint64(owner), point))
        asked = self._challenge(owner, point, joint, made, times_base(nonce), times(nonce, joint))
        response = to_number(nonce) + to_number(asked) * to_number(piece)
        return asked + bytes(to_scalar(response))

    def is_proven(self, owner: int, point: bytes, proof: bytes) -> bool:
        """Whether the partials of `owner` are what the number behind `point` makes."""
        asked, response = proof[:CHALLENGE_BYTES], to_number(proof[CHALLENGE_BYTES:]) % 2**255
        numbers = [*([1] if self.masks else []), *map(self._weight, self.lost[owner])]
        minus = -to_number(asked)
        try:
            joint = self._joint_point(owner)
            (made,) = sums(numbers, self.points[owner], known=self.sound)
            (seen,) = sums((response, minus), BASE + point)
            (seen_joint,) = sums((response, minus), joint + made, known=True)
        except (RemoteProtocolError, ValueError):
            return False
        return hmac.compare_digest(asked, self._challenge(owner, point, joint, made, seen, seen_joint))


def combine(said: Mapping[int, bytes], *, known: bool = False) -> list[bytes]:
    """`f(0) P` of each point P in turn, from the partials `f(c) P` that as many members as the threshold made of them.

    said    by the member's number from 1, its partials one after another
    known   they are proven, or what they give is checked: their order is not

    Points that are none, or that make zero together, are a `RemoteProtocolError`.
    """
    places = tuple(sorted(said))
    rows = zip(*(cut(said[place]) for place in places), strict=True)
    numbers, denominator = small_coefficients(places)
    found = sums(numbers, b"".join(part for row in rows for part in row), known=known)
    if ZERO in found:
        raise RemoteProtocolError("the partials make zero together")
    return found if denominator == 1 else sums([pow(denominator, -1, ORDER)], b"".join(found), known=True)
