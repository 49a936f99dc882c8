"""Whatever one node replies, round after round, is its own failure: the run goes on, and exact sums are right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from niss.protocol import keys, repair
from niss.protocol.committee import coefficients
from niss.protocol.messages import Reveal, Upload, decode, encode, signed_part
from niss.protocol.points import ZERO, cut
from niss.session.ports import Reply, Request, Stage, sign_refusal
from niss.session.server import drive
from session.scene import COORDINATES, Scene, update_of

LIAR, ROUNDS = 1, 4
NO_POINTS = (
    ZERO,  # The identity.
    bytes(32),  # Of order 4.
    (2**255 - 20).to_bytes(32, "little"),  # Of order 2.
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),  # Of order 8.
    b"\xff" * 32,
    bytes([2]) + bytes(31),  # Not on the curve.
)

Lie = Callable[["Liar", Request, Reply, int], "Reply | str"]
LIES: dict[str, Lie] = {}


def lie(make: Lie) -> Lie:
    LIES[make.__name__] = make
    return make


@dataclass
class Liar:
    """One node that answers honestly first, and sends something else.

    others  the honest replies to this stage, by node
    before  all replies of this node, and of others, that it has seen, also in another run
    """

    scene: Scene
    before: list[Reply]
    others: dict[int, Reply] = field(default_factory=dict)

    def signed(self, reply: Reply, **changes: Any) -> Reply:
        """The message with other parts, under the liar's own signature."""
        message: Any = replace(decode(reply.body), **changes)
        purpose = "upload" if isinstance(message, Upload) else "reveal"
        identity = self.scene.parties.store(LIAR).identity
        message = replace(message, signature=identity.sign(purpose, signed_part(message)))
        return replace(reply, body=encode(message))

    def partials(self, reply: Reply, change: Callable[[int, bytes], bytes]) -> Reply:
        """A reveal in which every point is another; anything else stays as it is."""
        message = _message(reply)
        if not isinstance(message, Reveal):
            return reply
        false = (
            replace(one, points=b"".join(change(one.seat, point) for point in cut(one.points)))
            for one in message.partials
        )
        return self.signed(reply, partials=tuple(false))


def _message(reply: Reply) -> object:
    return None if reply.body.startswith(b"niss enrolment") else decode(reply.body)


@lie
def flipped(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    body = bytearray(reply.body)
    body[pick % len(body)] ^= 1 << pick % 8
    return replace(reply, body=bytes(body))


@lie
def cut_short(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    return replace(reply, body=reply.body[: pick % len(reply.body)])


@lie
def replayed(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    return liar.before[pick % len(liar.before)] if liar.before else reply


@lie
def anothers(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:
    """Not as its enrolment: who else than the server has seen that of another?"""
    if not liar.others or request.stage is Stage.ENROL:
        return reply
    return list(liar.others.values())[pick % len(liar.others)]


@lie
def out_of_step(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    return replace(reply, step=(0, 2**62, reply.step + 1)[pick % 3])


@lie
def silent(liar: Liar, request: Request, reply: Reply, pick: int) -> str:  # noqa: ARG001
    return "no answer in time"


@lie
def declined(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:
    digest = request.digest if pick % 2 else bytes(32)
    identity = liar.scene.parties.store(LIAR).identity
    return replace(reply, body=encode(sign_refusal(identity, digest, "\x1b[2J" * (pick % 9))))


@lie
def false_dealing(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    """Some of its points, pieces and seals are others, or no points at all."""
    message = _message(reply)
    if not isinstance(message, Upload) or not message.pieces:
        return reply
    start = 32 * (pick % (len(message.pieces) // 32))
    put = NO_POINTS[pick % len(NO_POINTS)]
    return liar.signed(reply, pieces=message.pieces[:start] + put + message.pieces[start + 32 :])


@lie
def other_commitment(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    message = _message(reply)
    return liar.signed(reply, commitment=bytes(32)) if getattr(message, "commitment", b"") else reply


@lie
def no_points(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    return liar.partials(reply, lambda _seat, _point: NO_POINTS[pick % len(NO_POINTS)])


@lie
def false_partials(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    return liar.partials(
        reply, lambda _seat, point: keys.total((point, keys.times_base(keys.to_scalar(1 + pick))))
    )


@lie
def partials_of_another_seat(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    message = _message(reply)
    if not isinstance(message, Reveal) or len(message.partials) < 2:
        return reply
    seats = [one.seat for one in message.partials]
    turned = (
        replace(one, seat=seat) for one, seat in zip(message.partials, seats[1:] + seats[:1], strict=True)
    )
    return liar.signed(reply, partials=tuple(sorted(turned, key=lambda one: one.seat)))


@lie
def partials_that_make_zero(liar: Liar, request: Request, reply: Reply, pick: int) -> Reply:  # noqa: ARG001
    """With the first members' partials, which it has seen, its own give the identity."""
    current = liar.scene.session.round
    message = _message(reply)
    if not isinstance(message, Reveal) or current is None or message.context != current.agreed.digest:
        return reply
    members, own = list(current.agreed.committee), current.nodes.index(LIAR)
    said = {
        members.index(one.seat) + 1: one
        for one in map(_message, liar.others.values())
        if isinstance(one, Reveal)
    }
    mine = members.index(own) + 1
    first = sorted({*said, mine})[: current.agreed.terms.threshold]
    if mine not in first or len(first) < 2:
        return reply
    weights = dict(zip(first, coefficients(tuple(first), 0), strict=True))

    def zero(seat: int, point: bytes) -> bytes:
        theirs = {
            number: cut(next(part.points for part in said[number].partials if part.seat == seat))[0]
            for number in first
            if number != mine
        }
        rest = keys.total(keys.times(keys.to_scalar(weights[one]), theirs[one]) for one in theirs)
        inverse = pow(weights[mine], -1, keys.ORDER)
        del point
        return keys.times(keys.to_scalar(-inverse % keys.ORDER), rest)

    return liar.partials(reply, zero)


@cache
def seen_elsewhere(carried: bool) -> tuple[Reply, ...]:
    """All replies of nodes with these numbers in another run."""
    scene, seen = Scene.of(carried, rounds=2, repair=True, label="elsewhere"), []

    def deliver(requests: Mapping[int, Request]) -> dict[int, Reply | str]:
        replies = scene.deliver(requests)
        seen.extend(one for one in replies.values() if isinstance(one, Reply))
        return replies

    scene.start()
    play_round(scene, deliver)
    return tuple(seen)


def play_round(scene: Scene, deliver: Callable[[Mapping[int, Request]], dict[int, Reply | str]]) -> None:
    """A round, as it is played on Flower: what cannot be opened is skipped, and the next begun."""
    session, here = scene.session, scene.present()
    session.begin(scene.done, here, connected=here, coordinates=COORDINATES)
    drive(session, deliver)
    if session.refused is None:
        total, record = session.finish()
        if total is not None:
            mean = session.mean(total)[0]
            scene.model = scene.model + mean
            if record.exact and not scene.carried:
                nodes = [node for node in scene.asked[scene.done] if str(node) not in record.lost]
                bare = sum(update_of(node, scene.done) for node in nodes) / len(nodes)
                np.testing.assert_allclose(mean, bare, rtol=0, atol=1e-5)
    scene.done += 1


def play(carried: bool, lies: list[tuple[str, int]]) -> Scene:
    """A run in which the liar's replies, one after the other, are these lies; where there are no more it is honest."""
    scene = Scene.of(carried, rounds=ROUNDS, repair=True, nodes=10 if carried else 4)
    liar, left = Liar(scene, list(seen_elsewhere(carried))), list(lies)

    def deliver(requests: Mapping[int, Request]) -> dict[int, Reply | str]:
        replies = scene.deliver(requests)
        liar.others = {node: one for node, one in replies.items() if node != LIAR and isinstance(one, Reply)}
        own = replies.get(LIAR)
        if isinstance(own, Reply) and left:
            name, pick = left.pop(0)
            if name != "honest":
                replies[LIAR] = LIES[name](liar, requests[LIAR], own, pick)
        liar.before += [own] if isinstance(own, Reply) else []
        liar.before += liar.others.values()
        return replies

    scene.start()
    while scene.done < ROUNDS:
        play_round(scene, deliver)
    return scene


def check(scene: Scene) -> None:
    """Every round is accounted for, nobody else is blamed, and all others are in every sum there is."""
    assert [one.round for one in scene.records] == [*range(1, ROUNDS + 1)]
    assert set(scene.session.members.left_out) <= {LIAR}
    for one in scene.records:
        assert set(one.lost) <= {str(LIAR)}
        assert one.survivors >= 3
    if all(one.exact for one in scene.records):
        np.testing.assert_allclose(scene.model, scene.bare(), rtol=0, atol=1e-5)


SEQUENCES = st.lists(
    st.tuples(st.sampled_from(["honest", "honest", *LIES]), st.integers(0, 10_000)), min_size=1, max_size=12
)


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("place", range(5))
def test_one_lie_is_its_own_failure(carried: bool, name: str, place: int) -> None:
    """In every stage of the first round, and the first of the next."""
    check(play(carried, [*[("honest", 0)] * place, (name, 7 * place + 1)]))


def test_no_sequence_of_lies_ends_the_run(carried: bool) -> None:
    @settings(
        max_examples=40,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(SEQUENCES)
    def explore(lies: list[tuple[str, int]]) -> None:
        check(play(carried, lies))

    explore()


def test_what_a_reply_causes_is_caught_and_named_and_what_none_causes_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store of keys that cannot take some, a node that nobody asked, and then a fault of our own."""
    scene = Scene.of(False, rounds=ROUNDS, repair=True)
    session = scene.start()

    def refuse(_identity: bytes, _prekeys: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(session._coordinator, "replenish", refuse)

    def deliver(requests: Mapping[int, Request]) -> dict[int, Reply | str]:
        replies = scene.deliver(requests)
        return replies | ({77: Reply(b"", 0)} if session.stage is not Stage.ENROL else {})

    with caplog.at_level(logging.WARNING, "niss.session.server"):
        play_round(scene, deliver)
    assert (
        "the reply of node 2 in stage round does not count: the reply cannot be read (ZeroDivisionError)"
        in caplog.text
    )
    assert "node 77 in stage reveal does not count" in caplog.text
    assert (scene.records[0].survivors, scene.records[0].exact) == (4, True)
    monkeypatch.setattr(session._server, "request_reveals", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        play_round(scene, scene.deliver)


def test_what_cannot_be_combined_is_at_most_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails while what was revealed of one client is put together, the round ends and the next opens."""
    combined = repair._recover_one

    def fails_for_one(agreed: Any, seat: int, *rest: Any) -> Any:
        return 1 // 0 if (agreed.terms.round, seat) == (0, 2) else combined(agreed, seat, *rest)

    monkeypatch.setattr(repair, "_recover_one", fails_for_one)
    scene = play(False, [])
    assert [one.exact for one in scene.records] == [False, True, True, True]
    assert [one.masked for one in scene.records] == [1, 0, 0, 0]
