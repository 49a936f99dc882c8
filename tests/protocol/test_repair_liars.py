"""Liars in the repair: the sum is right to the last bit or declared noisy, liars are named, honest clients never."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import RemoteProtocolError
from niss.protocol import server as server_module
from niss.protocol.agreement import Agreed, agree
from niss.protocol.messages import Reveal, RevealedEdge, RevealedPiece, SealedPiece, Upload
from niss.protocol.server import Outcome
from niss.protocol.shares import edge_commitment
from niss.protocol.wire import encode, pack, signed_part, unpack
from support.protocol_round import Federation, carried

SIZE = 7
ABSENT = (5, 6)
SURVIVORS = range(5)
RUBBISH = bytes([0, *range(32)])
Lie = Callable[[Any], Any]


def signed_by(federation: Federation, seat: int, message: Any, purpose: str) -> Any:
    """The message signed by the client in that seat: a lie it stands by."""
    bare = replace(message, signature=b"")
    return carried(replace(bare, signature=federation.seats[seat].identity.sign(purpose, signed_part(bare))))


@dataclass
class Settled:
    outcome: Outcome
    exact: np.ndarray
    agreed: Agreed
    uploads: dict[int, Upload]

    @property
    def right(self) -> bool:
        return np.array_equal(self.outcome.total, self.exact)


def settle(
    size: int = SIZE,
    absent: tuple[int, ...] = ABSENT,
    *,
    uploads: Mapping[int, Lie] | None = None,
    reveals: Mapping[int, Lie] | None = None,
    **terms: Any,
) -> Settled:
    """A repaired round in which some seats change their uploads, or reveals, and sign the change."""
    federation = Federation(size)
    opened = federation.open(federation.terms(mode="repair", **{"neighbours": size - 1.0, **terms}))
    updates, sent = federation.updates(), {}
    for seat, client in enumerate(federation.clients):
        if seat in absent:
            continue
        sent[seat] = client.upload(opened, updates[seat], federation.entropy)
        if seat in (uploads or {}):
            sent[seat] = signed_by(federation, seat, (uploads or {})[seat](sent[seat]), "upload")
        federation.server.take_upload(sent[seat])
    claim = carried(federation.server.claim_survivors())
    for seat in claim.survivors:
        federation.server.take_verdict(carried(federation.clients[seat].judge(claim)))
    for seat, request in federation.server.request_reveals().items():
        reveal = carried(federation.clients[seat].reveal(carried(request)))
        if seat in (reveals or {}):
            reveal = signed_by(federation, seat, (reveals or {})[seat](reveal), "reveal")
        federation.server.take_reveal(reveal)
    grid = agree(opened).grid
    steps = sum(grid.quantise(updates[seat] / size) for seat in claim.survivors)
    return Settled(federation.server.finish(), grid.to_float(np.asarray(steps)), agree(opened), sent)


def false_pieces(reveal: Reveal) -> Reveal:
    return replace(reveal, pieces=tuple(replace(piece, value=RUBBISH) for piece in reveal.pieces))


def false_seeds(reveal: Reveal) -> Reveal:
    return replace(reveal, edges=tuple(replace(edge, seed=bytes(32)) for edge in reveal.edges))


def one_false_seed(reveal: Reveal) -> Reveal:
    return replace(reveal, edges=(replace(reveal.edges[0], seed=bytes(32)), *reveal.edges[1:]))


def one_seed_kept_back(reveal: Reveal) -> Reveal:
    return replace(reveal, edges=reveal.edges[1:])


def swapped_seeds(reveal: Reveal) -> Reveal:
    """The share sent for the share received."""
    first, second, *others = reveal.edges
    return replace(
        reveal, edges=(replace(first, seed=second.seed), replace(second, seed=first.seed), *others)
    )


def edge_of_a_survivor(reveal: Reveal) -> Reveal:
    other = next(seat for seat in SURVIVORS if seat != reveal.seat)
    return replace(reveal, edges=(RevealedEdge(reveal.seat, other, bytes(32)), *reveal.edges))


def malformed_pieces(reveal: Reveal) -> Reveal:
    return replace(reveal, pieces=tuple(replace(piece, value=b"x") for piece in reveal.pieces))


def pieces_of_another(reveal: Reveal) -> Reveal:
    """Of each survivor the piece of the next one."""
    rolled = (*reveal.pieces[1:], reveal.pieces[0])
    changed = zip(reveal.pieces, rolled, strict=True)
    return replace(reveal, pieces=tuple(replace(own, value=other.value) for own, other in changed))


def piece_of_the_dropped(reveal: Reveal) -> Reveal:
    return replace(reveal, pieces=(*reveal.pieces, RevealedPiece(ABSENT[-1], 1, RUBBISH)))


PROVABLE_IN_REVEALS: list[Lie] = [
    false_pieces,
    false_seeds,
    one_false_seed,
    one_seed_kept_back,
    swapped_seeds,
    edge_of_a_survivor,
    malformed_pieces,
    pieces_of_another,
    piece_of_the_dropped,
]


def keeps_all_back(reveal: Reveal) -> Reveal:
    return replace(reveal, edges=(), pieces=())


def with_pieces(upload: Upload, change: Callable[[SealedPiece], bytes]) -> Upload:
    return replace(upload, pieces=tuple(replace(one, ciphertext=change(one)) for one in upload.pieces))


def with_edges(upload: Upload, commitments: dict[int, bytes]) -> Upload:
    """Other commitments to the shares with these neighbours."""
    return with_pieces(upload, lambda one: one.ciphertext[:-16] + commitments.get(one.seat, one.edges))


def false_edge_commitments(upload: Upload) -> Upload:
    return with_pieces(upload, lambda one: one.ciphertext[:-16] + bytes(16))


def false_piece_commitments(upload: Upload) -> Upload:
    return with_pieces(upload, lambda one: one.sealed + bytes(16) + one.edges)


def sealed_rubbish(upload: Upload) -> Upload:
    return with_pieces(upload, lambda one: bytes(85) + one.commitment + one.edges)


def false_mask_commitment(upload: Upload) -> Upload:
    return replace(upload, commitment=bytes(32))


IN_UPLOADS: list[Lie] = [
    false_edge_commitments,
    false_piece_commitments,
    sealed_rubbish,
    false_mask_commitment,
]


@pytest.mark.parametrize("liar", SURVIVORS)
def test_one_liars_pieces_cost_nothing_and_it_is_named(liar: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once choices of pieces were tried one after another: the time of `finish` grew as m^4."""
    combined: list[int] = []

    def counting(pieces: Any, threshold: int) -> Any:
        combined.append(len(pieces))
        return real(pieces, threshold)

    real = server_module.combine
    monkeypatch.setattr(server_module, "combine", counting)
    settled = settle(reveals={liar: false_pieces})
    assert len(combined) <= len(SURVIVORS)
    assert settled.outcome.exact
    assert settled.right
    assert settled.outcome.liars == (liar,)
    assert any(f"seat {liar} " in problem for problem in settled.outcome.problems)


def test_two_liars_leave_no_mask_in() -> None:
    """Nine survivors, five pieces wanted, eight given: once two false ones among them left all masks in."""
    settled = settle(10, (9,), reveals={0: false_pieces, 1: false_pieces})
    assert settled.outcome.masked == ()
    assert settled.outcome.exact
    assert settled.right
    assert settled.outcome.liars == (0, 1)


def test_as_many_liars_as_leave_enough_pieces() -> None:
    """Each honest client's mask has eight pieces, five wanted: three liars are borne, a fourth leaves masks in."""
    borne = settle(10, (9,), reveals=dict.fromkeys((1, 4, 7), false_pieces))
    assert borne.outcome.exact
    assert borne.right
    assert borne.outcome.liars == (1, 4, 7)
    noisy = settle(10, (9,), reveals=dict.fromkeys((1, 4, 6, 7), false_pieces))
    assert not noisy.outcome.exact
    assert noisy.outcome.liars == (1, 4, 6, 7)
    assert noisy.outcome.extra_variance == pytest.approx(len(noisy.outcome.masked))


@pytest.mark.parametrize("lie", [false_seeds, one_false_seed, swapped_seeds])
def test_a_false_edge_seed_never_passes_for_a_true_one(lie: Lie) -> None:
    """Once it was believed: another noise of the same strength, in a sum that called itself exact."""
    settled = settle(reveals={2: lie})
    assert settled.outcome.exact == settled.right
    assert not settled.outcome.exact
    assert settled.outcome.liars == (2,)
    # Two shares with one lost client, or with both.
    assert settled.outcome.uncancelled == (4 if lie is false_seeds else 2)
    assert settled.outcome.extra_variance == pytest.approx(settled.outcome.uncancelled * 0.5)


@pytest.mark.parametrize("lie", PROVABLE_IN_REVEALS)
def test_every_lie_in_a_reveal_is_named(lie: Lie) -> None:
    settled = settle(reveals={1: lie})
    assert settled.right or not settled.outcome.exact
    assert settled.outcome.liars == (1,)


def test_an_honest_holder_of_a_false_piece_is_not_named() -> None:
    """The owner sealed one thing and committed to another: the holder notices, and gives nothing."""
    for lie in (false_piece_commitments, sealed_rubbish):
        settled = settle(uploads={3: lie})
        assert settled.outcome.masked == (3,)
        assert settled.outcome.liars == ()
        assert any("self-mask of seat 3" in problem for problem in settled.outcome.problems)


def test_an_owner_whose_pieces_do_not_give_its_seed_is_named() -> None:
    settled = settle(uploads={3: false_mask_commitment})
    assert settled.outcome.masked == (3,)
    assert settled.outcome.liars == (3,)


def test_ends_that_committed_to_different_seeds_make_the_sum_noisy_and_name_the_pair() -> None:
    """One of them lied, nobody can say which: neither is called a liar, and nobody vouches for their shares."""

    def one(upload: Upload) -> Upload:
        return with_edges(upload, {upload.pieces[0].seat: bytes(16)})

    settled = settle(uploads={3: one})
    assert not settled.outcome.exact
    assert settled.outcome.liars == ()
    assert any("seat 0" in problem and "3" in problem for problem in settled.outcome.problems)


def test_what_no_commitment_can_show() -> None:
    """A false seed, committed to from the start, for a client that happens to drop out: a false update by other means.

    The liar could as well have added the difference to its own vector, which nobody can see either.
    """
    agreed = settle().agreed
    false = {(2, 5): bytes(32), (5, 2): bytes(32)}

    def commits(upload: Upload) -> Upload:
        return with_edges(upload, {5: edge_commitment(agreed, 2, 5, false)})

    def reveals(reveal: Reveal) -> Reveal:
        return replace(
            reveal,
            edges=tuple(
                replace(edge, seed=false.get((edge.sender, edge.receiver), edge.seed))
                for edge in reveal.edges
            ),
        )

    settled = settle(uploads={2: commits}, reveals={2: reveals})
    assert settled.outcome.exact
    assert not settled.right
    shift = agreed.grid.quantise(settled.outcome.total - settled.exact)

    def shifts(upload: Upload) -> Upload:
        vector = unpack(upload.vector, agreed.terms.coordinates, 64).view(np.int64) + shift
        return replace(upload, vector=pack(vector, 64))

    np.testing.assert_array_equal(settle(uploads={2: shifts}).outcome.total, settled.outcome.total)


@pytest.mark.parametrize("pairs", [[(2, 0), (0, 2)], [(2, 5)]], ids=["a survivor's edge", "half of an edge"])
def test_a_commitment_does_not_excuse_what_nobody_asked_for(pairs: list[tuple[int, int]]) -> None:
    agreed, other = settle().agreed, pairs[0][1]
    false = dict.fromkeys(pairs, bytes(32))

    def commits(upload: Upload) -> Upload:
        return with_edges(upload, {other: edge_commitment(agreed, 2, other, false)})

    def reveals(reveal: Reveal) -> Reveal:
        kept = [edge for edge in reveal.edges if other not in (edge.sender, edge.receiver)]
        told = [RevealedEdge(*pair, seed) for pair, seed in false.items()]
        return replace(reveal, edges=(*told, *kept))

    settled = settle(uploads={2: commits}, reveals={2: reveals})
    assert not settled.outcome.exact
    assert settled.outcome.liars == (2,)


@pytest.mark.parametrize("size", [1, 16, 32])
def test_an_upload_without_commitments_is_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="seat 1 did not commit"):
        settle(uploads={1: lambda upload: with_pieces(upload, lambda one: one.ciphertext[:size])})


def test_what_the_commitments_cost() -> None:
    """32 bytes for each neighbour, in the upload and in requests."""
    upload = settle().uploads[0]
    bare = replace(upload, pieces=(), commitment=b"")
    assert len(encode(upload)) - len(encode(bare)) == 32 + (SIZE - 1) * (87 + 32)


def test_neither_commitments_nor_problems_show_a_secret() -> None:
    settled = settle(reveals={1: false_pieces, 2: false_seeds})
    said = " ".join(settled.outcome.problems)
    assert RUBBISH.hex() not in said
    assert len(settled.outcome.problems) <= 2 * SIZE


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whoever_lies_the_sum_is_exact_or_noisy_and_no_honest_client_is_named(data: st.DataObject) -> None:
    lies_of_reveals = st.sampled_from([*PROVABLE_IN_REVEALS, keeps_all_back])
    reveals = data.draw(st.dictionaries(st.sampled_from(SURVIVORS), lies_of_reveals, max_size=4))
    uploads = data.draw(st.dictionaries(st.sampled_from(SURVIVORS), st.sampled_from(IN_UPLOADS), max_size=2))
    settled = settle(uploads=uploads, reveals={seat: _where_possible(lie) for seat, lie in reveals.items()})
    assert settled.right or not settled.outcome.exact
    assert set(settled.outcome.liars) <= set(reveals) | set(uploads)
    if not uploads:
        provable = {seat for seat, lie in reveals.items() if lie is not keeps_all_back}
        assert set(settled.outcome.liars) == provable
        assert settled.outcome.exact == settled.right


def _where_possible(lie: Lie) -> Lie:
    """A lie about pieces needs some: a liar that was given none (its owners lied too) tells the truth."""

    def told(reveal: Reveal) -> Reveal:
        return lie(reveal) if len(reveal.pieces) > 1 and reveal.edges else reveal

    return told
