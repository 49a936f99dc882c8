"""Uniform masks in place of Gaussian shares: exact sums, uploads that show nothing, void rounds, hostile terms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from niss.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import agree
from niss.protocol.messages import Terms
from niss.protocol.wire import decode, encode, signed_part, unpack
from support.protocol_round import Federation


def uniform_terms(federation: Federation, **changes: Any) -> Terms:
    size = len(federation.seats)
    wanted = {"mode": "repair", "unit_variance": math.inf, "self_variance": math.inf}
    wanted |= {"neighbours": float(size - 1), "dropped": 3, "revealed": 3}
    return federation.terms(**{**wanted, **changes})


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("absent", [(), (0,), (1, 5), (2, 3, 4)])
def test_a_repaired_sum_is_exact_to_the_last_bit(absent: tuple[int, ...], bits: int) -> None:
    federation = Federation(9, f"uniform {absent}")
    outcome, exact = federation.play(uniform_terms(federation, modulus_bits=bits), absent=absent)
    assert outcome.exact
    assert not outcome.void
    assert outcome.dropped == absent
    assert outcome.extra_variance == 0.0
    np.testing.assert_array_equal(outcome.total, exact)


def test_a_sparse_graph_with_edges_both_ways_and_one_way_cancels() -> None:
    federation = Federation(9, "uniform sparse")
    terms = uniform_terms(federation, neighbours=4.0, revealed=8)
    graph = agree(federation.open(terms)).graph
    directed = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    mutual = {pair for pair in directed if pair[::-1] in directed}
    assert mutual
    assert mutual != directed
    federation = Federation(9, "uniform sparse")
    outcome, exact = federation.play(terms, absent=(3,))
    assert outcome.exact
    np.testing.assert_array_equal(outcome.total, exact)


def test_two_clients_share_one_mask_whichever_way_edges_go() -> None:
    federation = Federation(6)
    agreed = agree(federation.open(uniform_terms(federation)))
    assert len(agreed.edges_of(2)) == 5
    assert len(agreed.shares()) == 15
    assert all(sender < receiver and variance == math.inf for sender, receiver, variance in agreed.shares())
    assert set(agreed.shares(agreed.graph.edges_of(2))) <= set(agreed.shares())


@pytest.mark.parametrize("bits", [32, 64])
def test_an_upload_is_uniform_over_all_residues_and_tells_nothing_of_the_update(bits: int) -> None:
    federation = Federation(4, f"uniform law {bits}")
    opened = federation.open(uniform_terms(federation, coordinates=4096, modulus_bits=bits))
    update = np.full(4096, 2.0 / 64.0)
    for client in federation.clients:
        words = unpack(client.upload(opened, update, federation.entropy).vector, 4096, bits)
        # Four Kolmogorov-Smirnov tests with a fixed seed: false-alarm rate 4e-7.
        assert stats.kstest(words.astype(np.float64) / 2.0**bits, "uniform").pvalue > 1e-7


def test_the_noise_in_the_sum_is_the_residual_noise_alone() -> None:
    federation = Federation(8)
    outcome, exact = federation.play(
        uniform_terms(federation, coordinates=20_000, residual_variance=0.01), absent=(1,)
    )
    # 20,000 normal draws: 6 standard deviations of the sample variance are 6 % of it.
    assert abs(np.var(outcome.total - exact) / 0.07 - 1.0) < 0.06


@pytest.mark.parametrize("stage", ["uploads", "repair"])
def test_unresolved_masks_make_the_round_void_and_it_says_so(stage: str) -> None:
    federation = Federation(6, f"void {stage}")
    opened = federation.open(uniform_terms(federation, dropped=1, revealed=1, threshold=5))
    federation.upload(opened, federation.updates(), absent=(4,))
    if stage == "repair":
        federation.repair(silent=(0, 1))
    outcome = federation.server.finish()
    assert outcome.void
    assert not outcome.exact
    assert outcome.survivors == ()
    assert not outcome.total.any()
    assert outcome.dropped == (4,)
    assert outcome.extra_variance == 0.0
    assert any("the round is void" in problem for problem in outcome.problems)
    # What was charged before the uploads left stays charged.
    assert [len(seat.charges) for seat in federation.seats] == [1, 1, 1, 1, 0, 1]


def test_a_void_round_leaves_the_next_one_as_it_was() -> None:
    federation = Federation(6, "void, then not")
    opened = federation.open(uniform_terms(federation))
    federation.upload(opened, federation.updates())
    assert federation.server.finish().void
    outcome, exact = federation.play(uniform_terms(federation, round=2))
    assert outcome.exact
    np.testing.assert_array_equal(outcome.total, exact)


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "tolerate", "dropped": 0, "revealed": 0},
        {"self_variance": 1.0},
        {"unit_variance": 0.5},
        {"residual_variance": math.inf},
        {"unit_variance": math.nan},
    ],
)
def test_masks_that_would_not_hide_or_not_come_out_again_are_refused(changes: dict[str, Any]) -> None:
    federation = Federation(5)
    with pytest.raises((RemoteProtocolError, LocalProtocolError)):
        federation.open(uniform_terms(federation, **changes))


def test_a_client_that_agreed_to_gaussian_shares_refuses_masks_and_the_reverse() -> None:
    for strength, terms in ((48.0, {}), (math.inf, {"unit_variance": 0.5, "self_variance": 1.0})):
        federation = Federation(5, strength=strength)
        opened = federation.open(uniform_terms(federation, **terms))
        with pytest.raises(RemoteProtocolError, match="not as strong as the plan says"):
            federation.clients[0].upload(opened, federation.updates()[0], federation.entropy)
    federation = Federation(5, strength=math.inf)
    outcome, _ = federation.play(uniform_terms(federation))
    assert outcome.exact


def test_the_sum_must_fit_and_the_masks_need_not() -> None:
    federation = Federation(5)
    tight = {"modulus_bits": 32, "grid_bits": 28, "clip": 1.0}
    with pytest.raises(ConfigError, match="modulo 2"):
        federation.open(uniform_terms(federation, **tight, unit_variance=0.5, self_variance=1.0))
    with pytest.raises(ConfigError, match="modulo 2"):
        federation.open(uniform_terms(federation, **tight | {"grid_bits": 31}))
    federation.open(uniform_terms(federation, **tight))


def test_terms_with_uniform_masks_travel_as_they_are() -> None:
    federation = Federation(4)
    opened = federation.open(uniform_terms(federation))
    assert decode(encode(opened)).terms == opened.terms
    assert opened.terms.uniform


@pytest.mark.parametrize("bits", [32, 64])
def test_an_upload_under_masks_of_its_own_making_voids_the_round_and_moves_no_model(bits: int) -> None:
    federation = Federation(6, f"false masks {bits}")
    opened = federation.open(uniform_terms(federation, modulus_bits=bits))
    updates = federation.updates()
    for seat, client in enumerate(federation.clients):
        upload = client.upload(opened, updates[seat], federation.entropy)
        if seat == 2:
            upload = replace(upload, vector=federation.entropy(len(upload.vector)), signature=b"")
            signature = federation.seats[seat].identity.sign("upload", signed_part(upload))
            upload = replace(upload, signature=signature)
        federation.server.take_upload(upload)
    federation.repair()
    outcome = federation.server.finish()
    assert outcome.void
    assert not outcome.exact
    assert not outcome.total.any()
    assert any("some upload is false" in problem for problem in outcome.problems)
