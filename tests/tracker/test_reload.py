"""SIGHUP: the lists of those who may take part, and the certificate, are read again without a restart."""

from __future__ import annotations

import shutil
import signal
import ssl
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from niss.local.deployment import make_certificates
from niss.protocol.keyfile import Coalition
from niss.tracker.api import Attempt, SeatsWanted
from niss.tracker.auth import Refused
from niss.tracker.client import TrackerClient, TrackerRefused
from niss.tracker.service import Tracker
from niss.tracker.store import TrackerStore
from tracker.harness import SERVER, Member, TrackerProcess, member, members, tracker_process


def write_list(path: Path, names: list[Member]) -> None:
    path.write_text(
        "\n".join(f'[[members]]\nname = "{one.label}"\nidentity = "{one.public.hex()}"\n' for one in names)
    )


def reload(process: TrackerProcess, event: str) -> dict[str, object]:
    """Send the signal; returns the line of the log that says what became of it."""
    before = sum(one["event"] == event for one in process.entries())
    process.process.send_signal(signal.SIGHUP)
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        assert process.process.poll() is None, "the signal ended the tracker"
        found = [one for one in process.entries() if one["event"] == event]
        if len(found) > before:
            return found[-1]
        time.sleep(0.05)
    raise AssertionError(f"the log has no {event!r}:\n{process.log.read_text()}")


@pytest.fixture
def people() -> list[Member]:
    return members(3, "person")


def test_who_is_new_in_the_file_may_register_and_who_is_gone_is_no_longer_live(
    tmp_path: Path, people: list[Member]
) -> None:
    first, second, third = people
    admit = tmp_path / "members.toml"
    write_list(admit, [first, second])
    with tracker_process(tmp_path, SERVER.public, "--admit", str(admit)) as process:

        def client(one: Member) -> TrackerClient:
            return TrackerClient(process.url, one.identity, retries=0)

        client(first).register(first.batch(4))
        client(second).register(second.batch(4))
        with pytest.raises(TrackerRefused, match="not admitted"):
            client(third).register(third.batch(4))
        write_list(admit, [second, third])
        assert reload(process, "lists read again")["left"] == 1
        client(third).register(third.batch(4))
        with pytest.raises(TrackerRefused, match="not admitted"):
            client(first).heartbeat()
        assert client(second).heartbeat().held == 4
        server = TrackerClient(process.url, SERVER.identity, retries=0)
        server.start_run(b"run", rounds=1)
        seated = server.seat(Attempt(b"run", 0, 0), count=3, at_least=2)
        assert {one.identity for one in seated} == {second.public, third.public}


def test_a_file_that_cannot_be_used_leaves_everything_as_it_was(tmp_path: Path, people: list[Member]) -> None:
    first, second, _ = people
    admit = tmp_path / "members.toml"
    write_list(admit, [first])
    with tracker_process(tmp_path, SERVER.public, "--admit", str(admit)) as process:
        for spoil in (
            lambda: admit.write_text("[[members]\n"),
            lambda: admit.write_text(""),
            lambda: admit.chmod(0o666),
            lambda: admit.unlink(),
        ):
            spoil()
            entry = reload(process, "reload failed")
            assert entry["level"] == "error"
            assert entry["hint"]
            TrackerClient(process.url, first.identity, retries=0).register(first.batch(1))
            with pytest.raises(TrackerRefused, match="not admitted"):
                TrackerClient(process.url, second.identity, retries=0).register(second.batch(1))


def test_the_certificate_is_read_again_and_a_wrong_one_is_not_used(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        make_certificates(folder, datetime.now(UTC))
    certificate, key = (Path(shutil.copy2(first / name, tmp_path)) for name in ("tls.pem", "tls.key"))
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with tracker_process(tmp_path, SERVER.public, *flags) as process:

        def shown() -> str:
            return ssl.get_server_certificate(("127.0.0.1", process.port)).strip()

        before = shown()
        shutil.copy2(second / "tls.pem", certificate)
        assert reload(process, "reload failed")["level"] == "error", "the certificate of another key"
        assert shown() == before
        shutil.copy2(second / "tls.key", key)
        reload(process, "certificate read again")
        assert shown() == (second / "tls.pem").read_text().strip() != before


def test_whoever_is_not_on_the_list_is_let_go_at_its_next_sign_of_life(
    store: TrackerStore, people: list[Member]
) -> None:
    """A tracker that was restarted with a shorter list finds clients in its store whom it would not let in."""
    first, second, third = people
    earlier = Tracker(store, member(1, "tracker").identity, server=SERVER.public)
    for one in people:
        earlier.register(one.public, one.batch(2), None)
    now = Tracker(
        store,
        member(1, "tracker").identity,
        server=SERVER.public,
        admitted=Coalition({"second": second.public}),
    )
    for ask in (
        lambda: now.heartbeat(first.public),
        lambda: now.deposit(SERVER.public, third.public, third.batch(1)),
        lambda: now.join(first.public, None),
    ):
        with pytest.raises(Refused, match="not admitted"):
            ask()
    assert store.counts(now=time.time()).registered == 1
    assert now.heartbeat(second.public).held == 2


def test_a_closed_coalition_loses_those_who_left_its_file(store: TrackerStore, people: list[Member]) -> None:
    first, *others = people
    closed = {"clinics": Coalition({one.label: one.public for one in people})}
    tracker = Tracker(store, member(1, "tracker").identity, server=SERVER.public, coalitions=closed)
    for one in people:
        tracker.register(one.public, one.batch(2), "clinics")
    assert tracker.replace_lists(None, {"clinics": Coalition({one.label: one.public for one in others})}) == 0
    tracker.rounds.start_run(SERVER.public, b"run", 1)
    wanted = SeatsWanted(count=3, coalition="clinics")
    view = tracker.rounds.seat(SERVER.public, Attempt(b"run", 0, 0), wanted)
    assert set(view.numbers) == {one.public for one in others}
    with pytest.raises(Refused, match="not in the coalition"):
        tracker.join(first.public, "clinics")
