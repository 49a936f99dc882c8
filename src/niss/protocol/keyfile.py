"""The file that keeps an identity, for its owner's eyes only, and the one that says which identities are trusted.

A key file is created readable by its owner alone, from the first byte, and never overwritten. One that others can read
is not loaded.

    "niss-keyfile/2" newline | identity's secret, 32 bytes | SHA-256 of all that, 32 bytes

The identities a client trusts, pinned in a TOML file, so that nobody can slip in strangers.

    [[members]]
    name = "Hospital North"
    identity = "3b6a27bc..."    # from `niss keys show`, hex or base64

Names and identities are unique; names differ in more than case, and hold no characters that do not show. Errors name
the line, the entry and the field. Everyone who may change the file could add a stranger: it is not read if that is
everyone on the machine.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.files import read_private, write_new
from niss.protocol.keys import PUBLIC_BYTES, SECRET_BYTES, Identity, check_public, fingerprint
from niss.redaction import SecretBytes

_TAG = b"niss-keyfile/2\n"
_ROOM = "choose a folder of your own that has room"


def create_keyfile(path: Path, identity: Identity) -> Identity:
    """A new file with mode 0600; one that already exists is left alone and refused (`ConfigError`).

    Missing folders are made with mode 0700. Returns the identity.
    """
    body = _TAG + identity.secret_bytes()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_new(path, body + _digest(body))
    except FileExistsError:
        if path.parent.is_dir():
            raise ConfigError(
                f"{path} already exists and is not overwritten",
                hint="see whose it is with `niss keys show`, or choose another path with --out",
            ) from None
        raise ConfigError(f"cannot write {path}: its folder is a file", hint=_ROOM) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint=_ROOM) from None
    return identity


def load_identity(path: Path) -> Identity:
    """The identity in a key file.

    `PrivacyError` if group or others have any right to it, `ConfigError` if it is missing, damaged or no key file.
    """
    try:
        content = SecretBytes(read_private(path, follow_links=True))
    except FileNotFoundError:
        raise ConfigError(f"there is no key file {path}", hint="make one with `niss keys new`") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="give a key file that you own"
        ) from None
    end = len(_TAG) + SECRET_BYTES
    if content[: len(_TAG)] != _TAG:
        raise ConfigError(
            f"{path} is not a key file of this version of niss", hint="give the path of a key file"
        )
    if len(content) < end or _digest(content[:end]) != content[end:]:
        raise ConfigError(f"{path} is damaged", hint="restore it from a copy, or make a new identity")
    return Identity(content[len(_TAG) : end])


def _digest(body: bytes) -> bytes:
    """It finds damage, and is no protection against forgery."""
    return hashlib.sha256(body).digest()


def default_keyfile(environment: Mapping[str, str]) -> Path:
    """$XDG_CONFIG_HOME/niss/identity.key, or ~/.config/niss/identity.key.

    `environment` is usually `os.environ`; a relative XDG_CONFIG_HOME is ignored, as its specification demands.
    """
    configured = Path(environment.get("XDG_CONFIG_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".config"
    return base / "niss" / "identity.key"


_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*members[ \t]*\]\]", re.MULTILINE)
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{43}=?")
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Coalition:
    """Names and identities of those who are trusted; everyone else is a stranger.

    `members` maps each name to its public key and cannot be changed. `public in coalition` asks for an identity.
    """

    members: Mapping[str, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", MappingProxyType(dict(self.members)))

    def require(self, public: bytes) -> str:
        """The name of the member with this identity; a stranger is a `RemoteProtocolError`.

        The error names the stranger's fingerprint, which its owner can read out with `niss keys show`.
        """
        for name, identity in self.members.items():
            if identity == public:
                return name
        raise RemoteProtocolError(
            f"identity {fingerprint(public)} is not in the coalition",
            hint="if it should be, compare fingerprints with its owner and add it to the coalition file",
        )

    def __contains__(self, public: object) -> bool:
        return public in self.members.values()


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
        hint = "add [[members]] with a name and an identity"
        raise ConfigError("does not list any members", field=where, hint=hint)
    lines = [text.count("\n", 0, header.start()) + 1 for header in _HEADER.finditer(text)]
    members: dict[str, bytes] = {}
    names: dict[str, int] = {}
    owners: dict[bytes, str] = {}
    for number, entry in enumerate(entries, start=1):
        # The lines are a help for people: left out where they could be wrong.
        place = f", line {lines[number - 1]}" if len(lines) == len(entries) else ""
        field = f"{where}{place}: members, entry {number}"
        name, identity = _member(entry, field)
        if (first := names.setdefault(name.casefold(), number)) != number:
            raise ConfigError(f"{name!r} is already taken by entry {first}", field=f"{field}: name")
        if (owner := owners.setdefault(identity, name)) != name:
            raise ConfigError(f"already belongs to {owner!r}", field=f"{field}: identity")
        members[name] = identity
    return Coalition(members)


def _member(entry: object, field: str) -> tuple[str, bytes]:
    """Name and identity of one entry; `field` is where it stands."""
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
        problem = f"must be 1 to {_LONGEST_NAME} printable characters, without spaces at the ends"
        raise ConfigError(problem, field=f"{field}: name")
    return name, _read_identity(entry["identity"], f"{field}: identity")


def _read_identity(text: str, field: str) -> bytes:
    """A public key in hex or in base64 of either alphabet, padded or not; refused if nobody could hold it."""
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
        problem = f"must be a public key: {PUBLIC_BYTES} bytes in hex or base64"
        raise ConfigError(problem, field=field, hint=hint)
    try:
        check_public(public)
    except RemoteProtocolError as error:
        raise ConfigError(error.message, field=field, hint=error.hint) from None
    return public
