"""Updates and noise as whole numbers of steps `g = 2^-bits`, added modulo a power of two, and what that costs.

On the grid noise that cancels does so to the last bit, in any order. Wrapping around costs no privacy (it
is a function of what would have been seen); only the final sum must fit, which `Grid.check_fits` checks.
How updates are rounded: `niss.mechanism.rounding`.

**What it costs that every noise is rounded on its own, and drawn by a real sampler** (`discretisation_delta`).
One coordinate of one round, additive distortion, everything in grid steps. The honest clients upload

    Y = x + B R(n) + R(eta)        x whole; n_e ~ N(0, s_e^2), eta_k ~ N(0, eta_k^2), R = rounding, and
                                   B the incidence matrix: +1 at the sender, -1 at the receiver of a share.

What the accounting knows is the Gaussian mechanism `x + B n + eta`, mu-GDP at sensitivity `||x - x'||`.

1. One rounded noise costs nothing. `x + B R(n)` is whole, so `Y = R(x + B R(n) + eta)`: whoever gives no
   credit to the shares has a function of `x + eta`, exactly. Shares with colluders are known whole numbers,
   and the sum modulo 2^64 is a function of Y: they change nothing either.

2. The sum of rounded shares is not the rounded sum, but nearly a *noisier* one. With `u_e` uniform on
   [-1/2, 1/2] and independent, `Y* = R(x + B (n + u) + eta)` is a function of `x + B n + eta` (add `B u`, round)
   and so exactly mu-GDP. The claim is that the distance between the laws of Y and Y* is at most

       TV(Y, Y*) <= sum_e sum_{j >= 1} exp(-2 pi^2 j^2 / kappa_e),   kappa_e = 1/s_e^2 + 1/eta_a^2 + 1/eta_b^2,

   with a, b the ends of share e. Proof: put `n_e + u_e` in the place of `R(n_e)` one share at a time and fix
   everything but `n_e, u_e, eta_a, eta_b`. `R(n_e)` has the probabilities `p(w)`, `w` whole, where `p` is the density
   of `n_e + u_e`. With `c_a(r) = P(-1/2 < r - eta_a < 1/2)` and offsets `r_a, r_b` that depend on what is fixed,
   the two laws give an outcome y the probabilities

       sum_{w whole} F_y(w)   and   integral F_y(v) dv,    F_y(v) = p(v) c_a(y_a - r_a - v) c_b(y_b - r_b + v).

   By Poisson's summation they differ by `sum_{j != 0} G_y(2 pi j)`, G_y the Fourier transform of F_y. F_y is entire,
   and a Gaussian density of deviation d obeys `|phi(v + i t)| = exp(t^2 / 2 d^2) phi(v)`, which integration over
   a cell keeps as `<=`; so `|F_y(v + i t)| <= exp(t^2 kappa_e / 2) F_y(v)`. Moving the line of integration by
   t = 2 pi j / kappa_e gives `|G_y(2 pi j)| <= exp(-2 pi^2 j^2 / kappa_e) integral F_y`, and the integrals sum
   to 1 over y. Half the sum over y and over j != 0 is the bound. It needs `eta > 0` at both ends of every share.
   A rounded Gaussian with one honest end (a share left uncancelled, a self-mask) has one eta fewer in kappa.

3. The sampler's distance from the ideal is nearly all a factor on probabilities: `P'(A) <= e^h P(A) + rest` for all
   events, and the same the other way round (`niss.randomness.sampler_factor`). With D the sum of the aliasing over
   all shares, coordinates and rounds,

       delta(epsilon) <= e^h curve(epsilon - 2 h) + (1 + e^(epsilon + h)) (rest + D),

   with `curve` that of the ideal mechanism: `gdp_delta` at the mu of all rounds, or where batches are secret what all
   slots compose to (whatever they draw, rounds differ from ideal ones by no more than above).

With all deviations at least S steps a share and coordinate cost exp(-6.5 S^2): 4e-12 at S = 2, 2e-46 at S = 4.
`h` grows with the deviation instead: 4e-7 at S = 256 for 6e9 draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.checks import require_real
from niss.errors import ConfigError
from niss.randomness import sampler_factor

MAX_BITS = 62
# The probability with which a sum may wrap in some coordinate, though it was found to fit.
_WRAPS = 2.0**-40
Residues = NDArray[np.uint32] | NDArray[np.uint64]


@dataclass(frozen=True)
class Grid:
    """The multiples of `g = 2^-bits`; `bits` is 0 to 62, anything else a `ConfigError`."""

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
        steps = values.astype(np.float64)
        with np.errstate(over="ignore"):
            np.ldexp(steps, self.bits, out=steps)  # exact, or infinite
        largest = max(float(np.max(steps, initial=0.0)), -float(np.min(steps, initial=0.0)))
        if largest >= 2.0**63:
            raise ConfigError(
                f"has an entry of 2^{math.log2(largest) if math.isfinite(largest) else math.inf:.3g} steps; "
                "64 bits hold less than 2^63",
                field="values",
                hint="clip the update, or use fewer grid bits",
            )
        return np.asarray(steps)

    def to_float(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """`steps * g`; exact below 2^53 steps, correctly rounded above."""
        floats = steps.astype(np.float64)
        return np.ldexp(floats, -self.bits, out=floats)

    def deviation_steps(self, variance: float) -> float:
        """The deviation `sqrt(variance)` in grid steps."""
        require_real(variance, field="variance")
        return math.ldexp(math.sqrt(variance), self.bits)

    def check_fits(
        self,
        *,
        clip_sum: float,
        deviation_sum: float,
        coordinates: int,
        clients: int = 1,
        modulus_bits: int = 64,
    ) -> float:
        """Refuse a grid on which the final sum may wrap; give the largest sum, in steps.

        Shares cancel exactly and may wrap on the way. What remains in a coordinate is at most

            (clip_sum + z deviation_sum) / g + clients / 2,    z = sqrt(2 ln(coordinates / p)),

        with `clip_sum = sum_k |p_k| clip`, `deviation_sum^2 = sum_k eta_k^2` of the residual noise and
        half a step for rounding each of the `clients` residuals; but for the probability p = 2^-40 over all
        coordinates (`P(|Z| > z) <= exp(-z^2 / 2)`), to which `sampler_distance` of the sampler adds. Rounding
        the updates adds nothing: no entry of one exceeds its norm, which is within the clip after rounding too.
        """
        require_real(clip_sum, field="clip_sum")
        require_real(deviation_sum, field="deviation_sum")
        reach = clip_sum + math.sqrt(2.0 * math.log(coordinates / _WRAPS)) * deviation_sum
        room, rounding = 2.0 ** (modulus_bits - 1) - 1.0, clients / 2.0
        # A hair more than computed, for the rounding of these few operations.
        largest = (math.ldexp(reach, self.bits) + rounding) * (1.0 + 1e-12)
        if largest <= room:
            return largest
        left = room * (1.0 - 1e-12) - rounding
        fitting = math.floor(math.log2(left / reach) - 1e-9) if reach > 0.0 and left > 0.0 else -1
        raise ConfigError(
            f"{self.bits} bits put the largest sum at 2^{math.log2(largest):.1f} steps, "
            f"but sums modulo 2^{modulus_bits} hold less than 2^{modulus_bits - 1}",
            field="grid bits",
            hint=f"use at most {fitting} grid bits"
            if fitting >= 0
            else "use 64 modulus bits or a smaller clip",
        )


def residues(steps: NDArray[np.int64], modulus_bits: int = 64) -> Residues:
    """`steps` modulo 2^32 or 2^64, as unsigned numbers of that width: what is uploaded."""
    unsigned = steps.view(np.uint64)
    return unsigned.copy() if modulus_bits == 64 else unsigned.astype(np.uint32)  # keeps the low bits


def centred(values: Residues) -> NDArray[np.int64]:
    """The number nearest zero for each residue: the true sum, if that fits (`Grid.check_fits`)."""
    signed = values.view(np.int32 if values.dtype == np.uint32 else np.int64)
    return signed.astype(np.int64)


def aliasing_distance(residual: float, share: float) -> float:
    """`sum_j exp(-2 pi^2 j^2 / kappa)` of one share, in one coordinate of one round, from deviations in grid steps.

    Rounding noises one by one, against rounding their sum: see the proof above. `residual` is the smaller of both ends.
    """
    least = min(share, residual)  # Multiplied, and not squared, it may overflow.
    first = math.exp(
        -2.0 * math.pi**2 * (least * least) / ((least / share) ** 2 + 2.0 * (least / residual) ** 2)
    )
    # q + q^4 + q^9 + ... <= q / (1 - q)
    return first / (1.0 - first)


def discretisation_delta(
    deviation_steps: ArrayLike,
    draws: ArrayLike,
    *,
    aliasing: float,
    epsilon: float,
    curve: Callable[[float], float],
    rest: float,
) -> float:
    """What grid and sampler add to the delta of the ideal mechanism at `epsilon`; at most 1, which is no claim.

    deviation_steps  of every kind of noise that is drawn, in grid steps
    draws            how many of each there are: all participants, coordinates and rounds
    aliasing         D, `aliasing_distance` times coordinates and rounds
    epsilon, curve   the claim, and delta(epsilon) of the ideal Gaussians behind it, all rounds together
    rest             how much of the sampler's distance may be no factor; the smaller, the larger the factor

    Rounds need not be alike: where each alone, repeated as often as there are rounds, has a factor `e^h`, all together
    have at most `e^2h` (take the order `80 log(2) / h` in `sampler_factor`), and that is what is counted.
    """
    factor = 2.0 * sampler_factor(deviation_steps, draws, rest=rest)
    if not factor < 1.0 or epsilon > 500.0:
        return 1.0
    moved = math.exp(factor) * curve(max(epsilon - 2.0 * factor, 0.0)) - curve(epsilon)
    return min(1.0, max(moved, 0.0) + (1.0 + math.exp(epsilon + factor)) * (rest + aliasing))
