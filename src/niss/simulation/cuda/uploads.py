"""The rows of a round on the device where its clients were trained: clipped, hidden and summed there.

The same formulas as `HostUploads`; noise in the same distribution from other numbers. Float32 only: squares of
float32 neither over- nor underflow in the float64 in which norms are taken. Everything here is plain torch, so that
tests can run it on the processor; the kernels of the noise are used where Triton is installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.errors import ConfigError
from niss.mechanism.adaptive import bit_weight, room, was_short
from niss.mechanism.shares import Common, Distortion, Edges, distortion_named
from niss.randomness import SimStream
from niss.simulation.cuda import add_shares_on_device
from niss.simulation.uploads import Clipping, HostUploads, IntArray, Rows, Seats

# Rows for which float64 or noise of their size is made at a time.
_ROWS_AT_ONCE = 64


class DeviceUploads:
    """Rows [clients, h] of a CUDA tensor, changed in place; `Uploads` says what the methods do.

    Rows must be contiguous float32. They visit the processor only for `rows`, and to keep factors per coordinate.
    Noise of all seats is drawn, also of those whose rows another process has: that is a small part of what training
    takes, and every number of processes has the same noise.
    """

    def __init__(self, rows: Tensor, seats: Seats | None = None) -> None:
        if rows.ndim != 2 or rows.dtype != torch.float32 or not rows.is_contiguous():
            shape = tuple(rows.shape)
            raise ConfigError(f"must be contiguous float32 rows, not {rows.dtype} of {shape}", field="rows")
        self._rows = rows
        self._seats = Seats.all(len(rows)) if seats is None else seats

    @property
    def shape(self) -> tuple[int, int]:
        return self._seats.count, self._rows.shape[1]

    @torch.no_grad()
    def bound(self, clipping: Clipping, clip: float, weights: NDArray[np.float64]) -> int:
        # A row is finite if its largest entry is: NaN and infinity both pass through abs and amax.
        rows, device = self._rows, self._rows.device
        weights = weights[self._seats.mine]
        finite = rows.abs().amax(1).isfinite()
        rows.masked_fill_(~finite[:, None], 0.0)
        if clipping == "elements":
            rows.clamp_(-clip, clip)
        if clipping == "l2":
            for part in torch.split(rows, _ROWS_AT_ONCE):
                _clip_l2(part, clip)
        rows.mul_(torch.from_numpy(weights.astype(np.float32)).to(device)[:, None])
        return int((~finite).sum())

    @torch.no_grad()
    def bound_with_bit(self, clip: float, weights: NDArray[np.float64]) -> tuple[DeviceUploads, int]:
        limit = room(clip)
        norms = torch.linalg.vector_norm(self._rows, dim=1, dtype=torch.float64).cpu().tolist()
        lost = self.bound("l2", limit, weights)
        bits = np.array([was_short(norm, limit) for norm in norms], dtype=np.float64)
        tails = bit_weight(clip) * weights[self._seats.mine] * bits
        tail = torch.from_numpy(tails.astype(np.float32)).to(self._rows.device)
        return DeviceUploads(torch.cat([self._rows, tail[:, None]], dim=1), self._seats), lost

    @torch.no_grad()
    def add_own_noise(self, deviations: NDArray[np.float64], stream: SimStream) -> None:
        scales = torch.from_numpy(deviations.astype(np.float32)).to(self._rows.device)[:, None]
        for seats, drawn in self._drawn(np.arange(self._seats.count), stream.child("own")):
            self._add(seats, drawn.mul_(scales[int(seats[0]) : int(seats[-1]) + 1]))

    def _drawn(self, seats: IntArray, stream: SimStream) -> Iterator[tuple[IntArray, Tensor]]:
        """A row of normals for each of these seats, from one generator, in parts: what is drawn stays small."""
        device, width = self._rows.device, self._rows.shape[1]
        source = torch.Generator(device).manual_seed(stream.torch_seed())
        for first in range(0, seats.size, _ROWS_AT_ONCE):
            part = seats[first : first + _ROWS_AT_ONCE]
            yield part, torch.randn((part.size, width), device=device, generator=source)

    def _add(self, seats: IntArray, noise: Tensor, alpha: float = 1.0) -> None:
        """Add row i of the noise to the row of seat i, where it is here."""
        places = self._seats.rows[seats]
        here = np.flatnonzero(places >= 0)
        if here.size < seats.size:
            noise = noise[torch.from_numpy(here).to(noise.device)]
        self._rows.index_add_(0, torch.from_numpy(places[here]).to(noise.device), noise, alpha=alpha)

    def add_shares(
        self,
        edges: Edges,
        *,
        distortion: str | Distortion,
        keep_factors: bool = False,
        **settings: Any,
    ) -> Rows | None:
        """As `niss.mechanism.add_shares`; where factors per coordinate are to be kept, the processor does the work."""
        if keep_factors and distortion_named(distortion).per_coordinate:
            rows = self.rows()
            factors = HostUploads(rows, self._seats).add_shares(
                edges, distortion=distortion, keep_factors=True, **settings
            )
            self._rows.copy_(torch.from_numpy(rows))
            return factors
        return add_shares_on_device(
            self._rows, edges, distortion=distortion, seats=self._seats.mine, **settings
        )

    @torch.no_grad()
    def add_spread(
        self, seats: NDArray[np.int64], variance: float, common: Sequence[Common], stream: SimStream
    ) -> None:
        """As `niss.mechanism.shares.add_spread`, a part of the rows at a time; the mean is taken out at the end."""
        deviation, mean = math.sqrt(variance), self._rows.new_zeros(self._rows.shape[1], dtype=torch.float64)
        for part, drawn in self._drawn(seats, stream.child("spread")):
            mean += drawn.sum(0, dtype=torch.float64)
            self._add(part, drawn, alpha=deviation)
        offset = mean.mul_(-deviation / max(seats.size, 1))
        for scale, origin in common:
            offset += scale * self._normal(origin)
        whole = offset.to(self._rows.dtype)
        for first in range(0, seats.size, _ROWS_AT_ONCE):
            part = seats[first : first + _ROWS_AT_ONCE]
            self._add(part, whole.expand(part.size, -1))

    def _normal(self, stream: SimStream) -> Tensor:
        """A vector of standard normals, the same whenever it is asked for."""
        device = self._rows.device
        source = torch.Generator(device).manual_seed(stream.torch_seed())
        return torch.randn(self._rows.shape[1], device=device, generator=source)

    def blank(self, seats: Seats) -> DeviceUploads:
        return DeviceUploads(self._rows.new_zeros((seats.mine.size, self._rows.shape[1])), seats)

    def total(self, seats: IntArray | None = None) -> NDArray[np.float64]:
        rows, places = self._rows, self._seats.rows_of(seats)
        if places.size < len(rows):
            rows = rows[torch.from_numpy(places).to(rows.device)]
        summed: NDArray[np.float64] = rows.sum(0, dtype=torch.float64).cpu().numpy()
        return summed

    def rows(self) -> Rows:
        copied: Rows = self._rows.cpu().numpy()
        return copied


def _clip_l2(rows: Tensor, bound: float) -> None:
    """Each row times `min(1, bound / ||row||_2)`, in place; its norm is at most `bound` after rounding too.

    A product rounded to float32 can be longer than the bound by its last bits: factors of such rows are lowered, by
    twice as much each time, until none is.
    """
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    factors = (bound / norms).clamp_(max=1.0)  # a zero row: inf, hence 1
    updates = rows.clone()
    step = torch.finfo(rows.dtype).eps
    while True:
        torch.mul(updates, factors.to(rows.dtype)[:, None], out=rows)
        above = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) > bound
        if not bool(above.any()):
            return
        factors = torch.where(above, factors * (1.0 - step), factors)
        step *= 2.0
