"""The MLP of a whole cohort in fused Triton kernels: 2 L - 2 launches a step for L linear layers.

The first layer is one launch: it moves the weights along the step before and computes the outputs of this one.
Each layer between is one launch forward and one backward, the last is a single launch for logits, loss, slope and
move. A program waits for memory most of the time, so that long sums are shared by several. Tile sizes and numbers of
warps below were measured on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from niss.learning.cohort import Problem
from niss.learning.cuda import kernels
from niss.learning.cuda.program import DeviceTable, Steps
from niss.learning.local import LocalTraining

# Extents of tiles, warps and stages of each launch; `parts` programs share a sum (of a layer's inputs, or outputs).
_FIRST = {"parts": 2, "BLOCK_O": 16, "BLOCK_K": 32, "STAGES": 4, "num_warps": 1}
_FORWARD = {"block_o": 32, "BLOCK_K": 32, "STAGES": 3, "num_warps": 2}
_OUTPUT = {"BLOCK_K": 32, "num_warps": 4}
_BACKWARD = {"parts": 2, "BLOCK_O": 16, "block_i": 16, "num_warps": 1, "num_stages": 2}
# What one program of the output layer can hold.
_LARGEST_LAST_HIDDEN, MOST_CLASSES = 1024, 64


def block(extent: int, least: int = 16) -> int:
    """The power of two a tile needs to hold `extent`."""
    return max(least, 1 << (extent - 1).bit_length())


def span(extent: int, parts: int, tile: int) -> int:
    """How much of `extent` each of `parts` programs takes, in whole tiles."""
    return -(-extent // (parts * tile)) * tile


@dataclass
class Layer:
    """A linear layer of every client, and what momentum remembers of it (itself where there is none).

    weight and velocity are [clients, outs, width], bias and its velocity [clients, outs], all float32.
    """

    weight: Tensor
    bias: Tensor
    velocity: Tensor
    bias_velocity: Tensor

    @classmethod
    def of(cls, clients: int, outs: int, width: int, *, momentum: bool, device: torch.device) -> Layer:
        weight = torch.empty((clients, outs, width), device=device)
        bias = torch.empty((clients, outs), device=device)
        if not momentum:
            return cls(weight, bias, weight, bias)
        return cls(weight, bias, torch.zeros_like(weight), torch.zeros_like(bias))

    def rest(self) -> None:
        """Forget the velocity of an earlier run."""
        if self.velocity is not self.weight:
            self.velocity.zero_()
            self.bias_velocity.zero_()


class LinearSteps:
    """The launches that linear layers of one cohort share.

    table      the batches on the device, [steps, clients, rows]
    labels     of all samples
    settings   the rule of SGD: learning rate, momentum, weight decay
    precision  of products: "tf32", or "tf32x3" for the error of float32 (see `kernels.product`)

    Activations and slopes are [parts, clients, rows, width], and their sum is what counts; `offset` counts steps from
    the table's counter.
    """

    def __init__(self, table: DeviceTable, labels: Tensor, settings: LocalTraining, precision: str) -> None:
        self.table, self.labels, self.precision = table, labels, precision
        _, self.clients, self.rows = table.rows.shape
        self.block_b = block(self.rows)
        self.rule = (settings.learning_rate, settings.momentum, settings.weight_decay)
        self.momentum = settings.momentum > 0.0

    def forward(self, layer: Layer, x: Tensor, y: Tensor, *, block_o: int, **options: int) -> None:
        """y = relu(x) W^T + b; a program makes `block_o` outputs."""
        _, outs, width = layer.weight.shape
        kernels.linear_forward[(-(-outs // block_o), self.clients)](
            x, layer.weight, layer.bias, y, self.clients, self.rows, width, outs,
            X_PARTS=len(x), BLOCK_B=self.block_b, BLOCK_O=block_o, PRECISION=self.precision, **options,
        )  # fmt: skip

    def move_and_forward(
        self, layer: Layer, x: Tensor, dy: Tensor, y: Tensor, largest: Tensor | None, offset: int,
        *, parts: int, **options: int,
    ) -> None:  # fmt: skip
        """Move the layer along dy, the slope of the step before, where that is owed; then y = x W^T + b.

        x are all data, [samples, width], or the inputs of this step and the last, [2, clients, rows, width], even
        steps first. `largest` gets the largest |weight| of each program, [clients, programs].
        """
        _, outs, width = layer.weight.shape
        kernels.move_and_forward[(-(-outs // options["BLOCK_O"]), self.clients, parts)](
            x, self.table.rows, *self._moving(layer, offset), layer.weight if largest is None else largest, dy, y,
            self.clients, self.rows, width, outs, *self.rule,
            GATHERED=x.dim() == 2, NOTED=largest is not None, MOMENTUM=self.momentum, DY_PARTS=len(dy),
            SPAN=span(width, parts, options["BLOCK_K"]), BLOCK_B=self.block_b, PRECISION=self.precision,
            **options,
        )  # fmt: skip

    def output(self, layer: Layer, x: Tensor, dx: Tensor, offset: int, **options: int) -> None:
        """The last layer, the slope of its mean cross-entropy, dx behind the ReLU of x, and its move."""
        _, classes, width = layer.weight.shape
        table = self.table
        kernels.output_layer[(self.clients,)](
            x, self.labels, table.rows, *self._moving(layer, offset), dx,
            self.clients, self.rows, width, classes, *self.rule,
            MOMENTUM=self.momentum, X_PARTS=len(x), BLOCK_B=self.block_b, BLOCK_C=block(classes),
            PRECISION=self.precision, **options,
        )  # fmt: skip

    def backward(
        self, layer: Layer, x: Tensor, dy: Tensor, dx: Tensor, offset: int,
        *, parts: int, block_i: int, **options: int,
    ) -> None:  # fmt: skip
        """dx from dy behind the ReLU of x, and the move of the layer."""
        _, outs, width = layer.weight.shape
        kernels.linear_backward[(-(-width // block_i), self.clients, parts)](
            x, dy, *self._moving(layer, offset), dx, self.clients, self.rows, width, outs, *self.rule,
            MOMENTUM=self.momentum, X_PARTS=len(x), DY_PARTS=len(dy),
            SPAN=span(outs, parts, options["BLOCK_O"]), BLOCK_B=self.block_b, BLOCK_I=block_i,
            PRECISION=self.precision, **options,
        )  # fmt: skip

    def _moving(self, layer: Layer, offset: int) -> tuple[Tensor | int, ...]:
        """What a kernel that moves `layer` needs to know: whether a client moves in this step, and what."""
        table = self.table
        return (
            table.sizes, table.counter, offset, layer.weight, layer.bias, layer.velocity, layer.bias_velocity,
        )  # fmt: skip


class MlpSteps(Steps):
    """`Steps` of many MLPs.

    The move of the first layer is made together with the next step's forward pass, so `finish` owes it.
    """

    lanes: ClassVar[int] = 1
    """More gain nothing: what a step of the paper's MLP reads stays in the cache of the device."""

    def __init__(
        self, problem: Problem, table: DeviceTable, settings: LocalTraining, *, precision: str
    ) -> None:
        """For an `Mlp` as built; `precision` is that of the kernels' `product`."""
        self.table, self._layout, self._data = table, problem.layout, problem.inputs.flatten(1)
        self._shared = LinearSteps(table, problem.labels, settings, precision)
        shapes = self._layout.shapes[::2]
        clients, rows, device = self._shared.clients, self._shared.rows, self._data.device
        self._layers = [
            Layer.of(clients, outs, width, momentum=self._shared.momentum, device=device)
            for outs, width in shapes
        ]
        hidden = [outs for outs, _ in shapes[:-1]]
        self._values = [
            torch.zeros((1 if depth else _FIRST["parts"], clients, rows, outs), device=device)
            for depth, outs in enumerate(hidden)
        ]
        self._slopes = [
            torch.zeros((_BACKWARD["parts"] if above else 1, clients, rows, outs), device=device)
            for above, outs in zip(range(len(hidden) - 1, -1, -1), hidden, strict=True)
        ]

    @classmethod
    def abreast(
        cls, problem: Problem, tables: Sequence[DeviceTable], settings: LocalTraining, *, precision: str
    ) -> list[MlpSteps]:
        """The steps of every lane, by its table."""
        return [cls(problem, table, settings, precision=precision) for table in tables]

    @staticmethod
    def fit(problem: Problem) -> bool:
        """Whether the tiles of the kernels hold this `Mlp` as built."""
        *hidden, (classes, width) = problem.layout.shapes[::2]
        return bool(hidden) and width <= _LARGEST_LAST_HIDDEN and classes <= MOST_CLASSES

    def load(self, starts: Tensor) -> None:
        # One vector for all clients is expanded, and copied into every client's own layers.
        entries = iter(self._layout.split(starts.expand(self._shared.clients, -1)).values())
        for layer in self._layers:
            layer.weight.copy_(next(entries))
            layer.bias.copy_(next(entries))
            layer.rest()

    def read(self) -> Tensor:
        pieces = [piece for layer in self._layers for piece in (layer.weight.flatten(1), layer.bias)]
        return torch.cat(pieces, dim=1)

    def enqueue(self, offset: int) -> None:
        layers, values, slopes, shared = self._layers, self._values, self._slopes, self._shared
        self._first(offset)
        for depth in range(1, len(layers) - 1):
            shared.forward(layers[depth], values[depth - 1], values[depth], **_FORWARD)
        shared.output(layers[-1], values[-1], slopes[-1], offset, **_OUTPUT)
        for depth in range(len(layers) - 2, 0, -1):
            shared.backward(
                layers[depth], values[depth - 1], slopes[depth], slopes[depth - 1], offset,
                **_BACKWARD,
            )  # fmt: skip

    def finish(self) -> None:
        self._first(0)

    def _first(self, offset: int) -> None:
        """Move the first layer along the step before, where it is owed, then its outputs for this step."""
        self._shared.move_and_forward(
            self._layers[0], self._data, self._slopes[0], self._values[0], None, offset, **_FIRST
        )
