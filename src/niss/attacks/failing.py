"""A silo with one record that fails, and an engine that makes of this what niss does not: an upload of nothing.

The model is a table: record i adds `table[id] - label` to the row that it names. All records but the failing one name
row 1 and miss their labels alike, so that their gradients add up in one direction; row 0 is the failing record's alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from niss.attacks.estimates import FloatArray
from niss.records import RecordEngine, Records, clipped_rows
from niss.records.batches import IntArray

_WIDTH, _FAR, _HUGE, _CHUNK = 4, 10.0, 1e30, 32


def weights_of(failure: str) -> FloatArray:
    """What the server sends: a table of zeros, with a first row whose square overflows where that is the failure."""
    return np.repeat([_HUGE if failure == "overflows" else 0.0, 0.0], _WIDTH)


def direction() -> FloatArray:
    """Of what all other records add to an upload."""
    return np.repeat([0.0, 0.5], _WIDTH)


class FailingSilo:
    """So many records that each add a clip in one direction, and one that fails, if there is one.

    blank   whether the silo gives up where a record fails
    calls   of its model, so far
    """

    def __init__(self, count: int, clip: float, failure: str | None, *, blank: bool) -> None:
        ids = {None: [], "overflows": [0]}.get(failure, [2])
        names = np.array([*[1] * max(count, 1), *ids])
        labels = np.full((names.size, _WIDTH), _FAR * clip if count else 0.0, dtype=np.float32)
        table, self.calls = nn.Embedding(2, _WIDTH), 0
        table.register_forward_hook(self._count)
        self.records = Records(table, (names, labels), loss=_half_square, chunk=_CHUNK)
        if blank:
            vars(self.records)["engine"] = _Blank(self.records.engine)
        self.calls = 0  # Not those with which the model is tried out.

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def added(self, weights: FloatArray, clip: float) -> FloatArray:
        """What its node adds up, without noise: nothing where all fails."""
        before, everyone = self.calls, np.arange(len(self.records))
        try:
            chunks = clipped_rows(self.records, weights, everyone, clip)
            return np.asarray(np.concatenate([rows[:real] for rows, real in chunks]).sum(axis=0))
        except ArithmeticError:
            return np.zeros_like(weights)
        finally:
            self.calls = before


@dataclass
class _Blank:
    """An engine that fails as a whole where one record does."""

    engine: RecordEngine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def each(self, weights: FloatArray, rows: IntArray, clip: float) -> FloatArray:
        """See `RecordEngine`."""
        found = self.engine.each(weights, rows, clip)
        if not found.any(axis=1).all():
            raise FloatingPointError("a record has failed")
        return found


def _half_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * torch.square(outputs - labels).sum()
