"""Who has nothing to upload uploads a blank: an update like any other, which cancels, costs and looks the same."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from niss.errors import RemoteProtocolError
from niss.mechanism import l2_norm
from niss.mechanism.blocks import Blocks
from niss.mechanism.clipping import AdaptiveClip
from niss.protocol.keys import SIGNATURE_BYTES
from niss.protocol.messages import Upload, decode
from niss.session.limits import Limits
from niss.session.metrics import BELOW_CLIP, BLANK, NoisyMetrics
from niss.session.ports import Reply, Request, Stage
from niss.session.proposal import read_proposal
from session.scene import Scene, signed_proposal
from session.test_metrics import _terms

COUNTED = NoisyMetrics({BLANK: (0.0, 1.0)})


def third(node: int, number: int) -> bool:
    """Another third of the nodes is late in each round."""
    return (node + number) % 3 == 0


class Watched(Scene):
    """Keeps uploads as they left, and who was asked in which stage."""

    def deliver(self, requests: Mapping[int, Request]) -> dict[int, Reply | str]:
        replies = super().deliver(requests)
        for node, request in requests.items():
            self.stages.append(request.stage)
            reply = replies[node]
            if request.stage is Stage.ROUND and isinstance(reply, Reply):
                self.uploads.append((self.late(node, self.done), self.done, reply))
        return replies

    def start(self) -> Any:
        self.stages: list[Stage] = []
        self.uploads: list[tuple[bool, int, Reply]] = []
        return super().start()


@pytest.mark.parametrize("metrics", [NoisyMetrics(), COUNTED], ids=["bare", "counted"])
@pytest.mark.parametrize("repair", [False, True], ids=["tolerate", "repair"])
def test_blanks_cancel_and_nothing_is_lost_or_repaired(
    carried: bool, repair: bool, metrics: NoisyMetrics
) -> None:
    """Without residual noise the model is that of the others' updates, up to the steps of the grid."""
    scene = Watched.of(carried, repair=repair, late=third, metrics=metrics).play()
    blanks = sum(late for late, *_ in scene.uploads)
    assert 0 < blanks < len(scene.uploads)
    assert all(one.exact and one.survivors == one.participants and not one.lost for one in scene.records)
    assert not any(one.uncancelled or one.masked or one.problems for one in scene.records)
    assert Stage.LATE not in scene.stages
    scene.check()
    if metrics.ranges:
        counted = [one.blanks for one in scene.records]
        assert sum(counted) == pytest.approx(blanks, abs=0.01)


def test_a_blank_looks_and_costs_like_any_other_upload(carried: bool) -> None:
    scene = Watched.of(carried, private=True, late=third, repair=True).play()
    seen: set[tuple[bool, int]] = set()
    forms: dict[int, list[Any]] = {}
    for late, number, reply in scene.uploads:
        message = decode(reply.body)
        assert isinstance(message, Upload)
        shape = {name: len(value) for name, value in vars(message).items() if hasattr(value, "__len__")}
        forms.setdefault(number, []).append((len(reply.body), shape, reply.clear, reply.note))
        seen.add((late, number))
    assert len(seen) == 2 * scene.rounds
    assert all(one == alike[0] for alike in forms.values() for one in alike)
    # All that was charged, on every node alike: each was late in other rounds.
    spent = {node: scene.parties.store(node).charged for node in range(scene.nodes)}
    rounds = {node: [one for one in range(scene.rounds) if node in scene.asked[one]] for node in spent}
    for node, ledger in spent.items():
        for other, theirs in spent.items():
            if rounds[node] == rounds[other]:
                assert ledger.joint_squared.tolist() == theirs.joint_squared.tolist()
    assert {third(node, number) for node in (0, 1) for number in rounds[node]} == {False, True}


def test_the_number_of_blanks_is_known_up_to_the_noise_of_a_coordinate() -> None:
    """6 deviations of a Gaussian in each of three rounds, false-alarm rate 6e-9."""
    scene = Scene.of(False, private=True, late=third, metrics=COUNTED, nodes=12).play()
    for number, record in enumerate(scene.records):
        blanks = sum(third(node, number) for node in range(12))
        deviation = math.sqrt(record.noise.variance) * 12 / (2 * 0.2 * 0.5)
        assert record.blanks_deviation == pytest.approx(deviation, rel=1e-9)
        assert abs(record.blanks - blanks) < 6 * deviation
    part, noise = scene.session.books.blanks
    assert part == pytest.approx(sum(one.blanks for one in scene.records) / 36)
    assert noise == pytest.approx(scene.records[0].blanks_deviation * math.sqrt(3) / 36, rel=0.05)
    (told,) = [one for one in scene.session.books.statement.caveats if "were blanks" in one]
    assert f"noise of {noise:.0%}" in told


def test_a_blank_leaves_the_clip_where_it_is_and_fits_into_it() -> None:
    both = NoisyMetrics({BELOW_CLIP: (0.0, 1.0), BLANK: (0.0, 1.0), "loss": (0.0, 4.0)})
    joined = both.joined(Blocks.of(np.zeros(4)), {}, _terms(), 4, blank=True).array()
    own = dict(zip(both.ranges, joined[4:] / (0.2 * 2.0 / math.sqrt(3)), strict=True))
    assert own == pytest.approx({"loss": 0.0, BELOW_CLIP: 0.0, BLANK: 1.0})
    assert l2_norm(joined) <= 2.0
    # What an app says of it counts nothing.
    said = both.joined(Blocks.of(np.full(4, 9.0)), {BLANK: 1.0}, _terms(), 4).array()
    assert said[4:][list(both.ranges).index(BLANK)] < 0.0
    # Half short, half blank: the clip follows those that trained.
    clip, tail = AdaptiveClip(2.0, 0.5), np.mean([joined[4:], said[4:]], axis=0)
    fraction = both.means(tail, 2.0, 0.0)[BELOW_CLIP]
    assert clip.after(1.0, fraction) == pytest.approx(clip.after(1.0, 0.25))


class TestDeadlines:
    @staticmethod
    def signed(deadline: Any) -> bytes:
        scene = Scene.of(False)
        honest = json.loads(scene.start().proposal.signed(scene.identity)[SIGNATURE_BYTES:])
        return signed_proposal(scene.identity, {**honest, "deadline": deadline})

    @pytest.mark.parametrize("deadline", [0, -1, 1e7, math.nan, math.inf, -math.inf, True, "9", [9], 10**400])
    def test_that_no_clock_can_keep_are_not_read(self, deadline: Any) -> None:
        with pytest.raises(RemoteProtocolError):
            read_proposal(self.signed(deadline))

    def test_that_are_too_short_for_a_node_are_refused(self) -> None:
        short, long = (read_proposal(self.signed(deadline)) for deadline in (2.0, 60.0))
        limits = Limits(uncalibrated=True)
        for proposal in (short, long, replace(short, deadline=None)):
            limits.check(proposal)
        slow = limits.of_node({"niss-deadline": 30.0})
        slow.check(long)
        slow.check(replace(short, deadline=None))
        with pytest.raises(RemoteProtocolError, match=r"deadline of 2\.0 seconds .* insists on 30"):
            slow.check(short)
        with pytest.raises(RemoteProtocolError, match="insists on 1"):
            limits.check(replace(short, deadline=1e-9))
