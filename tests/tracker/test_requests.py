"""Who may ask what: signatures, clocks, copies, roles and rates; without HTTP, with a clock of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from niss.protocol.keyfile import Coalition
from niss.tracker.auth import IDENTITY, NONCE, SIGNATURE, TIME, Buckets, Refused, check_request, sign_request
from niss.tracker.options import TrackerSettings
from tracker.harness import SERVER, START, Member, Scene, member, members


def request(scene: Scene, by: Member, **changes: Any) -> dict[str, Any]:
    """A signed request and what it was signed for, to be checked as it is or changed."""
    usual = {"method": "PUT", "target": "/v1/clients/me", "body": b"{}", "time": int(scene.now)}
    signed = usual | {"tracker": scene.tracker.public, "nonce": bytes(16)} | changes
    headers = sign_request(by.identity, **signed)
    return {"headers": headers, "method": "PUT", "target": b"/v1/clients/me", "body": b"{}"}


def check(scene: Scene, made: dict[str, Any]) -> bytes:
    tracker, now, tolerance = scene.tracker, scene.now, scene.tracker.settings.tolerance
    return tracker.admit(check_request(**made, tracker=tracker.public, now=now, tolerance=tolerance))


def test_a_signed_request_is_its_signers(scene: Scene) -> None:
    one = member(1)
    assert check(scene, request(scene, one)) == one.public


@pytest.mark.parametrize(
    "change",
    [
        {"method": "POST"},
        {"target": "/v1/clients/me?x=1"},
        {"body": b"other"},
        {"tracker": member(9).public},
        {"nonce": b"\x01" * 16},
        {"identity": member(2).public},
        {"identity": (1).to_bytes(32, "little"), "said": "degenerate key"},
    ],
)
def test_a_request_signed_for_something_else_is_refused(scene: Scene, change: dict[str, Any]) -> None:
    """The last two: the signature of another identity, and a key under which anyone can sign."""
    change = dict(change)
    identity, said = change.pop("identity", None), change.pop("said", "the signature")
    made = request(scene, member(1), **change)
    made["headers"] |= {NONCE: bytes(16).hex()} | ({} if identity is None else {IDENTITY: identity.hex()})
    with pytest.raises(Refused, match=said) as refused:
        check(scene, made)
    assert (refused.value.status, refused.value.field) == (401, SIGNATURE)


@pytest.mark.parametrize("name", ["niss-identity", "niss-time", "niss-nonce", "niss-signature"])
@pytest.mark.parametrize("value", [None, "", "zz", "0" * 65, "é" * 64, "٣" * 10, "A" * 128])
def test_missing_and_malformed_headers_are_named(scene: Scene, name: str, value: str | None) -> None:
    made = request(scene, member(1))
    del made["headers"][name]
    if value is not None:
        made["headers"][name] = value
    with pytest.raises(Refused) as refused:
        check(scene, made)
    assert (refused.value.status, refused.value.field) == (401, name)


@pytest.mark.parametrize(("off", "passes"), [(-61, False), (-60, True), (60, True), (61, False)])
def test_clocks_may_differ_by_a_minute(scene: Scene, off: int, passes: bool) -> None:
    made = request(scene, member(1), time=int(START) + off)
    if passes:
        assert check(scene, made) == member(1).public
    else:
        with pytest.raises(Refused, match="more than 60 s apart") as refused:
            check(scene, made)
        assert refused.value.field == TIME


@pytest.mark.parametrize("off", [-60, 0, 60])
def test_a_copy_is_refused_as_long_as_its_time_would_pass(scene: Scene, off: int) -> None:
    stamp = int(START) + off
    assert check(scene, request(scene, member(1), time=stamp))
    for later in range(0, 140, 7):
        scene.now = START + later
        for _ in range(60):  # The store sweeps old nonces now and then; it must not sweep this one too early.
            scene.store.first_use(b"x" * 32, bytes(scene.now.hex(), "ascii")[:16], now=scene.now, expires=0)
        with pytest.raises(Refused):
            check(scene, request(scene, member(1), time=stamp))


def test_each_identity_has_its_own_rate_and_the_server_has_none(scene: Scene) -> None:
    def ask(by: Member, number: int) -> bytes:
        return check(scene, request(scene, by, nonce=number.to_bytes(16, "big")))

    for number in range(20):
        ask(member(1), number)
    with pytest.raises(Refused, match="too many") as refused:
        ask(member(1), 20)
    assert refused.value.status == 429
    assert refused.value.retry_after == pytest.approx(0.1)
    ask(member(2), 0)
    scene.now += 0.2
    ask(member(1), 21)
    for number in range(50):
        ask(SERVER, number)


def test_buckets_forget_the_oldest_and_zero_means_any_rate() -> None:
    unlimited, buckets = Buckets(0), Buckets(1.0)
    for _ in range(1000):
        unlimited.check("one", 0.0, "questions")
    for _ in range(2):
        buckets.check("one", 0.0, "questions")
    with pytest.raises(Refused, match="too many questions"):
        buckets.check("one", 0.0, "questions")
    for number in range(Buckets._MOST):
        buckets.check(number, 0.0, "questions")
    assert len(buckets._levels) == Buckets._MOST
    buckets.check("one", 0.0, "questions")


def test_a_prekey_must_be_signed_by_its_owner(scene: Scene) -> None:
    one, other = members(2)
    with pytest.raises(Refused, match="signature") as refused:
        scene.tracker.register(one.public, (*one.batch(1), *other.batch(1)), None)
    assert (refused.value.status, refused.value.field) == (422, "prekeys.1.signature")
    assert scene.store.counts(now=START).registered == 0


def test_an_old_identity_with_a_new_key_store_is_told_so(scene: Scene) -> None:
    one, again = member(1), member(1)
    scene.tracker.register(one.public, one.batch(3), None)
    again.label = "another store"
    with pytest.raises(Refused, match="used before") as refused:
        scene.tracker.register(again.public, again.batch(2), None)
    assert refused.value.status == 409


def test_only_the_server_deposits_prekeys_and_only_for_the_registered(scene: Scene) -> None:
    one, tracked = member(1), scene.tracker
    with pytest.raises(Refused, match="only the server"):
        tracked.deposit(one.public, one.public, one.batch(1))
    with pytest.raises(Refused, match="no client") as refused:
        tracked.deposit(SERVER.public, one.public, one.batch(1))
    assert refused.value.status == 404
    tracked.register(one.public, one.batch(1), None)
    assert tracked.deposit(SERVER.public, one.public, one.batch(2)).held == 3


def test_a_client_low_on_prekeys_is_told_how_many_to_send(scene: Scene) -> None:
    one, tracked = member(1), scene.tracker
    assert tracked.wanted(tracked.register(one.public, one.batch(3), None)) == 13
    assert tracked.wanted(tracked.register(one.public, one.batch(1), None)) == 0


def test_time_runs_out_and_a_heartbeat_renews_it(scene: Scene) -> None:
    one, tracked = member(1), scene.tracker
    tracked.register(one.public, one.batch(1), None)
    scene.now += 599
    assert scene.store.counts(now=scene.now).live == 1
    scene.now += 2
    assert scene.store.counts(now=scene.now).live == 0
    tracked.heartbeat(one.public)
    assert scene.store.counts(now=scene.now).live == 1
    scene.now += scene.tracker.settings.forget_after + 601
    assert scene.tracker.sweep() == 1
    with pytest.raises(Refused, match="no client"):
        tracked.heartbeat(one.public)


def test_closed_lists_keep_strangers_out(make_scene: Callable[..., Scene]) -> None:
    friend, outsider = members(2)
    scene = make_scene(
        admitted=Coalition({"friend": friend.public, "guest": member(5).public}),
        coalitions={"clinics": Coalition({"friend": friend.public})},
    )
    tracked = scene.tracker
    with pytest.raises(Refused, match="not admitted") as refused:
        tracked.register(outsider.public, outsider.batch(1), None)
    assert refused.value.status == 403
    tracked.register(friend.public, friend.batch(1), "clinics")
    guest = member(5)
    with pytest.raises(Refused, match="not in the coalition"):
        tracked.register(guest.public, guest.batch(1), "clinics")
    assert scene.store.counts(now=START).registered == 1
    tracked.register(guest.public, guest.batch(1), "farms")
    with pytest.raises(Refused, match="not in the coalition"):
        tracked.join(guest.public, "clinics")
    tracked.join(guest.public, None)


def test_a_full_tracker_says_so(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(settings=TrackerSettings(max_clients=2))
    tracked = scene.tracker
    for one in members(2):
        tracked.register(one.public, one.batch(1), None)
        scene.now += 10
    third = member(3)
    with pytest.raises(Refused, match="no more clients") as refused:
        tracked.register(third.public, third.batch(1), None)
    assert refused.value.status == 503
