"""Verdicts: what binds the repairs of two rounds with noise carried between them, and what no server can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import agree
from niss.protocol.messages import Reveal, RevealRequest, Verdict, Vote
from niss.protocol.repair import make_verdict, vote
from support.protocol_round import CarriedFederation, carried, repairing, resigned, signed_by


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
