"""Downloading one file whose checksum is known: mirrors, resume, and nothing kept that was not verified.

The file grows as `NAME.part` and takes its real name, in one step, only once its checksum is right. A
transfer that ends early, by the network or by Ctrl-C, leaves the `.part` behind and the next try goes on
from there. Whatever a server sends, the checksum has the last word.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from niss.data.catalog import Digest, mismatch
from niss.errors import DataError
from niss.files import locked_folder

Progress = Callable[[str, int, int | None], None]

_CHUNK = 1 << 16
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


def download(
    urls: Sequence[str],
    target: Path,
    *,
    digest: Digest,
    max_bytes: int,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> None:
    """Bring `target` into being from the first of `urls` that delivers it whole.

    `progress` is called with the file name, the bytes there so far, and their final number if known.
    `timeout` bounds the connecting and each wait for data, in seconds.
    """
    part = target.with_name(target.name + ".part")
    with _disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    # Two processes must not write one `.part`. Where folders cannot be locked the checksum throws out what they made.
    with locked_folder(target.parent):
        if target.is_file():  # another process was quicker
            _verify_rival(target, digest)
            return
        failures: list[str] = []
        if part.is_file() and _take_if_right(part, target, digest, part.name, failures, keep_wrong=True):
            return
        for url in urls:
            try:
                _from_mirror(url, part, target, digest, max_bytes, progress, timeout, failures)
                return
            except _MirrorFailed as reason:
                failures.append(f"{url}: {reason}")
    raise DownloadError(f"cannot download {target.name}: " + "; ".join(failures))


def _from_mirror(
    url: str,
    part: Path,
    target: Path,
    digest: Digest,
    max_bytes: int,
    progress: Progress | None,
    timeout: float,
    failures: list[str],
) -> None:
    """Get the file from one mirror, picking up where an earlier transfer ended, or raise `_MirrorFailed`.

    A mirror gets five tries as long as each brings new bytes. A wrong checksum after a resumed transfer may be the old
    beginning's fault, so it is fetched once more from nothing; a wrong checksum of a whole transfer ends it.
    `failures` collects what went wrong, for the message if no mirror delivers.
    """
    reason = ""
    for _ in range(_TRIES_PER_MIRROR):
        before = _size(part)
        try:
            _transfer(url, part, target.name, max_bytes, progress, timeout)
        except _PartDoesNotFit as error:
            reason = str(error)
            _discard(part, f"{url}: {reason}", failures)
            continue
        except _Interrupted as error:
            reason = str(error)
            if _size(part) <= before:
                break
            continue
        if _take_if_right(part, target, digest, url, failures):
            return
        reason = "gave up on it after a wrong checksum"
        if before == 0:  # otherwise an old beginning may be to blame: once more, from nothing
            break
    raise _MirrorFailed(reason)


def _transfer(
    url: str, part: Path, name: str, max_bytes: int, progress: Progress | None, timeout: float
) -> None:
    """Fetch what `part` lacks, or all of it where the server does not do ranges."""
    start = _size(part)
    headers = {"User-Agent": "niss"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with _opened(Request(url, headers=headers), timeout) as response:
        if response.status == _PARTIAL_CONTENT:
            if _first_byte(response.headers.get("Content-Range")) != start:
                raise _PartDoesNotFit("the server answered with another range than the one asked for")
        else:
            start = 0
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdigit() else None
        done = start
        with _disk_errors(part), part.open("ab" if start else "wb") as sink:
            while chunk := _read(response):
                done += len(chunk)
                if done > max_bytes:
                    break
                sink.write(chunk)
                if progress is not None:
                    progress(name, done, total)
    if done > max_bytes:
        part.unlink()
        raise _MirrorFailed(f"sends more than the {max_bytes} bytes this file can have")
    if total is not None and done < total:
        raise _Interrupted(f"the connection ended after {done} of {total} bytes")


@contextlib.contextmanager
def _opened(request: Request, timeout: float) -> Iterator[HTTPResponse]:
    """The response to a request; what goes wrong before the first byte means that this mirror is of no use now."""
    try:
        response = urlopen(request, timeout=timeout)
    except HTTPError as error:
        error.close()
        if error.code == _RANGE_NOT_SATISFIABLE and request.has_header("Range"):
            raise _PartDoesNotFit("the server has no more bytes than are there already") from error
        raise _MirrorFailed(f"HTTP {error.code} {error.reason}") from error
    except URLError as error:
        raise _MirrorFailed(str(error.reason)) from error
    except (OSError, HTTPException) as error:
        raise _MirrorFailed(str(error) or type(error).__name__) from error
    with response:
        yield response


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise _Interrupted(f"the connection broke: {error}") from error


def _take_if_right(
    part: Path, target: Path, digest: Digest, origin: str, failures: list[str], *, keep_wrong: bool = False
) -> bool:
    """Give a complete `part` its real name; one that is complete and wrong is thrown away and reported."""
    with _disk_errors(part):
        found = digest.of_file(part)
        if found == digest.hexdigest:
            part.replace(target)
            return True
    if not keep_wrong:
        report = f"{digest.algorithm} is {found} instead of {digest.hexdigest}; discarded"
        _discard(part, f"{origin}: {report}", failures)
    return False


def _discard(part: Path, report: str, failures: list[str]) -> None:
    """Throw away a `.part` that cannot become the file, and say so in the log and in `failures`."""
    _log.warning("%s", report)
    failures.append(report)
    with _disk_errors(part):
        part.unlink(missing_ok=True)


def _verify_rival(target: Path, digest: Digest) -> None:
    """Check a file that another process finished while this one waited for the lock."""
    with _disk_errors(target):
        found = digest.of_file(target)
    if found != digest.hexdigest:
        raise mismatch(target, digest, found, fix="delete it and fetch again")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


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
