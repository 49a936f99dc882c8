"""No round of a server's making talks a client out of its noise: it refuses it, or is charged what it costs.

What a round truly costs is computed here from the joint covariance of what leaves the honest clients, over every set of
colluders and every repair the terms allow, with nothing of the package's accountant.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from niss.errors import ConfigError, NissError, RemoteProtocolError
from niss.mechanism.grid import centred
from niss.protocol.agreement import Agreed, agree, unpack
from niss.protocol.keys import _prekey_statement as signed_prekey
from niss.protocol.messages import MODES, Participant, Prekey, RoundOpen, Terms
from support.protocol_round import Federation, carried, resigned
from support.what_left import (
    COLLUDERS,
    COORDINATES,
    SIZE,
    assessing,
    honest_terms,
    opened_with,
    spoilt,
    true_mu,
)

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
    if update.size != opened.terms.coordinates:
        return None  # A node has compared it with its model before.
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


@pytest.mark.parametrize(
    ("policy", "change", "match"),
    [
        ({}, {"clip": 11.0}, "clip of 11"),
        ({}, {"attempt": 3}, "allows only 3"),
        ({"participants": 6}, {}, "at least 6"),
        ({"trusted": frozenset()}, {}, "trusts"),
        ({"mu": 0.1}, {}, r"mu = 0\.5"),
        ({"modes": ("tolerate",)}, {"mode": "repair"}, "repair"),
        ({}, {"unit_variance": 0.0}, "no noise shares"),
        ({}, {"grid_bits": 63}, "at most 62"),
        ({}, {"modulus_bits": 40}, "32 or 64 bits"),
        ({}, {"unit_variance": 1e40}, "too strong for the grid"),
        ({}, {"self_variance": 1e308, "mode": "repair"}, "too strong for the grid"),
    ],
)
def test_rounds_that_a_client_does_not_accept_are_refused_and_cost_nothing(
    policy: dict[str, Any], change: dict[str, Any], match: str
) -> None:
    """Below its own policy, or not to be carried out."""
    federation = Federation(5, **policy)
    opened = opened_with(federation, federation.terms(**change))
    assert opened is not None
    with pytest.raises(RemoteProtocolError, match=match):
        federation.clients[0].upload(opened, federation.updates()[0], federation.entropy)
    assert federation.seats[0].charges == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"grid_bits": 63}, RemoteProtocolError),
        ({"unit_variance": 1e40}, RemoteProtocolError),
        ({"self_variance": 1e308, "mode": "repair"}, RemoteProtocolError),
        ({"grid_bits": 30, "modulus_bits": 32}, ConfigError),
        ({"neighbours": 0.5}, ConfigError),
    ],
)
def test_a_server_opens_no_round_that_cannot_be_carried_out(
    change: dict[str, Any], error: type[Exception]
) -> None:
    federation = Federation(5)
    with pytest.raises(error):
        federation.open(federation.terms(**change))


def listed_with(federation: Federation, terms: Terms, prekeys: dict[int, Prekey]) -> RoundOpen:
    """A round in which some seats are listed with the prekeys given."""
    participants = tuple(
        Participant(seat.client.public, prekeys.get(number) or federation.prekeys[number].pop(0))
        for number, seat in enumerate(federation.seats)
    )
    beacon = federation.beacon(participants, terms)
    return carried(federation.server.open_round(terms, participants, beacon))


def test_a_prekey_in_use_is_refused_and_the_client_lives_on() -> None:
    """Listed twice, it once cost a charge without an upload, and the client could never answer again."""
    federation = Federation(4)
    first = federation.open()
    client, update = federation.clients[0], federation.updates()[0]
    client.upload(first, update, federation.entropy)
    federation.server.finish()
    used = first.participants[0].prekey
    again = listed_with(federation, federation.terms(round=2), {0: used})
    with pytest.raises(RemoteProtocolError, match="prekey"):
        client.upload(again, update, federation.entropy)
    assert len(federation.seats[0].charges) == 1
    federation.server.finish()
    client.upload(federation.open(federation.terms(round=3)), update, federation.entropy)
    client.close_round()
    client.close_round()


@pytest.mark.parametrize("public", ["own", "degenerate"])
def test_a_neighbours_useless_prekey_costs_no_charge(public: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colluder signs a prekey with which nothing can be shared: refused before anything is spent."""
    # An honest server would not open such a round.
    monkeypatch.setattr("niss.protocol.server.check_prekey", lambda *_: None)
    federation = Federation(4)
    own = federation.prekeys[0][0].public
    chosen = own if public == "own" else bytes(32)
    liar = federation.seats[2].identity
    prekey = Prekey(9, chosen, liar.sign("prekey with possession", signed_prekey(liar.public, 9, chosen)))
    opened = listed_with(federation, federation.terms(), {2: prekey})
    with pytest.raises(RemoteProtocolError):
        federation.clients[0].upload(opened, federation.updates()[0], federation.entropy)
    assert federation.seats[0].charges == []


def test_a_relay_that_swaps_keys_is_found_out() -> None:
    federation = Federation(4)
    opened = federation.open()
    stranger = Federation(4, "stranger").prekeys[0][0]
    swapped = tuple(
        replace(one, prekey=stranger) if seat == 1 else one for seat, one in enumerate(opened.participants)
    )
    lie = resigned(federation.server, replace(opened, participants=swapped), "open")
    with pytest.raises(RemoteProtocolError):
        federation.clients[0].upload(lie, federation.updates()[0], federation.entropy)


def test_a_beacon_of_another_list_or_an_old_one_is_refused() -> None:
    federation = Federation(4)
    first, second = federation.open(), None
    fewer = replace(first, participants=first.participants[:3])
    with pytest.raises(RemoteProtocolError):
        federation.clients[0].upload(
            resigned(federation.server, fewer, "open"), federation.updates()[0], federation.entropy
        )
    federation.clients[0].upload(first, federation.updates()[0], federation.entropy)
    federation.server.finish()
    second = federation.open(federation.terms(round=2))
    replayed = resigned(federation.server, replace(second, beacon=first.beacon), "open")
    with pytest.raises(RemoteProtocolError, match="this attempt has link"):
        federation.clients[0].upload(replayed, federation.updates()[0], federation.entropy)
