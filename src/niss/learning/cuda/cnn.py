"""The CNN of a whole cohort in fused Triton kernels: eleven launches a step.

Forward: both convolutions with pool and ReLU, the hidden layer, the output layer with its loss and its move.
Backward: the hidden layer with its move, which also puts the slope back where the maxima of the second pool were;
the gradients of both convolutions, in parts that are summed in a fixed order, so that runs repeat to the bit; and
the moves of their weights. The gradient of the second convolution's weight runs beside that of its input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from niss.learning.cohort import Problem
from niss.learning.cuda import conv_kernels as kernels
from niss.learning.cuda.mlp import MOST_CLASSES, Layer, LinearSteps, block
from niss.learning.cuda.program import DeviceTable, Steps, stacked_views
from niss.learning.local import LocalTraining

# Side and area of a convolution's kernel, and the channels of the two layers: the kernels are written for these.
_KERNEL, _TAPS, _FIRST, _SECOND = 5, 25, 32, 64
# Programs that share the gradient of the second convolution's weight; their parts are summed in a fixed order.
_PARTS = 4


class CnnSteps(Steps):
    """`Steps` of many CNNs: two 5x5 convolutions, each with pool and ReLU, a hidden layer and an output layer.

    Between `load` and `read` the weights are kept in the order of the kernels: the convolutions as
    `conv_kernels` says, the hidden layer's columns by position, then channel.
    """

    def __init__(
        self, problem: Problem, table: DeviceTable, settings: LocalTraining, *, precision: str
    ) -> None:
        """For a `Cnn` as built; `precision` is that of the kernels' `product`.

        With heights and widths halved by each pool: pooled1 [clients, rows, (h/2 + 4) (w/2 + 4), 32] has a border
        of two zeros, so that the next convolution needs no mask; pooled2 is [clients, rows, h/4 w/4, 64]; which1
        and which2 say where each maximum was; grid_slope is the bordered slope in the second convolution's
        outputs; parts1, parts2 and bias_parts2 are the parts of gradients.
        """
        self._layout, inputs = problem.layout, problem.inputs
        self._shared = shared = LinearSteps(table, problem.labels, settings, precision)
        clients, rows, device = shared.clients, shared.rows, inputs.device
        _, channels, height, width = inputs.shape
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._data = functional.pad(inputs, (2, 2, 2, 2)).contiguous()
        self._channels = channels
        self._half, self._quarter = (height // 2, width // 2), (height // 4, width // 4)
        self._taps = channels * _TAPS
        # Measured on an H200: positions of a tile and warps, for the two large products.
        self._tiles = (256, 8) if precision == "tf32" else (128, 4)
        self._patch = block(self._taps + 1, 32)
        area_1, area_2 = (rows_ * columns for rows_, columns in (self._half, self._quarter))
        bordered = (self._half[0] + 4) * (self._half[1] + 4)
        hidden, classes = self._layout.shapes[4][0], self._layout.shapes[6][0]

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((clients, *shape), dtype=dtype, device=device)

        self._conv1 = zeros(self._patch, _FIRST)
        self._conv2, self._bias2 = zeros(_TAPS, _FIRST, _SECOND), zeros(_SECOND)
        moving = shared.momentum
        self._conv1_velocity = zeros(self._patch, _FIRST) if moving else self._conv1
        self._conv2_velocity = zeros(_TAPS, _FIRST, _SECOND) if moving else self._conv2
        self._bias2_velocity = zeros(_SECOND) if moving else self._bias2
        self._hidden = Layer.of(clients, hidden, area_2 * _SECOND, momentum=moving, device=device)
        self._output = Layer.of(clients, classes, hidden, momentum=moving, device=device)
        # Borders of two are zero from here on: the kernels write inside them alone.
        self._pooled1 = zeros(rows, bordered, _FIRST)
        self._which1 = zeros(rows, area_1, _FIRST, dtype=torch.uint8)
        self._pooled2 = zeros(rows, area_2, _SECOND)
        self._which2 = zeros(rows, area_2, _SECOND, dtype=torch.uint8)
        self._value3, self._slope3 = zeros(rows, hidden), zeros(rows, hidden)
        self._grid_slope, self._slope1 = zeros(rows, bordered, _SECOND), zeros(rows, area_1, _FIRST)
        self._parts1 = zeros(4 * rows, self._patch, _FIRST)
        self._parts2 = zeros(_PARTS, _TAPS, _FIRST, _SECOND)
        self._bias_parts2 = zeros(area_2, _SECOND)

    @staticmethod
    def fit(problem: Problem) -> bool:
        """Whether the tiles of the kernels hold this `Cnn` as built and its images."""
        _, channels, height, width = problem.inputs.shape
        classes = problem.layout.shapes[-1][0]
        return channels <= 4 and height % 4 == 0 and width % 4 == 0 and classes <= MOST_CLASSES

    def load(self, starts: Tensor) -> None:
        """From the order of the layout into that of the kernels; row `taps` of a first patch is its bias."""
        stack = starts.expand(self._shared.clients, -1)
        first, first_bias, second, second_bias, hidden, hidden_bias, output, output_bias = stacked_views(
            self._layout, stack
        ).values()
        self._conv1.zero_()
        self._conv1[:, : self._taps].copy_(first.flatten(2).transpose(1, 2))
        self._conv1[:, self._taps].copy_(first_bias)
        self._conv2.copy_(second.flatten(3).permute(0, 3, 2, 1))
        self._bias2.copy_(second_bias)
        by_position = hidden.reshape(*hidden.shape[:2], _SECOND, -1).transpose(2, 3)
        self._hidden.weight.view(by_position.shape).copy_(by_position)
        self._hidden.bias.copy_(hidden_bias)
        self._output.weight.copy_(output)
        self._output.bias.copy_(output_bias)
        self._hidden.rest()
        self._output.rest()
        if self._shared.momentum:
            for velocity in (self._conv1_velocity, self._conv2_velocity, self._bias2_velocity):
                velocity.zero_()

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
        shared = self._shared
        self._convolutions_forward(offset)
        shared.forward(self._hidden, self._pooled2, self._value3, block_o=64, block_k=64, num_stages=3)
        shared.output(self._output, self._value3, self._slope3, offset)
        height, width = self._quarter
        shared.backward(
            self._hidden, self._pooled2, self._slope3, self._slope3, offset,
            block_o=32, block_i=_SECOND, num_warps=2,
            unpool=(self._which2, self._grid_slope, self._bias_parts2, width, height),
        )  # fmt: skip
        self._convolutions_backward(offset)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Launch on the side stream what may run at the same time as the launches that follow."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._data.device))
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._data.device).wait_stream(self._side)

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
        block_p = 64
        block_m, warps = self._tiles
        kernels.conv1_forward[(-(-rows * area_1 // block_p), clients)](
            self._data, table.rows, table.counter, offset, self._conv1, self._pooled1, self._which1,
            clients, rows, **self._first_geometry(), BLOCK_P=block_p, PRECISION=shared.precision,
        )  # fmt: skip
        pitch = self._half[1] + 4
        kernels.conv2_forward[(-(-rows * area_2 * 4 // block_m), clients)](
            self._pooled1, self._conv2, self._bias2, self._pooled2, self._which2, rows,
            PITCH=pitch, PLANE=pitch * (self._half[0] + 4), OUT_WIDTH=self._quarter[1], OUT_AREA=area_2,
            BLOCK_M=block_m, STAGES=3, PRECISION=shared.precision, num_warps=warps,
        )  # fmt: skip

    def _convolutions_backward(self, offset: int) -> None:
        """From the slope in the second convolution's outputs to the moves of both convolutions."""
        shared, table = self._shared, self._shared.table
        clients, rows = shared.clients, shared.rows
        area_1 = self._half[0] * self._half[1]
        pitch = self._half[1] + 4
        grid = {"PITCH": pitch, "PLANE": pitch * (self._half[0] + 4), "WIDTH": self._half[1], "AREA": area_1}
        block_m, warps = self._tiles
        # Neither of the two large products fills the device alone.
        with self._beside():
            kernels.conv2_gradient[(_KERNEL, clients, _PARTS)](
                self._pooled1, self._grid_slope, self._parts2, rows, **grid,
                PARTS=_PARTS, BLOCK_K=32, STAGES=3, PRECISION=shared.precision, num_warps=4,
            )  # fmt: skip
        kernels.conv2_input_gradient[(-(-rows * area_1 // block_m), clients)](
            self._grid_slope, self._conv2, self._slope1, rows, **grid,
            BLOCK_M=block_m, STAGES=3, PRECISION=shared.precision, num_warps=warps,
        )  # fmt: skip
        kernels.conv1_gradient[(4 * rows, clients)](
            self._data, table.rows, table.counter, offset, self._slope1, self._which1, self._parts1,
            clients, rows, **self._first_geometry(), BLOCK_P=32, PRECISION=shared.precision,
            num_warps=1, num_stages=1,
        )  # fmt: skip
        self._join()
        self._move(self._parts2, self._conv2, self._conv2_velocity, offset)
        self._move(self._bias_parts2, self._bias2, self._bias2_velocity, offset)
        self._move(self._parts1, self._conv1, self._conv1_velocity, offset)

    def _move(self, parts: Tensor, weight: Tensor, velocity: Tensor, offset: int) -> None:
        """Sum the `parts` [clients, count, ...] of a gradient and move `weight` [clients, ...] along it."""
        shared, table = self._shared, self._shared.table
        size = weight[0].numel()
        count = parts[0].numel() // size
        block_e = max(64, 4096 // block(count, 1))
        kernels.sum_and_move[(-(-size // block_e), shared.clients)](
            parts, table.sizes, table.counter, offset, weight, velocity,
            shared.clients, count, size, *shared.rule,
            COUNT=block(count, 1), BLOCK_E=block_e, MOMENTUM=shared.momentum,
        )  # fmt: skip
