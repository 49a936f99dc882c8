"""The CNN of a whole cohort in fused Triton kernels: eleven launches a step.

Forward: both convolutions with pool and ReLU, the hidden layer, which moves along the step before, the output layer
with its loss and its move. Backward: the slope in the hidden layer's inputs, put back where the maxima of the second
pool were; the gradients of both convolutions, in parts that are summed in a fixed order, so that runs repeat to the
bit; and their moves.

The hidden layer is memory, nine tenths of the weights: it is read twice and written once a step. The convolutions are
arithmetic; the gradient of the second one's weight is made on a side stream, beside that of its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from niss.learning.cohort import Problem
from niss.learning.cuda import conv_kernels as kernels
from niss.learning.cuda.mlp import MOST_CLASSES, Layer, LinearSteps, block
from niss.learning.cuda.program import DeviceTable, Steps
from niss.learning.local import LocalTraining
from niss.learning.models import Cnn

# Side and area of a convolution's kernel, and the channels of the two layers: the kernels are written for these.
_KERNEL, _TAPS, _FIRST, _SECOND = 5, 25, 32, 64
# Programs that share the gradient of the second convolution's weight; their parts are summed in a fixed order.
_PARTS = 4
# How many times brighter the brightest image may be than the darkest one that is not black.
_SPREAD = 1024.0
# Images of a batch in an evaluation.
_EVALUATED = 50
# Extents of tiles, warps and stages of each launch; of the second convolution for halves in pairs, and alone.
_HIDDEN = {"parts": 2, "BLOCK_O": 32, "BLOCK_K": 64, "STAGES": 2, "num_warps": 2}
_HIDDEN_SLOPE = {"BLOCK_O": 32, "STAGES": 3, "num_warps": 2}
_OUTPUT = {"BLOCK_K": 128, "num_warps": 4}
_CONV1_FORWARD = {"BLOCK_P": 64, "num_warps": 4}
_CONV1_GRADIENT = {"SPAN": 64, "BLOCK_P": 16, "num_warps": 1, "num_stages": 1}
_CONV2_FORWARD = {
    True: {"BLOCK_M": 64, "STAGES": 3, "num_warps": 4},
    False: {"BLOCK_M": 128, "STAGES": 3, "num_warps": 8},
}
_CONV2_SLOPE = {
    True: {"BLOCK_M": 128, "STAGES": 2, "num_warps": 4},
    False: {"BLOCK_M": 256, "STAGES": 3, "num_warps": 8},
}
_CONV2_GRADIENT = {"LINES": 2, "STAGES": 3, "num_warps": 4}


def _largest_of_each(tensor: Tensor) -> Tensor:
    """The largest |value| of every entry of the first dimension, without a copy of `tensor`."""
    lowest, highest = tensor.flatten(1).aminmax(dim=1)
    return torch.maximum(-lowest, highest)


def of_like_brightness(images: Tensor) -> bool:
    """Whether the images can share a unit: their largest values are finite and at most `_SPREAD` times apart.

    Halves keep what is 2^-38 of a bound for the brightest image of a batch (`put_halves`): with the spread 2^-28 of
    each image's own.
    """
    brightest = _largest_of_each(images)
    lit = brightest[brightest > 0.0]
    highest = brightest.max()
    return bool(highest.isfinite()) and (not len(lit) or bool(highest <= _SPREAD * lit.min()))


class _Halves:
    """A tensor of every client as float16 halves of multiples of units, which the kernels write.

    values  [1 or 2, clients, ...]: the high halves, then, if `pairs`, the low ones
    units   [clients, units of each]
    """

    def __init__(self, *shape: int, units: int, pairs: bool, device: torch.device) -> None:
        self.values = torch.zeros((2 if pairs else 1, *shape), dtype=torch.float16, device=device)
        self.units = torch.zeros((shape[0], units), device=device)

    def arguments(self) -> tuple[Tensor, int, Tensor]:
        """Values, how far behind the low halves lie, units: what the kernels take."""
        return self.values, self.values[0].numel(), self.units


class Convolutions:
    """The two convolutions of every client, each with its pool and ReLU, forward.

    inputs  all images, which `shared`'s table of batches points into

    With heights and widths halved by each pool: pooled1 [clients, rows, (h/2 + 4) (w/2 + 4), 32] has a border
    of two zeros, so that the next convolution needs no mask; pooled2 is [2, clients, rows, h/4 w/4, 64], of
    even and odd steps; which1 and which2 say where each maximum was. The weights are kept in the order of the kernels,
    as `conv_kernels` says; halves2 are the halves of the second one, and pooled1 has halves too.
    """

    def __init__(self, inputs: Tensor, shared: LinearSteps, *, beside: Convolutions | None = None) -> None:
        """`beside` are those of other clients on the same inputs: what is made of these is shared."""
        self._shared, self._device = shared, inputs.device
        _, self._channels, height, width = inputs.shape
        self._pairs = shared.precision != "tf32"
        if beside is None:
            self._data = functional.pad(inputs, (2, 2, 2, 2)).contiguous()
            self._brightest = _largest_of_each(inputs)
        else:
            self._data, self._brightest = beside._data, beside._brightest
        self._half, self._quarter = (height // 2, width // 2), (height // 4, width // 4)
        self._taps = self._channels * _TAPS
        self._patch = block(self._taps + 1, 32)
        self._bordered = (self._half[0] + 4) * (self._half[1] + 4)
        area_1, area_2 = (rows * columns for rows, columns in (self._half, self._quarter))
        self._conv1 = self._zeros(self._patch, _FIRST)
        self._conv2, self._bias2 = self._zeros(_TAPS, _FIRST, _SECOND), self._zeros(_SECOND)
        moving = shared.momentum
        self._conv1_velocity = torch.zeros_like(self._conv1) if moving else self._conv1
        self._conv2_velocity = torch.zeros_like(self._conv2) if moving else self._conv2
        self._bias2_velocity = torch.zeros_like(self._bias2) if moving else self._bias2
        self._halves2 = self._halves(_TAPS, _FIRST, _SECOND, units=_TAPS)
        self._parts2 = self._zeros(_PARTS, _TAPS, _FIRST, _SECOND)
        rows = shared.rows
        # Borders of two are zero from here on: the kernels write inside them alone.
        self._pooled1 = self._halves(rows, self._bordered, _FIRST)
        self._which1 = self._zeros(rows, area_1, _FIRST, dtype=torch.uint8)
        self._pooled2 = torch.zeros((2, shared.clients, rows, area_2 * _SECOND), device=self._device)
        self._which2 = self._zeros(rows, area_2, _SECOND, dtype=torch.uint8)

    def pooled(self, images: Tensor, *weights: Tensor) -> Tensor:
        """Outputs [len(images), positions x channels] for one model's weights and biases of both convolutions,
        with `images` in place of the first ones of the data."""
        count = len(images)
        self._data[:count, :, 2:-2, 2:-2].copy_(images)
        self._brightest.zero_()
        self._brightest[:count].copy_(_largest_of_each(images))
        first, first_bias, second, second_bias = (
            weight.detach().expand(self._shared.clients, *weight.shape) for weight in weights
        )
        self._load_convolutions(first, first_bias, second, second_bias)
        self._convolutions_forward(0)
        return self._pooled2[0].flatten(0, 1)[:count]

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((self._shared.clients, *shape), dtype=dtype, device=self._device)

    def _halves(self, *shape: int, units: int = 1) -> _Halves:
        return _Halves(self._shared.clients, *shape, units=units, pairs=self._pairs, device=self._device)

    def _load_convolutions(
        self, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor
    ) -> None:
        """From the order of the layout, [clients, ...], into that of the kernels; row `taps` of a first patch is
        its bias. While no step is written: nobody moves, and the halves of the second weight are made."""
        self._conv1.zero_()
        self._conv1[:, : self._taps].copy_(first.flatten(2).transpose(1, 2))
        self._conv1[:, self._taps].copy_(first_bias)
        self._conv2.copy_(second.flatten(3).permute(0, 3, 2, 1))
        self._bias2.copy_(second_bias)
        if self._shared.momentum:
            for velocity in (self._conv1_velocity, self._conv2_velocity, self._bias2_velocity):
                velocity.zero_()
        self._move(self._parts2, self._conv2, self._conv2_velocity, 0, halves=self._halves2)

    def _first_geometry(self) -> dict[str, int]:
        """The constants of the kernels of the first convolution: its patches, and images with their borders."""
        pitch = 2 * self._half[1] + 4
        plane = pitch * (2 * self._half[0] + 4)
        return {
            "TAPS": self._taps, "PATCH": self._patch, "PITCH": pitch, "PLANE": plane,
            "IMAGE": self._channels * plane,
            "OUT_WIDTH": self._half[1], "OUT_AREA": self._half[0] * self._half[1],
        }  # fmt: skip

    def _convolutions_forward(self, offset: int) -> None:
        """From the images of the step to pooled2, and where the maxima were."""
        shared, table = self._shared, self._shared.table
        clients, rows = shared.clients, shared.rows
        area_1, area_2 = self._half[0] * self._half[1], self._quarter[0] * self._quarter[1]
        block_p, block_m = _CONV1_FORWARD["BLOCK_P"], _CONV2_FORWARD[self._pairs]["BLOCK_M"]
        kernels.conv1_forward[(-(-rows * area_1 // block_p), clients)](
            self._data, self._brightest, table.rows, table.counter, offset, self._conv1,
            *self._pooled1.arguments(), self._which1, clients, rows, **self._first_geometry(),
            BLOCK_B=shared.block_b, PAIRS=self._pairs, PRECISION=shared.precision, **_CONV1_FORWARD,
        )  # fmt: skip
        pitch = self._half[1] + 4
        kernels.conv2_forward[(-(-rows * area_2 * 4 // block_m), clients)](
            *self._pooled1.arguments(), *self._halves2.arguments(), self._bias2, table.counter, offset,
            self._pooled2, self._which2, clients, rows,
            PITCH=pitch, PLANE=pitch * (self._half[0] + 4), OUT_WIDTH=self._quarter[1], OUT_AREA=area_2,
            PAIRS=self._pairs, **_CONV2_FORWARD[self._pairs],
        )  # fmt: skip

    def _move(
        self, parts: Tensor, weight: Tensor, velocity: Tensor, offset: int, halves: _Halves | None = None
    ) -> None:
        """Sum the `parts` [clients, count, ...] of a gradient and move `weight` [clients, ...] along it; `halves`
        follow it where they are given, with a unit for each program."""
        shared, table = self._shared, self._shared.table
        size = weight[0].numel()
        count = parts[0].numel() // size
        block_e = size // halves.units.shape[1] if halves else max(64, 4096 // block(count, 1))
        kernels.sum_and_move[(-(-size // block_e), shared.clients)](
            parts, table.sizes, table.counter, offset, weight, velocity,
            *(halves.arguments() if halves else (weight, 0, weight)),
            shared.clients, count, size, *shared.rule,
            COUNT=block(count, 1), BLOCK_E=block_e, MOMENTUM=shared.momentum,
            HALVES=halves is not None, PAIRS=self._pairs,
        )  # fmt: skip


class CnnSteps(Convolutions, Steps):
    """`Steps` of many CNNs: two 5x5 convolutions, each with pool and ReLU, a hidden layer and an output layer.

    The move of the hidden layer is made together with the next step's forward pass, so `finish` owes it.

    Between `load` and `read` the hidden layer's columns are ordered by position, then channel.
    """

    lanes: ClassVar[int] = 4
    """They fill each other's gaps: 0.90 of the time of one lane on an H200."""

    def __init__(
        self,
        problem: Problem,
        table: DeviceTable,
        settings: LocalTraining,
        *,
        precision: str,
        beside: CnnSteps | None = None,
    ) -> None:
        """For a `Cnn` as built; `precision` is that of the kernels' `product`, `beside` another lane.

        grid_slope are the halves of the bordered slope in the second convolution's outputs; parts1, parts2 and
        bias_parts2 are the parts of gradients.
        """
        self.table, self._layout = table, problem.layout
        shared = LinearSteps(table, problem.labels, settings, precision)
        super().__init__(problem.inputs, shared, beside=beside)
        clients, rows, device = self._shared.clients, self._shared.rows, self._device
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        area_1, area_2 = (rows_ * columns for rows_, columns in (self._half, self._quarter))
        hidden, classes = self._layout.shapes[4][0], self._layout.shapes[6][0]
        moving = self._shared.momentum
        self._hidden = Layer.of(clients, hidden, area_2 * _SECOND, momentum=moving, device=device)
        self._output = Layer.of(clients, classes, hidden, momentum=moving, device=device)
        self._largest = self._zeros(-(-hidden // _HIDDEN["BLOCK_O"]) * _HIDDEN["parts"])
        self._value3 = torch.zeros((_HIDDEN["parts"], clients, rows, hidden), device=device)
        self._slope3 = torch.zeros((1, clients, rows, hidden), device=device)
        self._grid_slope = self._halves(rows, self._bordered, _SECOND)
        self._slope1 = self._zeros(rows, area_1, _FIRST)
        self._parts1 = self._zeros(rows * -(-area_1 // _CONV1_GRADIENT["SPAN"]), self._patch, _FIRST)
        self._bias_parts2 = self._zeros(area_2, _SECOND)

    @classmethod
    def abreast(
        cls, problem: Problem, tables: Sequence[DeviceTable], settings: LocalTraining, *, precision: str
    ) -> list[CnnSteps]:
        """The steps of every lane, by its table; the images are there once."""
        lanes: list[CnnSteps] = []
        for table in tables:
            beside = lanes[0] if lanes else None
            lanes.append(cls(problem, table, settings, precision=precision, beside=beside))
        return lanes

    @staticmethod
    def fit(problem: Problem) -> bool:
        """Whether the tiles of the kernels hold this `Cnn` as built, and their halves its images."""
        _, channels, height, width = problem.inputs.shape
        classes = problem.layout.shapes[-1][0]
        fits = channels <= 4 and height % 4 == 0 and width % 4 == 0 and classes <= MOST_CLASSES
        return fits and of_like_brightness(problem.inputs)

    def load(self, starts: Tensor) -> None:
        """From the order of the layout into that of the kernels."""
        stack = starts.expand(self._shared.clients, -1)
        *convolutions, hidden, hidden_bias, output, output_bias = self._layout.split(stack).values()
        self._load_convolutions(*convolutions)
        by_position = hidden.reshape(*hidden.shape[:2], _SECOND, -1).transpose(2, 3)
        self._hidden.weight.view(by_position.shape).copy_(by_position)
        self._hidden.bias.copy_(hidden_bias)
        self._output.weight.copy_(output)
        self._output.bias.copy_(output_bias)
        self._hidden.rest()
        self._output.rest()

    def read(self) -> Tensor:
        """Back into the order of the layout."""
        weight = self._hidden.weight
        by_channel = weight.view(*weight.shape[:2], -1, _SECOND).transpose(2, 3)
        pieces = (
            self._conv1[:, : self._taps].transpose(1, 2), self._conv1[:, self._taps],
            self._conv2.permute(0, 3, 2, 1), self._bias2,
            by_channel, self._hidden.bias, self._output.weight, self._output.bias,
        )  # fmt: skip
        return torch.cat([piece.flatten(1) for piece in pieces], dim=1)

    def enqueue(self, offset: int) -> None:
        self._convolutions_forward(offset)
        self._hidden_forward(offset)
        self._shared.output(self._output, self._value3, self._slope3, offset, **_OUTPUT)
        self._hidden_slope()
        self._convolutions_backward(offset)
        self._join()

    def finish(self) -> None:
        self._hidden_forward(0)

    def _hidden_forward(self, offset: int) -> None:
        """Move the hidden layer along the step before, where it is owed, then its outputs for this step."""
        self._shared.move_and_forward(
            self._hidden, self._pooled2, self._slope3, self._value3, self._largest, offset, **_HIDDEN
        )

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Launch on the side stream, after all launches so far, what may run beside those that follow."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def _hidden_slope(self) -> None:
        """From the slope in the hidden layer's outputs to that in the second convolution's."""
        shared = self._shared
        _, outs, width = self._hidden.weight.shape
        programs = self._largest.shape[1]
        pitch = self._half[1] + 4
        kernels.pooled_input_gradient[(width // _SECOND, shared.clients)](
            self._slope3, self._hidden.weight, self._largest, self._which2, *self._grid_slope.arguments(),
            self._bias_parts2, programs, shared.rows, width, outs,
            BLOCK_B=shared.block_b, LARGEST=block(programs, 1), POOLED_WIDTH=self._quarter[1],
            PITCH=pitch, AREA=pitch * (self._half[0] + 4), PAIRS=self._pairs, PRECISION=shared.precision,
            **_HIDDEN_SLOPE,
        )  # fmt: skip

    def _convolutions_backward(self, offset: int) -> None:
        """From the slope in the second convolution's outputs to the moves of both convolutions."""
        shared, table = self._shared, self._shared.table
        clients, rows = shared.clients, shared.rows
        area_1 = self._half[0] * self._half[1]
        pitch = self._half[1] + 4
        grid = {"PITCH": pitch, "PLANE": pitch * (self._half[0] + 4), "WIDTH": self._half[1], "AREA": area_1}
        block_m = _CONV2_SLOPE[self._pairs]["BLOCK_M"]
        # Neither of the two large products fills the device alone.
        with self._beside():
            kernels.conv2_gradient[(_KERNEL, clients, _PARTS)](
                *self._pooled1.arguments(), *self._grid_slope.arguments(), self._parts2, rows, **grid,
                PARTS=_PARTS, PAIRS=self._pairs, **_CONV2_GRADIENT,
            )  # fmt: skip
            self._move(self._bias_parts2, self._bias2, self._bias2_velocity, offset)
        kernels.conv2_input_gradient[(-(-rows * area_1 // block_m), clients)](
            *self._grid_slope.arguments(), *self._halves2.arguments(), self._slope1, rows, **grid,
            PAIRS=self._pairs, **_CONV2_SLOPE[self._pairs],
        )  # fmt: skip
        # The weight moves once both products are done: one reads it, the other makes its gradient.
        with self._beside():
            self._move(self._parts2, self._conv2, self._conv2_velocity, offset, halves=self._halves2)
        kernels.conv1_gradient[(self._parts1.shape[1], clients)](
            self._data, table.rows, table.counter, offset, self._slope1, self._which1, self._parts1,
            clients, rows, **self._first_geometry(), PRECISION=shared.precision, **_CONV1_GRADIENT,
        )  # fmt: skip
        self._move(self._parts1, self._conv1, self._conv1_velocity, offset)


class CnnForward(nn.Module):
    """The logits of a `Cnn` as built, for many images at once: its convolutions by the kernels of the training.

    module  the CNN whose weights are used, as they are at each call

    Images are dealt to as many copies of the convolutions as make batches of `_EVALUATED`.
    """

    def __init__(self, module: Cnn, images: Tensor, *, precision: str) -> None:
        """For at most as many images of the kind of `images` as these."""
        super().__init__()
        self._module = module
        clients = -(-len(images) // _EVALUATED)
        table = DeviceTable(1, clients, _EVALUATED, images.device)
        places = torch.arange(clients * _EVALUATED, dtype=torch.int32, device=images.device)
        table.rows.copy_(places.view(1, clients, -1))
        room = torch.zeros((clients * _EVALUATED, *images.shape[1:]), device=images.device)
        self._convolutions = Convolutions(room, LinearSteps(table, places, LocalTraining(), precision))

    def forward(self, images: Tensor) -> Tensor:
        *convolutions, hidden, hidden_bias, output, output_bias = self._module.parameters()
        pooled = self._convolutions.pooled(images, *convolutions)
        by_position = hidden.view(len(hidden), _SECOND, -1).transpose(1, 2).flatten(1)
        values = functional.linear(pooled, by_position, hidden_bias).relu()
        return functional.linear(values, output, output_bias)
