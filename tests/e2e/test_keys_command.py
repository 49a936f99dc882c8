"""`niss keys`: an identity is made once, for its owner alone, and only its public half is ever shown."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from niss.cli.services import keys_app as app
from niss.errors import ConfigError, PrivacyError
from niss.protocol.keyfile import load_identity
from niss.protocol.keys import fingerprint


def keys(*arguments: str | Path, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


def test_new_then_show_in_words_and_as_json(tmp_path: Path) -> None:
    path, other = tmp_path / "north.key", tmp_path / "south.key"
    made = keys("new", "--out", path)
    assert made.exit_code == 0, made.output
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys("show", path).stdout == made.stdout
    public = load_identity(path).public
    assert public.hex() in made.stdout
    assert fingerprint(public) in made.stdout
    assert keys("show", path, "--public").stdout == f"{public.hex()}\n"
    again = json.loads(keys("new", "--out", other, "--json").stdout)
    assert again == json.loads(keys("show", other, "--json").stdout)
    public = load_identity(other).public
    assert again == {"path": str(other), "public_key": public.hex(), "fingerprint": fingerprint(public)}
    assert public != load_identity(path).public


def test_nothing_secret_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "north.key"
    output = "".join(
        keys(*arguments).output
        for arguments in (("new", "--out", path), ("show", path), ("show", path, "--json"))
    )
    secret = bytes(load_identity(path).secret_bytes())
    for form in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1]):
        assert form not in output


def test_the_default_place(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    made = keys("new", environment=environment)
    assert made.exit_code == 0, made.output
    assert (tmp_path / "niss" / "identity.key").is_file()
    assert keys("show", environment=environment).stdout == made.stdout


def test_an_identity_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "north.key"
    keys("new", "--out", path)
    before = path.read_bytes()
    again = keys("new", "--out", path)
    assert isinstance(again.exception, ConfigError)
    assert again.stdout == ""
    assert path.read_bytes() == before


def test_a_file_that_others_can_read_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "north.key"
    keys("new", "--out", path)
    path.chmod(0o644)
    assert isinstance(keys("show", path).exception, PrivacyError)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="niss keys new"):
        raise keys("show", tmp_path / "none.key").exception or AssertionError
