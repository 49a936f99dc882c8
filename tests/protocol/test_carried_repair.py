"""Repair of runs that carry noise over: what is taken out, and what no server can have taken out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import agree
from niss.protocol.committee import make_verdict, vote
from niss.protocol.messages import Reveal, RevealRequest, Verdict, Vote
from niss.protocol.server import EndedRound, Server
from support.protocol_round import GRID, CarriedFederation, carried, repairing, resigned, signed_by


def in_steps(total: np.ndarray) -> np.ndarray:
    return np.rint(total * 2.0**GRID).astype(np.int64)


def played(absent: dict[int, tuple[int, ...]], committed: Any = None, **how: Any) -> CarriedFederation:
    federation = CarriedFederation(committed or repairing())
    for number in range(federation.schedule.rounds):
        federation.play_round(number, absent.get(number, ()), **how)
    return federation


def left(federation: CarriedFederation) -> np.ndarray:
    """The noise that is still in the sum of all rounds."""
    sums = federation.sums
    if federation.schedule.closing:
        sums[federation.schedule.rounds - 1] = np.zeros_like(sums[0])
    return sum(in_steps(one.total) for one in federation.outcomes.values()) - sum(sums.values())


@pytest.mark.parametrize(
    ("absent", "changes"),
    [
        ({}, {}),
        ({1: (2,)}, {}),
        ({0: (0,)}, {}),
        ({4: (3,)}, {}),
        ({1: (0,), 2: (4,)}, {}),
        ({number: (number,) for number in range(5)}, {}),
        ({1: (0, 3), 2: (5,), 3: (1, 2)}, {"participants": 7, "dropped": 2, "committee": 6, "threshold": 4}),
        ({1: (2,), 3: (2,)}, {"closing": True, "rounds": 4}),
    ],
)
def test_whoever_drops_out_leaves_nothing_behind(absent: dict, changes: dict) -> None:
    """Within the round, carried to it and carried from it: without fresh noise the sum is exact, bit by bit."""
    federation = played(absent, repairing(**changes))
    np.testing.assert_array_equal(left(federation), 0)
    for number, outcome in federation.outcomes.items():
        assert outcome.exact
        assert outcome.dropped == absent.get(number, ())
        assert outcome.extra_variance == 0.0
        assert not outcome.problems


def test_members_may_be_restarted_before_every_answer() -> None:
    np.testing.assert_array_equal(left(played({1: (0,), 2: (4,)}, restarts=True)), 0)


def test_a_round_without_a_verdict_leaves_its_noise_and_says_so() -> None:
    """Too few members answer in round 1: nothing that is carried to it or from it can be repaired."""
    federation = CarriedFederation(repairing())
    federation.play_round(0)
    federation.play_round(1, (2,), silent=(0, 1, 3))
    first, second = federation.outcomes[1], federation.play_round(2)
    # Spatial edges with seat 2, sent and received; five shares carried to it.
    assert first.uncancelled == 8 + 5
    assert first.masked == (0, 1, 3, 4)
    assert second.uncancelled == 5
    assert second.extra_variance == pytest.approx(5 * 0.25)
    assert second.repaired == (0.0, 0.0)
    for number in (3, 4):
        assert federation.play_round(number).exact


def test_more_than_were_charged_for_are_not_repaired() -> None:
    federation = CarriedFederation(repairing())
    federation.play_round(0)
    federation.upload_round(1, (0, 2))
    for seat, request in federation.server.request_reveals().items():
        with pytest.raises(RemoteProtocolError, match="at most 1 can be repaired"):
            federation.seats[federation.cohort(1)[seat]].client.reveal(carried(request))


def test_a_server_may_be_started_again_between_any_two_rounds() -> None:
    federation = CarriedFederation(repairing())
    for number in range(5):
        federation.play_round(number, (number,))
        ended = federation.server.ended
        kept = None if ended is None else EndedRound.from_bytes(ended.to_bytes())
        federation.server = Server(federation.server._identity, ended=kept)
    np.testing.assert_array_equal(left(federation), 0)
    assert all(outcome.exact for outcome in federation.outcomes.values())


def test_what_a_server_kept_is_whole_or_refused() -> None:
    federation = CarriedFederation(repairing())
    federation.play_round(0)
    assert federation.server.ended is not None
    kept = json.loads(federation.server.ended.to_bytes())
    wrong = ([], kept[:1], kept[1:], kept[:-1], [*kept, kept[-1]], [*kept[:2], "?"], "no list", [1, 2])
    for damaged in (b"", *(json.dumps(one).encode() for one in wrong)):
        with pytest.raises(LocalProtocolError, match="damaged"):
            EndedRound.from_bytes(damaged)


def test_a_server_that_forgot_the_round_before_leaves_carried_noise_and_says_so() -> None:
    federation = CarriedFederation(repairing())
    federation.play_round(0)
    federation.play_round(1, (2,))
    federation.server.ended = None
    assert federation.play_round(2, (1,)).uncancelled == 4 + 4
    assert federation.play_round(3).exact


seats = st.sets(st.integers(0, 4), max_size=2)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    absent=st.lists(seats, min_size=4, max_size=4),
    pretended=st.lists(seats, min_size=4, max_size=4),
    silent=st.lists(st.sets(st.integers(0, 4), max_size=3), min_size=4, max_size=4),
    started_again=st.sets(st.integers(1, 3), max_size=1),
    restarts=st.booleans(),
)
def test_whatever_is_lost_the_sum_is_right_or_declared_noisy(
    absent: list, pretended: list, silent: list, started_again: set, restarts: bool
) -> None:
    """Clients that vanish, or are said to; members that do not answer; restarts on both sides."""
    federation = CarriedFederation(repairing(rounds=4))
    for number in range(4):
        if number in started_again:
            federation.server.ended = None
        missing = absent[number] | pretended[number]
        # Three uploads at least: of fewer there is not always a sum.
        absent_here = sorted(missing)[:2]
        said = [seat for seat in absent_here if seat in pretended[number]]
        federation.play_round(
            number,
            [seat for seat in absent_here if seat not in said],
            pretended=said,
            silent=silent[number],
            restarts=restarts,
        )
    federation.seen.check_shares()
    exact = all(outcome.exact for outcome in federation.outcomes.values())
    assert exact == (not left(federation).any())
    if (
        not any(silent)
        and not started_again
        and all(len(a | b) < 2 for a, b in zip(absent, pretended, strict=True))
    ):
        assert exact


# A server that lies.


class Scene:
    """A run up to the uploads of round 2, seat 2 of round 1 having dropped out, and the requests for its repair."""

    def __init__(self, absent: tuple[int, ...] = (4,)) -> None:
        self.federation = federation = CarriedFederation(repairing(rounds=6))
        federation.play_round(0, (1,))
        self.earlier = federation.server.ended
        federation.play_round(1, (2,))
        self.before = federation.server.ended
        federation.upload_round(2, absent)
        self.requests = federation.server.request_reveals()

    @property
    def verdict(self) -> Verdict:
        assert self.before is not None
        assert self.before.verdict is not None
        return self.before.verdict

    def ask(self, seat: int, number: int = 2, **changes: Any) -> Reveal:
        return self.put(seat, replace(self.requests[seat], **changes), number)

    def put(self, seat: int, request: RevealRequest, number: int = 2) -> Reveal:
        client = self.federation.seats[self.federation.cohort(number)[seat]].client
        signed = resigned(self.federation.server, request, "request")
        answer: Reveal = client.reveal(carried(signed))
        return answer

    def late(self) -> dict[int, RevealRequest]:
        """Round 2 is repaired; what the committee of round 1 is asked then."""
        for seat in self.requests:
            self.federation.server.take_reveal(carried(self.ask(seat)))
        return self.federation.server.request_carried_reveals()

    def voted(self, survivors: tuple[int, ...], seats: tuple[int, ...], number: int = 1) -> Verdict:
        """A verdict of round 1 with the votes of these colluding members."""
        agreed = agree(self.federation.opened[number])
        identities = [self.federation.seats[one].identity for one in self.federation.cohort(number)]
        votes = [Vote(seat, vote(agreed, survivors, identities[seat])) for seat in seats]
        made = make_verdict(agreed, survivors, votes)
        whole = self.verdict if made is None else made
        return replace(whole, survivors=survivors, votes=tuple(votes))


def test_what_comes_out_of_the_round_before_follows_from_its_verdict_alone() -> None:
    scene = Scene(absent=())
    with_verdict, without = scene.ask(0), scene.ask(0, verdict=None)
    assert {len(one.points) // 32 for one in with_verdict.partials} == {2}
    assert {len(one.points) // 32 for one in without.partials} == {1}


def with_first(scene: Scene, **changes: Any) -> Verdict:
    first, *others = scene.verdict.votes
    return replace(scene.verdict, votes=(replace(first, **changes), *others))


OTHER = "not that of the round before"
WHY = "clients dropped, at most|signature|surviving member|needs the votes"
FALSE: dict[str, tuple[Callable[[Scene], Verdict], str]] = {
    "two votes": (lambda s: replace(s.verdict, votes=s.verdict.votes[:2]), "needs the votes of 3 members"),
    "no votes": (lambda s: replace(s.verdict, votes=()), "needs the votes of 3 members"),
    "a forged vote": (lambda s: with_first(s, signature=bytes(64)), "signature"),
    # A vote for this set, but of another member.
    "a borrowed vote": (lambda s: with_first(s, signature=s.verdict.votes[1].signature), "signature"),
    "a vote of who is called dropped": (
        lambda s: s.voted((0, 1, 3, 4), (0, 1, 2)),
        "not that of a surviving",
    ),
    "a whole cohort": (lambda s: s.voted((0, 1), (0, 1)), "calls 3 clients dropped, at most 1"),
    "of an earlier round": (lambda s: s.earlier.verdict, OTHER),
    "another beacon": (lambda s: replace(s.verdict, beacon=s.earlier.verdict.beacon), OTHER),
    "another next round": (lambda s: replace(s.verdict, following=bytes(32)), OTHER),
}
for other in ((0, 1, 3), (0, 1, 2, 3, 4), (0, 2, 3, 4), (), (1,)):
    # Another client, one more, nobody, a whole cohort: the votes are for one set, and two that collude are too few.
    FALSE[f"for {other}"] = (lambda s, o=other: replace(s.verdict, survivors=o), WHY)
    FALSE[f"of two for {other}"] = (lambda s, o=other: s.voted(o, (0, 1)), WHY)


@pytest.mark.parametrize("name", FALSE)
def test_a_verdict_needs_the_votes_of_a_threshold_of_members_for_just_that_set(name: str) -> None:
    scene, (verdict, match) = Scene(), FALSE[name]
    assert len(scene.verdict.votes) == 3
    with pytest.raises(RemoteProtocolError, match=match):
        scene.ask(0, verdict=verdict(scene))


def test_a_member_votes_once_and_others_do_not() -> None:
    scene = Scene()
    with pytest.raises(LocalProtocolError):
        scene.ask(0, verdict=scene.voted((0, 1, 3, 4), (1, 1, 1)))
    small = CarriedFederation(repairing(participants=7, committee=4, threshold=3, rounds=6))
    small.play_round(0)
    small.play_round(1, (2,))
    outside = set(range(7)) - set(agree(small.opened[1]).committee)
    assert outside
    assert small.server.ended is not None
    assert small.server.ended.verdict is not None
    assert not {vote.seat for vote in small.server.ended.verdict.votes} & outside


def test_a_member_gives_its_part_for_one_set_however_often_it_is_asked() -> None:
    scene = Scene(absent=())
    scene.ask(0)
    with pytest.raises(RemoteProtocolError, match="another survivor set"):
        scene.ask(0, survivors=(0, 1, 2, 3), pieces=scene.requests[0].pieces[: 4 * 64])
    # So is it when the next round is repaired: its own round's set stays what it was.
    late = Scene()
    request = late.late()[0]
    with pytest.raises(RemoteProtocolError, match="another survivor set"):
        late.put(0, replace(request, survivors=(0, 1, 2, 4)), number=1)


def test_the_committee_of_the_round_before_is_shown_the_verdict_of_this_one() -> None:
    scene = Scene()
    requests = scene.late()
    assert sorted(requests) == [0, 1, 3, 4]
    request = requests[0]
    true = request.verdict
    assert true is not None
    lies = {
        "needs the votes": replace(true, votes=true.votes[:2]),
        "signature": replace(true, survivors=(0, 1, 2, 4)),
        "at most 1 can be repaired": replace(true, survivors=(0, 1, 2)),
        "this attempt has link": scene.verdict,
        "Signature|signature": replace(true, following=bytes(32)),
        "no verdict of the next round": None,
    }
    for match, verdict in lies.items():
        with pytest.raises(RemoteProtocolError, match=match):
            scene.put(0, replace(request, verdict=verdict), number=1)
    answer = scene.put(0, request, number=1)
    # Nobody's mask: one point for the one client that dropped out, of each survivor.
    assert [(one.seat, len(one.points)) for one in answer.partials] == [(0, 32), (1, 32), (3, 32), (4, 32)]
    assert answer == scene.put(0, request, number=1)


def test_masks_and_shares_of_one_client_never_come_out_together() -> None:
    """Seat 4 survives in round 2: neither round 1's committee nor round 3's can be had to strip it."""
    scene = Scene(absent=())
    assert scene.late() == {}
    federation = scene.federation
    federation.outcomes[2] = federation.server.finish()
    ended = federation.server.ended
    assert ended is not None
    federation.upload_round(3)
    scene.requests = federation.server.request_reveals()
    for survivors in ((0, 1, 2, 3), (0, 1, 2)):
        with pytest.raises(RemoteProtocolError):
            scene.ask(0, number=3, verdict=replace(ended.verdict, survivors=survivors))
    # And round 1's, which was never shown that anyone dropped out of round 2.
    gap = ended.agreed.before
    assert gap is not None
    request = RevealRequest(
        gap.context.digest(),
        (0, 1, 3, 4),
        b"",
        verdict=replace(ended.verdict, survivors=(0, 1, 2, 3)),
    )
    with pytest.raises(RemoteProtocolError):
        scene.put(0, request, number=1)


def test_a_member_that_gave_no_part_in_its_round_gives_none_later() -> None:
    federation = CarriedFederation(repairing())
    federation.play_round(0, silent=(3,))
    federation.upload_round(1, (2,))
    for seat, request in federation.server.request_reveals().items():
        one = federation.cohort(1)[seat]
        federation.server.take_reveal(carried(federation.seats[one].client.reveal(carried(request))))
    request = federation.server.request_carried_reveals()[3]
    with pytest.raises(RemoteProtocolError, match="no part for its own round"):
        federation.seats[federation.cohort(0)[3]].client.reveal(carried(request))


def test_a_server_takes_no_reveal_without_a_vote_for_its_set() -> None:
    """One false vote in a verdict, and the next round's committee would refuse it."""
    scene = Scene()
    answer = scene.ask(0)
    identity = scene.federation.seats[scene.federation.cohort(2)[0]].identity
    other = vote(agree(scene.federation.opened[2]), (0, 1, 2, 4), identity)
    for false in (other, bytes(64), None):
        lie = signed_by(identity, replace(answer, vote=false), "reveal")
        with pytest.raises(RemoteProtocolError):
            scene.federation.server.take_reveal(lie)
    scene.federation.server.take_reveal(carried(answer))


def test_a_round_that_is_over_gives_nothing_away() -> None:
    """Its prekeys are erased after their window."""
    scene = Scene()
    requests = scene.late()
    scene.federation.close(1)
    with pytest.raises(RemoteProtocolError, match="not in a round"):
        scene.put(0, requests[0], number=1)


def test_what_a_member_of_the_round_before_cannot_prove_is_left_out() -> None:
    scene = Scene()
    server, requests = scene.federation.server, scene.late()
    for seat, request in requests.items():
        answer = scene.put(seat, request, number=1)
        if seat in (0, 1):
            false = tuple(replace(one, points=answer.partials[0].points) for one in answer.partials)
            identity = scene.federation.seats[scene.federation.cohort(1)[seat]].identity
            answer = signed_by(identity, replace(answer, partials=false), "reveal")
        server.take_reveal(carried(answer))
    outcome = server.finish()
    assert any(
        "of the round before revealed partials that it cannot prove" in one for one in outcome.problems
    )
    assert outcome.uncancelled > 0
