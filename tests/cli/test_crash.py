"""How niss ends: the table of exit codes; a crash is two lines, a log with the traceback, and no secret anywhere."""

from __future__ import annotations

import base64
import re
import stat
from pathlib import Path

import pytest

from cli.terminals import Ended, run_python
from niss import errors
from niss.cli.errors import CRASHED, EXIT_CODES, INTERRUPTED
from niss.redaction import REDACTED

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "exit-codes.md"
SEED = bytes(range(100, 132))
KEY = bytes(range(7, 39))

# Commands that exist only here: they crash while they hold keys and seeds, in the ways in which a value could slip out.
CRASHING = """
import sys
from niss.cli import app, main
from niss.protocol.keys import Identity
from niss.protocol.keys import SecretBytes
from niss.randomness.secret import SecretStream

SEED, KEY = bytes(range(100, 132)), bytes(range(7, 39))
DRAWN = []

def entropy(count):
    DRAWN.append(KEY[:count])
    return KEY[:count]

@app.command("plain")
def plain():
    identity, stream, secret = Identity.generate(entropy), SecretStream(SEED), SecretBytes(SEED)
    held = [identity, stream, secret, SEED, KEY]
    held[9]

@app.command("chained")
def chained():
    identity, stream = Identity.generate(entropy), SecretStream(SEED)
    try:
        {}[SEED]
    except KeyError as error:
        fault = ValueError(f"cannot use {KEY!r} or {SEED.hex()} or {list(SEED)} of {stream!r} {identity!r}")
        fault.add_note(__import__("base64").b64encode(KEY).decode())
        raise fault from error

main()
"""
FORMS = [
    form(secret)
    for secret in (SEED, KEY)
    for form in (
        repr,
        bytes.hex,
        lambda value: repr(value)[2:-1],
        lambda value: str(list(value)),
        lambda value: base64.b64encode(value).decode(),
        lambda value: str(int.from_bytes(value, "big")),
        lambda value: str(int.from_bytes(value, "little")),
    )
]


def crash(*arguments: str, **environment: str) -> Ended:
    """Run one of the commands above; `XDG_STATE_HOME` or `HOME` say where its log goes."""
    return run_python(CRASHING, *arguments, COLUMNS="200", **environment)


@pytest.mark.parametrize("command", ["plain", "chained"])
@pytest.mark.parametrize("debug", [False, True])
def test_a_crash_is_told_in_two_lines_and_logged_without_secrets(
    tmp_path: Path, command: str, debug: bool
) -> None:
    done = crash(*(["--debug"] if debug else []), command, XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    *trace, error, hint = done.stderr.splitlines()
    name = "IndexError" if command == "plain" else "ValueError"
    assert error.startswith(f"error: niss crashed: {name}: ")
    [log] = (tmp_path / "niss").iterdir()
    assert str(log) in hint
    text = log.read_text()
    assert "Traceback (most recent call last)" in text
    assert f"in {command}" in text
    assert command in text.splitlines()[2]
    assert bool(trace) == debug
    if debug:
        assert "\n".join(trace) in text
    for form in FORMS:
        assert form not in text
        assert form not in done.stderr
    if command == "chained":
        assert "KeyError" in text
        assert text.count(REDACTED) >= 5
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700


def test_a_log_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "niss").write_text("a file where the folder should be")
    done = crash("plain", XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    *_, error, hint = done.stderr.splitlines()
    assert "IndexError" in error
    assert "could not be written" in hint


def test_an_intended_error_is_no_crash(tmp_path: Path) -> None:
    done = crash("--debug", "report", str(tmp_path / "absent"), XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 5
    assert "crashed" not in done.stderr
    assert not (tmp_path / "niss").exists()


@pytest.mark.parametrize("state", ["", "relative"])
def test_without_a_usable_place_logs_go_below_home(tmp_path: Path, state: str) -> None:
    crash("plain", HOME=str(tmp_path), XDG_STATE_HOME=state)
    [log] = (tmp_path / ".local/state/niss").iterdir()
    assert "IndexError" in log.read_text()


def test_the_documentation_holds_the_same_table() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(str(code), name, meaning) for code, name, meaning in EXIT_CODES]


def test_every_error_has_a_code_of_the_table() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert {kind.exit_code for kind in kinds if issubclass(kind, errors.NissError)} == set(range(1, 9))
    codes = [code for code, _, _ in EXIT_CODES]
    assert len(codes) == len(set(codes))
    assert {0, CRASHED, INTERRUPTED, *range(1, 9)} == set(codes)
