"""The rows of a round on the device where its clients were trained: clipped, hidden and summed there.

The same formulas as `HostUploads`; noise in the same distribution from other numbers. Float32 only: squares of
float32 neither over- nor underflow in the float64 in which norms are taken. Everything here is plain torch, so that
tests can run it on the processor; the kernels of the noise are used where Triton is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.errors import ConfigError
from niss.mechanism.adaptive import bit_weight, room, was_short
from niss.mechanism.carried import Common
from niss.mechanism.shares import Distortion, Edges, distortion_named
from niss.randomness import SimStream
from niss.simulation.cuda.noise import add_shares_on_device
from niss.simulation.uploads import Clipping, HostUploads, Rows

# Rows for which float64 or noise of their size is made at a time.
_ROWS_AT_ONCE = 64


class DeviceUploads:
    """Rows [clients, h] of a CUDA tensor, changed in place; `Uploads` says what the methods do.

    Rows must be contiguous float32. They visit the processor only for `rows`, and to keep factors per coordinate.
    """

    def __init__(self, rows: Tensor) -> None:
        if rows.ndim != 2 or rows.dtype != torch.float32 or not rows.is_contiguous():
            shape = tuple(rows.shape)
            raise ConfigError(f"must be contiguous float32 rows, not {rows.dtype} of {shape}", field="rows")
        self._rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows.shape[0], self._rows.shape[1]

    @torch.no_grad()
    def bound(self, clipping: Clipping, clip: float, weights: NDArray[np.float64]) -> int:
        # A row is finite if its largest entry is: NaN and infinity both pass through abs and amax.
        rows, device = self._rows, self._rows.device
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
        tails = bit_weight(clip) * weights * [was_short(norm, limit) for norm in norms]
        tail = torch.from_numpy(tails.astype(np.float32)).to(self._rows.device)
        return DeviceUploads(torch.cat([self._rows, tail[:, None]], dim=1)), lost

    @torch.no_grad()
    def add_own_noise(self, deviations: NDArray[np.float64], stream: SimStream) -> None:
        # One generator for all rows, in parts: what is drawn beside the rows stays small.
        device = self._rows.device
        source = torch.Generator(device).manual_seed(stream.child("own").torch_seed())
        scales = torch.from_numpy(deviations.astype(np.float32)).to(device)[:, None]
        parts = zip(torch.split(self._rows, _ROWS_AT_ONCE), torch.split(scales, _ROWS_AT_ONCE), strict=True)
        for part, scale in parts:
            part.add_(torch.randn(part.shape, device=device, generator=source).mul_(scale))

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
            factors = HostUploads(rows).add_shares(
                edges, distortion=distortion, keep_factors=True, **settings
            )
            self._rows.copy_(torch.from_numpy(rows))
            return factors
        return add_shares_on_device(self._rows, edges, distortion=distortion, **settings)

    @torch.no_grad()
    def add_spread(
        self, seats: NDArray[np.int64], variance: float, common: Sequence[Common], stream: SimStream
    ) -> None:
        """As `niss.mechanism.carried.add_spread`, a part of the rows at a time; the mean is taken out at the end."""
        rows, device, deviation = self._rows, self._rows.device, math.sqrt(variance)
        source = torch.Generator(device).manual_seed(stream.child("spread").torch_seed())
        mean = torch.zeros(rows.shape[1], dtype=torch.float64, device=device)
        places = torch.from_numpy(seats).to(device)
        for part in torch.split(places, _ROWS_AT_ONCE):
            drawn = torch.randn((len(part), rows.shape[1]), device=device, generator=source)
            mean += drawn.sum(0, dtype=torch.float64)
            rows.index_add_(0, part, drawn, alpha=deviation)
        offset = mean.mul_(-deviation / max(seats.size, 1))
        for scale, origin in common:
            offset += scale * self._normal(origin)
        whole = offset.to(rows.dtype)
        for part in torch.split(places, _ROWS_AT_ONCE):
            rows.index_add_(0, part, whole.expand(len(part), -1))

    @torch.no_grad()
    def add_edge_noise(
        self, seats: NDArray[np.int64], scales: NDArray[np.float64], streams: Sequence[SimStream]
    ) -> None:
        for seat, scale, stream in zip(seats, scales, streams, strict=True):
            self._rows[int(seat)].add_(self._normal(stream), alpha=float(scale))

    def _normal(self, stream: SimStream) -> Tensor:
        """A vector of standard normals, the same whenever it is asked for."""
        device = self._rows.device
        source = torch.Generator(device).manual_seed(stream.torch_seed())
        return torch.randn(self._rows.shape[1], device=device, generator=source)

    def blank(self, clients: int) -> DeviceUploads:
        return DeviceUploads(torch.zeros_like(self._rows[:1]).repeat(clients, 1))

    def total(self, seats: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        rows = self._rows
        if seats is not None and seats.size < len(rows):
            rows = rows[torch.from_numpy(seats).to(rows.device)]
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
