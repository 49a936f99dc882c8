"""No secret shows itself: not in reprs, formats, pickles, copies, logs, errors or the locals of a traceback."""

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
from collections.abc import Callable
from pathlib import Path

import pytest

from niss.errors import NissError
from niss.protocol import curve
from niss.protocol.keyfile import create_keyfile, load_keyfile
from niss.protocol.keys import Identity, PrekeyStore, Secret, SecretBytes, x25519_public
from niss.protocol.shares import derive_seed, pair_secret
from support.fixed_entropy import FixedEntropy, context

SECRET = SecretBytes(FixedEntropy("secret")(32))
A, B = bytes([1]) * 32, bytes([2]) * 32


def forms(secret: bytes) -> list[str]:
    """How bytes usually end up in a text; halves too, since what is shown may be cut."""
    secret = bytes(secret)
    shown = []
    for part in (secret, secret[: len(secret) // 2], secret[len(secret) // 2 :]):
        # Without the last characters, which depend on what follows.
        base = base64.b64encode(part).decode().rstrip("=")[:-1]
        shown += [repr(part)[2:-1], part.hex(), part.hex().upper(), base, base.translate({43: 45, 47: 95})]
        shown += [str(list(part))[1:-1], part.decode("latin-1"), "".join(f"\\x{byte:02x}" for byte in part)]
    return [*shown, str(int.from_bytes(secret, "big")), str(int.from_bytes(secret, "little"))]


def assert_hidden(text: str, *secrets: bytes) -> None:
    for secret in secrets:
        for form in forms(secret):
            assert form not in text


def holders(folder: Path) -> list[tuple[object, list[bytes]]]:
    """One of each thing that holds a secret, and the secrets in it."""
    identity = Identity(SECRET)
    store = PrekeyStore()
    store.batch(2, identity, FixedEntropy())
    privates = [bytes(store.private(number)) for number in (0, 1)]
    other = x25519_public(store.private(1))
    pair = pair_secret(SECRET, other)
    seed = derive_seed(pair, context(), A, B, "share")
    file = create_keyfile(folder / "identity.key", identity, store)
    return [
        (SECRET, [SECRET]),
        (SECRET[:16], [SECRET[:16]]),
        (SECRET + b"more", [SECRET]),
        (b"more" + SECRET, [SECRET]),
        (identity, [SECRET]),
        (identity.secret_bytes(), [SECRET]),
        (store, privates),
        (store.to_bytes(), privates),
        (store.private(0), privates),
        (pair, [pair]),
        (seed, [seed]),
        (curve.scalar_of(SECRET), [curve.scalar_of(SECRET), SECRET]),
        (curve.clamped(SECRET), [curve.clamped(SECRET)]),
        (file, [SECRET, *privates]),
        (load_keyfile(folder / "identity.key"), [SECRET, *privates]),
    ]


def test_no_text_shows_a_secret(tmp_path: Path) -> None:
    for holder, secrets in holders(tmp_path):
        assert isinstance(holder, Secret)
        stream = io.StringIO()
        logger = logging.Logger("test")
        logger.addHandler(logging.StreamHandler(stream))
        logger.error("%s %r %s", holder, holder, [holder])
        texts = [repr(holder), str(holder), ascii(holder), f"{holder}", f"{holder!r:>90}", f"{holder:>90}"]
        texts += ["%s %r %a" % (holder, holder, holder), "{} {!r}".format(holder, holder)]  # noqa: UP031, UP032
        texts += [repr([holder]), str({"key": (holder,)}), pprint.pformat([holder]), reprlib.repr(holder)]
        texts += [stream.getvalue(), str(ValueError(holder)), repr(KeyError(holder))]
        assert_hidden("\n".join(texts), *secrets)


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


def failing(_: int) -> bytes:
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
    create_keyfile(damaged, identity, store)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    later = failing_later()
    later(1)
    return [
        ("identity", lambda: Identity(SECRET[:31])),
        ("purpose", lambda: identity.sign("", b"")),
        ("generate", lambda: Identity.generate(lambda count: FixedEntropy("secret")(count + 1))),
        ("batch", lambda: store.batch(1, identity, failing)),
        ("batch later", lambda: store.batch(1, identity, later)),
        ("private", lambda: store.private(7)),
        ("store", lambda: PrekeyStore.from_bytes(store.to_bytes()[:-1])),
        ("other store", lambda: PrekeyStore.from_bytes(SECRET)),
        ("degenerate", lambda: pair_secret(SECRET, bytes(32))),
        ("own", lambda: pair_secret(SECRET, x25519_public(SECRET))),
        ("private length", lambda: pair_secret(SECRET[:31], bytes(32))),
        ("ends", lambda: derive_seed(pair, context(), A, A, "share")),
        ("shared", lambda: derive_seed(SECRET + b"x", context(), A, B, "share")),
        ("point", lambda: curve.times(curve.scalar_of(SECRET), b"\x02" + bytes(31))),
        ("no point", lambda: curve.times(SECRET[:31] + b"\0", bytes(32))),
        # Plain bytes handed in are hidden before anything is refused.
        ("plain identity", lambda: Identity(bytes(SECRET)[:31])),
        ("plain private", lambda: pair_secret(bytes(SECRET), bytes(32))),
        ("plain shared", lambda: derive_seed(bytes(pair), context(), A, A, "share")),
        ("plain store", lambda: PrekeyStore.from_bytes(bytes(store.to_bytes())[:-1])),
        ("exists", lambda: create_keyfile(damaged, identity, store)),
        ("damaged", lambda: load_keyfile(damaged)),
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
    secrets = [SECRET[:31], store.private(0), store.private(1), pair, curve.scalar_of(SECRET)]
    for name, attempt in attempts(tmp_path):
        with_locals, usual = told(attempt)
        # Frames with secrets in them were seen, not just frames without.
        assert "hidden" in with_locals or name in ("purpose", "private"), name
        assert_hidden(with_locals + usual, *secrets)


def test_the_scan_would_find_a_secret_that_shows() -> None:
    raw = bytes(SECRET)
    for text in (repr(raw), raw.hex(), base64.b64encode(raw).decode(), str(list(raw)), f"x {raw[:16]!r} y"):
        with pytest.raises(AssertionError):
            assert_hidden(text, SECRET)
