"""No secret shows itself: not in reprs, formats, pickles, copies, logs, errors or the locals of a traceback.

First what holds one, then the machines of a repaired round.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import logging
import pickle
import pprint
import reprlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niss.errors import LocalProtocolError, NissError
from niss.protocol import client as client_module
from niss.protocol import committee as committee_module
from niss.protocol import keys
from niss.protocol import shares as shares_module
from niss.protocol.client import Memory, dump, restore
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.protocol.keys import Identity, PrekeyStore, x25519_public
from niss.protocol.shares import derive_seed, edge_key, pair_secret
from niss.redaction import Secret, SecretBytes
from support.fixed_entropy import FixedEntropy, context
from support.protocol_round import Federation, Uploader, carried, resigned

SECRET = SecretBytes(FixedEntropy("secret")(32))
A, B = bytes([1]) * 32, bytes([2]) * 32
ABSENT = 5


def forms(secret: bytes) -> list[str]:
    """How bytes usually end up in a text; halves too, since what is shown may be cut, and base64 at any alignment."""
    secret, half = bytes(secret), len(secret) // 2
    shown = [str(int.from_bytes(secret, "big")), str(int.from_bytes(secret, "little"))]
    for part in (secret[2:-2], secret[:half], secret[half:]):
        shown += [repr(part)[2:-1], part.hex(), part.hex().upper(), part.decode("latin-1")]
        shown += [str(list(part))[1:-1], "".join(f"\\x{byte:02x}" for byte in part)]
    # The first and last characters depend on what stands before and after.
    encoded = [base64.b64encode(secret[shift : shift + 24]).decode()[4:-4] for shift in range(3)]
    encoded += [base64.b64encode(part).decode().rstrip("=")[:-1] for part in (secret[:half], secret[half:])]
    return [*shown, *encoded, *(one.translate({43: 45, 47: 95}) for one in encoded)]


def assert_hidden(text: str, secrets: Sequence[bytes]) -> None:
    for secret in secrets:
        for form in forms(secret):
            assert form not in text


def logged(*holders: object) -> str:
    """What a log says of them."""
    stream = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(stream))
    for holder in holders:
        logger.error("%s %r %s", holder, holder, [holder])
    return stream.getvalue()


def holders(folder: Path) -> list[tuple[object, list[bytes]]]:
    """One of each thing that holds a secret, and the secrets in it."""
    identity = Identity(SECRET)
    store = PrekeyStore()
    store.batch(2, identity, FixedEntropy())
    privates = [bytes(store.private(number)) for number in (0, 1)]
    other = x25519_public(store.private(1))
    pair = pair_secret(SECRET, other)
    key = edge_key(pair, context(), A, B)
    seed = derive_seed(key, context(), A, B)
    create_keyfile(folder / "identity.key", identity)
    return [
        (SECRET, [SECRET]),
        (SECRET[:16], [SECRET[:16]]),
        (SECRET + b"more", [SECRET]),
        (b"more" + SECRET, [SECRET]),
        (identity, [SECRET]),
        (identity.secret_bytes(), [SECRET]),
        (store, privates),
        (dump(Memory(), store), privates),
        (store.private(0), privates),
        (pair, [pair]),
        (key, [key]),
        (seed, [seed]),
        (keys.scalar_of(SECRET), [keys.scalar_of(SECRET), SECRET]),
        (keys.clamped(SECRET), [keys.clamped(SECRET)]),
        (load_identity(folder / "identity.key"), [SECRET]),
    ]


def test_no_text_shows_a_secret(tmp_path: Path) -> None:
    for holder, secrets in holders(tmp_path):
        assert isinstance(holder, Secret)
        texts = [repr(holder), str(holder), ascii(holder), f"{holder}", f"{holder!r:>90}", f"{holder:>90}"]
        texts += ["%s %r %a" % (holder, holder, holder), "{} {!r}".format(holder, holder)]  # noqa: UP031, UP032
        texts += [repr([holder]), str({"key": (holder,)}), pprint.pformat([holder]), reprlib.repr(holder)]
        texts += [logged(holder), str(ValueError(holder)), repr(KeyError(holder))]
        assert_hidden("\n".join(texts), secrets)


def test_no_secret_is_pickled_or_copied(tmp_path: Path) -> None:
    for holder, _ in holders(tmp_path):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match="secret"):
                pickle.dumps(holder, protocol)
        with pytest.raises(TypeError, match="secret"):
            pickle.dumps({"nested": [holder]})
        for copied in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="secret"):
                copied(holder)
        with pytest.raises(TypeError, match="secret"):
            copy.deepcopy([holder])
        with pytest.raises(TypeError):
            json.dumps(holder)
        assert not hasattr(holder, "__dict__")


def test_hidden_bytes_are_bytes_all_the_same() -> None:
    assert isinstance(SECRET, bytes)
    raw = bytes(SECRET)
    assert raw == SECRET
    assert SECRET.__eq__(raw)
    assert SECRET.__ne__(bytes(32))
    assert raw[1:] + b"x" != SECRET
    assert SECRET != "text"
    assert hash(SECRET) == hash(bytes(SECRET))
    assert SECRET[0] == bytes(SECRET)[0]
    assert bytes(b"a" + SECRET + b"b") == b"a" + bytes(SECRET) + b"b"


def no_entropy(_: int) -> bytes:
    raise OSError("no entropy")


def failing_later() -> Callable[[int], bytes]:
    """Gives what it is asked for first, and one byte too few from then on."""
    source, calls = FixedEntropy("later"), []

    def entropy(count: int) -> bytes:
        calls.append(count)
        return source(count if len(calls) == 1 else count - 1)

    return entropy


def attempts(folder: Path) -> list[tuple[str, Callable[[], object]]]:
    """Calls that fail with secrets at hand."""
    identity, store = Identity(SECRET), PrekeyStore()
    store.batch(2, identity, FixedEntropy())
    pair = pair_secret(SECRET, x25519_public(store.private(1)))
    damaged = folder / "damaged.key"
    create_keyfile(damaged, identity)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    later = failing_later()
    later(1)
    return [
        ("identity", lambda: Identity(SECRET[:31])),
        ("generate", lambda: Identity.generate(lambda count: FixedEntropy("secret")(count + 1))),
        ("batch", lambda: store.batch(1, identity, no_entropy)),
        ("batch later", lambda: store.batch(1, identity, later)),
        ("private", lambda: store.private(7)),
        ("store", lambda: PrekeyStore(1, store.privates)),
        ("other store", lambda: PrekeyStore(1, {0: SECRET[1:]})),
        ("degenerate", lambda: pair_secret(SECRET, bytes(32))),
        ("own", lambda: pair_secret(SECRET, x25519_public(SECRET))),
        ("private length", lambda: pair_secret(SECRET[:31], bytes(32))),
        ("ends", lambda: derive_seed(pair, context(), A, A)),
        ("shared", lambda: derive_seed(SECRET + b"x", context(), A, B)),
        ("point", lambda: keys.times(keys.scalar_of(SECRET), b"\x02" + bytes(31))),
        ("no point", lambda: keys.times(SECRET[:31] + b"\0", bytes(32))),
        # Plain bytes handed in are hidden before anything is refused.
        ("plain identity", lambda: Identity(bytes(SECRET)[:31])),
        ("plain private", lambda: pair_secret(bytes(SECRET), bytes(32))),
        ("plain shared", lambda: derive_seed(bytes(pair), context(), A, A)),
        ("plain store", lambda: PrekeyStore(1, {0: bytes(SECRET)[1:]})),
        ("exists", lambda: create_keyfile(damaged, identity)),
        ("damaged", lambda: load_identity(damaged)),
    ]


def told(attempt: Callable[[], object]) -> tuple[str, str]:
    """What a traceback of a failed attempt says, with the locals of all frames, and as it is usually shown."""
    with pytest.raises((NissError, OSError)) as caught:
        attempt()
    whole = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    return "".join(whole.format()), "".join(traceback.format_exception(caught.value))


def test_no_traceback_shows_a_secret_even_with_its_locals(tmp_path: Path) -> None:
    store = PrekeyStore()
    store.batch(2, Identity(SECRET), FixedEntropy())
    pair = pair_secret(SECRET, x25519_public(store.private(1)))
    secrets = [SECRET[:31], store.private(0), store.private(1), pair, keys.scalar_of(SECRET)]
    for name, attempt in attempts(tmp_path):
        with_locals, usual = told(attempt)
        # Frames with secrets in them were seen, not just frames without.
        assert "hidden" in with_locals or name == "private", name
        assert_hidden(with_locals + usual, secrets)


def test_the_scan_would_find_a_secret_that_shows() -> None:
    raw = bytes(SECRET)
    for text in (
        repr(raw),
        raw.hex(),
        base64.b64encode(raw).decode(),
        str(list(raw)),
        f"x {raw[:16]!r} y",
        repr(b"x" + raw + b"y"),
        base64.b64encode(b"ab" + raw + b"c").decode(),
    ):
        with pytest.raises(AssertionError):
            assert_hidden(text, [SECRET])


# The machines of a repaired round.


class Story:
    """A repaired round, with every secret of client 0 that was ever at hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.secrets: list[bytes] = []
        self._watch(monkeypatch)
        federation = self.federation = Federation(6, "secrets")
        self.seat = federation.seats[0]
        self.secrets.append(bytes(self.seat.identity.secret_bytes()))
        store = self.seat.client._prekeys
        self.secrets += [bytes(store.private(number)) for number in store.privates]
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
    for holder in holders:
        assert_hidden("\n".join([repr(holder), f"{holder}", pprint.pformat(holder)]), story.secrets)
    assert_hidden(logged(*holders), story.secrets)


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

    def start(kept: bytes, **calls: Any) -> Uploader:
        given = {"charge": lambda *_: None, "persist": lambda _: None, **calls}
        return Uploader(seat.identity, seat.policy, assess=lambda *_: 0.5, kept=kept, **given)

    def accepted(kept: bytes) -> Uploader:
        client = start(kept)
        client.accept(story.opened, entropy)
        return client

    def persisting(kept: bytes) -> Uploader:
        return start(kept, persist=failing)

    def torn(kept: bytes, end: int) -> Callable[[], Uploader]:
        return lambda: start(kept[:end])

    def upload_with(source: Callable[[int], bytes]) -> Callable[[], object]:
        return lambda: start(story.before).upload(story.opened, story.update, source)

    other = resigned(federation.server, replace(story.request, survivors=(0, 1)), "request")
    short = resigned(federation.server, replace(story.request, pieces=story.request.pieces[1:]), "request")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("again", lambda: start(story.uploaded).upload(story.opened, story.update, entropy)),
        ("shape", lambda: accepted(story.before).answer(np.zeros(3), entropy)),
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
        ("version", lambda: start(bytes(story.revealed).replace(b'"version":2', b'"version":1'))),
        ("memory", lambda: start(bytes(story.revealed).replace(b'"last":[', b'"past":['))),
    ]
    calls += [(f"entropy {after}", upload_with(out_of_entropy(after, entropy))) for after in range(3)]
    return calls


def machine_frames(whole: traceback.TracebackException) -> traceback.StackSummary:
    """All frames but those of this file that pass plain bytes on; callbacks of a driver stay in."""
    own = ("start", "<lambda>", "test_")
    kept = [frame for frame in whole.stack if frame.filename != __file__ or not frame.name.startswith(own)]
    return traceback.StackSummary.from_list(kept)


def test_no_traceback_of_a_machine_shows_a_secret_even_with_its_locals(story: Story) -> None:
    for name, call in failures(story):
        with pytest.raises(NissError) as caught:
            call()
        whole = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        text = "".join([*machine_frames(whole).format(), *whole.format_exception_only()])
        assert "self = <" in text or "kept = <" in text, name
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
    for change in ((b'"last":[', b'"lost":[],"last":['), (b'"seat":0', b'"seat":1e999'), (b"uploaded", b"x")):
        with pytest.raises(LocalProtocolError, match="damaged"):
            restore(bytes(story.uploaded).replace(*change))


def test_the_scan_would_find_what_a_machine_shows(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept memory as plain bytes, as it once was, is found in the locals of a driver that fails."""
    monkeypatch.setattr(client_module, "dump", lambda *parts: bytes(dump(*parts)))
    persisting = dict(failures(story))["persist reveal"]
    with pytest.raises(NissError) as caught:
        persisting()
    whole = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    with pytest.raises(AssertionError):
        assert_hidden("".join(machine_frames(whole).format()), story.secrets)
