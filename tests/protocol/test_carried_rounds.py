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
from niss.protocol.agreement import commitment_of, participants_hash, terms_hash
from niss.protocol.carried import CarriedContext, Schedule
from niss.protocol.shares import carried_seed
from support.carried_run import GRID, CarriedFederation, repairing, schedule


def in_steps(total: np.ndarray) -> np.ndarray:
    return np.rint(total * 2.0**GRID).astype(np.int64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"participants": 7, "separation": 3, "rounds": 7},
        {"closing": True, "rounds": 4},
        {"modulus_bits": 32, "grid_bits": 20, "unit_variance": 0.01, "carried_variance": 0.01},
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
    "unit_variance": 0.75,
    "carried_variance": 0.125,
    "residual_variance": 0.5,
}
REPAIR = {"dropped": 2, "committee": 6, "threshold": 5, "self_variance": 0.25}


def test_every_number_of_a_schedule_is_in_its_hash_and_comes_back_from_json() -> None:
    assert {*OTHER, *REPAIR} == {field.name for field in fields(Schedule)}
    base, repaired = schedule(), repairing(participants=7)
    others = [replace(base, **{name: value}) for name, value in OTHER.items()]
    others += [replace(repaired, **{name: value}) for name, value in REPAIR.items()]
    assert len({one.digest for one in (base, repaired, *others)}) == len(others) + 2
    for other in others:
        assert Schedule.from_json(json.loads(json.dumps(other.to_json()))) == other


def test_the_hash_of_a_schedule_does_not_change_from_release_to_release() -> None:
    """Clients of different releases must derive the same seeds."""
    assert schedule().digest.hex() == "df85cd7b5fd566466ccbeef053ebcbefcf6fc1600086e83814f5aedf841303fb"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("participants", 1),
        ("participants", 2_001),
        ("rounds", 0),
        ("rounds", 2_001),
        ("separation", 1),
        ("separation", 10**12),
        ("coordinates", 0),
        ("grid_bits", 64),
        ("modulus_bits", 65),
        ("clip", -1.0),
        ("unit_variance", math.nan),
        ("carried_variance", math.inf),
        ("residual_variance", -0.5),
    ],
)
def test_numbers_that_cannot_be_a_run_are_refused_before_anything_is_computed(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(schedule(), **{name: value})
    with pytest.raises(RemoteProtocolError, match=name):
        Schedule.from_json({**schedule().to_json(), name: value})


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
    ],
)
def test_what_is_no_schedule_is_refused(values: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="schedule"):
        Schedule.from_json(values)


# What seeds are bound to.

CONTEXT = CarriedContext(b"run", b"p" * 32, 3, b"b" * 32, b"t" * 32, b"s" * 32, b"r" * 32)


def test_whatever_differs_gives_another_seed() -> None:
    """Both rounds, both lists, the schedule, the beacon, the terms (and so the attempt), the run, and the direction."""
    shared, one, other = bytes(range(32)), b"a" * 32, b"b" * 32
    seeds = [carried_seed(shared, CONTEXT, one, other), carried_seed(shared, CONTEXT, other, one)]
    seeds.append(carried_seed(bytes(32), CONTEXT, one, other))
    for field in fields(CarriedContext):
        value = getattr(CONTEXT, field.name)
        changed = replace(CONTEXT, **{field.name: value + 1 if isinstance(value, int) else b"x" * len(value)})
        seeds.append(carried_seed(shared, changed, one, other))
        assert changed.digest() != CONTEXT.digest()
    assert len({bytes(seed) for seed in seeds}) == 3 + len(fields(CarriedContext))
    # And it does not change from release to release.
    assert bytes(seeds[0]).hex() == "c597414d729f86cb8ff6dc1126a1d51710979f546c368ce3141c9e4d3080290f"


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
