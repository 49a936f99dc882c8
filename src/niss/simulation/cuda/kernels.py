"""The Triton kernel that adds the noise shares of a round to the uploads, in one pass over them."""

# mypy: ignore-errors
# The bodies below are Triton's language, not Python's: only its compiler can check them.

from __future__ import annotations

import triton
import triton.language as tl

# Coordinates of one counter block: output q of counter (block, lane) is coordinate (4 block + q) LANES + lane.
LANES = tl.constexpr(256)


@triton.jit
def radius(bits):
    """sqrt(-2 ln u), u in (0, 1] from 32 bits; by the device's logarithm, within about 1e-6."""
    u = bits.to(tl.uint32, bitcast=True).to(tl.float32) * 2.0**-32 + 2.0**-33
    log2 = tl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.sqrt(tl.maximum(log2 * -1.3862943611198906, 0.0))  # 2 ln 2


@triton.jit
def circle(bits):
    """Cosine and sine of an angle in [-pi, pi), where the device's are within about 1e-6."""
    angle = bits.to(tl.int32, bitcast=True).to(tl.float32) * (3.141592653589793 * 2.0**-31)
    x = tl.inline_asm_elementwise(
        "cos.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
    )
    y = tl.inline_asm_elementwise(
        "sin.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
    )
    return x, y


@triton.jit
def normals(seed, lane, name, kind):
    """Four standard normals for each lane: Philox4x32-7 keyed by the seed at counter (lane, name, kind), Box-Muller.

    The radius comes from 32 bits: nothing lies beyond 6.8 deviations.
    """
    zero = tl.zeros_like(lane)
    a, b, c, d = tl.philox(seed, lane, zero + name, zero + kind, zero, n_rounds=7)
    r1 = radius(a)
    r2 = radius(c)
    x1, y1 = circle(b)
    x2, y2 = circle(d)
    return r1 * x1, r1 * y1, r2 * x2, r2 * y2


@triton.jit
def share_noise(
    uploads, seats, starts, edges, own_scales, taus, residuals, seed, coordinates,
    COORDINATE: tl.constexpr, ADDITIVE: tl.constexpr,
):  # fmt: skip
    """One client's row, four counter blocks of coordinates: every share it gives or takes, made from its counter.

    Entry j of `starts[client] .. starts[client + 1]` is an end of edge `edges[j]`: its share enters times
    `own_scales[j]`, and with COORDINATE times `1 + taus[j] z'`, z' a fresh normal of that edge and
    coordinate (taus is 0 at a sender). With ADDITIVE the client adds `residuals[client]` times a normal.
    `own_scales[j]` is the share's deviation at its sender, and minus that times its factor at its receiver.
    `seats[client]` is by which name the client's own noise is made, wherever its row is.
    Both ends make the same normals, from the same counter: what cancels, cancels but for the last bits of the sums.
    """
    block = tl.program_id(0)
    client = tl.program_id(1)
    lane = block * LANES + tl.arange(0, LANES)
    first = block.to(tl.int64) * (4 * LANES) + tl.arange(0, LANES)
    row = uploads + client.to(tl.int64) * coordinates + first
    x0 = tl.load(row, mask=first < coordinates, other=0.0)
    x1 = tl.load(row + LANES, mask=first + LANES < coordinates, other=0.0)
    x2 = tl.load(row + 2 * LANES, mask=first + 2 * LANES < coordinates, other=0.0)
    x3 = tl.load(row + 3 * LANES, mask=first + 3 * LANES < coordinates, other=0.0)
    for entry in range(tl.load(starts + client), tl.load(starts + client + 1)):
        edge = tl.load(edges + entry)
        scale = tl.load(own_scales + entry)
        z0, z1, z2, z3 = normals(seed, lane, edge, 0)
        if COORDINATE:
            tau = tl.load(taus + entry)
            if tau != 0.0:
                f0, f1, f2, f3 = normals(seed, lane, edge, 1)
                z0 += z0 * (tau * f0)
                z1 += z1 * (tau * f1)
                z2 += z2 * (tau * f2)
                z3 += z3 * (tau * f3)
        x0 += scale * z0
        x1 += scale * z1
        x2 += scale * z2
        x3 += scale * z3
    if ADDITIVE:
        residual = tl.load(residuals + client)
        if residual != 0.0:
            z0, z1, z2, z3 = normals(seed, lane, tl.load(seats + client), 2)
            x0 += residual * z0
            x1 += residual * z1
            x2 += residual * z2
            x3 += residual * z3
    tl.store(row, x0, mask=first < coordinates)
    tl.store(row + LANES, x1, mask=first + LANES < coordinates)
    tl.store(row + 2 * LANES, x2, mask=first + 2 * LANES < coordinates)
    tl.store(row + 3 * LANES, x3, mask=first + 3 * LANES < coordinates)
