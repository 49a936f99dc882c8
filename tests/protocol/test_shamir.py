"""Any threshold of pieces gives the seed back, fewer give nothing, and liars are noticed."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.keys import SecretBytes, length_prefixed
from niss.protocol.shamir import PRIME, Piece, check_commitment, combine, commit, split
from support.fixed_entropy import FixedEntropy

SECRET = SecretBytes(range(32))
GOLDEN = [
    "00000001004e033e3c404c64bfc47f91365acf487871eea0893f0b0fb5d861c56119af0069",
    "00000002009c057a757c93c37880f61861a99182e1d3cc2eff6a01095498aa70a71740e2b3",
    "0000000300ea07b6aeb8db22313d6c9f8cf853bd4b35a9bd7594f702f358f31bed14d2c4fd",
]

seeds = st.binary(min_size=32, max_size=32)


def pieces(threshold: int = 3, shares: int = 5) -> list[Piece]:
    return split(SECRET, threshold, shares, FixedEntropy())


def test_the_modulus_is_the_first_prime_above_all_seeds() -> None:
    def probably_prime(number: int) -> bool:
        odd, twos = number - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
            power = pow(base, odd, number)
            if power not in (1, number - 1) and all(
                pow(base, odd * 2**step, number) != number - 1 for step in range(1, twos)
            ):
                return False
        return True

    assert probably_prime(PRIME)
    assert not any(probably_prime(number) for number in range(2**256, PRIME))


@settings(deadline=None)
@given(data=st.data(), secret=seeds, shares=st.integers(2, 12))
def test_any_threshold_of_pieces_in_any_order_gives_the_secret(
    data: st.DataObject, secret: bytes, shares: int
) -> None:
    threshold = data.draw(st.integers(2, shares))
    made = split(secret, threshold, shares, FixedEntropy(data.draw(st.text(max_size=3))))
    assert [piece.index for piece in made] == list(range(1, shares + 1))
    order = data.draw(st.permutations(made))
    for count in range(threshold, shares + 1):
        assert bytes(combine(order[:count], threshold)) == secret


def test_every_choice_of_pieces_gives_the_secret() -> None:
    for chosen in combinations(pieces(), 3):
        assert combine(chosen, 3) == SECRET


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, bytes(31) + b"\x01", b"\x80" + bytes(31)])
def test_the_smallest_and_the_largest_secrets_come_back(secret: bytes) -> None:
    assert bytes(combine(split(secret, 2, 3, FixedEntropy())[1:], 2)) == secret


def test_many_pieces() -> None:
    made = split(SECRET, 200, 300, FixedEntropy())
    assert combine(made[100:], 200) == SECRET
    assert combine(made, 200) == SECRET


def test_the_format_never_changes() -> None:
    assert [piece.encode().hex() for piece in pieces(2, 3)] == GOLDEN
    assert combine([Piece.decode(bytes.fromhex(text)) for text in GOLDEN[1:]], 2) == SECRET


def _by_hand(points: list[tuple[int, int]], place: int) -> int:
    """Lagrange's formula as the books write it."""
    total = 0
    for x, y in points:
        ratio = Fraction(1)
        for other, _ in points:
            if other != x:
                ratio *= Fraction(place - other, x - other)
        total += y * ratio.numerator * pow(ratio.denominator, -1, PRIME)
    return total % PRIME


@settings(deadline=None)
@given(secret=seeds, other=seeds, threshold=st.integers(2, 6), data=st.data())
def test_fewer_pieces_fit_every_secret_equally_well(
    secret: bytes, other: bytes, threshold: int, data: st.DataObject
) -> None:
    """With threshold - 1 pieces every secret has exactly one polynomial: whichever it is, combine finds it."""
    made = split(secret, threshold, 8, FixedEntropy())
    seen = data.draw(st.permutations(made))[: threshold - 1]
    points = [(0, int.from_bytes(other, "big"))]
    points += [(piece.index, int.from_bytes(piece.value, "big")) for piece in seen]
    missing = next(piece.index for piece in made if piece not in seen)
    forged = Piece(missing, _by_hand(points, missing).to_bytes(33, "big"))
    assert bytes(combine([*seen, forged], threshold)) == other


def test_coefficients_are_drawn_from_all_of_the_field() -> None:
    """The entropy of a coefficient is twice as long as the field: what is left of a bias is below 2^-254."""
    asked: list[int] = []

    def entropy(count: int) -> bytes:
        asked.append(count)
        return b"\xff" * count

    (first, second) = split(bytes(32), 2, 2, entropy)
    assert asked == [64]
    assert int.from_bytes(first.value, "big") == (2**512 - 1) % PRIME
    assert int.from_bytes(second.value, "big") == 2 * (2**512 - 1) % PRIME


@settings(deadline=None)
@given(place=st.integers(0, 4), change=st.integers(1, PRIME - 1))
def test_surplus_pieces_expose_a_liar(place: int, change: int) -> None:
    made = pieces()
    value = (int.from_bytes(made[place].value, "big") + change) % PRIME
    made[place] = Piece(made[place].index, value.to_bytes(33, "big"))
    with pytest.raises(RemoteProtocolError, match="belong together"):
        combine(made, 3)


def test_a_liar_among_just_enough_pieces_is_exposed_by_the_commitment() -> None:
    made = pieces()
    commitment = commit(SECRET, b"context")
    check_commitment(commitment, combine(made[:3], 3), b"context")
    wrong = Piece(made[0].index, made[1].value)
    with pytest.raises(RemoteProtocolError, match="committed"):
        check_commitment(commitment, combine([wrong, *made[1:3]], 3), b"context")


def test_what_is_no_secret_is_refused() -> None:
    """Pieces of a polynomial whose value at 0 is in the field but is no 32 bytes."""
    value = (2**256 + 5).to_bytes(33, "big")
    with pytest.raises(RemoteProtocolError, match="belong together"):
        combine([Piece(1, value), Piece(2, value)], 2)


def test_duplicates_and_too_few_are_refused() -> None:
    made = pieces()
    with pytest.raises(RemoteProtocolError, match="same index"):
        combine([made[0], made[1], made[0]], 3)
    with pytest.raises(LocalProtocolError, match="2 pieces are too few: the secret needs 3"):
        combine(made[:2], 3)
    with pytest.raises(LocalProtocolError):
        combine([], 2)


@pytest.mark.parametrize(("threshold", "shares"), [(0, 5), (1, 5), (-1, 5), (6, 5), (2, 2**16), (2, 0)])
def test_impossible_thresholds_are_refused(threshold: int, shares: int) -> None:
    with pytest.raises(LocalProtocolError):
        split(SECRET, threshold, shares, FixedEntropy())


@pytest.mark.parametrize("length", [0, 31, 33])
def test_secrets_of_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(LocalProtocolError, match="32 bytes"):
        split(bytes(length), 2, 3, FixedEntropy())


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, bytes(33)),
        (-1, bytes(33)),
        (2**16, bytes(33)),
        (True, bytes(33)),
        (1, bytes(32)),
        (1, bytes(34)),
        (1, PRIME.to_bytes(33, "big")),
        (1, b"\xff" * 33),
    ],
)
def test_malformed_pieces_are_refused(index: int, value: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Piece(index, value)


@pytest.mark.parametrize("length", [0, 36, 38])
def test_pieces_of_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match="37 bytes"):
        Piece.decode(bytes(length))


@settings(deadline=None)
@given(st.integers(1, 2**16 - 1), st.integers(0, PRIME - 1))
def test_pieces_survive_their_bytes(index: int, value: int) -> None:
    piece = Piece(index, value.to_bytes(33, "big"))
    assert Piece.decode(piece.encode()) == piece


@settings(deadline=None)
@given(seed=seeds, other=seeds, context=st.binary(max_size=8), elsewhere=st.binary(max_size=8))
def test_a_commitment_is_for_one_seed_and_context(
    seed: bytes, other: bytes, context: bytes, elsewhere: bytes
) -> None:
    commitment = commit(seed, context)
    assert commitment == hashlib.sha256(length_prefixed(b"niss.commitment.v1", context, seed)).digest()
    check_commitment(commitment, seed, context)
    refused = [(commitment[:-1], seed, context)]
    refused += [(commitment, other, context)] if other != seed else []
    refused += [(commitment, seed, elsewhere)] if elsewhere != context else []
    for arguments in refused:
        with pytest.raises(RemoteProtocolError, match="committed"):
            check_commitment(*arguments)


def test_a_commitment_to_a_guessable_seed_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="at least 32"):
        commit(bytes(31), b"context")
