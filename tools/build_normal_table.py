"""Rebuild the table of the normal quantile that `SecretStream` draws from, and print its SHA-256.

Usage: python tools/build_normal_table.py [--out FILE]

Each row interpolates `z(t) = Phi^-1(1 - t)`, `t = f / 2^64`, at the six Chebyshev nodes of its segment, in
50-digit arithmetic; each coefficient is rounded to float64 once. The result is the same on every platform.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import mpmath
import numpy as np
from scipy.special import ndtri

from niss.randomness import normal_table as layout

DEFAULT = Path(layout.__file__).with_name(layout.FILE)
DIGITS = 50


def quantile(tail: mpmath.mpf) -> mpmath.mpf:
    """`Phi^-1(1 - tail)`, for tails in [2^-80, 1/2], to `DIGITS` digits: Newton in the logarithm from scipy's."""
    root2 = mpmath.sqrt(2)
    z = mpmath.mpf(-float(ndtri(float(tail))))
    for _ in range(3):  # quadratic: 1e-15, 1e-29, 1e-57
        upper = mpmath.erfc(z / root2) / 2
        density = mpmath.exp(-z * z / 2) / mpmath.sqrt(2 * mpmath.pi)
        z += mpmath.log(upper / tail) * upper / density
    return z


def segment(row: int) -> tuple[mpmath.mpf, mpmath.mpf]:
    """The first `f` of a row's segment, and the width of the segment."""
    octave, part = divmod(row, 1 << layout.SEGMENT_BITS)
    start = mpmath.ldexp(1, octave + layout.LOWEST_EXPONENT)
    width = mpmath.ldexp(start, -layout.SEGMENT_BITS)
    return start + part * width, width


def interpolation_matrix() -> tuple[list[mpmath.mpf], mpmath.matrix]:
    """The Chebyshev nodes in [0, 1], and the matrix from values there to coefficients of the powers."""
    count = layout.COLUMNS
    nodes = [(1 - mpmath.cos(mpmath.pi * (2 * i + 1) / (2 * count))) / 2 for i in range(count)]
    return nodes, mpmath.matrix([[node**power for power in range(count)] for node in nodes]) ** -1


def coefficients(row: int) -> list[float]:
    """The row's coefficients, lowest power first, for a place counted in units of the last mantissa bit."""
    with mpmath.workdps(DIGITS):
        if row == layout.ROWS - 1:
            return [0.0] * layout.COLUMNS
        start, width = segment(row)
        nodes, matrix = interpolation_matrix()
        values = mpmath.matrix([quantile((start + node * width) / 2**64) for node in nodes])
        return [float(mpmath.ldexp(c, -layout.PLACE_BITS * power)) for power, c in enumerate(matrix * values)]


def build() -> bytes:
    table = np.array([coefficients(row) for row in range(layout.ROWS)])
    return np.ascontiguousarray(table.T).astype("<f8").tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild the table of the normal quantile.")
    parser.add_argument("--out", type=Path, default=DEFAULT, help="default: its place in the package")
    arguments = parser.parse_args()
    content = build()
    arguments.out.write_bytes(content)
    print(f"{len(content)} bytes written to {arguments.out}")
    print(f"sha256: {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
