"""Triton kernels of the CNN's two 5x5 convolutions, each with its 2x2 max-pool and ReLU; all clients at once.

Convolutions are matrix products over patches that are never stored: a tile of patches is read from an
image with a border of two zeros. Activations are channels-last. While training, the weights live in
the order the products want them:

- first layer: [clients, PATCH, 32], row k the k-th entry of a patch (channel, then 5x5), row TAPS the bias
  (the patch's entry TAPS is 1), the rest unused;
- second layer: [clients, 25, 32, 64]: shift, input channel, output channel.

`which` tells, per pooled value, which of the four was the maximum (the first one, as in torch), 4 where
the ReLU is dead.

The products of the second convolution are the work of a step. Their factors (the first layer's outputs, the
weight, the slopes) are stored by whoever makes them as float16 halves of multiples of a unit (`put_halves`), so
that no tile is split twice: a power of two for each client's tensor, for the weight one for each shift. Units come
from bounds that hold whatever the values are, so nothing overflows and no step depends on an earlier one:

    first outputs   |y| <= max over channels of (sum |w|) max |image| + |bias|
    slopes          |dx| <= (sum |dy|) max |weight|, by the row with the largest sum
    weight          its own largest entry

`low_offset` is how far the low halves lie behind the high ones. PAIRS says whether there are any: without them a
product has the 11 bits of TF32.
"""

# mypy: ignore-errors
# The bodies below are Triton's language, not Python's: only its compiler can check them.

from __future__ import annotations

import triton
import triton.language as tl

from niss.learning.cuda.kernels import moved, product, product_of_halves, put_halves, unit_of


@triton.jit
def first_patches(
    data, image_start, y, x, k, mask, TAPS: tl.constexpr, PITCH: tl.constexpr, PLANE: tl.constexpr
):
    """Tile [positions, PATCH] of 5x5 patches at (y, x) of bordered images; entry TAPS is 1, later ones 0."""
    tap = (k // 25) * PLANE + (k % 25 // 5) * PITCH + k % 5
    place = image_start + y * PITCH + x
    patch = tl.load(data + place[:, None] + tap[None, :], mask=mask[:, None] & (k < TAPS)[None, :], other=0.0)
    return tl.where((k == TAPS)[None, :], 1.0, patch)


@triton.jit(do_not_specialize=["offset"])
def conv1_forward(
    data, brightest, table, counter, offset, weight, pooled, low_offset, units, which, clients, rows,
    TAPS: tl.constexpr, PATCH: tl.constexpr, PITCH: tl.constexpr, PLANE: tl.constexpr,
    IMAGE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_AREA: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """pooled = relu(maxpool(conv(data[table[step]]))) as halves of multiples of units[client], in images with a
    border of two; `brightest` has the largest |value| of each image of the data.

    A program makes BLOCK_P pooled positions of one client, all 32 channels, from the four patches of each pool. PITCH,
    PLANE and IMAGE are how far apart rows, channels and images of the bordered data lie; OUT_WIDTH and
    OUT_AREA are those of the pooled image. A NaN is a maximum, as in torch.
    """
    client = tl.program_id(1).to(tl.int64)
    step = tl.load(counter) + offset
    position = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    image = position // OUT_AREA
    y = position % OUT_AREA // OUT_WIDTH
    x = position % OUT_WIDTH
    real = image < rows
    row = tl.load(table + (step * clients + client) * rows + image, mask=real, other=0).to(tl.int64)
    k = tl.arange(0, PATCH)
    o = tl.arange(0, 32)
    w_tile = tl.load(weight + client * PATCH * 32 + k[:, None] * 32 + o[None, :])
    b = tl.arange(0, BLOCK_B)
    batch = tl.load(table + (step * clients + client) * rows + b, mask=b < rows, other=0).to(tl.int64)
    light = tl.max(tl.load(brightest + batch, mask=b < rows, other=0.0))
    bounds = tl.where((k < TAPS)[:, None], tl.abs(w_tile) * light, tl.abs(w_tile))
    unit = unit_of(tl.max(tl.sum(tl.where((k <= TAPS)[:, None], bounds, 0.0), axis=0)))
    tl.store(units + client, unit, mask=tl.program_id(0) == 0)
    best = tl.full([BLOCK_P, 32], float("-inf"), dtype=tl.float32)
    place = tl.zeros([BLOCK_P, 32], dtype=tl.int32)
    for q in tl.static_range(4):
        patch = first_patches(data, row * IMAGE, 2 * y + q // 2, 2 * x + q % 2, k, real, TAPS, PITCH, PLANE)
        value = product(patch, w_tile, tl.zeros([BLOCK_P, 32], dtype=tl.float32), PRECISION)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        place = tl.where(better, q, place)
    place = tl.where(best > 0.0, place, 4)
    best = tl.where(best < 0.0, 0.0, best)
    cell = client * rows + image
    out_pitch: tl.constexpr = OUT_WIDTH + 4
    out_plane: tl.constexpr = (OUT_AREA // OUT_WIDTH + 4) * out_pitch
    target = (cell * out_plane + (y + 2) * out_pitch + x + 2)[:, None] * 32 + o[None, :]
    put_halves(best, unit, pooled + target, low_offset, real[:, None], PAIRS)
    tl.store(
        which + (cell * OUT_AREA + position % OUT_AREA)[:, None] * 32 + o[None, :],
        place.to(tl.uint8),
        mask=real[:, None],
    )


@triton.jit(do_not_specialize=["offset"])
def conv2_forward(
    x, x_low, x_units, weight, weight_low, weight_units, bias, counter, offset, pooled, which, clients, rows,
    PITCH: tl.constexpr, PLANE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_AREA: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """pooled [step % 2, clients, rows, OUT_AREA, 64] = relu(maxpool(conv(x))); the other half is the last step's.

    A tile has the four values of a pool in a row. x is the bordered output of the first layer, PITCH its width and
    PLANE its area; x_low and weight_low are how far behind the low halves lie. A sum over 25 shifts of products
    [BLOCK_M, 32] x [32, 64]; STAGES of them are loaded ahead.
    """
    client = tl.program_id(1).to(tl.int64)
    value = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cell = value // 4
    image = cell // OUT_AREA
    y = 2 * (cell % OUT_AREA // OUT_WIDTH) + value % 4 // 2
    column = 2 * (cell % OUT_WIDTH) + value % 2
    c = tl.arange(0, 32)
    o = tl.arange(0, 64)
    spot = tl.where(image < rows, image, 0) * PLANE + y * PITCH + column
    source = x + client * rows * (PLANE * 32) + (spot[:, None] * 32 + c[None, :])
    weights = weight + client * (25 * 32 * 64) + (c[:, None] * 64 + o[None, :])
    total = tl.zeros([BLOCK_M, 64], dtype=tl.float32)
    for shift in tl.range(0, 25, num_stages=STAGES):
        place = ((shift // 5) * PITCH + shift % 5) * 32
        x_high = tl.load(source + place)
        w_high = tl.load(weights + shift * 2048)
        x_rest = tl.load(source + place + x_low) if PAIRS else x_high
        w_rest = tl.load(weights + shift * 2048 + weight_low) if PAIRS else w_high
        part = product_of_halves(x_high, x_rest, w_high, w_rest, PAIRS)
        total += part * tl.load(weight_units + client * 25 + shift)
    total = total * tl.load(x_units + client) + tl.load(bias + client * 64 + o)[None, :]
    best, place = tl.max(tl.reshape(total, [BLOCK_M // 4, 4, 64]), axis=1, return_indices=True)
    place = tl.where(best > 0.0, place, 4)
    best = tl.where(best < 0.0, 0.0, best)
    cells = tl.program_id(0) * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    target = (client * rows * OUT_AREA + cells)[:, None] * 64 + o[None, :]
    mask = (cells < rows * OUT_AREA)[:, None]
    parity = ((tl.load(counter) + offset) % 2).to(tl.int64)
    tl.store(pooled + parity * clients * rows * (OUT_AREA * 64) + target, best, mask=mask)
    tl.store(which + target, place.to(tl.uint8), mask=mask)


@triton.jit
def pooled_input_gradient(
    dy, weight, largest, which, grid_slope, low_offset, units, bias_parts, programs, rows, width, outs,
    BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr, LARGEST: tl.constexpr, STAGES: tl.constexpr,
    POOLED_WIDTH: tl.constexpr, PITCH: tl.constexpr, AREA: tl.constexpr,
    PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dy weight of the hidden layer, put where the maxima of its inputs were (`which`).

    A program makes the 64 channels of one pooled position. They go to `grid_slope` [clients, rows, AREA, 64], whose
    border of two stays zero, as halves of multiples of units[client]; their sum over the rows goes to
    `bias_parts`, for the bias of the convolution below. `largest` [clients, programs] bounds the weight.
    """
    client = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0)
    channel = tl.arange(0, 64)
    i = position * 64 + channel
    b = tl.arange(0, BLOCK_B)
    o = tl.arange(0, BLOCK_O)
    real = b < rows
    below = tl.zeros([BLOCK_B, 64], dtype=tl.float32)
    sums = tl.zeros([BLOCK_B, BLOCK_O], dtype=tl.float32)
    slopes = dy + client * rows * outs + (b[:, None] * outs + o[None, :])
    weights = weight + client * outs * width + (o[:, None] * width + i[None, :])
    for start in tl.range(0, outs, BLOCK_O, num_stages=STAGES):
        inside = start + o < outs
        dy_tile = tl.load(slopes + start, mask=real[:, None] & inside[None, :], other=0.0)
        w_tile = tl.load(weights + start * width, mask=inside[:, None], other=0.0)
        below = product(dy_tile, w_tile, below, PRECISION)
        sums += tl.abs(dy_tile)
    program = tl.arange(0, LARGEST)
    most = tl.max(tl.load(largest + client * programs + program, mask=program < programs, other=0.0))
    unit = unit_of(tl.max(tl.sum(sums, axis=1)) * most)
    tl.store(units + client, unit, mask=position == 0)
    x_place = (client * rows + b[:, None]) * width + i[None, :]
    place = tl.load(which + x_place, mask=real[:, None], other=4)
    top = 2 * (position // POOLED_WIDTH) + 2
    left = 2 * (position % POOLED_WIDTH) + 2
    for q in tl.static_range(4):
        spot = (top + q // 2) * PITCH + left + q % 2
        target = ((client * rows + b[:, None]) * AREA + spot) * 64 + channel[None, :]
        put_halves(
            tl.where(place == q, below, 0.0), unit, grid_slope + target, low_offset, real[:, None], PAIRS
        )
    tl.store(bias_parts + client * width + i, tl.sum(tl.where(place < 4, below, 0.0), axis=0))


@triton.jit
def conv2_input_gradient(
    grid_slope, slope_low, slope_units, weight, weight_low, weight_units, dx, rows,
    PITCH: tl.constexpr, PLANE: tl.constexpr, WIDTH: tl.constexpr, AREA: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """dx [clients, rows, AREA, 32] of the second convolution from the bordered slopes of its outputs.

    The convolution with the weight turned by 180 degrees: weight s meets the slope at shift 24 - s. The ReLU and
    the pool below are left to `conv1_gradient`, which knows where the maxima were.
    """
    client = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    image = position // AREA
    spot = (position % AREA // WIDTH) * PITCH + position % WIDTH + tl.where(image < rows, image, 0) * PLANE
    o = tl.arange(0, 64)
    c = tl.arange(0, 32)
    source = grid_slope + client * rows * (PLANE * 64) + (spot[:, None] * 64 + o[None, :])
    weights = weight + client * (25 * 32 * 64) + (c[:, None] * 64 + o[None, :])
    total = tl.zeros([BLOCK_M, 32], dtype=tl.float32)
    for shift in tl.range(0, 25, num_stages=STAGES):
        place = ((4 - shift // 5) * PITCH + 4 - shift % 5) * 64
        g_high = tl.load(source + place)
        w_high = tl.load(weights + shift * 2048)
        g_rest = tl.load(source + place + slope_low) if PAIRS else g_high
        w_rest = tl.load(weights + shift * 2048 + weight_low) if PAIRS else w_high
        part = product_of_halves(g_high, g_rest, tl.trans(w_high), tl.trans(w_rest), PAIRS)
        total += part * tl.load(weight_units + client * 25 + shift)
    target = (client * rows * AREA + position)[:, None] * 32 + c[None, :]
    tl.store(dx + target, total * tl.load(slope_units + client), mask=(image < rows)[:, None])


@triton.jit
def conv2_gradient(
    x, x_low, x_units, grid_slope, slope_low, slope_units, parts, rows,
    PITCH: tl.constexpr, PLANE: tl.constexpr, WIDTH: tl.constexpr, AREA: tl.constexpr,
    PARTS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """parts[client, part] = the gradient of the second convolution's weight from every PARTS-th tile of positions.

    A tile is LINES lines of 16 positions of an image. A program makes one line of five shifts: for a position their
    inputs are 5 x 32 numbers that follow each other, multiplied as 128 and 32 columns.
    """
    line = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    o = tl.arange(0, 64)
    four = tl.arange(0, 128)
    one = tl.arange(0, 32)
    row = tl.arange(0, 16 * LINES) // 16
    column = tl.arange(0, 16 * LINES) % 16
    spot = (row * PITCH + column)[:, None]
    g_place = grid_slope + client * rows * (PLANE * 64) + (2 * PITCH + 2) * 64 + (spot * 64 + o[None, :])
    x_place = x + client * rows * (PLANE * 32) + line * (PITCH * 32) + (spot * 32 + four[None, :])
    last_place = x + client * rows * (PLANE * 32) + line * (PITCH * 32) + (spot * 32 + 128 + one[None, :])
    across: tl.constexpr = (WIDTH + 15) // 16
    tiles: tl.constexpr = across * ((AREA // WIDTH + LINES - 1) // LINES)
    total4 = tl.zeros([64, 128], dtype=tl.float32)
    total1 = tl.zeros([64, 32], dtype=tl.float32)
    for tile in tl.range(part, rows * tiles, PARTS, num_stages=STAGES):
        top = tile % tiles // across * LINES
        left = tile % across * 16
        real = ((top + row < AREA // WIDTH) & (left + column < WIDTH))[:, None]
        start = tile // tiles * PLANE + top * PITCH + left
        g_high = tl.load(g_place + start * 64, mask=real, other=0.0)
        g_rest = tl.load(g_place + start * 64 + slope_low, mask=real, other=0.0) if PAIRS else g_high
        x_high = tl.load(x_place + start * 32, mask=real, other=0.0)
        x_rest = tl.load(x_place + start * 32 + x_low, mask=real, other=0.0) if PAIRS else x_high
        total4 += product_of_halves(tl.trans(g_high), tl.trans(g_rest), x_high, x_rest, PAIRS)
        x_high = tl.load(last_place + start * 32, mask=real, other=0.0)
        x_rest = tl.load(last_place + start * 32 + x_low, mask=real, other=0.0) if PAIRS else x_high
        total1 += product_of_halves(tl.trans(g_high), tl.trans(g_rest), x_high, x_rest, PAIRS)
    x_unit = tl.load(x_units + client)
    slope_unit = tl.load(slope_units + client)
    target = parts + ((client * PARTS + part) * 25 + line * 5) * 2048 + o[:, None]
    tl.store(target + four[None, :] * 64, total4 * slope_unit * x_unit)
    tl.store(target + (128 + one[None, :]) * 64, total1 * slope_unit * x_unit)


@triton.jit(do_not_specialize=["offset"])
def conv1_gradient(
    data, table, counter, offset, dx, which, parts, clients, rows,
    TAPS: tl.constexpr, PATCH: tl.constexpr, PITCH: tl.constexpr, PLANE: tl.constexpr,
    IMAGE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_AREA: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[client, program] = the gradient of the first convolution's weight and bias from SPAN pooled positions of
    one image, each with its patch at the place of its maximum."""
    client = tl.program_id(1).to(tl.int64)
    spans: tl.constexpr = (OUT_AREA + SPAN - 1) // SPAN
    image = tl.program_id(0) // spans
    first = tl.program_id(0) % spans * SPAN
    step = tl.load(counter) + offset
    row = tl.load(table + (step * clients + client) * rows + image).to(tl.int64)
    k = tl.arange(0, PATCH)
    o = tl.arange(0, 32)
    cell = client * rows + image
    total = tl.zeros([PATCH, 32], dtype=tl.float32)
    for start in range(first, tl.minimum(first + SPAN, OUT_AREA), BLOCK_P):
        position = start + tl.arange(0, BLOCK_P)
        real = position < OUT_AREA
        y = position // OUT_WIDTH
        x = position % OUT_WIDTH
        place = (cell * OUT_AREA + position)[:, None] * 32 + o[None, :]
        slope = tl.load(dx + place, mask=real[:, None], other=0.0)
        spot = tl.load(which + place, mask=real[:, None], other=4)
        for q in tl.static_range(4):
            patch = first_patches(
                data, row * IMAGE, 2 * y + q // 2, 2 * x + q % 2, k, real, TAPS, PITCH, PLANE
            )
            total = product(tl.trans(patch), tl.where(spot == q, slope, 0.0), total, PRECISION)
    part = client * rows * spans + tl.program_id(0)
    tl.store(parts + part * PATCH * 32 + k[:, None] * 32 + o[None, :], total)


@triton.jit(do_not_specialize=["offset"])
def sum_and_move(
    parts, sizes, counter, offset, weight, velocity, halves, low_offset, units,
    clients, count, size, rate, momentum, decay,
    COUNT: tl.constexpr, BLOCK_E: tl.constexpr, MOMENTUM: tl.constexpr,
    HALVES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Sum the `count` parts of a gradient, in a fixed order, and move the weight [clients, size] along it.

    COUNT is the power of two that holds `count`; a program moves BLOCK_E entries of one client. With HALVES it
    stores them as `halves` too, multiples of a unit of their own in `units` [clients, programs].
    """
    client = tl.program_id(1).to(tl.int64)
    active = tl.load(sizes + (tl.load(counter) + offset) * clients + client) > 0
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = e < size
    part = tl.arange(0, COUNT)
    tile = tl.load(
        parts + (client * count + part[:, None]) * size + e[None, :],
        mask=(part < count)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    gradient = tl.sum(tile, axis=0)
    place = client * size + e
    tile = tl.load(weight + place, mask=inside, other=0.0)
    tile = moved(tile, gradient, velocity + place, inside, active, rate, momentum, decay, MOMENTUM)
    tl.store(weight + place, tile, mask=inside)
    if HALVES:
        unit = unit_of(tl.max(tl.abs(tile)))
        tl.store(units + client * tl.num_programs(0) + tl.program_id(0), unit)
        put_halves(tile, unit, halves + place, low_offset, inside, PAIRS)
