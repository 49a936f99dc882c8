"""No terms of a server's making talk a client out of its noise: it refuses them, or is charged what they cost.

What a round truly costs is computed here from the joint covariance of what leaves the honest clients, over every set of
colluders and every repair the terms allow, with nothing of the package's accountant.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from niss.errors import NissError
from niss.mechanism.grid import centred
from niss.protocol.agreement import Agreed, agree
from niss.protocol.messages import MODES, RoundOpen, Terms
from niss.protocol.wire import unpack
from support.hostile import (
    COLLUDERS,
    COORDINATES,
    SIZE,
    assessing,
    honest_terms,
    opened_with,
    spoilt,
    true_mu,
)
from support.protocol_round import Federation

# Noise so wide that a float64 holds only multiples of 8 or more of it, and an update of a few steps below that.
WIDE: dict[str, Any] = {"grid_bits": 62, "residual_variance": 2.0**-10, "clip": 16.0 * 2.0**-62}


@pytest.mark.parametrize("unit_variance", [0.0, 2.0**-10])
def test_noise_on_a_coarser_lattice_than_the_update_is_refused(unit_variance: float) -> None:
    """The upload modulo 8 was the update itself, at a charge of next to nothing."""
    federation = assessing(4, "lattice")
    terms = federation.terms(unit_variance=unit_variance, **WIDE)
    opened = opened_with(federation, terms)
    assert opened is not None
    signs = np.tile([1.0, -1.0, 1.0, 1.0], 4)
    try:
        upload = federation.clients[0].upload(opened, signs * 4.0 * 2.0**-62, federation.entropy)
    except NissError:
        assert federation.seats[0].charges == []
        return
    seen = centred(unpack(upload.vector, 16, 64)) % 8
    read = np.where(seen > 4, seen - 8, seen)
    cosine = float(read @ signs / (np.linalg.norm(read) * np.linalg.norm(signs) + 1e-300))
    pytest.fail(f"a bare update: cosine {cosine:.2f} at a charge of {federation.seats[0].charges[0][2]:.2g}")


def answered(federation: Federation, opened: RoundOpen) -> float | None:
    """What the first client charged for its upload; None where it refused, which then left no trace."""
    seat, client = federation.seats[0], federation.clients[0]
    update = np.ones(max(1, min(opened.terms.coordinates, COORDINATES)))
    try:
        client.upload(opened, update, federation.entropy)
    except NissError:
        assert seat.charges == []
        return None
    ((_, _, mu),) = seat.charges
    return mu


NAMES = [field.name for field in fields(Terms)]


@pytest.mark.parametrize("mode", MODES)
def test_the_terms_of_an_honest_server_are_accepted(mode: str) -> None:
    federation = assessing(SIZE, "honest", colluders=COLLUDERS)
    opened = federation.open(honest_terms(mode))
    mu = answered(federation, opened)
    assert mu is not None
    assert true_mu(agree(opened)) <= mu * (1.0 + 1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_term_is_refused_or_paid_for(name: str, mode: str) -> None:
    base = honest_terms(mode)
    for value in spoilt(base, name):
        federation = assessing(SIZE, f"{name} {mode}", colluders=COLLUDERS)
        terms = replace(base, **{name: value})
        opened = opened_with(federation, terms)
        if opened is None:
            continue
        mu = answered(federation, opened)
        if mu is not None:
            agreed = agree(opened)
            assert true_mu(agreed) <= mu * (1.0 + 1e-9), (name, value)
            widest = max(terms.residual_variance, terms.self_variance, *agreed_shares(agreed))
            # Within a float64 there is room for at least 2^20 values in each step.
            assert math.sqrt(widest) * 2.0**terms.grid_bits <= 2.0**30, (name, value)
            assert terms.unit_variance > 0.0


def agreed_shares(agreed: Agreed) -> list[float]:
    return [float(weight) * agreed.terms.unit_variance for weight in agreed.graph.weights]


@pytest.mark.parametrize(
    "name", ["clip", "neighbours", "unit_variance", "residual_variance", "self_variance"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_what_the_wire_cannot_carry_is_refused_behind_it_too(name: str, value: float) -> None:
    federation = assessing(SIZE, "behind the wire")
    opened = federation.open(honest_terms("repair"))
    with pytest.raises(NissError):
        agree(replace(opened, terms=replace(opened.terms, **{name: value})))


@pytest.mark.parametrize(
    ("factor", "accepted"), [(1.0, True), (0.99, False), (1.01, False), (1e-6, False), (4.0, False)]
)
def test_shares_of_another_strength_than_planned_are_refused(factor: float, accepted: bool) -> None:
    """Kappa is the plan's, not the server's: neither weaker shares nor stronger ones."""
    base = honest_terms("tolerate")
    strength = base.neighbours * base.unit_variance * (SIZE / base.clip) ** 2
    federation = assessing(SIZE, "strength", colluders=COLLUDERS, strength=strength)
    opened = opened_with(federation, replace(base, unit_variance=factor * base.unit_variance))
    assert opened is not None
    assert (answered(federation, opened) is not None) == accepted


def test_a_round_without_shares_is_refused_though_its_charge_would_do() -> None:
    federation = assessing(SIZE, "no shares", colluders=COLLUDERS, mu=10.0)
    opened = opened_with(federation, replace(honest_terms("tolerate"), unit_variance=0.0))
    assert opened is not None
    with pytest.raises(NissError, match="no noise shares"):
        federation.clients[0].upload(opened, np.ones(COORDINATES), federation.entropy)
