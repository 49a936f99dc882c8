"""A coalition file pins who is trusted; what is wrong with it is named by line and field."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.protocol.keyfile import Coalition, load_coalition, parse_coalition
from niss.protocol.keys import Identity, fingerprint
from support.fixed_entropy import FixedEntropy

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
    assert len(coalition) == 2
    assert NORTH in coalition
    assert coalition.require(SOUTH) == "South"


@settings(deadline=None)
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


@pytest.mark.skipif(os.name != "posix", reason="file modes mean this on POSIX only")
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
