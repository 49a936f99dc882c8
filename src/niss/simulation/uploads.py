"""The rows of a round, one for each client: first what it learned, then what it uploads.

Where several processes train (`niss.simulation.ranks`), each has the rows of some seats and does with them what one
process would do: noise is drawn by seat and by edge, and whatever is summed adds up to the sum of all.

A round does the same with them wherever they are: clip each row, hide it in noise, sum the rows. `HostUploads` does
it on the processor and is the reference; `niss.simulation.cuda` does it on the device where the clients were
trained, so that the rows never leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.errors import PrivacyError
from niss.mechanism import (
    add_gaussian,
    add_shares,
    clip_elements,
    clip_l2,
    distortion_named,
    l2_norm,
    require_finite,
)
from niss.mechanism.clipping import bit_weight, room, was_short
from niss.mechanism.shares import (
    Common,
    Distortion,
    Edges,
    SomeEdges,
    add_clique_shares,
    add_part_of_spread,
    add_spread,
    find_clique,
)
from niss.methods import UploadRows
from niss.randomness import SimStream

if TYPE_CHECKING:
    from torch import Tensor

Rows = NDArray[np.floating[Any]]
Clipping = Literal["none", "l2", "elements"]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Seats:
    """Whose rows these are: row i is that of seat `mine[i]`, of `count` seats that a round has."""

    count: int
    mine: IntArray

    @classmethod
    def all(cls, count: int) -> Seats:
        return cls(count, np.arange(count))

    @property
    def complete(self) -> bool:
        return self.mine.size == self.count

    @cached_property
    def rows(self) -> IntArray:
        """The row of each seat; -1 where another process has it."""
        found = np.full(self.count, -1, dtype=np.int64)
        found[self.mine] = np.arange(self.mine.size)
        return found

    def rows_of(self, seats: IntArray | None) -> IntArray:
        """The rows that these seats, or all, have here."""
        found = self.rows if seats is None else self.rows[seats]
        return found[found >= 0]


class Uploads(UploadRows, Protocol):
    """The rows of one round, changed in place: what methods add noise to (`UploadRows`), and how they are clipped
    before and summed after."""

    def bound(self, clipping: Clipping, clip: float, weights: NDArray[np.float64]) -> int:
        """Turn each update x_k into its clipped contribution `p_k x_k`.

        clipping  "l2": ||x_k||_2 <= clip after rounding too; "elements": every |entry| <= clip; "none": neither
        weights   p_k, one for each seat

        A row with NaN or infinite entries becomes zero; returns how many such rows there were here.
        """

    def bound_with_bit(self, clip: float, weights: NDArray[np.float64]) -> tuple[Uploads, int]:
        """Turn each update into `p_k [w_k ; bit]`, within the clip together (`niss.mechanism.clipping`).

        Returns the rows, one entry longer than these, which are not to be used any more; and what `bound` returns.
        """

    def total(self, seats: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """The sum of the rows that these seats, or all, have here, in float64.

        Over all processes these add up to the sum of the round; one alone may have parts in it that cancel in there.
        """

    def rows(self) -> Rows:
        """The rows on the processor, to be read only."""

    def blank(self, seats: Seats) -> Uploads:
        """Rows of zeros of the same length for these seats, where these are."""


def make_uploads(rows: Tensor, seats: Seats) -> Uploads:
    """The updates of a cohort, [clients, h], as uploads that stay where they are.

    float64 rows of a device come to the processor: the device's clipping and noise are for float32.
    """
    if rows.is_cuda and rows.dtype.itemsize == 4:
        from niss.simulation.cuda import DeviceUploads

        return DeviceUploads(rows, seats)
    return HostUploads(rows.cpu().numpy(), seats)


class HostUploads:
    """Rows [clients, h] in the memory of the processor: the reference; `Uploads` says what the methods do."""

    def __init__(self, rows: Rows, seats: Seats | None = None) -> None:
        self._rows = rows
        self._seats = Seats.all(len(rows)) if seats is None else seats
        # Of normals of which the mean over all seats is to be taken, those seats, and the sum of what was drawn here.
        self._spreads: list[tuple[IntArray, NDArray[np.float64]]] = []

    @property
    def shape(self) -> tuple[int, int]:
        return self._seats.count, self._rows.shape[1]

    def bound(self, clipping: Clipping, clip: float, weights: NDArray[np.float64]) -> int:
        lost = 0
        for row, weight in zip(self._rows, weights[self._seats.mine], strict=True):
            bounded, finite = _bounded(row, clipping, clip)
            np.multiply(bounded, weight, out=row, casting="same_kind")
            lost += not finite
        return lost

    def bound_with_bit(self, clip: float, weights: NDArray[np.float64]) -> tuple[HostUploads, int]:
        rows, limit = self._rows, room(clip)
        bits = np.array([was_short(l2_norm(row), limit) for row in rows], dtype=np.float64)
        lost = self.bound("l2", limit, weights)
        tails = (bit_weight(clip) * weights[self._seats.mine] * bits).astype(rows.dtype)
        return HostUploads(np.concatenate([rows, tails[:, None]], axis=1), self._seats), lost

    def add_own_noise(self, deviations: NDArray[np.float64], stream: SimStream) -> None:
        for row, seat in zip(self._rows, self._seats.mine.tolist(), strict=True):
            add_gaussian(row, float(deviations[seat]), stream.child("own", seat))

    def add_shares(
        self,
        edges: Edges,
        *,
        unit_variance: float,
        tau2: ArrayLike,
        distortion: str | Distortion,
        stream: SimStream,
        keep_factors: bool = False,
    ) -> Rows | None:
        # Where everyone shares with everyone, the same law is drawn in one vector for each client.
        if distortion_named(distortion).additive and (clique := find_clique(edges)) is not None:
            if self._seats.complete:
                add_clique_shares(self._rows, clique, unit_variance=unit_variance, stream=stream)
            else:
                self._add_part_of_spread(clique.seats, clique.variance(unit_variance), (), stream, "clique")
            # The shares are added; what was received of them is left to be distorted.
            edges = SomeEdges.of(edges, np.zeros(edges.senders.size, dtype=bool))
        return add_shares(
            self._rows, edges, unit_variance=unit_variance, tau2=tau2, distortion=distortion,
            stream=stream, keep_factors=keep_factors, rows=self._seats.rows,
        )  # fmt: skip

    def add_spread(
        self, seats: IntArray, variance: float, common: Sequence[Common], stream: SimStream
    ) -> None:
        if self._seats.complete:
            add_spread(self._rows, seats, variance, common, stream)
        else:
            self._add_part_of_spread(seats, variance, common, stream, "spread")

    def _add_part_of_spread(
        self, seats: IntArray, variance: float, common: Sequence[Common], stream: SimStream, name: str
    ) -> None:
        places = self._seats.rows_of(seats)
        streams = [stream.child(name, seat) for seat in self._seats.mine[places].tolist()]
        drawn = add_part_of_spread(self._rows, places, variance, common, streams)
        self._spreads.append((seats, drawn))

    def blank(self, seats: Seats) -> HostUploads:
        return HostUploads(np.zeros((seats.mine.size, self._rows.shape[1]), dtype=self._rows.dtype), seats)

    def total(self, seats: IntArray | None = None) -> NDArray[np.float64]:
        places = self._seats.rows_of(seats)
        rows = self._rows if places.size == len(self._rows) else self._rows[places]
        summed: NDArray[np.float64] = rows.sum(axis=0, dtype=np.float64)
        for spread, drawn in self._spreads:
            # What of the mean belongs to this process, in a sum over these seats.
            share = 1.0 if seats is None else float(np.isin(spread, seats).mean())
            summed -= share * drawn
        return summed

    def rows(self) -> Rows:
        return self._rows


def _bounded(update: Rows, clipping: Clipping, clip: float) -> tuple[Rows, bool]:
    """The clipped update of one client, a new vector or the update itself; zero, and False, where it diverged."""
    try:
        if clipping == "none":
            require_finite(update)
            return update, True
        return (clip_l2 if clipping == "l2" else clip_elements)(update, clip), True
    except PrivacyError:
        return np.zeros_like(update), False
