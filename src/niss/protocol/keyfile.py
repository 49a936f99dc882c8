"""The file that keeps a client's identity and its prekeys, for its owner's eyes only.

It is created readable by its owner alone, from the first byte; it is never overwritten by a new identity;
an update replaces it as a whole, durably, or not at all. A file that others can read is not loaded.
What an update removes is gone from the file; the disk below may keep old blocks, as disks do.

    "niss-keyfile/1" newline | identity's secret, 32 bytes | `PrekeyStore.to_bytes` | SHA-256 of all that, 32 bytes
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from niss.errors import ConfigError, LocalProtocolError
from niss.files import locked_folder, read_private, write_atomically, write_new
from niss.protocol.keys import SECRET_BYTES, Identity, PrekeyStore, Secret, SecretBytes

_TAG = b"niss-keyfile/1\n"
_CHECK_BYTES = 32


class KeyFile(Secret):
    """A key file that was created or loaded: change `prekeys`, then `save`.

    path        where it is, links resolved
    identity    whose it is
    prekeys     the store; what is erased there is gone from the file after `save`
    """

    __slots__ = ("_saved", "identity", "path", "prekeys")

    def __init__(self, path: Path, identity: Identity, prekeys: PrekeyStore, content: bytes) -> None:
        self.path = path
        self.identity = identity
        self.prekeys = prekeys
        self._saved = _digest(content)

    def save(self) -> None:
        """Replace the file by what is here now; refused (`LocalProtocolError`) if another process changed it."""
        content = _pack(self.identity, self.prekeys)
        with locked_folder(self.path.parent):
            if _digest(_read(self.path)) != self._saved:
                raise LocalProtocolError(
                    f"{self.path} was changed by another process",
                    hint="let one process use a key file at a time; load it again",
                )
            # A fixed name: what a crash left there may hold keys that were erased since, and goes.
            temporary = self.path.with_name(f".{self.path.name}.new")
            try:
                write_atomically(self.path, content, temporary=temporary)
            except OSError as error:
                raise _unwritable(self.path, error) from None
        self._saved = _digest(content)


def create_keyfile(path: Path, identity: Identity, prekeys: PrekeyStore | None = None) -> KeyFile:
    """A new file with mode 0600; one that already exists is left alone and refused (`ConfigError`).

    Missing folders are made with mode 0700. Without `prekeys` the file starts with an empty store.
    """
    path = Path(path)
    store = PrekeyStore() if prekeys is None else prekeys
    content = _pack(identity, store)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        write_new(path, content)
    except FileExistsError:
        raise ConfigError(
            f"{path} already exists and is not overwritten",
            hint="see whose it is with `niss keys show`, or choose another path with --out",
        ) from None
    except OSError as error:
        raise _unwritable(path, error) from None
    return KeyFile(path.resolve(), identity, store, content)


def load_keyfile(path: Path) -> KeyFile:
    """Identity and prekeys of a file.

    `PrivacyError` if group or others have any right to it, `ConfigError` if it is missing, damaged or no key file.
    """
    path = Path(path)
    content = _read(path)
    body, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    start = len(_TAG) + SECRET_BYTES
    if content[: len(_TAG)] != _TAG:
        raise ConfigError(
            f"{path} is not a key file of this version of niss", hint="give the path of a key file"
        )
    if len(body) < start or _digest(body) != check:
        raise ConfigError(f"{path} is damaged", hint="restore it from a copy, or make a new identity")
    identity = Identity(body[len(_TAG) : start])
    return KeyFile(path.resolve(), identity, PrekeyStore.from_bytes(body[start:]), content)


def load_identity(path: Path) -> Identity:
    """The identity in a key file; refused like `load_keyfile`."""
    return load_keyfile(path).identity


def default_keyfile(environment: Mapping[str, str]) -> Path:
    """$XDG_CONFIG_HOME/niss/identity.key, or ~/.config/niss/identity.key.

    `environment` is usually `os.environ`; a relative XDG_CONFIG_HOME is ignored, as its specification demands.
    """
    configured = Path(environment.get("XDG_CONFIG_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".config"
    return base / "niss" / "identity.key"


def _pack(identity: Identity, prekeys: PrekeyStore) -> SecretBytes:
    """The whole content of a file; the hash at its end finds damage, and is no protection against forgery."""
    body = _TAG + identity.secret_bytes() + prekeys.to_bytes()
    return body + _digest(body)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _read(path: Path) -> SecretBytes:
    try:
        return SecretBytes(read_private(path, follow_links=True))
    except FileNotFoundError:
        raise ConfigError(f"there is no key file {path}", hint="make one with `niss keys new`") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="give a key file that you own"
        ) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror}", hint="choose a folder of your own that has room"
    )
