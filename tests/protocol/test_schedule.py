"""What a run that carries noise over commits to; what a server could do to it is refused, or covered by the charge."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from operator import methodcaller
from typing import Any

import pytest

from niss.accounting import Promise
from niss.errors import ConfigError, RemoteProtocolError
from niss.mechanism.noise import Noise
from niss.protocol.agreement import participants_hash, previous_of
from niss.protocol.keys import _prekey_statement, _signed_link
from niss.protocol.messages import Participant, RoundCohorts, RoundOpen, Terms, decode, encode
from niss.protocol.schedule import Schedule
from niss.settings import check_json
from support.protocol_round import NOISY, CarriedFederation, changed, covered, repairing, resigned, schedule


def refused(federation: CarriedFederation, one: int, opened: RoundOpen, match: str) -> None:
    """Refused in words, with nothing charged, and nothing changed in the client's memory."""
    seat = federation.seats[one]
    charges, kept = list(seat.charges), list(seat.kept)
    with pytest.raises(RemoteProtocolError, match=match):
        federation.answer(one, opened)
    assert seat.charges == charges
    assert seat.kept == kept


def started(rounds: int = 1, **changes: Any) -> CarriedFederation:
    """A federation that has played so many rounds."""
    federation = CarriedFederation(schedule(**changes))
    for number in range(rounds):
        federation.play_round(number)
    return federation


def cohorts(opened: RoundOpen) -> RoundCohorts:
    assert opened.cohorts is not None
    return opened.cohorts


@dataclass
class Next:
    """The next round of a run, as an honest server opens it, and lies about it."""

    federation: CarriedFederation
    opened: RoundOpen

    @property
    def around(self) -> RoundCohorts:
        return cohorts(self.opened)

    def fresh(self, number: int) -> tuple[Participant, ...]:
        """The cohort of a round with prekeys that nobody was told of."""
        return tuple(self.federation.seat_of(one) for one in self.federation.cohort(number))

    def forged(self, **changes: Any) -> RoundOpen:
        """With other parts, which server and holder sign; terms and cohorts by the names of what is changed in them."""
        for part, kind in (("terms", Terms), ("cohorts", RoundCohorts)):
            inner = {
                name: changes.pop(name) for name in [one.name for one in fields(kind)] if name in changes
            }
            changes = {part: replace(getattr(self.opened, part), **inner), **changes} if inner else changes
        return self.federation.forged(self.opened, **changes)

    def listed(self, where: str, name: str) -> RoundOpen:
        """With another list of the next round, or of the one before."""
        change, before = LISTS[name][0], self.around.previous
        if where == "following":
            return self.forged(following=change(self, self.around.following))
        assert before is not None
        return self.forged(previous=replace(before, participants=change(self, before.participants)))

    def first_other(self, one: int) -> tuple[Participant, ...]:
        return (self.federation.seat_of(one), *self.opened.participants[1:])

    def carrying(self, **changes: Any) -> RoundOpen:
        assert self.opened.terms.carrying is not None
        return self.forged(carrying=replace(self.opened.terms.carrying, **changes))


def spoilt(_: Next, people: tuple[Participant, ...]) -> tuple[Participant, ...]:
    return (replace(people[0], prekey=replace(people[0].prekey, signature=bytes(64))), *people[1:])


def unshown(scene: Next) -> RoundOpen:
    cohorts = replace(scene.around, following=scene.fresh(2))
    return resigned(scene.federation.server, replace(scene.opened, cohorts=cohorts), "open")


def copied(scene: Next) -> RoundOpen:
    """A stranger that signs a copy of this client's key would agree with it on something that is no secret to it."""
    own, other = scene.opened.participants[0].prekey, scene.federation.seats[4].identity
    statement = _prekey_statement(other.public, own.number, own.public)
    stranger = Participant(other.public, replace(own, signature=other.sign("prekey", statement)))
    return scene.forged(following=(stranger, *scene.around.following[1:]))


def skipping(scene: Next, **beacon: Any) -> RoundOpen:
    """Told of round 0 as the one before round 2."""
    earlier = previous_of(scene.federation.opened[0])
    return scene.forged(previous=replace(earlier, beacon=replace(earlier.beacon, **beacon)))


BEACON, SCHEDULE = "signature for 'beacon'", "not those of the schedule"
LISTS: dict[str, tuple[Callable[..., tuple[Participant, ...]], str]] = {
    "fewer": (lambda _, people: people[:3], "has 3 participants, but the schedule says 4"),
    "more": (lambda s, people: (*people, s.federation.seat_of(5)), "has 5 participants, but the schedule"),
    "of this round": (lambda s, people: (s.opened.participants[1], *people[1:]), "listed in two rounds"),
    "false prekey": (spoilt, "signature for 'prekey'"),
}
CHANGED = {"mode": "repair", "coordinates": 9, "grid_bits": 21, "modulus_bits": 32, "clip": 1.0}
CHANGED |= {"neighbours": 2.0, "unit_variance": 0.25, "residual_variance": 0.01, "self_variance": 0.1}
CHANGED |= {"committee": 4, "revealed": 1, "dropped": 1, "threshold": 3}
# Of each: rounds that were played before, who is told, the lie, and why it is refused.
LIES: dict[str, tuple[int, int, Callable[[Next], RoundOpen], str]] = {
    "announced in another order": (
        1,
        5,
        lambda s: s.forged(participants=s.opened.participants[::-1]),
        BEACON,
    ),
    "announced with another prekey": (1, 5, lambda s: s.forged(participants=s.first_other(4)), BEACON),
    "another next cohort than the holder was shown": (1, 4, unshown, BEACON),
    # Called the last, every round would have its fresh noise alone.
    "a next cohort after the end": (4, 0, lambda s: s.forged(following=s.fresh(1)), "says 0"),
    "no next cohort before it": (1, 4, lambda s: s.forged(following=()), "says 4"),
    "own prekey under another name": (0, 0, copied, "made without the prekey"),
    "without the round before": (1, 4, lambda s: s.forged(previous=None), "needs the one before it"),
    "a round before the first": (
        0,
        0,
        lambda s: s.forged(previous=previous_of(s.opened)),
        "the first has none",
    ),
    "carried: plan": (0, 0, lambda s: s.carrying(plan=bytes(32)), SCHEDULE),
    "carried: variance": (0, 0, lambda s: s.carrying(unit_variance=2.0), SCHEDULE),
    "no noise is carried": (0, 0, lambda s: s.forged(carrying=None, cohorts=None), "says it does"),
}
for where, name in itertools.product(("following", "previous"), LISTS):
    # Of the round before the beacon is looked at first.
    why = BEACON if (where, name) == ("previous", "false prekey") else LISTS[name][1]
    LIES[f"{where}: {name}"] = (1, 4, partial(Next.listed, where=where, name=name), why)
for name, value in CHANGED.items():
    # Every term but the round's own is fixed by the schedule.
    LIES[f"terms: {name}"] = (0, 0, methodcaller("forged", **{name: value}), "schedule|clip")


@pytest.mark.parametrize("name", LIES)
def test_what_is_not_the_next_round_of_the_schedule_is_refused(name: str) -> None:
    played, told, lie, match = LIES[name]
    federation = started(rounds=played)
    scene = Next(federation, federation.open_next(played))
    refused(federation, told, lie(scene), match)


def test_a_round_that_skips_one_is_refused() -> None:
    """With its number changed the old evidence is no better: the holder signed it as link 1."""
    federation = started(rounds=2, separation=3)
    scene = Next(federation, federation.open_next(2))
    refused(federation, 8, skipping(scene), "beacon link 1, but this attempt has link 5")
    refused(federation, 8, skipping(scene, index=5), "signature for 'beacon'")


def test_doubles_are_refused_behind_the_wire_too() -> None:
    federation = started()
    scene = Next(federation, federation.open_next(1))
    people = scene.around.following
    double = replace(scene.around, following=(people[0], people[0], *people[2:]))
    with pytest.raises(RemoteProtocolError, match="listed twice"):
        federation.policy.check_cohorts(scene.opened, double)


def test_a_next_cohort_of_strangers_is_refused_by_who_trusts_listed_ones() -> None:
    federation = CarriedFederation(schedule())
    strangers = CarriedFederation(schedule(), "strangers")
    pinned = frozenset(seat.identity.public for seat in federation.seats)
    opened = federation.open_next(0)
    after = tuple(strangers.seat_of(one) for one in federation.cohort(1))
    lie = federation.forged(opened, cohorts=RoundCohorts(after, None))
    for one in (0, 1):
        seat = federation.seats[one]
        seat.policy = replace(seat.policy, trusted=pinned)
        federation.restart(one)
        refused(federation, one, lie, "neighbouring round is not among the identities this client trusts")
    # Whoever trusts anyone counts them among the colluders.
    assert federation.answer(2, lie).seat == 2


def test_a_round_before_of_strangers_is_refused_likewise() -> None:
    federation = started()
    opened = federation.open_next(1)
    known = frozenset(one.identity for one in (*opened.participants, *cohorts(opened).following))
    seat = federation.seats[4]
    seat.policy = replace(seat.policy, trusted=known - {federation.seats[1].identity.public})
    federation.restart(4)
    refused(federation, 4, opened, "not among the identities this client trusts")


def test_a_repeated_round_is_refused_as_another_attempt_too() -> None:
    federation = CarriedFederation(schedule(), attempts=3)
    federation.play_round(0)
    opened = federation.opened[0]
    refused(federation, 0, opened, "was answered before")
    again = replace(opened, terms=replace(opened.terms, attempt=1))
    fresh = (federation.seat_of(0), *opened.participants[1:])
    for one in (0, 1):
        federation.restart(one)
    refused(federation, 0, federation.forged(again, participants=fresh), "has one attempt")
    single = CarriedFederation(schedule())
    opened = single.open_next(0)
    again = single.forged(replace(opened, terms=replace(opened.terms, attempt=1)))
    refused(single, 0, again, "allows only 1")


def test_the_holder_lets_out_a_link_once() -> None:
    federation = CarriedFederation(schedule())
    federation.open_next(0)
    with pytest.raises(RemoteProtocolError, match="released before"):
        federation.chain.release(0, 0, bytes(96))


def test_no_round_past_the_end_is_answered() -> None:
    federation = started(rounds=5)
    scene = Next(federation, federation.opened[4])
    people = scene.fresh(5)
    beyond = scene.forged(round=5, participants=people, following=(), previous=previous_of(scene.opened))
    refused(federation, 4, beyond, "past the committed end of 5 rounds")


@pytest.mark.parametrize(("cyclic", "gap"), [(True, 1), (True, 3), (False, 1)])
def test_nobody_is_asked_back_too_soon_or_out_of_turn(cyclic: bool, gap: int) -> None:
    """Also after a restart: what the account knows of the past comes from the client's memory."""
    federation = started(rounds=1, cyclic=cyclic, separation=2)
    for number in range(1, gap):
        federation.play_round(number, absent=range(4) if number == 2 else ())
    people = (federation.seat_of(0), *federation.listed(gap)[1:])
    federation.seated[gap] = people
    # The round before announced this list: server and holder agree on it.
    before = federation.opened[gap - 1]
    before = federation.forged(before, cohorts=replace(cohorts(before), following=people))
    federation.opened[gap - 1] = before
    opened = federation.open_next(gap)
    refused(federation, 0, opened, f"comes {gap} after round 0")
    federation.restart(0)
    refused(federation, 0, opened, f"comes {gap} after round 0")


def test_a_longer_run_told_to_others_gives_them_other_seeds() -> None:
    """The schedule's hash is in every seed: of two clients that were told of different ends, nothing cancels."""
    short, long = CarriedFederation(schedule(rounds=3)), CarriedFederation(schedule(rounds=5))
    for federation in (short, long):
        federation.play_round(0)
    seeds = [
        {share[0] for _, _, shares in federation.seen.uploads for share in shares}
        for federation in (short, long)
    ]
    assert seeds[0]
    assert not seeds[0] & seeds[1]


def test_carried_noise_is_refused_by_who_agreed_to_no_schedule() -> None:
    federation = CarriedFederation(schedule())
    opened, seat = federation.open_next(0), federation.seats[0]
    seat.policy = replace(seat.policy, schedule=None)
    federation.restart(0)
    refused(federation, 0, opened, "agreed to no schedule")
    # Neither can be sent half: the wire has both or neither.
    assert decode(encode(opened)) == opened


# What is not refused is paid for.


@pytest.mark.parametrize("colluders", [0, 1])
@pytest.mark.parametrize("separation", [2, 3])
def test_the_charge_is_what_a_whole_run_costs(colluders: int, separation: int) -> None:
    """On complete graphs exactly: the dearest client's true mu^2 is its charge."""
    federation = CarriedFederation(schedule(rounds=7, separation=separation, **NOISY), colluders=colluders)
    for number in range(7):
        federation.play_round(number)
    assert covered(federation) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("colluders", [0, 1])
def test_drops_an_early_end_and_lost_rounds_cost_less(colluders: int) -> None:
    federation = CarriedFederation(schedule(rounds=7, **NOISY), colluders=colluders)
    for number, absent in enumerate([(), (1,), (0, 2), (0, 1, 2, 3), (3,)]):
        federation.play_round(number, absent)
        covered(federation)
    assert not federation.outcomes[4].exact


def test_two_versions_of_a_round_split_the_noise_and_cost_less() -> None:
    """Even where the holder signs everything: the same clients in another order, which the round before announced."""
    federation = CarriedFederation(schedule(rounds=6, **NOISY))
    federation.play_round(0)
    first = federation.open_next(1)
    turned = first.participants[::-1]
    before = cohorts(first).previous
    assert before is not None
    announced = participants_hash(before.participants) + before.terms + participants_hash(turned)
    link = before.beacon
    signature = federation.holder.sign("beacon", _signed_link(link.index, link.value, announced))
    before = replace(before, beacon=replace(link, signature=signature))
    other = federation.forged(first, participants=turned, cohorts=replace(cohorts(first), previous=before))
    for one, opened in ((4, first), (5, first), (6, other), (7, other)):
        federation.answer(one, opened)
    covered(federation)
    # Both go on, with the same next cohort, which is told of one or of the other.
    federation.outcomes[1] = federation.server.finish()
    second = federation.open_next(2)
    told = federation.forged(second, cohorts=replace(cohorts(second), previous=previous_of(other)))
    for one, opened in ((0, second), (1, second), (2, told), (3, told)):
        federation.answer(one, opened)
    federation.outcomes[2] = federation.server.finish()
    assert covered(federation) < 1.0
    for number in (3, 4, 5):
        federation.play_round(number)
    assert covered(federation) < 1.0


def test_two_next_cohorts_from_a_holder_that_obeys_split_the_noise_and_cost_less() -> None:
    """A server with a dishonest holder tells half of a cohort of another next one."""
    federation = CarriedFederation(schedule(rounds=6, separation=3, cyclic=False, **NOISY))
    opened = federation.open_next(0)
    others = tuple(federation.seat_of(one) for one in federation.cohort(2))
    told = federation.forged(opened, cohorts=RoundCohorts(others, None))
    for one, version in ((0, opened), (1, opened), (2, told), (3, told)):
        federation.answer(one, version)
    federation.outcomes[0] = federation.server.finish()
    for number in range(1, 6):
        federation.play_round(number)
    assert covered(federation) < 1.0


def test_a_client_whose_budget_is_used_up_declines() -> None:
    """The whole run would cost 2.5 of mu^2."""
    federation = CarriedFederation(schedule(rounds=7, **NOISY), account={"budget": 1.0})
    for number in range(4):
        federation.play_round(number)
    refused(federation, 0, federation.open_next(4), "of mu.2, and .* are left")
    assert 0.5 < sum(mu**2 for _, _, mu in federation.seats[0].charges) <= 1.0
    assert covered(federation) <= 1.0


def test_a_grid_too_coarse_or_too_fine_for_the_promise_is_refused() -> None:
    coarse = CarriedFederation(schedule(grid_bits=3, **NOISY))
    refused(coarse, 0, coarse.open_next(0), "a few grid steps wide")
    fine = CarriedFederation(
        schedule(grid_bits=24, coordinates=2**20, **NOISY), account={"promise": Promise(3.0, 1e-5)}
    )
    opened = fine.open_next(0)
    seat = fine.seats[0]
    with pytest.raises(RemoteProtocolError, match="too far from a Gaussian"):
        seat.client.accept(opened, fine.entropy)
    assert seat.charges == []


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
        assert check_json(Schedule, json.dumps(asdict(other))) == other


def test_the_hash_of_a_schedule_does_not_change_from_release_to_release() -> None:
    """Clients of different releases must derive the same seeds."""
    assert schedule().digest.hex() == "df85cd7b5fd566466ccbeef053ebcbefcf6fc1600086e83814f5aedf841303fb"


NO_RUN = {
    "participants": (1, 2_001),
    "rounds": (0, 2_001),
    "separation": (1, 10**12),
    "coordinates": (0,),
    "grid_bits": (64,),
    "modulus_bits": (40, 65),
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
    values = asdict(base())
    inner = {name: value} if name in values else {"noise": values["noise"] | {name: value}}
    with pytest.raises(ConfigError):
        check_json(Schedule, json.dumps(values | inner))


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {name: value for name, value in asdict(schedule()).items() if name != "clip"},
        {**asdict(schedule()), "rounds": 5.0},
        {**asdict(schedule()), "rounds": True},
        {**asdict(schedule()), "closing": 0},
        {**asdict(schedule()), "noise": None},
        {**asdict(schedule()), "noise": {}},
        {**asdict(schedule()), "noise": asdict(schedule())["noise"] | {"participants": 4.0}},
    ],
)
def test_what_is_no_schedule_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError):
        check_json(Schedule, json.dumps(values))
