"""Two servers with one set of nodes: what belongs to a run is out of reach for the server of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
import pytest

from niss.errors import PrivacyError
from niss.protocol.agreement import commitment_of
from niss.protocol.keys import _signed_link
from niss.protocol.messages import (
    Participant,
    Prekey,
    Refusal,
    RevealRequest,
    RoundOpen,
    Upload,
    decode,
    encode,
    signed_part,
)
from niss.session import HERE
from niss.session.limits import Budget
from niss.session.ports import Relay, Reply, Request, Stage
from niss.session.store import ClientState, JoinedRun
from session.scene import COORDINATES, Scene


def two_scenes(carried: bool, rounds: int = 4) -> tuple[Scene, Scene]:
    """Both repair, and lose a client in their second round; nodes start again from what they saved, before any answer.

    Where noise is carried, both hand it on to their next rounds.
    """
    scenes = [
        Scene.of(
            carried,
            rounds=rounds,
            repair=True,
            label=label,
            deaf=lambda _stage, number, seat: (number, seat) == (1, 2),
        )
        for label in ("first server", "second server")
    ]
    for scene in scenes:
        scene.parties = scenes[0].parties
        scene.heard = lambda _stage: restart(scenes[0])
        scene.start()
    return scenes[0], scenes[1]


def restart(scene: Scene) -> None:
    for store in scene.parties.stores.values():
        store.state = ClientState.from_bytes(store.state.to_bytes())


def stages(scene: Scene) -> Iterator[Stage]:
    """All rounds of a scene; stops before each stage."""
    session = scene.session
    while scene.done < scene.rounds:
        here = scene.present()
        session.begin(scene.done, here, connected=here, coordinates=COORDINATES)
        while session.stage is not Stage.DONE:
            yield session.stage
            requests = session.requests()
            session.take(scene.deliver(requests) if requests else {})
        assert session.refused is None
        total, _ = session.finish()
        assert total is not None
        scene.model = scene.model + session.mean(total)[0]
        scene.done += 1


def play_until(steps: Iterator[Stage], stage: Stage) -> None:
    assert any(one is stage for one in steps)


def ask(scene: Scene, node: int, request: Request) -> object:
    """What a node says to a request."""
    deliver = scene.parties.with_updates(lambda _node, _training: np.zeros(COORDINATES), COORDINATES)
    reply = deliver({node: request})[node]
    assert isinstance(reply, Reply)
    return decode(reply.body)


def test_rounds_of_two_runs_pass_each_other_by(carried: bool) -> None:
    """Stage by stage in turn: each opens its round, and asks about it, while the other's is under way."""
    first, second = two_scenes(carried)
    for _ in zip_longest(stages(first), stages(second)):
        pass
    restart(first)
    assert first.session.proposal.run != second.session.proposal.run
    # Both charge the same books of a node.
    for scene in (first, second):
        assert [one.survivors for one in scene.records] == [4, 3, 4, 4]
        assert all(one.exact and not one.problems for one in scene.records)
        np.testing.assert_allclose(scene.model, scene.bare(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("signer", "under"), [(0, 0), (0, 1), (1, 0)])
def test_another_runs_server_binds_nobody_to_its_story(carried: bool, signer: int, under: int) -> None:
    """Each member of a round of the second run is asked for its part of it, for a set with one survivor less.

    Whoever signs, and whatever run it is sent under, but for the second server itself under its own.
    """
    scenes = two_scenes(carried)
    second = scenes[1]
    theirs, ours = map(stages, scenes)
    play_until(theirs, Stage.REVEAL)
    play_until(ours, Stage.REVEAL)
    identity, run = scenes[signer].identity, scenes[under].session.proposal.run
    for node, request in second.session.requests().items():
        message = decode(request.body)
        assert isinstance(message, RevealRequest)
        piece = len(message.pieces) // len(message.survivors)
        forged = replace(message, survivors=message.survivors[:-1], pieces=message.pieces[:-piece])
        forged = replace(forged, signature=identity.sign("request", signed_part(forged)))
        assert isinstance(ask(second, node, Request(Stage.REVEAL, encode(forged), 0, run)), Refusal)
    for scene, steps in zip(scenes, (theirs, ours), strict=True):
        for _ in steps:
            pass
        assert [one.survivors for one in scene.records] == [4, 3, 4, 4]
        assert all(one.exact for one in scene.records)
        assert not scene.session.members.left_out


def test_keys_for_one_run_are_used_up_in_no_other(carried: bool) -> None:
    """The first server lists keys that the second was given; its holder, itself, signs the list."""
    first, second = two_scenes(carried)
    theirs, ours = stages(first), stages(second)
    play_until(theirs, Stage.ROUND)
    play_until(ours, Stage.ROUND)
    mine, other = (decode(next(iter(one.session.requests().values())).body) for one in (first, second))
    assert isinstance(mine, RoundOpen)
    assert isinstance(other, RoundOpen)
    assert {one.identity for one in mine.participants} == {one.identity for one in other.participants}
    keys = {one.identity: one.prekey for one in other.participants}
    swapped = tuple(Participant(one.identity, keys[one.identity]) for one in mine.participants)
    beacon, following = mine.beacon, () if mine.cohorts is None else mine.cohorts.following
    link = _signed_link(beacon.index, beacon.value, commitment_of(mine.terms, swapped, following))
    beacon = replace(beacon, signature=first.session._coordinator._holder.sign("beacon", link))
    forged = replace(mine, participants=swapped, beacon=beacon)
    forged = replace(forged, signature=first.identity.sign("open", signed_part(forged)))
    for node in first.session.requests():
        said = ask(first, node, Request(Stage.ROUND, encode(forged), 0, first.session.proposal.run))
        assert "does not hold" in getattr(said, "reason", "")
        # Not under the other's run either, which it could not sign for.
        said = ask(first, node, Request(Stage.ROUND, encode(mine), 0, second.session.proposal.run))
        assert not isinstance(said, Upload)
    for _ in ours:
        pass
    assert all(one.exact for one in second.records)
    assert not second.session.members.left_out
    assert [one.survivors for one in second.records] == [4, 3, 4, 4]


class OneTracker(Relay):
    """Whoever registers leaves the keys that it left before, and any run is handed what is there."""

    stock: ClassVar[dict[bytes, list[Prekey]]] = {}

    def start_run(self, run: bytes, rounds: int, saved: dict[str, Any] | None = None) -> bytes:
        anchor = super().start_run(run, rounds, saved)
        self._prekeys = self.stock
        return anchor

    def enrolled(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        self.stock.pop(identity, None)
        super().enrolled(identity, prekeys)

    def replenish(self, identity: bytes, prekeys: tuple[Prekey, ...]) -> None:
        super().enrolled(identity, prekeys)


def test_a_tracker_may_hand_out_keys_to_any_run_of_its_own(monkeypatch: Any) -> None:
    """The second run's enrolment replaces the keys of the first, which is then seated with those of the second.

    Where noise is carried a round's keys are announced before: they are not the tracker's to hand out again.
    """
    monkeypatch.setattr(OneTracker, "stock", {})
    monkeypatch.setattr("session.scene.Relay", partial(OneTracker, address=HERE))
    first, second = two_scenes(carried=False)
    first.parties.limits = replace(first.parties.limits, tracker=HERE)
    for _ in zip_longest(stages(first), stages(second)):
        pass
    for scene in (first, second):
        assert [one.survivors for one in scene.records] == [4, 3, 4, 4]
        assert all(one.exact and not one.problems for one in scene.records)


def test_runs_that_are_only_proposed_make_nobody_forget_one_with_rounds(
    carried: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr("niss.session.store._MOST_RUNS", 2)
    monkeypatch.setattr("niss.session.store.MOST_RUNS_OVER", 2)
    scene = Scene.of(carried, rounds=4, repair=True)
    scene.start()
    steps = stages(scene)
    play_until(steps, Stage.REVEAL)
    store, budget = scene.parties.store(0), Budget(1.0, 1e-5, 0.0)
    ours = scene.session.proposal.run.hex()
    for number in range(5):
        store.join(f"{number:032x}", b"proposal", budget, failure=0.0)
    assert list(store.state.runs) == [ours, f"{3:032x}", f"{4:032x}"]
    for _ in steps:
        pass
    assert all(one.exact for one in scene.records)
    # Rounds that others pay for do, and then it is over: it would not know what it has been charged for.
    for number in range(4):
        store.state.note(f"{number:032x}", JoinedRun(b"proposal", 0, answered=True))
    assert ours in store.state.over
    for run in (ours, "a new one"):
        with pytest.raises(PrivacyError, match="over for this client"):
            store.join(run, b"proposal", budget, failure=0.0)
