"""Compiled sums of points are those of libsodium, and refuse what it refuses; or they are not used."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from niss.errors import RemoteProtocolError
from niss.protocol import keys, points
from niss.protocol.agreement import agree
from niss.protocol.committee import PROOF_BYTES, MemberStatement, _open, deal, mask_point, piece_for
from niss.protocol.points import load_points
from niss.protocol.shares import EdgeKeys
from niss.protocol.wire import uint64
from support.protocol_round import Federation

if TYPE_CHECKING:
    from niss.protocol.compiled_points import CompiledPoints

# Of order 4, 2 and 1, and one of order 8; no point; other spellings of 1 and of a point with the wrong sign.
SMALL = [
    y.to_bytes(32, "little")
    for y in (0, keys.FIELD - 1, 1, 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7)
]
NONE = [y.to_bytes(32, "little") for y in (2, keys.FIELD, keys.FIELD + 1, 2**255 - 1, 1 | 1 << 255)]
GOOD = [points.hash_to_point(uint64(number)) for number in range(40)]
MIXED = [keys.total((GOOD[0], one)) for one in (SMALL[0], SMALL[1], SMALL[3])]


@pytest.fixture(scope="module")
def compiled() -> CompiledPoints:
    pytest.importorskip("numba", reason="the extra `fast` is not installed")
    found = load_points()
    assert found is not None, "compiled sums do not agree with libsodium on this machine"
    return found


@pytest.fixture(params=["libsodium", "compiled"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways in turn, from the first sum on."""
    if request.param == "compiled":
        request.getfixturevalue("compiled")
    monkeypatch.setattr(points.demand, "worth", 0 if request.param == "compiled" else 2**63)
    return request.param


numbers = st.integers(-(2**255) + 1, 2**255 - 1).filter(lambda number: number % keys.ORDER) | st.sampled_from(
    [1, -1, 2, 15, 16, 17, 31, keys.ORDER - 1, keys.ORDER + 1, 2**252, 2**255 - 1, 1 - 2**255]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(numbers, min_size=1, max_size=8), rows=st.integers(1, 3), known=st.booleans())
def test_sums_are_those_of_libsodium(
    compiled: CompiledPoints, drawn: list[int], rows: int, known: bool
) -> None:
    made = random.Random(str(drawn)).choices(GOOD, k=rows * len(drawn))
    assert compiled.sums(drawn, b"".join(made), known=known) == points._reference(drawn, b"".join(made))


@pytest.mark.parametrize("place", [0, 5, 38])
@pytest.mark.parametrize("wrong", [*SMALL, *NONE, *MIXED], ids=bytes.hex)
def test_what_is_not_of_prime_order_is_refused_wherever_it_is(wrong: bytes, place: int, either: str) -> None:
    """One among many, by itself and with all others at once: 2^-128 would get through."""
    some = b"".join((*GOOD[:place], wrong, *GOOD[place:39]))
    with pytest.raises(RemoteProtocolError):
        points.sums([3, 5], some)
    many = GOOD * 8
    assert not points.of_prime_order(b"".join((*many[:place], wrong, *many[place:])))
    assert points.of_prime_order(b"".join(many)) == (either == "compiled")


def test_parts_of_small_order_that_cancel_in_one_sum_are_found(compiled: CompiledPoints) -> None:
    """All points of a sum shifted by the same one of order 2, 4 or 8: whatever sum one looks at, half of them show."""
    for small in (SMALL[0], SMALL[1], SMALL[3]):
        for count in (1, 2, 3, 4, 5, 40):
            shifted = b"".join(keys.total((one, small)) for one in GOOD[:count])
            assert not compiled.of_prime_order(shifted, os.urandom)
            assert compiled.of_prime_order(b"".join(GOOD[:count]), os.urandom)


@pytest.mark.parametrize("number", [0, keys.ORDER, -keys.ORDER, 2 * keys.ORDER])
def test_a_number_that_makes_zero_of_everything_is_refused(number: int, either: str) -> None:
    del either
    with pytest.raises(RemoteProtocolError, match="zero"):
        points.sums([1, number], b"".join(GOOD[:2]))


def test_a_sum_may_be_zero(either: str) -> None:
    del either
    assert points.sums([7, -7], GOOD[0] * 2) == [points.ZERO]


def test_wrong_sums_are_not_used(compiled: CompiledPoints, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(compiled)

    class Off(kind):
        """Wrong where there are many terms; the others about what is of prime order."""

        def sums(self, numbers, made, *, known=False):  # type: ignore[no-untyped-def]
            found = compiled.sums(numbers, made, known=known)
            return found if len(numbers) < 24 else [*found[:-1], found[0]]

    class Credulous(kind):
        def sums(self, numbers, made, *, known=False):  # type: ignore[no-untyped-def]  # noqa: ARG002
            return compiled.sums(numbers, made, known=True)

    class Blind(kind):
        def of_prime_order(self, made: bytes, entropy: object) -> bool:  # noqa: ARG002
            return True

    assert points._agrees(compiled)
    assert not any(points._agrees(one()) for one in (Off, Credulous, Blind))
    monkeypatch.setattr("niss.protocol.points._agrees", lambda _: False)
    assert load_points.__wrapped__() is None


def test_a_proof_for_a_partial_with_a_part_of_small_order_is_no_proof(either: str) -> None:
    """Order 2 vanishes under an even challenge, and a member can try until it has one: the point's order decides."""
    federation = Federation(6, "small order")
    agreed = agree(federation.open(federation.terms(mode="repair", neighbours=5.0)))
    privates = [
        client._prekeys.private(agreed.participants[seat].prekey.number)
        for seat, client in enumerate(federation.clients)
    ]
    member = agreed.committee[0]
    owner = next(seat for seat in range(6) if seat != member)
    _, pieces = deal(EdgeKeys(agreed, owner, privates[owner]), federation.entropy)
    given = piece_for(agreed, member, pieces)
    piece, point = _open(agreed, owner, member, privates[member], given), given[32:64]

    mask = keys.total((keys.times(piece, mask_point(agreed, owner)), SMALL[1]))
    statement = MemberStatement(agreed, member, {owner: mask}, {owner: []})
    joint = statement._joint_point(owner)
    made = keys.total((keys.times(piece, joint), SMALL[1]))
    for number in range(1, 200):
        nonce = keys.to_scalar(number)
        asked = statement._challenge(
            owner, point, joint, made, keys.times_base(nonce), keys.times(nonce, joint)
        )
        if asked[0] % 2 == 0:
            break
    response = number + keys.to_number(asked) * keys.to_number(piece)
    proof = asked + bytes(keys.to_scalar(response))
    assert len(proof) == PROOF_BYTES
    assert not statement.is_proven(owner, point, proof)
    statement.__dict__["sound"] = True
    assert statement.is_proven(owner, point, proof) == (either == "compiled"), (
        "nothing but the order is wrong"
    )
