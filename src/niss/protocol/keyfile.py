"""The file that keeps a client's identity and its prekeys, for its owner's eyes only.

It is created readable by its owner alone, from the first byte; it is never overwritten by a new identity;
an update replaces it as a whole, durably, or not at all. A file that others can read is not loaded.
What an update removes is gone from the file; the disk below may keep old blocks, as disks do.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from niss.errors import ConfigError, LocalProtocolError, PrivacyError
from niss.protocol.keys import SECRET_BYTES, Identity
from niss.protocol.prekeys import PrekeyStore
from niss.protocol.secret import Secret, SecretBytes

try:
    import fcntl
except ImportError:  # Not POSIX: two processes at once are then only noticed, not kept apart.
    fcntl = None  # type: ignore[assignment]

_TAG = b"niss-keyfile/1\n"
_CHECK_BYTES = 32
_MODE = 0o600
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_OLD = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class KeyFile(Secret):
    """A key file that was created or loaded: change `prekeys`, then `save`."""

    __slots__ = ("_saved", "identity", "path", "prekeys")

    def __init__(self, path: Path, identity: Identity, prekeys: PrekeyStore, saved: bytes) -> None:
        self.path = path
        self.identity = identity
        self.prekeys = prekeys
        self._saved = saved

    def save(self) -> None:
        """Replace the file by what is here now; refused if someone else changed it in between."""
        content = _pack(self.identity, self.prekeys)
        with _locked(self.path.parent):
            if _digest(_read(self.path)) != self._saved:
                raise LocalProtocolError(
                    f"{self.path} was changed by another process",
                    hint="let one process use a key file at a time; load it again",
                )
            beside = self.path.with_name(f".{self.path.name}.new")
            beside.unlink(missing_ok=True)  # Left by a crash; it may hold keys that were erased since.
            try:
                _write_new(beside, content)
                beside.replace(self.path)
                _sync_folder(self.path.parent)
            except OSError as error:
                with suppress(OSError):
                    beside.unlink(missing_ok=True)
                raise _unwritable(self.path, error) from None
        self._saved = _digest(content)


def create_keyfile(path: Path, identity: Identity, prekeys: PrekeyStore | None = None) -> KeyFile:
    """A new file with mode 0600; one that is already there is left alone and refused."""
    path = Path(path)
    store = PrekeyStore() if prekeys is None else prekeys
    content = _pack(identity, store)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        _write_new(path, content)
        _sync_folder(path.parent)
    except FileExistsError:
        raise ConfigError(
            f"{path} already exists and is not overwritten",
            hint="see whose it is with `niss keys show`, or choose another path with --out",
        ) from None
    except OSError as error:
        raise _unwritable(path, error) from None
    return KeyFile(path.resolve(), identity, store, _digest(content))


def load_keyfile(path: Path) -> KeyFile:
    """Identity and prekeys; refused if group or others have any right to the file."""
    path = Path(path)
    content = _read(path)
    body, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    start = len(_TAG) + SECRET_BYTES
    if content[: len(_TAG)] != _TAG:
        raise ConfigError(
            f"{path} is no key file of this version of niss", hint="give the path of a key file"
        )
    if len(body) < start or _digest(body) != check:
        raise ConfigError(f"{path} is damaged", hint="restore it from a copy, or make a new identity")
    identity = Identity(body[len(_TAG) : start])
    return KeyFile(path.resolve(), identity, PrekeyStore.from_bytes(body[start:]), _digest(content))


def load_identity(path: Path) -> Identity:
    """The identity in a key file."""
    return load_keyfile(path).identity


def default_keyfile(environment: Mapping[str, str]) -> Path:
    """$XDG_CONFIG_HOME/niss/identity.key, or ~/.config/niss/identity.key."""
    configured = Path(environment.get("XDG_CONFIG_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".config"
    return base / "niss" / "identity.key"


def _pack(identity: Identity, prekeys: PrekeyStore) -> SecretBytes:
    body = _TAG + identity.secret_bytes() + prekeys.to_bytes()
    return body + _digest(body)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _read(path: Path) -> SecretBytes:
    try:
        with os.fdopen(os.open(path, _OLD), "rb") as file:
            # Asked of the open file, so that nobody can swap it between the look and the reading.
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
                raise PrivacyError(
                    f"{path} can be reached by others (mode {stat.S_IMODE(mode):04o}): it may be known already",
                    hint=f"chmod 600 {path}, and make a new identity if others used this machine",
                )
            return SecretBytes(file.read())
    except FileNotFoundError:
        raise ConfigError(f"there is no key file {path}", hint="make one with `niss keys new`") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="give a key file of yours") from None


def _write_new(path: Path, content: SecretBytes) -> None:
    """A file that did not exist, complete and durable; nothing is left of one that failed."""
    descriptor = os.open(path, _NEW, _MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps a second `save` in this folder waiting; a lock dies with its process."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # Some network disks lock no folders; the check for changes remains.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror}", hint="choose a folder of yours that has room"
    )
