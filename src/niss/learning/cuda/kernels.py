"""Triton kernels of the linear layers: every client of a cohort in one launch, one small batch each.

Names in all of them, here and in `conv_kernels`:

    data, labels          all samples of all clients
    table, sizes          [steps, clients, rows] data rows of each batch, and how many of them count, [steps, clients]
    counter, offset       the step is counter[0] + offset
    clients, rows         models, and the width of a batch
    width, outs, classes  inputs and outputs of a layer
    rate, momentum, decay of SGD; MOMENTUM says whether velocities are there at all
    BLOCK_*               extents of a tile: B rows of a batch, O outputs, K or I inputs, C classes
    PRECISION             of `product`

Arrays are client-major and contiguous: weights [clients, outs, width], activations and slopes [parts, clients, rows,
width]. They are the sum of their parts, which different programs made, and activations are stored before their ReLU:
whoever reads them adds up and cuts off (`activation`). A step is traffic of weights, so each kernel touches a weight
tile once: `move_and_forward` moves a layer along the step before and computes with it; `linear_backward` makes the
slope for the layer below and moves the weight in the same visit.

`step` counts from `counter[0]`; `sizes[step, client]` is the number of rows that count, 0 for a client
that has finished and must not move. Selections use `where`, never a product with zero: what a diverged
client holds stays its own.
"""

# mypy: ignore-errors
# The bodies below are Triton's language, not Python's: only its compiler can check them.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def moved(weight, gradient, velocity, mask, active, rate, momentum, decay, MOMENTUM: tl.constexpr):
    """`weight` after one step of SGD with momentum and weight decay; unchanged unless `active`."""
    direction = gradient + decay * weight
    if MOMENTUM:
        direction = momentum * tl.load(velocity, mask=mask, other=0.0) + direction
        tl.store(velocity, direction, mask=mask & active)
    return tl.where(active, weight - rate * direction, weight)


@triton.jit
def move_bias(gradient, bias, velocity, place, mask, active, rate, momentum, decay, MOMENTUM: tl.constexpr):
    """Move the entries of a bias at `place` and return them."""
    tile = tl.load(bias + place, mask=mask, other=0.0)
    tile = moved(tile, gradient, velocity + place, mask, active, rate, momentum, decay, MOMENTUM)
    tl.store(bias + place, tile, mask=mask)
    return tile


@triton.jit
def rounded(x):
    """`x` rounded to the 11 significant bits that tensor cores read of a float32; ties away from zero."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a b. With "tf32x3" a factor is split, x = high + low of 11 bits each, wrong by at most 2^-22 |x|:

        a b = low high + high low + high high,   the missing low low being at most 2^-22 |a b|.

    Tensor cores cut off where float32 rounds when they add, an error that grows with the length of a sum:
    so a tile's own sum begins at zero there, and is added to the total in float32 proper.
    """
    if PRECISION == "tf32x3":
        a_high = rounded(a)
        b_high = rounded(b)
        part = tl.dot(rounded(a - a_high), b_high, input_precision="tf32")
        part = tl.dot(a_high, rounded(b - b_high), part, input_precision="tf32")
        total += tl.dot(a_high, b_high, part, input_precision="tf32")
    elif PRECISION == "tf32":
        # Left to themselves tensor cores cut the bits off, always towards zero.
        total = tl.dot(rounded(a), rounded(b), total, input_precision="tf32")
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def unit_of(bound):
    """The power of two u with 2^13 <= bound / u < 2^14, at least 2^-110; NaN unless `bound` is finite."""
    exponent = tl.maximum((bound.to(tl.int32, bitcast=True) >> 23) & 0xFF, 30)
    unit = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent == 255, float("nan"), unit)


@triton.jit
def put_halves(x, unit, high, low_offset, mask, PAIRS: tl.constexpr):
    """Store x / unit as float16, high at `high` and with PAIRS the rest `low_offset` behind it.

    With |x| <= bound and unit = unit_of(bound) nothing overflows, and high + low differs from x / unit by at most
    max(2^-22 |x| / unit, 2^-25), the last being 2^-38 bound / unit: float16 has the 11 bits of TF32, and what
    is too small for it is far below what float32 keeps of a sum in which `bound` occurs.
    """
    # A power of two has only its exponent, and a quotient by bits is exact.
    inverse = (0x7F000000 - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    scaled = x * tl.where(unit == unit, inverse, unit)
    top = scaled.to(tl.float16)
    tl.store(high, top, mask=mask)
    if PAIRS:
        tl.store(high + low_offset, (scaled - top.to(tl.float32)).to(tl.float16), mask=mask)


@triton.jit
def product_of_halves(a_high, a_low, b_high, b_low, PAIRS: tl.constexpr):
    """a b of factors in float16 halves, up to low low (see `put_halves`); without PAIRS of the high halves alone.

    As in `product`, the sum of a tile begins at zero.
    """
    if PAIRS:
        part = tl.dot(a_low, b_high)
        part = tl.dot(a_high, b_low, part)
        part = tl.dot(a_high, b_high, part)
    else:
        part = tl.dot(a_high, b_high)
    return part


@triton.jit
def sum_of_parts(place, mask, stride, PARTS: tl.constexpr):
    """The sum of what lies at `place`, `place + stride` and so on, PARTS of them."""
    total = tl.load(place, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(place + part * stride, mask=mask, other=0.0)
    return total


@triton.jit
def activation(place, mask, stride, PARTS: tl.constexpr):
    """The ReLU of `sum_of_parts`. A NaN stays one: it is not below zero."""
    total = sum_of_parts(place, mask, stride, PARTS)
    return tl.where(total < 0.0, 0.0, total)


@triton.jit
def linear_forward(
    x, weight, bias, y, clients, rows, width, outs,
    X_PARTS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = relu(x) weight^T + bias, in one part; a program makes BLOCK_O outputs of one client."""
    client = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    b = tl.arange(0, BLOCK_B)
    k = tl.arange(0, BLOCK_K)
    weights = weight + client * outs * width + o[:, None] * width + k[None, :]
    inputs = x + client * rows * width + b[None, :] * width + k[:, None]
    total = tl.zeros([BLOCK_O, BLOCK_B], dtype=tl.float32)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        inside = start + k < width
        w_tile = tl.load(weights + start, mask=(o < outs)[:, None] & inside[None, :], other=0.0)
        x_mask = inside[:, None] & (b < rows)[None, :]
        x_tile = activation(inputs + start, x_mask, clients * rows * width, X_PARTS)
        total = product(w_tile, x_tile, total, PRECISION)
    total += tl.load(bias + client * outs + o, mask=o < outs, other=0.0)[:, None]
    target = y + (client * rows + b[None, :]) * outs + o[:, None]
    tl.store(target, total, mask=(o < outs)[:, None] & (b < rows)[None, :])


@triton.jit(do_not_specialize=["offset"])
def move_and_forward(
    x, table, sizes, counter, offset, weight, bias, velocity, bias_velocity, largest, dy, y,
    clients, rows, width, outs, rate, momentum, decay,
    GATHERED: tl.constexpr, NOTED: tl.constexpr, MOMENTUM: tl.constexpr, DY_PARTS: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Finish the step before (move the layer along `dy`), then y = x weight^T + bias for this step.

    Both need only the weight rows of a program's own outputs: one read and one write a step. A program has BLOCK_O
    outputs and SPAN of the inputs, and makes a part of y. With GATHERED x is all data, of which the table has the
    rows; else [2, clients, rows, width], even steps first. With NOTED the largest |weight| that each
    program moved goes to `largest` [clients, programs].
    """
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    step = tl.load(counter) + offset
    before = tl.maximum(step - 1, 0)
    active = (step > 0) & (tl.load(sizes + before * clients + client) > 0)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    b = tl.arange(0, BLOCK_B)
    k = tl.arange(0, BLOCK_K)
    real = b < rows
    if GATHERED:
        old_row = tl.load(table + (before * clients + client) * rows + b, mask=real, other=0).to(tl.int64)
        new_row = tl.load(table + (step * clients + client) * rows + b, mask=real, other=0).to(tl.int64)
    else:
        old_row = ((step + 1) % 2 * clients + client) * rows + b
        new_row = (step % 2 * clients + client) * rows + b
    dy_place = dy + (client * rows + b[None, :]) * outs + o[:, None]
    dy_mask = (o < outs)[:, None] & real[None, :]
    dy_tile = sum_of_parts(dy_place, dy_mask, clients * rows * outs, DY_PARTS)
    place = client * outs * width + (o[:, None] * width + k[None, :])
    total = tl.zeros([BLOCK_O, BLOCK_B], dtype=tl.float32)
    most = tl.zeros([BLOCK_O, BLOCK_K], dtype=tl.float32)
    for start in tl.range(part * SPAN, tl.minimum((part + 1) * SPAN, width), BLOCK_K, num_stages=STAGES):
        inside = start + k < width
        mask = (o < outs)[:, None] & inside[None, :]
        w_tile = tl.load(weight + place + start, mask=mask, other=0.0)
        new = tl.load(
            x + new_row[None, :] * width + start + k[:, None],
            mask=inside[:, None] & real[None, :], other=0.0,
        )  # fmt: skip
        old = tl.load(
            x + old_row[:, None] * width + start + k[None, :],
            mask=real[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        gradient = product(dy_tile, old, tl.zeros([BLOCK_O, BLOCK_K], dtype=tl.float32), PRECISION)
        w_tile = moved(
            w_tile, gradient, velocity + place + start, mask, active, rate, momentum, decay, MOMENTUM
        )
        tl.store(weight + place + start, w_tile, mask=mask)
        total = product(w_tile, new, total, PRECISION)
        if NOTED:
            most = tl.maximum(most, tl.abs(w_tile))
    if part == 0:
        b_tile = move_bias(
            tl.sum(dy_tile, axis=1), bias, bias_velocity, client * outs + o, o < outs, active,
            rate, momentum, decay, MOMENTUM,
        )  # fmt: skip
        total += b_tile[:, None]
    target = y + ((part * clients + client) * rows + b[None, :]) * outs + o[:, None]
    tl.store(target, total, mask=dy_mask)
    if NOTED:
        program = (client * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(2) + part
        tl.store(largest + program, tl.max(most))


@triton.jit(do_not_specialize=["offset"])
def output_layer(
    x, labels, table, sizes, counter, offset, weight, bias, velocity, bias_velocity, dx,
    clients, rows, width, classes, rate, momentum, decay,
    MOMENTUM: tl.constexpr, X_PARTS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits, the gradient of their mean cross-entropy, dx in one part, and the layer's move.

    One program for each client: all its classes fit into a tile. With n = sizes[step, client]

        slope = (softmax(relu(x) weight^T + bias) - onehot(label)) / n,   0 in rows from n on;
        dx = (slope weight) [x > 0].
    """
    client = tl.program_id(0).to(tl.int64)
    step = tl.load(counter) + offset
    size = tl.load(sizes + step * clients + client)
    b = tl.arange(0, BLOCK_B)
    c = tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    row = tl.load(table + (step * clients + client) * rows + b, mask=b < rows, other=0).to(tl.int64)
    label = tl.load(labels + row)
    b_place = client * classes + c
    b_tile = tl.load(bias + b_place, mask=c < classes, other=0.0)
    logits = tl.zeros([BLOCK_B, BLOCK_C], dtype=tl.float32) + b_tile[None, :]
    for start in range(0, width, BLOCK_K):
        inside = start + k < width
        x_place = (client * rows + b[:, None]) * width + start + k[None, :]
        x_mask = (b < rows)[:, None] & inside[None, :]
        x_tile = activation(x + x_place, x_mask, clients * rows * width, X_PARTS)
        w_tile = tl.load(
            weight + (client * classes + c[None, :]) * width + start + k[:, None],
            mask=inside[:, None] & (c < classes)[None, :], other=0.0,
        )  # fmt: skip
        logits = product(x_tile, w_tile, logits, PRECISION)
    logits = tl.where((c < classes)[None, :], logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    shares = powers / tl.sum(powers, axis=1)[:, None]
    slope = (shares - tl.where(label[:, None] == c[None, :], 1.0, 0.0)) / tl.maximum(size, 1)
    slope = tl.where((b < size)[:, None] & (c < classes)[None, :], slope, 0.0)
    active = size > 0
    for start in range(0, width, BLOCK_K):
        inside = start + k < width
        x_mask = (b < rows)[:, None] & inside[None, :]
        x_place = (client * rows + b[:, None]) * width + start + k[None, :]
        x_tile = activation(x + x_place, x_mask, clients * rows * width, X_PARTS)
        w_mask = (c < classes)[:, None] & inside[None, :]
        w_place = (client * classes + c[:, None]) * width + start + k[None, :]
        w_tile = tl.load(weight + w_place, mask=w_mask, other=0.0)
        below = product(slope, w_tile, tl.zeros([BLOCK_B, BLOCK_K], dtype=tl.float32), PRECISION)
        tl.store(dx + x_place, tl.where(x_tile > 0.0, below, 0.0), mask=x_mask)
        gradient = product(tl.trans(slope), x_tile, tl.zeros([BLOCK_C, BLOCK_K], dtype=tl.float32), PRECISION)
        w_tile = moved(w_tile, gradient, velocity + w_place, w_mask, active, rate, momentum, decay, MOMENTUM)
        tl.store(weight + w_place, w_tile, mask=w_mask)
    b_tile = moved(
        b_tile, tl.sum(slope, axis=0), bias_velocity + b_place, c < classes, active,
        rate, momentum, decay, MOMENTUM,
    )  # fmt: skip
    tl.store(bias + b_place, b_tile, mask=c < classes)


@triton.jit(do_not_specialize=["offset"])
def linear_backward(
    x, dy, sizes, counter, offset, weight, bias, velocity, bias_velocity, dx,
    clients, rows, width, outs, rate, momentum, decay,
    MOMENTUM: tl.constexpr, X_PARTS: tl.constexpr, DY_PARTS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx = (dy weight) [x > 0]; weight and bias move in the same visit.

    A program owns BLOCK_I columns and SPAN rows of one client's weight, so nobody else reads what it changes, and
    makes a part of dx.
    """
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    active = tl.load(sizes + (tl.load(counter) + offset) * clients + client) > 0
    block = tl.program_id(0)
    i = block * BLOCK_I + tl.arange(0, BLOCK_I)
    b = tl.arange(0, BLOCK_B)
    o = tl.arange(0, BLOCK_O)
    x_mask = (b < rows)[:, None] & (i < width)[None, :]
    x_place = (client * rows + b[:, None]) * width + i[None, :]
    x_tile = activation(x + x_place, x_mask, clients * rows * width, X_PARTS)
    below = tl.zeros([BLOCK_B, BLOCK_I], dtype=tl.float32)
    for start in range(part * SPAN, tl.minimum((part + 1) * SPAN, outs), BLOCK_O):
        inside = start + o < outs
        mask = inside[:, None] & (i < width)[None, :]
        place = (client * outs + start + o[:, None]) * width + i[None, :]
        w_tile = tl.load(weight + place, mask=mask, other=0.0)
        dy_place = dy + (client * rows + b[:, None]) * outs + start + o[None, :]
        dy_mask = (b < rows)[:, None] & inside[None, :]
        dy_tile = sum_of_parts(dy_place, dy_mask, clients * rows * outs, DY_PARTS)
        below = product(dy_tile, w_tile, below, PRECISION)
        gradient = product(
            tl.trans(dy_tile), x_tile, tl.zeros([BLOCK_O, BLOCK_I], dtype=tl.float32), PRECISION
        )
        w_tile = moved(w_tile, gradient, velocity + place, mask, active, rate, momentum, decay, MOMENTUM)
        tl.store(weight + place, w_tile, mask=mask)
        if block == 0:
            move_bias(
                tl.sum(dy_tile, axis=0), bias, bias_velocity, client * outs + start + o, inside, active,
                rate, momentum, decay, MOMENTUM,
            )  # fmt: skip
    target = dx + part * clients * rows * width + x_place
    tl.store(target, tl.where(x_tile > 0.0, below, 0.0), mask=x_mask)
