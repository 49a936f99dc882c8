"""Uploads on the CUDA device where clients were trained: a round's simulated noise shares, made and added there.

`uploads` is the interface of `niss.simulation.uploads` on device memory, and `kernels` is the Triton code that makes
and adds the shares in one pass.

The same mechanism as `niss.mechanism.add_shares` (see there for the formulas), from other random numbers:
share e at coordinate j is a function of the seed, e and j alone (Philox4x32-7 counters, Box-Muller), so each end
of an edge makes it anew instead of storing it. Memory beyond the uploads is O(edges), whatever h is.

This is simulated noise: whoever knows the seed knows it. On the processor, and where Triton is missing, plain torch
makes noise of the same distribution edge by edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from niss.errors import ConfigError
from niss.mechanism.shares import Distortion, Edges, distortion_named
from niss.randomness import SimStream

_FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class _Noise:
    """What is drawn, by edge e into client k: n_e with `deviations[e]`, and as received
    `factors[e] n_e (1 + taus[e] z)` with a fresh normal z in each coordinate; then `residuals[k]` times a normal."""

    deviations: _FloatArray
    factors: _FloatArray
    taus: _FloatArray
    residuals: _FloatArray
    seed: int


def add_shares_on_device(
    uploads: Tensor,
    edges: Edges,
    *,
    unit_variance: float,
    tau2: ArrayLike,
    distortion: str | Distortion,
    stream: SimStream,
    seats: NDArray[np.int64] | None = None,
    triton: bool | None = None,
) -> NDArray[np.float64] | None:
    """Add the shares of all edges and their distortion to `uploads` (m x h, on a CUDA device), in place.

    edges          the share graph, or some of its edges
    unit_variance  sigma^2, the variance of a share of weight 1 in each coordinate
    tau2           the distortion of received shares, one number or one per client
    seats          the client of each row; None: all clients of the graph, in order
    triton         False asks for plain torch, edge by edge: the same distribution from other numbers

    Returns the factors `s_e` where a share has one factor, else None: a factor per coordinate is never kept.
    """
    seats = np.arange(edges.size) if seats is None else seats
    if uploads.ndim != 2 or len(uploads) != seats.size or not uploads.is_contiguous():
        raise ConfigError(
            f"shape {tuple(uploads.shape)} is not one contiguous row for each of {seats.size} clients",
            field="uploads",
        )
    if not math.isfinite(unit_variance) or unit_variance < 0.0:
        raise ConfigError(f"must be finite and not negative, not {unit_variance!r}", field="unit_variance")
    kind = distortion_named(distortion)
    variances = np.asarray(tau2, dtype=np.float64)
    if (
        variances.shape not in ((), (1,), (edges.size,))
        or not (np.isfinite(variances) & (variances >= 0.0)).all()
    ):
        raise ConfigError(
            f"needs finite numbers, not negative: one, or one per client ({edges.size})", field="tau2"
        )
    tau = np.sqrt(np.broadcast_to(variances, (edges.size,)))
    factors = np.ones(edges.senders.size)
    if kind.one_factor:
        draws = stream.child("scales").generator().standard_normal(factors.size)
        factors += tau[edges.receivers] * draws
    noise = _Noise(
        deviations=np.sqrt(edges.weights * unit_variance),
        factors=factors,
        taus=tau[edges.receivers] * kind.per_coordinate,
        residuals=tau * np.sqrt(unit_variance * edges.in_weight) * kind.additive,
        seed=stream.child("shares").torch_seed(),
    )
    fused = _triton_installed() if triton is None else triton
    if seats.size:
        (_add_fused if fused else _add_plain)(uploads, edges, seats, noise)
    return factors if kind.one_factor else None


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
