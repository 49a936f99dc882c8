"""The paper's explicit form: sealed seeds through any relay, and the same exact sum."""

from __future__ import annotations

import numpy as np
import pytest

from niss.errors import RemoteProtocolError
from niss.mechanism import clip_l2
from niss.protocol.agreement import agree
from niss.protocol.messages import SealedPiece
from niss.protocol.noise import add_shares_from
from niss.protocol.sent import open_shares, seal_shares
from support.protocol_round import Federation


def test_sent_seeds_cancel_like_derived_ones() -> None:
    federation = Federation(6)
    opened = federation.open()
    agreed = agree(opened)
    privates = [
        seat.client._prekeys.private(opened.participants[number].prekey.number)
        for number, seat in enumerate(federation.seats)
    ]
    own, post = [], {seat: {} for seat in range(6)}
    for seat in range(6):
        seeds, letters = seal_shares(agreed, seat, privates[seat], federation.entropy)
        own.append(seeds)
        for letter in letters:
            post[letter.seat][seat] = letter
    updates = federation.updates()
    total = np.zeros(16, dtype=np.uint64)
    exact = np.zeros(16, dtype=np.int64)
    for seat in range(6):
        steps = agreed.grid.quantise(clip_l2(updates[seat], 2.0) / 6)
        seeds = {**own[seat], **open_shares(agreed, seat, privates[seat], post[seat])}
        vector = steps.view(np.uint64).copy()
        add_shares_from(agreed, seat, seeds, vector)
        assert not np.array_equal(vector, steps.view(np.uint64))
        total += vector
        exact += steps
    np.testing.assert_array_equal(total.view(np.int64), exact)


def test_a_tampered_misdirected_or_missing_letter_is_refused() -> None:
    federation = Federation(6)
    opened = federation.open(federation.terms(neighbours=5.0))
    agreed = agree(opened)
    privates = [
        seat.client._prekeys.private(opened.participants[number].prekey.number)
        for number, seat in enumerate(federation.seats)
    ]
    letters = {
        seat: {
            letter.seat: letter for letter in seal_shares(agreed, seat, privates[seat], federation.entropy)[1]
        }
        for seat in range(6)
    }
    mine = {seat: letters[seat][0] for seat in range(1, 6)}
    open_shares(agreed, 0, privates[0], mine)
    broken = SealedPiece(0, mine[1].ciphertext[:-1] + bytes([mine[1].ciphertext[-1] ^ 1]))
    for lie in ({**mine, 1: broken}, {**mine, 1: letters[1][2]}, {**mine, 1: mine[2]}):
        with pytest.raises(RemoteProtocolError):
            open_shares(agreed, 0, privates[0], lie)
    del mine[3]
    with pytest.raises(RemoteProtocolError, match="seat 3"):
        open_shares(agreed, 0, privates[0], mine)
