"""What a figure was drawn from, in the figure itself: two `tEXt` chunks of the PNG file.

`niss-data` is the digest of the result files, `niss-pixels` that of the compressed picture as it was written. The first
no longer fits once the results change, the second once the picture does; neither depends on who draws it again.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from experiments.reproduce.checks import Fault, fingerprint
from experiments.reproduce.design import BEYOND, DATASETS, FIGURE_3, FIGURE_4, SCALE
from experiments.reproduce.results import Record, all_leaks, read_results

DATA, PIXELS = b"niss-data", b"niss-pixels"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
DRAWN_FROM = {
    "figure-3": FIGURE_3,
    "gaps": FIGURE_3,
    "figure-4": FIGURE_4,
    "beyond": BEYOND,
    "faults": BEYOND,
    "scale": SCALE,
    "rivals": BEYOND,
    "noise": BEYOND,
    "datasets": DATASETS,
}
"""The figures, and the experiment that each one shows."""
OF_COHORTS = ("rivals", "noise")
"""Those that show settings with fixed cohorts alone."""


def figure_name(figure: str, *, dark: bool = False) -> str:
    """The file of a figure, on white or for a dark page."""
    return f"{figure}-dark.png" if dark else f"{figure}.png"


def data_digest(folder: Path, figure: str) -> str:
    """Of the result files that a figure is drawn from."""
    experiment = DRAWN_FROM[figure]
    records: Iterable[Record[Any]] = (
        all_leaks(folder).values() if experiment == FIGURE_4 else read_results(folder, experiment).values()
    )
    lines = sorted(f"{record.name} {fingerprint(record)}" for record in records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def stamp(png: bytes, data: str) -> bytes:
    """The same picture with both digests in it."""
    kept = [(kind, body) for kind, body in _chunks(png) if not _is_stamp(kind, body)]
    marks = [(b"tEXt", DATA + b"\0" + data.encode()), (b"tEXt", PIXELS + b"\0" + _pixels(kept).encode())]
    # The first chunk is the header, which has to stay there.
    return _SIGNATURE + b"".join(_packed(*chunk) for chunk in (kept[0], *marks, *kept[1:]))


def figure_faults(folder: Path, images: Path | None) -> Iterator[Fault]:
    """Figures that are missing, or were drawn from other results, or are not the ones in the documentation."""
    cohorts = any("images_per_client" in one.base for one in read_results(folder, BEYOND).values())
    unmeasured = {*(() if cohorts else OF_COHORTS), *(() if read_results(folder, DATASETS) else (DATASETS,))}
    for name, dark in product(DRAWN_FROM, (False, True)):
        path = folder / figure_name(name, dark=dark)
        if not path.exists():
            if name in unmeasured:
                continue
            yield Fault("figure", path.name, "is missing; `niss reproduce figures` draws it")
            continue
        try:
            chunks = list(_chunks(path.read_bytes()))
        except ValueError as error:
            yield Fault("figure", path.name, str(error))
            continue
        said = dict(body.split(b"\0", 1) for kind, body in chunks if _is_stamp(kind, body))
        if said.get(DATA) != data_digest(folder, name).encode():
            yield Fault(
                "figure", path.name, "was drawn from other results; `niss reproduce figures` draws it again"
            )
        if said.get(PIXELS) != _pixels(chunks).encode():
            yield Fault("figure", path.name, "is not the picture that was drawn")
        copy = None if images is None else images / f"reproduce-{path.name}"
        if copy is not None and (not copy.exists() or copy.read_bytes() != path.read_bytes()):
            yield Fault(
                "figure",
                copy.name,
                "is not the figure of the results; `tools/update_results.py` copies it",
            )


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    if not png.startswith(_SIGNATURE):
        raise ValueError("is not a PNG file")
    at = len(_SIGNATURE)
    while at < len(png):
        if at + 12 > len(png):
            raise ValueError("ends in the middle")
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body, check = (
            png[at + 4 : at + 8],
            png[at + 8 : at + 8 + length],
            png[at + 8 + length : at + 12 + length],
        )
        if struct.pack(">I", zlib.crc32(kind + body)) != check:
            raise ValueError("has a damaged part")
        yield kind, body
        at += 12 + length


def _packed(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _is_stamp(kind: bytes, body: bytes) -> bool:
    return kind == b"tEXt" and body.split(b"\0", 1)[0] in (DATA, PIXELS)


def _pixels(chunks: Iterable[tuple[bytes, bytes]]) -> str:
    digest = hashlib.sha256()
    for kind, body in chunks:
        if kind in (b"IHDR", b"PLTE", b"IDAT"):
            digest.update(kind + body)
    return digest.hexdigest()
