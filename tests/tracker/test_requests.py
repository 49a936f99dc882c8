"""Who may ask what: signatures, clocks, copies, roles and rates; without HTTP, with a clock of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from niss.protocol.coalition_file import Coalition
from niss.protocol.keys import Identity
from niss.tracker.auth import NONCE, SIGNATURE, TIME, Buckets, RequestRefusal, TrackerSettings, sign_request
from niss.tracker.service import Tracker
from niss.tracker.store_sqlite import SqliteStore
from support.protocol_round import seeded_entropy
from tracker.harness import Member, member, members

START = 1_800_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


class Scene:
    """A tracker, its clock, its server."""

    def __init__(self, path: Path, **given: Any) -> None:
        self.clock, self.server = Clock(), member(0, "server")
        self.store = SqliteStore(path / "store.db", durable=False)
        self.identity = Identity.generate(seeded_entropy("tracker"))
        self.tracker = Tracker(
            self.store,
            self.identity,
            server=self.server.public,
            clock=self.clock,
            monotonic=self.clock,
            **given,
        )

    def request(self, by: Member, **changes: Any) -> dict[str, Any]:
        """A signed request and what it was signed for, to be checked as it is or changed."""
        body = changes.pop("body", b"{}")
        signed = {"method": "PUT", "target": "/v1/clients/me", "body": body, "time": int(self.clock.now)}
        signed |= {"tracker": self.tracker.public, "nonce": bytes(16)} | changes
        headers = sign_request(by.identity, **signed)
        return {"headers": headers, "method": "PUT", "target": b"/v1/clients/me", "body": b"{}"}

    def check(self, request: dict[str, Any]) -> bytes:
        return self.tracker.admit(self.tracker.check(request.pop("headers"), **request))


@pytest.fixture
def scene(tmp_path: Path) -> Any:
    made = Scene(tmp_path)
    yield made
    made.store.close()


def test_a_signed_request_is_its_signers(scene: Scene) -> None:
    one = member(1)
    assert scene.check(scene.request(one)) == one.public


@pytest.mark.parametrize(
    "change",
    [
        {"method": "POST"},
        {"target": "/v1/clients/me?x=1"},
        {"body": b"other"},
        {"tracker": member(9).public},
        {"nonce": b"\x01" * 16},
    ],
)
def test_a_request_signed_for_something_else_is_refused(scene: Scene, change: dict[str, Any]) -> None:
    request = scene.request(member(1), **change)
    request["headers"][NONCE] = bytes(16).hex()
    with pytest.raises(RequestRefusal, match="the signature") as refused:
        scene.check(request)
    assert (refused.value.status, refused.value.field) == (401, SIGNATURE)


def test_a_signature_of_another_identity_is_refused(scene: Scene) -> None:
    request, other = scene.request(member(1)), scene.request(member(2))
    request["headers"][SIGNATURE] = other["headers"][SIGNATURE]
    with pytest.raises(RequestRefusal, match="the signature"):
        scene.check(request)


@pytest.mark.parametrize("name", ["niss-identity", "niss-time", "niss-nonce", "niss-signature"])
@pytest.mark.parametrize("value", [None, "", "zz", "0" * 65, "é" * 64, "٣" * 10, "A" * 128])
def test_missing_and_malformed_headers_are_named(scene: Scene, name: str, value: str | None) -> None:
    request = scene.request(member(1))
    del request["headers"][name]
    if value is not None:
        request["headers"][name] = value
    with pytest.raises(RequestRefusal) as refused:
        scene.check(request)
    assert (refused.value.status, refused.value.field) == (401, name)


def test_a_key_under_which_anyone_can_sign_is_refused(scene: Scene) -> None:
    request = scene.request(member(1))
    request["headers"]["niss-identity"] = (1).to_bytes(32, "little").hex()
    with pytest.raises(RequestRefusal) as refused:
        scene.check(request)
    assert refused.value.status == 401


@pytest.mark.parametrize(("off", "passes"), [(-61, False), (-60, True), (60, True), (61, False)])
def test_clocks_may_differ_by_a_minute(scene: Scene, off: int, passes: bool) -> None:
    request = scene.request(member(1), time=int(START) + off)
    if passes:
        assert scene.check(request) == member(1).public
    else:
        with pytest.raises(RequestRefusal, match="more than 60 s apart") as refused:
            scene.check(request)
        assert refused.value.field == TIME


@pytest.mark.parametrize("off", [-60, 0, 60])
def test_a_copy_is_refused_as_long_as_its_time_would_pass(scene: Scene, off: int) -> None:
    stamp = int(START) + off
    assert scene.check(scene.request(member(1), time=stamp))
    for later in range(0, 140, 7):
        scene.clock.now = START + later
        for _ in range(60):  # The store sweeps old nonces now and then; it must not sweep this one too early.
            scene.store.first_use(
                b"x" * 32, bytes(scene.clock.now.hex(), "ascii")[:16], now=scene.clock.now, expires=0
            )
        with pytest.raises(RequestRefusal):
            scene.check(scene.request(member(1), time=stamp))


def test_each_identity_has_its_own_rate_and_the_server_has_none(scene: Scene) -> None:
    def ask(by: Member, number: int) -> bytes:
        nonce = number.to_bytes(16, "big")
        request = scene.request(by, nonce=nonce)
        return scene.check(request)

    for number in range(20):
        ask(member(1), number)
    with pytest.raises(RequestRefusal, match="too many") as refused:
        ask(member(1), 20)
    assert refused.value.status == 429
    assert refused.value.retry_after == pytest.approx(0.1)
    ask(member(2), 0)
    scene.clock.now += 0.2
    ask(member(1), 21)
    for number in range(50):
        ask(scene.server, number)


def test_buckets_forget_the_oldest_and_zero_means_any_rate() -> None:
    assert all(Buckets(0).take("one", 0.0) == 0 for _ in range(1000))
    buckets = Buckets(1.0)
    assert [buckets.take("one", 0.0) > 0 for _ in range(3)] == [False, False, True]
    for number in range(Buckets._MOST):
        buckets.take(number, 0.0)
    assert len(buckets._levels) == Buckets._MOST
    assert buckets.take("one", 0.0) == 0


def test_a_prekey_must_be_signed_by_its_owner(scene: Scene) -> None:
    one, other = members(2)
    with pytest.raises(RequestRefusal, match="signature") as refused:
        scene.tracker.members.register(one.public, (*one.batch(1), *other.batch(1)), None)
    assert (refused.value.status, refused.value.field) == (422, "prekeys.1.signature")
    assert scene.store.counts(now=START).registered == 0


def test_an_old_identity_with_a_new_key_store_is_told_so(scene: Scene) -> None:
    one, again = member(1), member(1)
    scene.tracker.members.register(one.public, one.batch(3), None)
    again.label = "another store"
    with pytest.raises(RequestRefusal, match="used before") as refused:
        scene.tracker.members.register(again.public, again.batch(2), None)
    assert refused.value.status == 409


def test_only_the_server_deposits_prekeys_and_only_for_the_registered(scene: Scene) -> None:
    one, tracked = member(1), scene.tracker.members
    with pytest.raises(RequestRefusal, match="only the server"):
        tracked.deposit(one.public, one.public, one.batch(1))
    with pytest.raises(RequestRefusal, match="no client") as refused:
        tracked.deposit(scene.server.public, one.public, one.batch(1))
    assert refused.value.status == 404
    tracked.register(one.public, one.batch(1), None)
    assert tracked.deposit(scene.server.public, one.public, one.batch(2)).held == 3


def test_a_client_low_on_prekeys_is_told_how_many_to_send(scene: Scene) -> None:
    one, tracked = member(1), scene.tracker.members
    assert tracked.wanted(tracked.register(one.public, one.batch(3), None)) == 13
    assert tracked.wanted(tracked.register(one.public, one.batch(1), None)) == 0


def test_time_runs_out_and_a_heartbeat_renews_it(scene: Scene) -> None:
    one, tracked = member(1), scene.tracker.members
    tracked.register(one.public, one.batch(1), None)
    scene.clock.now += 599
    assert scene.store.counts(now=scene.clock.now).live == 1
    scene.clock.now += 2
    assert scene.store.counts(now=scene.clock.now).live == 0
    tracked.heartbeat(one.public)
    assert scene.store.counts(now=scene.clock.now).live == 1
    scene.clock.now += scene.tracker.settings.forget_after + 601
    assert scene.tracker.sweep() == 1
    with pytest.raises(RequestRefusal, match="no client"):
        tracked.heartbeat(one.public)


def test_closed_lists_keep_strangers_out(tmp_path: Path) -> None:
    friend, outsider = members(2)
    scene = Scene(
        tmp_path,
        admitted=Coalition({"friend": friend.public, "guest": member(5).public}),
        coalitions={"clinics": Coalition({"friend": friend.public})},
    )
    tracked = scene.tracker.members
    with pytest.raises(RequestRefusal, match="not admitted") as refused:
        tracked.register(outsider.public, outsider.batch(1), None)
    assert refused.value.status == 403
    tracked.register(friend.public, friend.batch(1), "clinics")
    guest = member(5)
    with pytest.raises(RequestRefusal, match="not in the coalition"):
        tracked.register(guest.public, guest.batch(1), "clinics")
    assert scene.store.counts(now=START).registered == 1
    tracked.register(guest.public, guest.batch(1), "farms")
    with pytest.raises(RequestRefusal, match="not in the coalition"):
        tracked.join(guest.public, "clinics")
    tracked.join(guest.public, None)
    scene.store.close()


def test_a_full_tracker_says_so(tmp_path: Path) -> None:
    scene = Scene(tmp_path, settings=TrackerSettings(max_clients=2))
    tracked = scene.tracker.members
    for one in members(2):
        tracked.register(one.public, one.batch(1), None)
        scene.clock.now += 10
    third = member(3)
    with pytest.raises(RequestRefusal, match="no more clients") as refused:
        tracked.register(third.public, third.batch(1), None)
    assert refused.value.status == 503
    scene.store.close()
