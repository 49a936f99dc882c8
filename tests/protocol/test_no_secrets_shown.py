"""The machines show no secret: not in reprs, logs, pickles, errors, or the locals of any frame of a traceback."""

from __future__ import annotations

import base64
import io
import logging
import pickle
import pprint
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from niss.errors import LocalProtocolError, NissError
from niss.protocol import client as client_module
from niss.protocol import committee as committee_module
from niss.protocol import shares as shares_module
from niss.protocol.client import Client
from niss.protocol.states import dump, restore
from support.protocol_round import Federation, carried, resigned

ABSENT = 5


def forms(secret: bytes) -> list[str]:
    """How the middle of a secret looks in a text: raw, hexadecimal, base64 at any alignment, as numbers."""
    part = bytes(secret)[2:-2]
    shown = [part.hex(), part.hex().upper(), repr(part)[2:-1], part.decode("latin-1"), str(list(part))[1:-1]]
    for shift in range(3):
        encoded = base64.b64encode(bytes(secret)[shift : shift + 24]).decode()
        # The first and last characters depend on what stands before and after.
        shown += [encoded[4:-4], encoded[4:-4].translate({43: 45, 47: 95})]
    return shown


def assert_hidden(text: str, secrets: list[bytes]) -> None:
    for secret in secrets:
        for form in forms(secret):
            assert form not in text


class Story:
    """A repaired round, with every secret of client 0 that was ever at hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.secrets: list[bytes] = []
        self._watch(monkeypatch)
        federation = self.federation = Federation(6, "secrets")
        self.seat = federation.seats[0]
        self.secrets.append(bytes(self.seat.identity.secret_bytes()))
        store = self.seat.client._prekeys
        self.secrets += [bytes(store.private(number)) for number in store._privates]
        self.opened = federation.open(federation.terms(mode="repair", neighbours=5.0))
        updates = federation.updates()
        self.before = self.seat.kept[-1]
        federation.upload(self.opened, updates, (ABSENT,))
        self.uploaded = self.seat.kept[-1]
        requests = federation.server.request_reveals()
        self.request = carried(requests[0])
        self.reveal = self.seat.client.reveal(self.request)
        self.revealed = self.seat.kept[-1]
        federation.server.take_reveal(self.reveal)
        self.update = updates[0]

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Notes derived seeds, self-masks and pair secrets as they are made."""

        def noting(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any) -> Any:
                made = function(*arguments)
                self.secrets.append(bytes(made))
                return made

            return wrapped

        for name in ("derive_seed", "edge_key", "pair_secret"):
            monkeypatch.setattr(shares_module, name, noting(getattr(shares_module, name)))
        for name in ("draw", "mask_seed", "_pad", "_open", "pair_secret"):
            monkeypatch.setattr(committee_module, name, noting(getattr(committee_module, name)))


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    told = Story(monkeypatch)
    assert len(told.secrets) > 50
    yield told
    # What the fixture noted stays out of the report of a failing test, too.
    told.secrets.clear()


def test_no_repr_or_log_shows_a_secret(story: Story) -> None:
    client, server = story.seat.client, story.federation.server
    holders = [client, server, client._memory, client.policy, client._prekeys, story.federation.chain]
    holders += [server._round, story.seat.kept, story.opened, story.request, story.reveal, story.revealed]
    stream = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(stream))
    for holder in holders:
        logger.error("%s %r", holder, holder)
        assert_hidden("\n".join([repr(holder), f"{holder}", pprint.pformat(holder)]), story.secrets)
    assert_hidden(stream.getvalue(), story.secrets)


def test_what_can_be_pickled_holds_no_secret(story: Story) -> None:
    client, server = story.seat.client, story.federation.server
    for machine in (client, server, client._prekeys, story.federation.chain, story.revealed):
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            pickle.dumps(machine)
    for message in (client._memory, client.policy, story.opened, story.request, story.reveal):
        assert_hidden(pickle.dumps(message).decode("latin-1"), story.secrets)


def failing(given: object, mu: object = None) -> None:  # noqa: ARG001
    """A driver that cannot keep or charge what it is given."""
    raise LocalProtocolError("the disk is full")


def out_of_entropy(after: int, entropy: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Gives what it is asked for a few times, then fails."""
    left = [after]

    def source(count: int) -> bytes:
        left[0] -= 1
        if left[0] < 0:
            raise LocalProtocolError("no entropy left")
        return entropy(count)

    return source


def failures(story: Story) -> list[tuple[str, Callable[[], object]]]:
    """Calls that fail with secrets at hand."""
    federation, seat, entropy = story.federation, story.seat, story.federation.entropy

    def start(kept: bytes, **calls: Any) -> Client:
        given = {"charge": lambda *_: None, "persist": lambda _: None, **calls}
        return Client(seat.identity, seat.policy, assess=lambda *_: 0.5, kept=kept, **given)

    def persisting(kept: bytes) -> Client:
        return start(kept, persist=failing)

    def torn(kept: bytes, end: int) -> Callable[[], Client]:
        return lambda: start(kept[:end])

    def upload_with(source: Callable[[int], bytes]) -> Callable[[], object]:
        return lambda: start(story.before).upload(story.opened, story.update, source)

    other = resigned(federation.server, replace(story.request, survivors=(0, 1)), "request")
    short = resigned(federation.server, replace(story.request, pieces=story.request.pieces[1:]), "request")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("again", lambda: start(story.uploaded).upload(story.opened, story.update, entropy)),
        ("shape", lambda: start(story.before).upload(story.opened, np.zeros(3), entropy)),
        ("nan", lambda: start(story.before).upload(story.opened, story.update * np.nan, entropy)),
        ("charge", lambda: start(story.before, charge=failing).upload(story.opened, story.update, entropy)),
        ("persist upload", lambda: persisting(story.before).upload(story.opened, story.update, entropy)),
        ("persist reveal", lambda: persisting(story.uploaded).reveal(story.request)),
        ("persist close", lambda: persisting(story.revealed).close_round()),
        ("enrol", lambda: start(story.before).enrol(2, out_of_entropy(0, entropy))),
        ("another set", lambda: start(story.revealed).reveal(other)),
        ("short", lambda: start(story.uploaded).reveal(short)),
        ("too early", lambda: start(story.before).reveal(story.request)),
        ("torn", torn(story.revealed, -1)),
        ("torn key", torn(story.revealed, len(story.revealed) - 40)),
        ("no prekeys", torn(story.revealed, 9)),
        ("version", lambda: start(bytes(story.revealed).replace(b'"version":1', b'"version":2'))),
        ("memory", lambda: start(bytes(story.revealed).replace(b'"last":{', b'"past":{'))),
    ]
    calls += [(f"entropy {after}", upload_with(out_of_entropy(after, entropy))) for after in range(3)]
    return calls


def machine_frames(whole: traceback.TracebackException) -> traceback.StackSummary:
    """All frames but those of this file that pass plain bytes on; callbacks of a driver stay in."""
    own = ("start", "<lambda>", "test_")
    kept = [frame for frame in whole.stack if frame.filename != __file__ or not frame.name.startswith(own)]
    return traceback.StackSummary.from_list(kept)


def test_no_traceback_shows_a_secret_even_with_its_locals(story: Story) -> None:
    for name, call in failures(story):
        with pytest.raises(NissError) as caught:
            call()
        whole = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        text = "".join([*machine_frames(whole).format(), *whole.format_exception_only()])
        assert "self = <niss.protocol" in text or "kept = <" in text, name
        assert_hidden(text, story.secrets)
        assert_hidden(str(pickle.dumps(caught.value)), story.secrets)


def test_a_piece_that_does_not_open_shows_nothing_of_the_key(story: Story) -> None:
    agreed, current = story.seat.client._current(story.request.context)
    private = story.seat.client._prekeys.private(current.prekey)
    with pytest.raises(NissError) as caught:
        committee_module._open(agreed, 1, 0, private, bytes(31) + b"\x09" + bytes(64))
    whole = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    text = "".join(traceback.StackSummary.from_list(list(whole.stack)[1:]).format())
    assert "hidden" in text
    assert_hidden(text, story.secrets)


def test_kept_memory_is_hidden_and_comes_back_whole(story: Story) -> None:
    memory, prekeys = restore(story.revealed)
    assert "hidden" in repr(dump(memory, prekeys))
    assert dump(memory, prekeys) == story.revealed
    for damaged in (
        b"",
        b"[]",
        b"{}",
        b'"text"',
        b"\xff",
        b'{"version":1,"memory":[],"prekeys":""}',
        b"[" * 99_999,
    ):
        with pytest.raises(LocalProtocolError):
            restore(damaged)
    for change in ((b'"last":{', b'"last":[],"lost":{'), (b'"seat":0', b'"seat":1e999'), (b"uploaded", b"x")):
        with pytest.raises(LocalProtocolError, match="damaged"):
            restore(bytes(story.uploaded).replace(*change))


def test_the_scan_would_find_what_shows(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept memory as plain bytes, as it once was, is found in the locals of a driver that fails."""
    for secret in story.secrets[:3]:
        for text in (
            repr(b"x" + secret + b"y"),
            secret.hex(),
            base64.b64encode(b"ab" + secret + b"c").decode(),
        ):
            with pytest.raises(AssertionError):
                assert_hidden(text, [secret])
    monkeypatch.setattr(client_module, "dump", lambda *parts: bytes(dump(*parts)))
    persisting = dict(failures(story))["persist reveal"]
    with pytest.raises(NissError) as caught:
        persisting()
    whole = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    with pytest.raises(AssertionError):
        assert_hidden("".join(machine_frames(whole).format()), story.secrets)
