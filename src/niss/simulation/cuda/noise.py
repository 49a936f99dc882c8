"""A round's simulated noise shares, made and added on the device.

The same mechanism as `niss.mechanism.add_shares` (see there for the formulas), from other random numbers:
share e at coordinate j is a function of the seed, e and j alone (Philox4x32-7 counters, Box-Muller), so each end
of an edge makes it anew instead of storing it. Memory beyond the uploads is O(edges), whatever h is.

This is simulated noise: whoever knows the seed knows it.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from niss.errors import ConfigError
from niss.mechanism.shares import DISTORTIONS, Edges
from niss.randomness import SimStream


def add_shares_on_device(
    uploads: Tensor,
    edges: Edges,
    *,
    unit_variance: float,
    tau2: ArrayLike,
    distortion: str,
    stream: SimStream,
    triton: bool | None = None,
) -> NDArray[np.float64] | None:
    """Add the shares of all edges and their distortion to `uploads` (m x h, on a CUDA device), in place.

    Returns the factors `s_e` of the `scalar` distortion, else None: a factor per coordinate is never kept.
    `triton=False` asks for plain torch, edge by edge: the same distribution from other numbers.
    """
    if uploads.ndim != 2 or len(uploads) != edges.size or not uploads.is_contiguous():
        raise ConfigError(
            f"shape {tuple(uploads.shape)} is not one contiguous row for each of {edges.size} clients",
            field="uploads",
        )
    if not math.isfinite(unit_variance) or unit_variance < 0.0:
        raise ConfigError(f"must be finite and not negative, not {unit_variance!r}", field="unit_variance")
    if distortion not in DISTORTIONS:
        raise ConfigError(
            f"unknown distortion {distortion!r}",
            field="distortion",
            hint="use one of: " + ", ".join(DISTORTIONS),
        )
    given = np.asarray(tau2, dtype=np.float64)
    if given.shape not in ((), (1,), (edges.size,)) or not np.all(np.isfinite(given)) or given.min() < 0.0:
        raise ConfigError(
            f"needs finite numbers, not negative: one, or one per client ({edges.size})", field="tau2"
        )
    tau = np.sqrt(np.broadcast_to(given, (edges.size,)))
    deviations = np.sqrt(edges.weights * unit_variance)
    factors = np.ones(edges.senders.size)
    if distortion == "scalar":
        draws = stream.child("scales").generator().standard_normal(factors.size)
        factors += tau[edges.receivers] * draws
    residuals = tau * np.sqrt(unit_variance * edges.in_weight) * (distortion == "additive")
    fused = _triton_installed() if triton is None else triton
    add = _add_fused if fused else _add_plain
    per_coordinate = tau[edges.receivers] * (distortion == "coordinate")
    add(uploads, edges, deviations, factors, per_coordinate, residuals, stream.child("shares").torch_seed())
    return factors if distortion == "scalar" else None


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def _add_fused(
    uploads: Tensor,
    edges: Edges,
    deviations: NDArray[np.float64],
    factors: NDArray[np.float64],
    taus: NDArray[np.float64],
    residuals: NDArray[np.float64],
    seed: int,
) -> None:
    from niss.learning.cohort_cuda_noise_kernels import LANES, share_noise

    count = edges.senders.size
    clients = np.concatenate([edges.senders, edges.receivers])
    order = np.argsort(clients, kind="stable")
    starts = np.searchsorted(clients[order], np.arange(edges.size + 1))
    scales = np.concatenate([deviations, -deviations * factors])[order]
    end_taus = np.concatenate([np.zeros(count), taus])[order]

    # One transfer for everything: five small ones would take longer than the noise of a small model.
    whole = np.concatenate([starts, order % max(count, 1)]).astype(np.int32)
    real = np.concatenate([scales, end_taus, residuals]).astype(np.float32)
    packed = torch.from_numpy(np.concatenate([whole, real.view(np.int32)])).to(uploads.device)
    begins, names, *floats = torch.split(
        packed, [edges.size + 1, 2 * count, 2 * count, 2 * count, edges.size]
    )
    own_scales, own_taus, own_residuals = (part.view(torch.float32) for part in floats)
    coordinates = uploads.shape[1]
    grid = (-(-coordinates // (4 * LANES.value)), edges.size)
    share_noise[grid](
        uploads, begins, names, own_scales, own_taus, own_residuals, seed, coordinates,
        COORDINATE=bool(taus.any()), ADDITIVE=bool(residuals.any()), num_warps=4,
    )  # fmt: skip


def _add_plain(
    uploads: Tensor,
    edges: Edges,
    deviations: NDArray[np.float64],
    factors: NDArray[np.float64],
    taus: NDArray[np.float64],
    residuals: NDArray[np.float64],
    seed: int,
) -> None:
    source = torch.Generator(uploads.device).manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(uploads.shape[1], dtype=uploads.dtype, device=uploads.device, generator=source)

    for index in range(edges.senders.size):
        share = normal().mul_(float(deviations[index]))
        uploads[int(edges.senders[index])].add_(share)
        if taus[index]:
            share.mul_(normal().mul_(float(taus[index])).add_(1.0))
        uploads[int(edges.receivers[index])].sub_(share, alpha=float(factors[index]))
    for client in np.flatnonzero(residuals):
        uploads[int(client)].add_(normal(), alpha=float(residuals[client]))
