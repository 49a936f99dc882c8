"""Shares carried from round to round: what comes out in the end, and who may be asked what."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from niss.errors import ConfigError, RemoteProtocolError
from niss.mechanism.noise import Noise
from niss.protocol.agreement import commitment_of, participants_hash, terms_hash
from niss.protocol.schedule import Schedule
from support.protocol_round import GRID, CarriedFederation, changed, repairing, schedule


def in_steps(total: np.ndarray) -> np.ndarray:
    return np.rint(total * 2.0**GRID).astype(np.int64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"participants": 7, "separation": 3, "rounds": 7},
        {"closing": True, "rounds": 4},
        {"modulus_bits": 32, "grid_bits": 20, "unit": 0.01, "carried": 0.04},
    ],
)
def test_the_sum_of_all_rounds_is_exact_to_the_last_bit(changes: dict) -> None:
    """Without fresh noise and with nobody lost, what was carried is gone after the last round, bit by bit."""
    federation = CarriedFederation(schedule(**changes))
    rounds = federation.schedule.rounds
    totals = [in_steps(federation.play_round(number).total) for number in range(rounds)]
    assert all(federation.outcomes[number].exact for number in range(rounds))
    sums = federation.sums
    if federation.schedule.closing:
        sums[rounds - 1] = np.zeros_like(sums[0])
    np.testing.assert_array_equal(sum(totals), sum(sums.values()))
    # And no round before the last was without noise.
    for number in range(rounds - 1):
        assert np.abs(totals[number] - sums[number]).max() > 1000
        assert federation.outcomes[number].under_way > 0.0
    assert federation.outcomes[rounds - 1].under_way == 0.0


# What a run commits to.

OTHER = {
    "participants": 5,
    "rounds": 6,
    "separation": 3,
    "cyclic": False,
    "closing": True,
    "coordinates": 9,
    "grid_bits": 21,
    "modulus_bits": 32,
    "clip": 2.5,
    "unit": 0.75,
    "carried": 0.125,
    "residual": 0.5,
}
REPAIR = {"dropped": 2, "committee": 6, "threshold": 5, "self_mask": 0.25}


def test_every_number_of_a_schedule_is_in_its_hash_and_comes_back_from_json() -> None:
    named = {field.name for kind in (Schedule, Noise) for field in fields(kind)}
    assert {*OTHER, *REPAIR} == named - {"noise", "neighbours", "revealed", "colluders"}  # These follow.
    base, repaired = schedule(), repairing(participants=7)
    others = [changed(base, **{name: value}) for name, value in OTHER.items()]
    others += [changed(repaired, **{name: value}) for name, value in REPAIR.items()]
    assert len({one.digest for one in (base, repaired, *others)}) == len(others) + 2
    for other in others:
        assert Schedule.from_json(json.loads(json.dumps(other.to_json()))) == other


def test_the_hash_of_a_schedule_does_not_change_from_release_to_release() -> None:
    """Clients of different releases must derive the same seeds."""
    assert schedule().digest.hex() == "df85cd7b5fd566466ccbeef053ebcbefcf6fc1600086e83814f5aedf841303fb"


NO_RUN = {
    "participants": (1, 2_001),
    "rounds": (0, 2_001),
    "separation": (1, 10**12),
    "coordinates": (0,),
    "grid_bits": (64,),
    "modulus_bits": (65,),
    "clip": (-1.0, math.nan, math.inf),
    "unit": (math.nan,),
    "carried": (math.inf,),
    "residual": (-0.5,),
    "neighbours": (2.0, math.nan),
    "revealed": (1,),
    "colluders": (1,),
    "dropped": (1,),
    "self_mask": (0.5, -1.0),
}
NO_REPAIR = {"dropped": (4,), "committee": (6, 0), "threshold": (2, 6), "self_mask": (-1.0,)}


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        *((schedule, name, value) for name, values in NO_RUN.items() for value in values),
        *((repairing, name, value) for name, values in NO_REPAIR.items() for value in values),
    ],
)
def test_numbers_that_cannot_be_a_run_are_refused_before_anything_is_computed(
    base: Any, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=name if base is schedule else None):
        changed(base(), **{name: value})
    values = base().to_json()
    inner = {name: value} if name in values else {"noise": values["noise"] | {name: value}}
    with pytest.raises(RemoteProtocolError, match=name if base is schedule else "schedule"):
        Schedule.from_json(values | inner)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {**schedule().to_json(), "more": 1},
        {name: value for name, value in schedule().to_json().items() if name != "clip"},
        {**schedule().to_json(), "rounds": 5.0},
        {**schedule().to_json(), "rounds": True},
        {**schedule().to_json(), "clip": 2},
        {**schedule().to_json(), "closing": 0},
        {**schedule().to_json(), "noise": None},
        {**schedule().to_json(), "noise": {}},
        {**schedule().to_json(), "noise": schedule().to_json()["noise"] | {"more": 1}},
        {**schedule().to_json(), "noise": schedule().to_json()["noise"] | {"participants": 4.0}},
    ],
)
def test_what_is_no_schedule_is_refused(values: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="schedule"):
        Schedule.from_json(values)


def test_both_ends_derive_the_same_seeds_and_nobody_else_has_them() -> None:
    federation = CarriedFederation(schedule(rounds=3))
    for number in range(3):
        federation.play_round(number)
    uses = Counter(share[0] for _, _, shares in federation.seen.uploads for share in shares)
    # Within 3 rounds 12 shares each, and 16 between each two: all of them used twice.
    assert len(uses) == 3 * 12 + 2 * 16
    assert set(uses.values()) == {2}
    federation.seen.check_shares()


# What the beacon is let out for.


def test_the_commitment_names_the_next_cohort_only_where_noise_is_carried() -> None:
    federation = CarriedFederation(schedule())
    opened = federation.open_next(0)
    assert opened.cohorts is not None
    here, after = opened.participants, opened.cohorts.following
    carrying = commitment_of(opened.terms, here, after)
    assert carrying == participants_hash(here) + terms_hash(opened.terms) + participants_hash(after)
    plain = replace(opened.terms, carrying=None)
    assert commitment_of(plain, here, after) == participants_hash(here) + terms_hash(plain)
    assert terms_hash(plain) != terms_hash(opened.terms)


def test_a_round_says_what_stays_in_the_model_and_what_is_under_way() -> None:
    """Of shares carried to a round those count of which one end is missing: a lost sender's and a lost receiver's."""
    federation = CarriedFederation(schedule(rounds=4))
    each = federation.schedule.carried_variance
    first = federation.play_round(0, absent=(1,))
    # 3 of 4 within the round: 2 shares with the lost one each; 3 carry on to 4.
    assert (first.uncancelled, first.extra_variance) == (6, pytest.approx(6 * 0.5))
    assert first.under_way == pytest.approx(12 * each)
    second = federation.play_round(1, absent=(0, 2))
    # Within: 2 x 2 pairs of a survivor and a lost one, both ways. Carried: 3 senders to 2 lost, and 1 lost to 2.
    assert second.uncancelled == 8 + 6 + 2
    assert second.extra_variance == pytest.approx(8 * 0.5 + 8 * each)
    assert not second.exact
    # A round that carries nothing away still ends: nobody came.
    third = federation.play_round(2, absent=range(4))
    assert third.survivors == ()
    assert third.under_way == 0.0
    assert third.extra_variance == pytest.approx(8 * each)
    fourth = federation.play_round(3)
    assert fourth.extra_variance == pytest.approx(16 * each)
