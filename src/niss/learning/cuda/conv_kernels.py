"""Triton kernels of the CNN's two 5x5 convolutions, each with its 2x2 max-pool and ReLU; all clients at once.

Convolutions are matrix products over patches that are never stored: a tile of patches is read from an
image with a border of two zeros. Activations are channels-last. While training, the weights live in
the order the products want them:

- first layer: [clients, PATCH, 32], row k the k-th entry of a patch (channel, then 5x5), row TAPS the bias
  (the patch's entry TAPS is 1), the rest unused;
- second layer: [clients, 25, 32, 64]: shift, input channel, output channel.

`which` tells, per pooled value, which of the four was the maximum (the first one, as in torch), 4 where
the ReLU is dead.
"""

# mypy: ignore-errors
# The bodies below are Triton's language, not Python's: only its compiler can check them.

from __future__ import annotations

import triton
import triton.language as tl

from niss.learning.cuda.kernels import moved, product


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
    data, table, counter, offset, weight, pooled, which, clients, rows,
    TAPS: tl.constexpr, PATCH: tl.constexpr, PITCH: tl.constexpr, PLANE: tl.constexpr,
    IMAGE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_AREA: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """pooled = relu(maxpool(conv(data[table[step]]))) into images with a border of two.

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
    tl.store(pooled + target, best, mask=real[:, None])
    tl.store(
        which + (cell * OUT_AREA + position % OUT_AREA)[:, None] * 32 + o[None, :],
        place.to(tl.uint8),
        mask=real[:, None],
    )


@triton.jit
def conv2_forward(
    x, weight, bias, pooled, which, rows,
    PITCH: tl.constexpr, PLANE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_AREA: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """pooled [clients, rows, OUT_AREA, 64] = relu(maxpool(conv(x))); a tile has the four values of a pool in a row.

    x is the bordered output of the first layer, PITCH its width and PLANE its area. A sum over 25 shifts of products
    [BLOCK_M, 32] x [32, 64]; STAGES of them are loaded ahead.
    """
    client = tl.program_id(1).to(tl.int64)
    value = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cell = value // 4
    image = cell // OUT_AREA
    y = 2 * (cell % OUT_AREA // OUT_WIDTH) + value % 4 // 2
    column = 2 * (cell % OUT_WIDTH) + value % 2
    source = x + (client * rows + tl.where(image < rows, image, 0))[:, None] * (PLANE * 32)
    c = tl.arange(0, 32)
    o = tl.arange(0, 64)
    source += (y * PITCH + column)[:, None] * 32 + c[None, :]
    weights = weight + client * (25 * 32 * 64) + c[:, None] * 64 + o[None, :]
    total = tl.zeros([BLOCK_M, 64], dtype=tl.float32)
    for shift in tl.range(0, 25, num_stages=STAGES):
        x_tile = tl.load(source + ((shift // 5) * PITCH + shift % 5) * 32)
        w_tile = tl.load(weights + shift * 2048)
        total = product(x_tile, w_tile, total, PRECISION)
    total += tl.load(bias + client * 64 + o)[None, :]
    best, place = tl.max(tl.reshape(total, [BLOCK_M // 4, 4, 64]), axis=1, return_indices=True)
    place = tl.where(best > 0.0, place, 4)
    best = tl.where(best < 0.0, 0.0, best)
    cells = tl.program_id(0) * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)
    target = (client * rows * OUT_AREA + cells)[:, None] * 64 + o[None, :]
    mask = (cells < rows * OUT_AREA)[:, None]
    tl.store(pooled + target, best, mask=mask)
    tl.store(which + target, place.to(tl.uint8), mask=mask)


@triton.jit
def conv2_input_gradient(
    grid_gradient, weight, dx, rows,
    PITCH: tl.constexpr, PLANE: tl.constexpr, WIDTH: tl.constexpr, AREA: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx [clients, rows, AREA, 32] of the second convolution from the bordered gradient of its outputs.

    The convolution with the weight turned by 180 degrees: weight s meets the gradient at shift 24 - s. The ReLU and
    the pool below are left to `conv1_gradient`, which knows where the maxima were.
    """
    client = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    image = position // AREA
    spot = (position % AREA // WIDTH) * PITCH + position % WIDTH
    o = tl.arange(0, 64)
    c = tl.arange(0, 32)
    source = grid_gradient + (client * rows + tl.where(image < rows, image, 0))[:, None] * (PLANE * 64)
    source += spot[:, None] * 64 + o[None, :]
    weights = weight + client * (25 * 32 * 64) + c[None, :] * 64 + o[:, None]
    total = tl.zeros([BLOCK_M, 32], dtype=tl.float32)
    for shift in tl.range(0, 25, num_stages=STAGES):
        g_tile = tl.load(source + ((4 - shift // 5) * PITCH + 4 - shift % 5) * 64)
        w_tile = tl.load(weights + shift * 2048)
        total = product(g_tile, w_tile, total, PRECISION)
    target = (client * rows * AREA + position)[:, None] * 32 + c[None, :]
    tl.store(dx + target, total, mask=(image < rows)[:, None])


@triton.jit
def conv2_gradient(
    x, grid_gradient, parts, rows,
    PITCH: tl.constexpr, PLANE: tl.constexpr, WIDTH: tl.constexpr, AREA: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[client, part] = the gradient of the second convolution's weight from every PARTS-th block of positions.

    A program makes one row of five shifts, which share the gradient's tile.
    """
    line = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    c = tl.arange(0, 32)
    o = tl.arange(0, 64)
    k = tl.arange(0, BLOCK_K)
    inputs = x + client * rows * (PLANE * 32) + line * (PITCH * 32) + c[:, None]
    slopes = grid_gradient + client * rows * (PLANE * 64) + (2 * PITCH + 2) * 64 + o[None, :]
    total0 = tl.zeros([32, 64], dtype=tl.float32)
    total1 = tl.zeros([32, 64], dtype=tl.float32)
    total2 = tl.zeros([32, 64], dtype=tl.float32)
    total3 = tl.zeros([32, 64], dtype=tl.float32)
    total4 = tl.zeros([32, 64], dtype=tl.float32)
    for start in tl.range(part * BLOCK_K, rows * AREA, PARTS * BLOCK_K, num_stages=STAGES):
        position = start + k
        real = (position < rows * AREA)[:, None]
        spot = ((position // AREA) * PLANE + (position % AREA // WIDTH) * PITCH + position % WIDTH)[:, None]
        g_tile = tl.load(slopes + spot * 64, mask=real, other=0.0)
        turned = tl.trans(spot) * 32
        x_tile = tl.load(inputs + turned, mask=tl.trans(real), other=0.0)
        total0 = product(x_tile, g_tile, total0, PRECISION)
        x_tile = tl.load(inputs + turned + 32, mask=tl.trans(real), other=0.0)
        total1 = product(x_tile, g_tile, total1, PRECISION)
        x_tile = tl.load(inputs + turned + 64, mask=tl.trans(real), other=0.0)
        total2 = product(x_tile, g_tile, total2, PRECISION)
        x_tile = tl.load(inputs + turned + 96, mask=tl.trans(real), other=0.0)
        total3 = product(x_tile, g_tile, total3, PRECISION)
        x_tile = tl.load(inputs + turned + 128, mask=tl.trans(real), other=0.0)
        total4 = product(x_tile, g_tile, total4, PRECISION)
    target = parts + (client * PARTS + part) * (25 * 32 * 64) + line * (5 * 32 * 64)
    target += c[:, None] * 64 + o[None, :]
    tl.store(target, total0)
    tl.store(target + 2048, total1)
    tl.store(target + 4096, total2)
    tl.store(target + 6144, total3)
    tl.store(target + 8192, total4)


@triton.jit(do_not_specialize=["offset"])
def conv1_gradient(
    data, table, counter, offset, dx, which, parts, clients, rows,
    TAPS: tl.constexpr, PATCH: tl.constexpr, PITCH: tl.constexpr, PLANE: tl.constexpr,
    IMAGE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_AREA: tl.constexpr,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[client, 4 row + q] = the gradient of the first convolution's weight and bias from one image,
    for the maxima at place q of their pools."""
    client = tl.program_id(1).to(tl.int64)
    image = tl.program_id(0) // 4
    q = tl.program_id(0) % 4
    step = tl.load(counter) + offset
    row = tl.load(table + (step * clients + client) * rows + image).to(tl.int64)
    k = tl.arange(0, PATCH)
    o = tl.arange(0, 32)
    cell = client * rows + image
    total = tl.zeros([PATCH, 32], dtype=tl.float32)
    for start in range(0, OUT_AREA, BLOCK_P):
        position = start + tl.arange(0, BLOCK_P)
        real = position < OUT_AREA
        y = position // OUT_WIDTH
        x = position % OUT_WIDTH
        place = (cell * OUT_AREA + position)[:, None] * 32 + o[None, :]
        slope = tl.load(dx + place, mask=real[:, None], other=0.0)
        spot = tl.load(which + place, mask=real[:, None], other=4)
        patch = first_patches(data, row * IMAGE, 2 * y + q // 2, 2 * x + q % 2, k, real, TAPS, PITCH, PLANE)
        routed = tl.where(spot == q, slope, 0.0)
        total = product(tl.trans(patch), routed, total, PRECISION)
    tl.store(parts + (4 * cell + q) * PATCH * 32 + k[:, None] * 32 + o[None, :], total)


@triton.jit(do_not_specialize=["offset"])
def sum_and_move(
    parts, sizes, counter, offset, weight, velocity, clients, count, size, rate, momentum, decay,
    COUNT: tl.constexpr, BLOCK_E: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """Sum the `count` parts of a gradient, in a fixed order, and move the weight [clients, size] along it.

    COUNT is the power of two that holds `count`; a program moves BLOCK_E entries of one client.
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
