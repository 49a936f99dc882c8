"""Updates and noise as whole numbers of steps `g = 2^-bits`, added modulo a power of two.

On the grid noise that cancels does so to the last bit, in any order. Wrapping around costs no privacy (it
is a function of what would have been seen); only the final sum must fit, which `Grid.check_fits` checks.
What rounding the noise costs: `discretisation_delta`, proven in `niss.mechanism.discretisation`. How updates are
rounded: `niss.mechanism.rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from niss.errors import ConfigError
from niss.mechanism.discretisation import discretisation_delta

__all__ = ["Grid", "centred", "discretisation_delta", "modular_sum", "require_modulus", "residues"]

MAX_BITS = 62
ModulusBits = Literal[32, 64]
Residues = NDArray[np.uint32] | NDArray[np.uint64]


@dataclass(frozen=True)
class Grid:
    """The multiples of `g = 2^-bits`."""

    bits: int

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 0 <= self.bits <= MAX_BITS:
            raise ConfigError(
                f"must be a whole number between 0 and {MAX_BITS}, not {self.bits!r}", field="grid bits"
            )

    @property
    def step(self) -> float:
        """`g = 2^-bits`, exactly."""
        return math.ldexp(1.0, -self.bits)

    def in_steps(self, values: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """`values / g`, exactly, not yet whole; refused where 64 bits would not hold it."""
        if not isinstance(values, np.ndarray) or values.dtype not in (np.float16, np.float32, np.float64):
            raise ConfigError("must be an array of float16, float32 or float64", field="values")
        if not np.all(np.isfinite(values)):
            raise ConfigError("has NaN or infinite entries", field="values")
        with np.errstate(over="ignore"):
            steps = np.ldexp(values.astype(np.float64), self.bits)  # exact, or infinite
        largest = float(np.max(np.abs(steps), initial=0.0))
        if largest >= 2.0**63:
            raise ConfigError(
                f"has an entry of 2^{math.log2(largest) if math.isfinite(largest) else math.inf:.3g} steps; "
                "64 bits hold less than 2^63",
                field="values",
                hint="clip the update, or use fewer grid bits",
            )
        return np.asarray(steps)

    def quantise(self, values: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
        """The grid steps in `values`, cut toward zero: `|q| g <= |x|` in every entry, so no norm grows.

        It shortens: an entry below one step is lost whole. An update is rounded by
        `niss.mechanism.rounding.round_randomly` instead, which cuts only as its last resort.
        """
        steps = self.in_steps(values)
        return np.trunc(steps, out=steps).astype(np.int64)

    def to_float(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """`steps * g`; exact below 2^53 steps, correctly rounded above."""
        if not isinstance(steps, np.ndarray) or steps.dtype != np.int64:
            raise ConfigError("must be an array of int64 (see `centred`)", field="steps")
        return np.asarray(np.ldexp(steps.astype(np.float64), -self.bits))

    def deviation_steps(self, variance: float) -> float:
        """The deviation `sqrt(variance)` in grid steps."""
        _require_amount(variance, "variance")
        return math.ldexp(math.sqrt(variance), self.bits)

    def check_fits(
        self,
        *,
        clip_sum: float,
        deviation_sum: float,
        coordinates: int,
        clients: int = 1,
        modulus_bits: int = 64,
        failure: float = 2.0**-40,
    ) -> float:
        """Refuse a grid on which the final sum may wrap; give the largest sum, in steps.

        Shares cancel exactly and may wrap on the way. What remains in a coordinate is at most

            (clip_sum + z deviation_sum) / g + clients / 2,    z = sqrt(2 ln(coordinates / failure)),

        with `clip_sum = sum_k |p_k| clip`, `deviation_sum^2 = sum_k eta_k^2` of the residual noise and
        half a step for rounding each of the `clients` residuals; but for probability `failure` over all
        coordinates (`P(|Z| > z) <= exp(-z^2 / 2)`), to which `sampler_distance` of the sampler adds. Rounding
        the updates adds nothing: no entry of one exceeds its norm, which is within the clip after rounding too.
        """
        bits = require_modulus(modulus_bits)
        _require_amount(clip_sum, "clip_sum")
        _require_amount(deviation_sum, "deviation_sum")
        if coordinates < 1 or clients < 1:
            raise ConfigError("must be at least 1", field="coordinates" if coordinates < 1 else "clients")
        if not 0.0 < failure < 1.0:
            raise ConfigError(f"must be between 0 and 1, not {failure!r}", field="failure")
        reach = clip_sum + math.sqrt(2.0 * math.log(coordinates / failure)) * deviation_sum
        room, rounding = 2.0 ** (bits - 1) - 1.0, clients / 2.0
        # A hair more than computed, for the rounding of these few operations.
        largest = (math.ldexp(reach, self.bits) + rounding) * (1.0 + 1e-12)
        if largest <= room:
            return largest
        left = room * (1.0 - 1e-12) - rounding
        fitting = math.floor(math.log2(left / reach) - 1e-9) if reach > 0.0 and left > 0.0 else -1
        raise ConfigError(
            f"{self.bits} bits put the largest sum at 2^{math.log2(largest):.1f} steps, "
            f"but sums modulo 2^{bits} hold less than 2^{bits - 1}",
            field="grid bits",
            hint=f"use at most {fitting} grid bits"
            if fitting >= 0
            else "use 64 modulus bits or a smaller clip",
        )


def residues(steps: NDArray[np.int64], modulus_bits: int = 64) -> Residues:
    """`steps` modulo 2^32 or 2^64, as unsigned numbers of that width: what is uploaded."""
    bits = require_modulus(modulus_bits)
    if not isinstance(steps, np.ndarray) or steps.dtype != np.int64:
        raise ConfigError("must be an array of int64", field="steps")
    unsigned = steps.view(np.uint64)
    return unsigned.astype(np.uint64) if bits == 64 else (unsigned & np.uint64(2**32 - 1)).astype(np.uint32)


def modular_sum(uploads: Iterable[Residues]) -> Residues:
    """The sum modulo the width of the uploads; exact, so their order does not matter."""
    total: NDArray[Any] | None = None
    for upload in uploads:
        if not isinstance(upload, np.ndarray) or upload.dtype not in (np.uint32, np.uint64):
            raise ConfigError("must be arrays of uint32 or uint64 (see `residues`)", field="uploads")
        if total is None:
            total = upload.copy()
        elif upload.dtype != total.dtype or upload.shape != total.shape:
            raise ConfigError("must all have the same modulus and length", field="uploads")
        else:
            np.add(total, upload, out=total)
    if total is None:
        raise ConfigError("needs at least one upload to sum", field="uploads")
    return total


def centred(values: Residues) -> NDArray[np.int64]:
    """The number nearest zero for each residue: the true sum, if that fits (`Grid.check_fits`)."""
    if not isinstance(values, np.ndarray) or values.dtype not in (np.uint32, np.uint64):
        raise ConfigError("must be an array of uint32 or uint64", field="values")
    signed = values.view(np.int32 if values.dtype == np.uint32 else np.int64)
    return signed.astype(np.int64)


def require_modulus(modulus_bits: int) -> ModulusBits:
    if modulus_bits == 64:
        return 64
    if modulus_bits == 32:
        return 32
    raise ConfigError(f"must be 32 or 64, not {modulus_bits!r}", field="modulus_bits")


def _require_amount(value: float, field: str) -> None:
    if not math.isfinite(value) or value < 0.0:
        raise ConfigError(f"must be finite and not negative, not {value!r}", field=field)
