"""The identities a client trusts, pinned in a TOML file, so that nobody can slip in strangers.

    [[members]]
    name = "Hospital North"
    identity = "3b6a27bc..."    # from `niss keys show`, hex or base64

Names and identities are unique; names differ in more than case. Errors name the line, the entry and the field.
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
    """Names and identities of those who are trusted; everyone else is a stranger. `identity in coalition` works."""

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
    """The coalition in a file.

    `PrivacyError` if everyone on this machine may change it, `ConfigError` if it cannot be read or is not valid.
    """
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
        raise ConfigError(f"{path} is not UTF-8 text") from None
    return parse_coalition(text, where=str(path))


def parse_coalition(text: str, *, where: str = "coalition") -> Coalition:
    """The coalition in the text of such a file; `where` names the text in errors (`ConfigError`)."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}", field=where) from None
    entries = content.pop("members", None)
    if content:
        raise ConfigError(
            f"unknown entry {next(iter(content))!r}", field=where, hint="only [[members]] belong here"
        )
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            "does not list any members", field=where, hint="add [[members]] with a name and an identity"
        )
    lines = [text.count("\n", 0, header.start()) + 1 for header in _HEADER.finditer(text)]
    members: dict[str, bytes] = {}
    names: dict[str, str] = {}
    owners: dict[bytes, str] = {}
    for number, entry in enumerate(entries, start=1):
        # The lines are a help for people: left out where they could be wrong.
        place = f", line {lines[number - 1]}" if len(lines) == len(entries) else ""
        field = f"{where}{place}: members, entry {number}"
        name, identity = _member(entry, field)
        folded = name.casefold()
        if folded in names:
            raise ConfigError(f"{name!r} is already taken by {names[folded]}", field=f"{field}: name")
        if identity in owners:
            raise ConfigError(f"already belongs to {owners[identity]}", field=f"{field}: identity")
        names[folded] = f"entry {number}"
        owners[identity] = repr(name)
        members[name] = identity
    return Coalition(members)


def _member(entry: object, field: str) -> tuple[str, bytes]:
    if not isinstance(entry, dict):
        raise ConfigError("must be a table", field=field, hint="write [[members]], then name and identity")
    for key in ("name", "identity"):
        if not isinstance(entry.get(key), str):
            raise ConfigError("is missing or not a string", field=f"{field}: {key}")
    unknown = set(entry) - {"name", "identity"}
    if unknown:
        raise ConfigError(
            "unknown field", field=f"{field}: {min(unknown)}", hint="give name and identity only"
        )
    name: str = entry["name"]
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"must be 1 to {_LONGEST_NAME} printable characters, without spaces at the ends",
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
            raise ConfigError("is not valid base64", field=field, hint=hint) from None
    else:
        raise ConfigError(
            f"must be a public key: {PUBLIC_BYTES} bytes in hex or base64", field=field, hint=hint
        )
    try:
        check_public(public)
    except RemoteProtocolError as error:
        raise ConfigError(error.message, field=field, hint=error.hint) from None
    return public
