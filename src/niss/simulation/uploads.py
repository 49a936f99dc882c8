"""The rows of a round, one for each client: first what it learned, then what it uploads.

A round does the same with them wherever they are: clip each row, hide it in noise, sum the rows. `HostUploads` does
it on the processor and is the reference; `niss.simulation.cuda.uploads` does it on the device where the clients were
trained, so that the rows never leave it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from niss.mechanism.adaptive import bit_weight, room, was_short
from niss.mechanism.carried import Common, add_edge_noise, add_spread
from niss.mechanism.shares import Distortion, Edges, SomeEdges, add_clique_shares, find_clique
from niss.methods import UploadRows
from niss.randomness import SimStream

if TYPE_CHECKING:
    from torch import Tensor

Rows = NDArray[np.floating[Any]]
Clipping = Literal["none", "l2", "elements"]


class Uploads(UploadRows, Protocol):
    """The rows of one round, changed in place: what methods add noise to (`UploadRows`), and how they are clipped
    before and summed after."""

    def bound(self, clipping: Clipping, clip: float, weights: NDArray[np.float64]) -> int:
        """Turn each update x_k into its clipped contribution `p_k x_k`.

        clipping  "l2": ||x_k||_2 <= clip after rounding too; "elements": every |entry| <= clip; "none": neither
        weights   p_k, one for each row

        A row with NaN or infinite entries becomes zero; returns how many such rows there were.
        """

    def bound_with_bit(self, clip: float, weights: NDArray[np.float64]) -> tuple[Uploads, int]:
        """Turn each update into `p_k [w_k ; bit]`, within the clip together (`niss.mechanism.adaptive`).

        Returns the rows, one entry longer than these, which are not to be used any more; and what `bound` returns.
        """

    def total(self, seats: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """The sum of these rows, or of all, in float64."""

    def rows(self) -> Rows:
        """The rows on the processor, to be read only."""

    def blank(self, clients: int) -> Uploads:
        """That many rows of zeros of the same length, where these are."""


def make_uploads(rows: Tensor) -> Uploads:
    """The updates of a cohort, [clients, h], as uploads that stay where they are.

    float64 rows of a device come to the processor: the device's clipping and noise are for float32.
    """
    if rows.is_cuda and rows.dtype.itemsize == 4:
        from niss.simulation.cuda.uploads import DeviceUploads

        return DeviceUploads(rows)
    return HostUploads(rows.cpu().numpy())


class HostUploads:
    """Rows [clients, h] in the memory of the processor: the reference; `Uploads` says what the methods do."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows.shape[0], self._rows.shape[1]

    def bound(self, clipping: Clipping, clip: float, weights: NDArray[np.float64]) -> int:
        lost = 0
        for row, weight in zip(self._rows, weights, strict=True):
            bounded, finite = _bounded(row, clipping, clip)
            np.multiply(bounded, weight, out=row, casting="same_kind")
            lost += not finite
        return lost

    def bound_with_bit(self, clip: float, weights: NDArray[np.float64]) -> tuple[HostUploads, int]:
        rows, limit = self._rows, room(clip)
        bits = [was_short(l2_norm(row), limit) for row in rows]
        lost = self.bound("l2", limit, weights)
        tails = (bit_weight(clip) * weights * bits).astype(rows.dtype)
        return HostUploads(np.concatenate([rows, tails[:, None]], axis=1)), lost

    def add_own_noise(self, deviations: NDArray[np.float64], stream: SimStream) -> None:
        for seat, (row, deviation) in enumerate(zip(self._rows, deviations, strict=True)):
            add_gaussian(row, float(deviation), stream.child("own", seat))

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
            add_clique_shares(self._rows, clique, unit_variance=unit_variance, stream=stream)
            # The shares are added; what was received of them is left to be distorted.
            edges = SomeEdges.of(edges, np.zeros(edges.senders.size, dtype=bool))
        return add_shares(
            self._rows, edges, unit_variance=unit_variance, tau2=tau2, distortion=distortion,
            stream=stream, keep_factors=keep_factors,
        )  # fmt: skip

    def add_spread(
        self,
        seats: NDArray[np.int64],
        variance: float,
        common: Sequence[Common],
        stream: SimStream,
    ) -> None:
        add_spread(self._rows, seats, variance, common, stream)

    def add_edge_noise(
        self, seats: NDArray[np.int64], scales: NDArray[np.float64], streams: Sequence[SimStream]
    ) -> None:
        add_edge_noise(self._rows, seats, scales, streams)

    def blank(self, clients: int) -> HostUploads:
        return HostUploads(np.zeros((clients, self._rows.shape[1]), dtype=self._rows.dtype))

    def total(self, seats: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        rows = self._rows if seats is None or seats.size == len(self._rows) else self._rows[seats]
        summed: NDArray[np.float64] = rows.sum(axis=0, dtype=np.float64)
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
