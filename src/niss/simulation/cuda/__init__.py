"""Uploads on the CUDA device where clients were trained: clipped, hidden and summed there, so that rows never leave it.

`DeviceUploads` has the same formulas as `HostUploads`. Float32 only: squares of float32 neither over- nor underflow in
the float64 in which norms are taken.

Shares are the mechanism of `niss.mechanism.add_shares` (see there for the formulas) from other random numbers:
share e at coordinate j is a function of the seed, e and j alone (Philox4x32-7 counters, Box-Muller), so each end
of an edge makes it anew instead of storing it. Memory beyond the uploads is O(edges), whatever h is. `kernels` is the
Triton code that makes and adds them in one pass.

This is simulated noise: whoever knows the seed knows it. On the processor, where tests run it, and where Triton is
missing, plain torch makes noise of the same distribution edge by edge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from niss.errors import ConfigError
from niss.mechanism.clipping import bit_weight, room, was_short
from niss.mechanism.shares import Common, Distortion, Edges, distortion_named, per_client
from niss.randomness import SimStream
from niss.simulation.uploads import Clipping, HostUploads, IntArray, Rows, Seats

_FloatArray = NDArray[np.float64]

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
        unit_variance: float,
        tau2: ArrayLike,
        distortion: str | Distortion,
        stream: SimStream,
        keep_factors: bool = False,
    ) -> Rows | None:
        """As `niss.mechanism.add_shares`; where factors per coordinate are to be kept, the processor does the work."""
        kind = distortion_named(distortion)
        if keep_factors and kind.per_coordinate:
            rows = self.rows()
            factors = HostUploads(rows, self._seats).add_shares(
                edges,
                unit_variance=unit_variance,
                tau2=tau2,
                distortion=kind,
                stream=stream,
                keep_factors=True,
            )
            self._rows.copy_(torch.from_numpy(rows))
            return factors
        tau = np.sqrt(per_client(tau2, edges.size, "tau2"))
        scales = np.ones(edges.senders.size)
        if kind.one_factor:
            draws = stream.child("scales").generator().standard_normal(scales.size)
            scales += tau[edges.receivers] * draws
        noise = _Noise(
            deviations=np.sqrt(edges.weights * unit_variance),
            factors=scales,
            taus=tau[edges.receivers] * kind.per_coordinate,
            residuals=tau * np.sqrt(unit_variance * edges.in_weight) * kind.additive,
            seed=stream.child("shares").torch_seed(),
        )
        if self._seats.mine.size:
            add = _add_fused if _triton_installed() else _add_plain
            add(self._rows, edges, self._seats.mine, noise)
        return scales if kind.one_factor else None

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


@dataclass(frozen=True)
class _Noise:
    """What is drawn, by edge e into client k: n_e with `deviations[e]`, and as received
    `factors[e] n_e (1 + taus[e] z)` with a fresh normal z in each coordinate; then `residuals[k]` times a normal."""

    deviations: _FloatArray
    factors: _FloatArray
    taus: _FloatArray
    residuals: _FloatArray
    seed: int


@cache
def _triton_installed() -> bool:
    # Once: looking for a package takes longer than the noise of a small model.
    return find_spec("triton") is not None


@dataclass(frozen=True)
class _Ends:
    """Each row's ends of edges together, in the order of the rows: those of row k are `starts[k]` to `starts[k + 1]`.

    names   the edge of each end
    scales  what its share enters the row with: its deviation at its sender, minus that times its factor at its receiver
    taus    of the factors in each coordinate, at a receiver; 0 at a sender
    """

    starts: NDArray[np.int64]
    names: NDArray[np.int64]
    scales: _FloatArray
    taus: _FloatArray

    @classmethod
    def of(cls, edges: Edges, seats: NDArray[np.int64], noise: _Noise) -> _Ends:
        """Of the rows of these seats. Entry e of what is sorted is the sender's end of edge e, entry count + e the
        receiver's; ends at clients without a row are left out."""
        count = edges.senders.size
        row_of = np.full(edges.size, -1)
        row_of[seats] = np.arange(seats.size)
        rows = row_of[np.concatenate([edges.senders, edges.receivers])]
        order = np.argsort(rows, kind="stable")
        order = order[np.searchsorted(rows[order], 0) :]
        return cls(
            np.searchsorted(rows[order], np.arange(seats.size + 1)),
            order % max(count, 1),
            np.concatenate([noise.deviations, -noise.deviations * noise.factors])[order],
            np.concatenate([np.zeros(count), noise.taus])[order],
        )


def _add_fused(uploads: Tensor, edges: Edges, seats: NDArray[np.int64], noise: _Noise) -> None:
    """One pass of the kernel over `uploads`."""
    from niss.simulation.cuda.kernels import LANES, share_noise

    ends, size = _Ends.of(edges, seats, noise), seats.size
    # One transfer for everything: six small ones would take longer than the noise of a small model.
    whole = np.concatenate([ends.starts, seats, ends.names]).astype(np.int32)
    real = np.concatenate([ends.scales, ends.taus, noise.residuals[seats]]).astype(np.float32)
    packed = torch.from_numpy(np.concatenate([whole, real.view(np.int32)])).to(uploads.device)
    begins, clients, names, *floats = torch.split(
        packed, [size + 1, size, ends.names.size, ends.names.size, ends.names.size, size]
    )
    own_scales, own_taus, own_residuals = (part.view(torch.float32) for part in floats)
    coordinates = uploads.shape[1]
    grid = (-(-coordinates // (4 * LANES.value)), size)
    share_noise[grid](
        uploads, clients, begins, names, own_scales, own_taus, own_residuals, noise.seed, coordinates,
        COORDINATE=bool(noise.taus.any()), ADDITIVE=bool(noise.residuals.any()), num_warps=4,
    )  # fmt: skip


def _add_plain(uploads: Tensor, edges: Edges, seats: NDArray[np.int64], noise: _Noise) -> None:
    """Edge by edge in torch: each share is drawn once, added at its sender and subtracted at its receiver.

    One generator draws for all clients, also for those without a row.
    """
    rows = dict(zip(seats.tolist(), uploads, strict=True))
    source = torch.Generator(uploads.device).manual_seed(noise.seed)

    def normal() -> Tensor:
        return torch.randn(uploads.shape[1], dtype=uploads.dtype, device=uploads.device, generator=source)

    for index in range(edges.senders.size):
        share = normal().mul_(float(noise.deviations[index]))
        if (row := rows.get(int(edges.senders[index]))) is not None:
            row.add_(share)
        if noise.taus[index]:
            share.mul_(normal().mul_(float(noise.taus[index])).add_(1.0))
        if (row := rows.get(int(edges.receivers[index]))) is not None:
            row.sub_(share, alpha=float(noise.factors[index]))
    for client in np.flatnonzero(noise.residuals).tolist():
        residual = normal()
        if (row := rows.get(client)) is not None:
            row.add_(residual, alpha=float(noise.residuals[client]))
