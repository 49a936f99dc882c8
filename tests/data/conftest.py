"""Shared by the data tests: an isolated machine, a misbehaving file server, and miniature datasets."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from niss.data.catalog import CIFAR10, MNIST, DatasetSpec, Digest, SourceFile
from niss.data.formats import IDX_FILES, CifarLayout

# Of the official files, by dataset: how often each class is in the training and in the test set.
CLASS_COUNTS = {
    "mnist": (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ),
    "fashion-mnist": ([6000] * 10, [1000] * 10),
    "cifar10": ([5000] * 10, [1000] * 10),
    "cifar100": ([500] * 100, [100] * 100),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No dataset of the developer's machine and no proxy is seen; returns where the user cache then is."""
    monkeypatch.delenv("NISS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "xdg" / "niss"


@dataclass
class FileServer:
    """A real HTTP server on a free port of this machine, with the faults of real ones on demand."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    knows_ranges: bool = True
    wrong_range: bool = False
    tells_length: bool = True
    cuts: list[int] = field(default_factory=list)  # each answer in turn breaks off after so many bytes
    stalls: bool = False  # a cut answer hangs instead of ending
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)


def _handler(state: FileServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            name = self.path.rpartition("/")[2]
            state.requests.append((name, asked))
            if name not in state.files:
                self.send_error(404)
                return
            content = state.files[name]
            start = int(re.match(r"bytes=(\d+)-", asked)[1]) if asked and state.knows_ranges else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            body = content[start:]
            self.send_response(206 if start else 200)
            if start:
                first = start + 1 if state.wrong_range else start
                self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            if state.tells_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.cuts:
                self.wfile.write(body[: state.cuts.pop(0)])
                self.wfile.flush()
                if state.stalls:
                    state.released.wait(30)
            else:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def start_server() -> Iterator[Callable[[], FileServer]]:
    running: list[tuple[ThreadingHTTPServer, threading.Thread, FileServer]] = []

    def start() -> FileServer:
        state = FileServer(url="")
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
        state.url = f"http://127.0.0.1:{server.server_address[1]}/base/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread, state))
        return state

    yield start
    for server, thread, state in running:
        state.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def server(start_server: Callable[[], FileServer]) -> FileServer:
    return start_server()


@pytest.fixture
def dead_url() -> str:
    """An address at which nothing listens."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_address[1]
    server.server_close()
    return f"http://127.0.0.1:{port}/"


@dataclass(frozen=True)
class Miniature:
    """A dataset like a real one but tiny: its catalog entry, its files, and what they must decode to."""

    spec: DatasetSpec
    files: dict[str, bytes]
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def put_into(self, root: Path) -> Path:
        folder = root / self.spec.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, raw in self.files.items():
            (folder / name).write_bytes(raw)
        return folder


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def tar_gz(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    """An archive of files, by name and content, and of whatever else is described."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            archive.addfile(info, io.BytesIO(member[1]))
    return packed.getvalue()


def _source(name: str, raw: bytes, mirrors: tuple[str, ...]) -> SourceFile:
    return SourceFile(name, Digest("md5", hashlib.md5(raw).hexdigest()), mirrors, max_bytes=1 << 20)


@pytest.fixture
def idx_miniature() -> Callable[..., Miniature]:
    def make(*mirrors: str) -> Miniature:
        random = np.random.default_rng(5)
        arrays = [
            random.integers(0, high, shape, dtype=np.uint8)
            for count in (12, 4)
            for high, shape in ((256, (count, 28, 28)), (10, count))
        ]
        files = {
            name: gzip.compress(idx(array), mtime=0) for name, array in zip(IDX_FILES, arrays, strict=True)
        }
        spec = replace(
            MNIST,
            train_size=12,
            test_size=4,
            file_sets=(tuple(_source(name, raw, mirrors) for name, raw in files.items()),),
        )
        return Miniature(spec, files, *arrays)

    return make


@pytest.fixture
def cifar_miniature() -> Callable[..., Miniature]:
    """CIFAR-like, as an archive; with `loose` as the record files themselves."""

    def make(*mirrors: str, loose: bool = False, label_bytes: int = 1) -> Miniature:
        random = np.random.default_rng(6)
        layout = CIFAR10.layout
        assert isinstance(layout, CifarLayout)
        records = {
            name: random.integers(0, 256, (3, label_bytes + 3072), dtype=np.uint8)
            for name in (*layout.train, *layout.test)
        }
        for table in records.values():
            table[:, label_bytes - 1] %= 10
        plain = {name: table.tobytes() for name, table in records.items()}
        digests = {name: Digest("sha256", hashlib.sha256(raw).hexdigest()) for name, raw in plain.items()}
        folder = tarfile.TarInfo(layout.folder_in_archive)
        folder.type = tarfile.DIRTYPE
        inside = {"readme.html": b"hello"} | plain
        archive = tar_gz(folder, *((f"{folder.name}/{name}", raw) for name, raw in inside.items()))
        spec = replace(
            CIFAR10,
            train_size=15,
            test_size=3,
            layout=replace(layout, label_bytes=label_bytes),
            file_sets=(
                tuple(SourceFile(name, digest) for name, digest in digests.items()),
                (_source(layout.archive, archive, mirrors),),
            ),
        )
        parts = (np.concatenate([records[name] for name in layout.train]), records["test_batch.bin"])
        return Miniature(
            spec,
            plain if loose else {layout.archive: archive},
            *(
                array
                for part in parts
                for array in (part[:, label_bytes:].reshape(-1, 3, 32, 32), part[:, label_bytes - 1])
            ),
        )

    return make
