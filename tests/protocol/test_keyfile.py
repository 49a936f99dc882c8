"""A key file is its owner's alone and never overwritten; a coalition file pins who is trusted, and names its faults."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.protocol.keyfile import (
    Coalition,
    create_keyfile,
    default_keyfile,
    load_coalition,
    load_identity,
    parse_coalition,
)
from niss.protocol.keys import Identity, fingerprint
from support.fixed_entropy import FixedEntropy

posix = pytest.mark.skipif(os.name != "posix", reason="file modes mean this on POSIX only")
IDENTITY = Identity.generate(FixedEntropy("north"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine" / "identity.key"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
def test_the_identity_comes_back_through_a_link_too(path: Path) -> None:
    assert create_keyfile(path, IDENTITY) is IDENTITY
    link = path.with_name("link.key")
    link.symlink_to(path)
    for where in (path, link):
        assert load_identity(where).public == IDENTITY.public
        assert load_identity(where).secret_bytes() == IDENTITY.secret_bytes()


def test_the_format_never_changes(path: Path) -> None:
    create_keyfile(path, IDENTITY)
    content = path.read_bytes()
    body = b"niss-keyfile/2\n" + bytes(IDENTITY.secret_bytes())
    assert content == body + hashlib.sha256(body).digest()


@posix
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_its_owner_can_read_it_whatever_the_umask(path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        create_keyfile(path, IDENTITY)
        assert mode(path) == 0o600
        assert mode(path.parent) & 0o077 == 0
    finally:
        os.umask(before)


@posix
def test_it_has_its_mode_before_its_first_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    opened = os.open

    def watched(where: Path, flags: int, *rest: int) -> int:
        descriptor = opened(where, flags, *rest)
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            modes.append((stat.S_IMODE(os.fstat(descriptor).st_mode), os.fstat(descriptor).st_size))
        return descriptor

    before = os.umask(0)
    try:
        monkeypatch.setattr(os, "open", watched)
        create_keyfile(path, IDENTITY)
    finally:
        os.umask(before)
    assert modes == [(0o600, 0)]


def test_an_existing_file_is_never_overwritten(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="already exists") as caught:
        create_keyfile(path, IDENTITY)
    assert "--out" in str(caught.value)
    assert path.read_bytes() == b"precious"


@posix
def test_a_link_to_nowhere_is_not_followed(path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(ConfigError, match="already exists"):
        create_keyfile(path, IDENTITY)
    assert not (path.parent / "elsewhere").exists()


@posix
@pytest.mark.parametrize("loose", [0o640, 0o604, 0o620, 0o601, 0o644, 0o666])
def test_a_file_that_others_can_reach_is_not_loaded(path: Path, loose: int) -> None:
    create_keyfile(path, IDENTITY)
    path.chmod(loose)
    with pytest.raises(PrivacyError, match=f"{loose:04o}") as caught:
        load_identity(path)
    assert caught.value.hint is not None
    assert f"chmod 600 {path}" in caught.value.hint
    path.chmod(0o400)
    load_identity(path)


def test_a_failed_creation_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(ConfigError, match="No space left"):
            create_keyfile(path, IDENTITY)
    assert not path.exists()
    create_keyfile(path, IDENTITY)


@posix
def test_file_and_folder_are_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[bool] = []
    synced = os.fsync

    def watched(descriptor: int) -> None:
        kinds.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    create_keyfile(path, IDENTITY)
    assert kinds == [False, True]


@given(data=st.data())
def test_any_flipped_bit_and_any_cut_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("keys") / "identity.key"
    create_keyfile(path, IDENTITY)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_identity(path)


def test_what_is_not_there_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no key file") as caught:
        load_identity(path)
    assert "niss keys new" in str(caught.value)
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot read"):
        load_identity(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot write"):
        create_keyfile(tmp_path / "file" / "identity.key", IDENTITY)


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    configured = tmp_path / "configuration"
    assert default_keyfile({"XDG_CONFIG_HOME": str(configured)}) == configured / "niss" / "identity.key"
    usual = tmp_path / ".config" / "niss" / "identity.key"
    for environment in ({}, {"XDG_CONFIG_HOME": ""}, {"XDG_CONFIG_HOME": "relative"}):
        assert default_keyfile(environment) == usual


NORTH, SOUTH, WEST = (Identity.generate(FixedEntropy(name)).public for name in ("north", "south", "west"))


def member(name: str, identity: str) -> str:
    return f'[[members]]\nname = "{name}"\nidentity = "{identity}"\n'


GOOD = member("North", NORTH.hex()) + member("South", base64.b64encode(SOUTH).decode())


def test_hex_and_base64_are_read(tmp_path: Path) -> None:
    path = tmp_path / "coalition.toml"
    path.write_text(GOOD)
    path.chmod(0o644)
    coalition = load_coalition(path)
    assert dict(coalition.members) == {"North": NORTH, "South": SOUTH}
    assert NORTH in coalition
    assert coalition.require(SOUTH) == "South"


@given(seed=st.binary(min_size=32, max_size=32))
def test_every_usual_spelling_is_the_same_identity(seed: bytes) -> None:
    public = Identity(seed).public
    standard, for_urls = base64.b64encode(public).decode(), base64.urlsafe_b64encode(public).decode()
    spellings = [public.hex(), public.hex().upper(), standard, standard.rstrip("="), for_urls]
    for spelling in spellings:
        assert parse_coalition(member("x", spelling)).members["x"] == public


def test_strangers_are_refused_by_their_fingerprint() -> None:
    with pytest.raises(RemoteProtocolError, match=fingerprint(WEST)):
        parse_coalition(GOOD).require(WEST)
    assert WEST not in parse_coalition(GOOD)


def test_a_coalition_cannot_be_changed() -> None:
    members = {"North": NORTH}
    coalition = Coalition(members)
    members["West"] = WEST
    assert WEST not in coalition
    with pytest.raises(TypeError):
        coalition.members["West"] = WEST  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            GOOD + member("North", WEST.hex()),
            "line 7: members, entry 3: name: 'North' is already taken by entry 1",
        ),
        (GOOD + member("nORTH", WEST.hex()), "line 7: members, entry 3: name"),
        (
            GOOD + member("West", NORTH.hex()),
            "line 7: members, entry 3: identity: already belongs to 'North'",
        ),
        (GOOD + member("West", SOUTH.hex()), "entry 3: identity: already belongs to 'South'"),
        (GOOD + "\n\n" + member("West", "zz"), "line 9: members, entry 3: identity"),
        (member("West", WEST.hex()[:-1]), "line 1: members, entry 1: identity"),
        (member("West", WEST.hex() + "00"), "identity: must be a public key"),
        (member("West", " " + WEST.hex()), "identity: must be a public key"),
        (member("West", ""), "identity: must be a public key"),
        (member("West", bytes(32).hex()), "identity: this identity is a degenerate key"),
        (member("", WEST.hex()), "entry 1: name: must be"),
        (member(" West", WEST.hex()), "entry 1: name: must be"),
        (member("We\\u202est", WEST.hex()), "entry 1: name: must be"),
        (member("W" * 101, WEST.hex()), "entry 1: name: must be"),
        ("[[members]]\nname = 'West'\n", "entry 1: identity: is missing"),
        (f"[[members]]\nidentity = '{WEST.hex()}'\n", "entry 1: name: is missing"),
        ("[[members]]\nname = 'West'\nidentity = 7\n", "entry 1: identity: is missing or not a string"),
        (member("West", WEST.hex()) + "role = 'x'\n", "entry 1: role: unknown field"),
        ("members = ['West']\n", "members, entry 1: must be a table"),
        ("members = 'West'\n", "does not list any members"),
        ("members = []\n", "does not list any members"),
        ("", "does not list any members"),
        ("member = 1\n" + GOOD, "unknown entry 'member'"),
        (GOOD + "[[members]\n", "not valid TOML.*line 7"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^team.toml.*{said}"):
        parse_coalition(text, where="team.toml")


def test_lines_are_left_out_where_they_could_be_wrong() -> None:
    text = f'members = [{{name = "West", identity = "{WEST.hex()}"}}, {{name = "x", identity = ""}}]'
    with pytest.raises(ConfigError, match=r"^coalition: members, entry 2: identity"):
        parse_coalition(text)


def test_trailing_bits_make_no_second_spelling() -> None:
    """The last character of base64 has two bits to spare: whatever they are, a duplicate is noticed."""
    text = base64.b64encode(SOUTH).decode()
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = text[:42] + alphabet[alphabet.index(text[42]) ^ 1] + "="
    with pytest.raises(ConfigError, match="identity"):
        parse_coalition(GOOD + member("West", other))


@posix
def test_a_file_that_everyone_may_change_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "coalition.toml"
    path.write_text(GOOD)
    path.chmod(0o666)
    with pytest.raises(PrivacyError, match="0666") as caught:
        load_coalition(path)
    assert "chmod o-w" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_coalition(tmp_path / "missing.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="UTF-8"):
        load_coalition(path)


def test_reading_a_key_file_loads_nothing_heavy() -> None:
    code = (
        "import sys, niss.protocol.keyfile; print({'numpy', 'torch', 'flwr', 'asyncio'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
