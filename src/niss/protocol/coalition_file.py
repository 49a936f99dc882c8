"""The identities a client trusts, pinned in a TOML file, so that nobody can slip in strangers.

[[members]]
name = "Hospital North"
identity = "3b6a27bc..."    # from `niss keys show`, hex or base64
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.protocol.keys import PUBLIC_BYTES, check_public, fingerprint

_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*members[ \t]*\]\]", re.MULTILINE)
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{43}=?")
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Coalition:
    """Names and identities of those who are trusted; everyone else is a stranger."""

    members: Mapping[str, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", MappingProxyType(dict(self.members)))

    def require(self, public: bytes) -> str:
        """The name of the member with this identity; a stranger is a `RemoteProtocolError`."""
        for name, identity in self.members.items():
            if identity == public:
                return name
        raise RemoteProtocolError(
            f"identity {fingerprint(public)} is not in the coalition",
            hint="if it should be, compare fingerprints with its owner and add it to the coalition file",
        )

    def __contains__(self, public: object) -> bool:
        return public in self.members.values()

    def __len__(self) -> int:
        return len(self.members)


def load_coalition(path: Path) -> Coalition:
    """The coalition in a file; refused if everyone on this machine may change it, or anything is amiss."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if os.name == "posix" and mode & stat.S_IWOTH:
                raise PrivacyError(
                    f"{path} can be changed by everyone on this machine (mode {mode:04o})",
                    hint=f"check its members, then: chmod o-w {path}",
                )
            text = file.read().decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the coalition file {path}: {error.strerror}",
            hint="name a TOML file with [[members]], each with a name and an identity",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8") from None
    return parse_coalition(text, where=str(path))


def parse_coalition(text: str, *, where: str = "coalition") -> Coalition:
    """The coalition in the text of such a file; what is wrong is named by line and field."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"no valid TOML: {error}", field=where) from None
    entries = content.pop("members", None)
    if content:
        raise ConfigError(
            f"unknown entry {next(iter(content))!r}", field=where, hint="only [[members]] belong here"
        )
    if not isinstance(entries, list) or not entries:
        raise ConfigError("names no members", field=where, hint="add [[members]] with a name and an identity")
    lines = [text.count("\n", 0, found.start()) + 1 for found in _HEADER.finditer(text)]
    members: dict[str, bytes] = {}
    names: dict[str, str] = {}
    places: dict[bytes, str] = {}
    for number, entry in enumerate(entries, start=1):
        # The lines are a help for people: left out where they could be wrong.
        place = f", line {lines[number - 1]}" if len(lines) == len(entries) else ""
        field = f"{where}{place}: members, entry {number}"
        name, identity = _member(entry, field)
        folded = name.casefold()
        if folded in names:
            raise ConfigError(f"{name!r} is already {names[folded]}", field=f"{field}: name")
        if identity in places:
            raise ConfigError(f"is already that of {places[identity]}", field=f"{field}: identity")
        names[folded] = f"entry {number}"
        places[identity] = repr(name)
        members[name] = identity
    return Coalition(members)


def _member(entry: object, field: str) -> tuple[str, bytes]:
    if not isinstance(entry, dict):
        raise ConfigError("is no table", field=field, hint="write [[members]], then name and identity")
    for key in ("name", "identity"):
        if not isinstance(entry.get(key), str):
            raise ConfigError("is missing or no text", field=f"{field}: {key}")
    unknown = set(entry) - {"name", "identity"}
    if unknown:
        raise ConfigError("is unknown", field=f"{field}: {min(unknown)}", hint="give name and identity only")
    name: str = entry["name"]
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"must be 1 to {_LONGEST_NAME} printable characters, without spaces around",
            field=f"{field}: name",
        )
    return name, _identity(entry["identity"], f"{field}: identity")


def _identity(text: str, field: str) -> bytes:
    hint = "copy it from what its owner's `niss keys show` prints"
    if _HEX.fullmatch(text):
        public = bytes.fromhex(text)
    elif _BASE64.fullmatch(text):
        standard = text.rstrip("=").replace("-", "+").replace("_", "/")
        try:
            public = base64.b64decode(standard + "=", validate=True)
        except binascii.Error:
            raise ConfigError("is no valid base64", field=field, hint=hint) from None
    else:
        raise ConfigError(f"is no public key: {PUBLIC_BYTES} bytes in hex or base64", field=field, hint=hint)
    try:
        check_public(public)
    except RemoteProtocolError as error:
        raise ConfigError(error.message, field=field, hint=error.hint) from None
    return public
