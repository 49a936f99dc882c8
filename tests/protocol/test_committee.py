"""Sharing an upload's secret among a committee: pieces, partials, proofs, and what a lying server can make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from niss.errors import RemoteProtocolError
from niss.protocol import committee, keys
from niss.protocol.agreement import Agreed, agree
from niss.protocol.committee import MemberStatement
from niss.protocol.messages import Partials
from niss.protocol.points import cut
from niss.protocol.shares import EdgeKeys
from niss.redaction import SecretBytes
from tests.support.protocol_round import Federation

SIZE, MEMBERS, THRESHOLD = 8, 5, 3
OWNER, GONE = 0, 7


def opened(label: str = "committee", **changes: object) -> tuple[Federation, Agreed]:
    federation = Federation(SIZE, label)
    terms = {"neighbours": 7.0, "committee": MEMBERS, "threshold": THRESHOLD, "revealed": 7, "dropped": 7}
    return federation, agree(federation.open(federation.terms(mode="repair", **{**terms, **changes})))


def private(federation: Federation, agreed: Agreed, seat: int) -> SecretBytes:
    return federation.clients[seat]._prekeys.private(agreed.participants[seat].prekey.number)


def dealt(federation: Federation, agreed: Agreed, seat: int = OWNER) -> tuple[SecretBytes, bytes]:
    """The seed of a client's mask, and what it deals."""
    return committee.deal(keys_of(federation, agreed, seat), federation.entropy)


def keys_of(federation: Federation, agreed: Agreed, seat: int) -> EdgeKeys:
    return EdgeKeys(agreed, seat, private(federation, agreed, seat))


def partials_of(federation: Federation, agreed: Agreed, member: int, pieces: bytes) -> Partials:
    """For one owner that lost one neighbour."""
    given = {OWNER: committee.piece_for(agreed, member, pieces)}
    (made,) = committee.answer(agreed, member, private(federation, agreed, member), {OWNER: [GONE]}, given)
    return made


def numbered(agreed: Agreed, made: dict[int, Partials], place: int) -> dict[int, bytes]:
    return {agreed.committee.index(member) + 1: cut(one.points)[place] for member, one in made.items()}


@pytest.mark.parametrize("chosen", [(0, 1, 2), (2, 3, 4), (0, 2, 4)])
def test_any_threshold_of_partials_gives_mask_and_edge_key(chosen: tuple[int, ...]) -> None:
    federation, agreed = opened()
    own, pieces = dealt(federation, agreed)
    made = {
        agreed.committee[one]: partials_of(federation, agreed, agreed.committee[one], pieces)
        for one in chosen
    }
    mask = committee.mask_seed(agreed, OWNER, *committee.combine(numbered(agreed, made, 0)))
    assert mask == own
    (point,) = committee.combine(numbered(agreed, made, 1))
    key = committee.open_seals(agreed, OWNER, {GONE: point}, pieces)[GONE]
    assert key == keys_of(federation, agreed, OWNER).key(GONE) == keys_of(federation, agreed, GONE).key(OWNER)
    # The point of one edge opens no other.
    other = committee.open_seals(agreed, OWNER, {GONE - 1: point}, pieces)[GONE - 1]
    assert other != keys_of(federation, agreed, OWNER).key(GONE - 1)


def test_fewer_partials_give_something_else() -> None:
    federation, agreed = opened()
    own, pieces = dealt(federation, agreed)
    made = {
        member: partials_of(federation, agreed, member, pieces)
        for member in agreed.committee[: THRESHOLD - 1]
    }
    assert committee.mask_seed(agreed, OWNER, *committee.combine(numbered(agreed, made, 0))) != own


def test_the_committee_is_drawn_anew_for_each_list_and_has_each_seat_once() -> None:
    drawn = [opened(f"draw {number}")[1].committee for number in range(6)]
    assert all(len(set(one)) == MEMBERS and set(one) <= set(range(SIZE)) for one in drawn)
    assert len(set(drawn)) > 1
    assert opened("draw 0")[1].committee == drawn[0]


def test_two_dealings_have_nothing_in_common() -> None:
    """Also after a rollback each secret serves one upload: neither points nor seals of the same keys come again."""
    federation, agreed = opened()
    (mask, first), (another, second) = dealt(federation, agreed), dealt(federation, agreed)
    assert len(first) == len(second) == committee.pieces_size(agreed, OWNER)
    numbers = 32 * (2 * MEMBERS - THRESHOLD + 3)
    assert len(first) == numbers + 16 * (SIZE - 1)
    assert not set(cut(first[:numbers])) & set(cut(second[:numbers]))
    seals = [{dealing[at : at + 16] for at in range(numbers, len(first), 16)} for dealing in (first, second)]
    assert len(seals[0]) == SIZE - 1
    assert not seals[0] & seals[1]
    assert mask != another


def test_an_added_number_only_adds_a_known_point() -> None:
    """A server that shifts a piece under its pad, and its point, gets `f(c) P + 5 P`: it could add that itself."""
    federation, agreed = opened()
    _, pieces = dealt(federation, agreed)
    member = agreed.committee[-1]
    part = committee.piece_for(agreed, member, pieces)
    shifted = keys.to_scalar(keys.to_number(part[64:]) + 5)
    point = keys.total((part[32:64], keys.times_base(keys.to_scalar(5))))
    own = private(federation, agreed, member)
    (true,) = committee.answer(agreed, member, own, {OWNER: []}, {OWNER: part})
    (moved,) = committee.answer(agreed, member, own, {OWNER: []}, {OWNER: part[:32] + point + bytes(shifted)})
    five = keys.times(keys.to_scalar(5), committee.mask_point(agreed, OWNER))
    assert moved.points == keys.total((true.points, five))


@pytest.mark.parametrize("where", [0, 40, 70])
def test_a_member_leaves_out_a_piece_that_was_tampered_with(where: int) -> None:
    federation, agreed = opened()
    member = agreed.committee[-1]
    part = bytearray(committee.piece_for(agreed, member, dealt(federation, agreed)[1]))
    part[where] ^= 1
    own = private(federation, agreed, member)
    assert committee.answer(agreed, member, own, {OWNER: [GONE]}, {OWNER: bytes(part)}) == ()


def test_pieces_of_another_owner_member_or_round_do_not_open() -> None:
    federation, agreed = opened()
    _, pieces = dealt(federation, agreed)
    member, other = agreed.committee[0], agreed.committee[1]
    part = committee.piece_for(agreed, member, pieces)
    own = private(federation, agreed, member)
    assert committee.answer(agreed, member, own, {1: []}, {1: part}) == ()
    assert (
        committee.answer(agreed, other, private(federation, agreed, other), {OWNER: []}, {OWNER: part}) == ()
    )
    elsewhere = replace(
        agreed, context=replace(agreed.context, fields=(b"another", *agreed.context.fields[1:]))
    )
    assert committee.answer(elsewhere, member, own, {OWNER: []}, {OWNER: part}) == ()


def test_a_proof_holds_for_its_points_alone() -> None:
    federation, agreed = opened()
    _, pieces = dealt(federation, agreed)
    member = agreed.committee[0]
    made = partials_of(federation, agreed, member, pieces)
    point = committee.commitments(agreed, pieces)[1]

    def holds(points: bytes, proof: bytes = made.proof, lost: int = GONE, claimed: bytes = point) -> bool:
        return MemberStatement(agreed, member, {OWNER: points}, {OWNER: [lost]}).is_proven(
            OWNER, claimed, proof
        )

    assert holds(made.points)
    mask, edge = cut(made.points)
    two = keys.to_scalar(2)
    assert not holds(keys.times(two, mask) + edge)
    assert not holds(mask + keys.times(two, edge))
    assert not holds(edge + mask)
    assert not holds(made.points, lost=GONE - 1)
    assert not holds(made.points, claimed=committee.commitments(agreed, pieces)[2])
    for place in range(committee.PROOF_BYTES):
        assert not holds(
            made.points, made.proof[:place] + bytes([made.proof[place] ^ 1]) + made.proof[place + 1 :]
        )


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31), b"\xff" * 32, b"\x02" + bytes(31)])
def test_points_that_are_none_prove_nothing(point: bytes) -> None:
    federation, agreed = opened()
    _, pieces = dealt(federation, agreed)
    member = agreed.committee[0]
    made = partials_of(federation, agreed, member, pieces)
    claimed = committee.commitments(agreed, pieces)[1]
    mask, edge = cut(made.points)
    for points in (point + edge, mask + point):
        statement = MemberStatement(agreed, member, {OWNER: points}, {OWNER: [GONE]})
        assert not statement.is_proven(OWNER, claimed, made.proof)
    assert not MemberStatement(agreed, member, {OWNER: made.points}, {OWNER: [GONE]}).is_proven(
        OWNER, point, made.proof
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 2},
        {"committee": 4, "threshold": 2},
        {"threshold": 6},
        {"committee": 9, "threshold": 5},
        {"committee": 1, "threshold": 1},
        {"committee": 0, "threshold": 0},
    ],
)
def test_a_committee_without_a_majority_or_larger_than_the_round_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(RemoteProtocolError, match="committee"):
        opened(**changes)
