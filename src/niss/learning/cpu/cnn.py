"""One client of the CNN: channels-last, a backward pass by hand, updates in place.

Convolutions and pools run on NHWC memory, where torch's kernels are fastest. So the convolution weights
lie channels-last while training, and the columns of the first linear layer follow the order in which an
NHWC image is flattened; both are put back at the end.

Clients are not stacked: a convolution of one client already keeps a core busy, and its weights stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from niss.learning.clipped import ClippedStep
from niss.learning.cohort import Job, Work
from niss.learning.cpu.steps import PlainLoop, step, step_by_product, velocity_like
from niss.learning.flat import FlatLayout
from niss.learning.local import LocalTraining, batch_order

_PADDING = 2
_pool = torch.ops.aten.max_pool2d_with_indices
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward
_relu_backward = torch.ops.aten.threshold_backward.grad_input
_convolution_backward = torch.ops.aten.convolution_backward


class CnnLoop(PlainLoop):
    """`Cnn` as built, client by client; the clipped step by the reference."""

    @property
    def name(self) -> str:
        return "CNN client by client, channels-last"

    def perform(self, work: Work, jobs: Sequence[Job], out: Tensor) -> None:
        if isinstance(work, ClippedStep):
            super().perform(work, jobs, out)
            return
        for row, job in zip(out, jobs, strict=True):
            self._train(job, work, row)

    @torch.no_grad()
    def _train(self, job: Job, settings: LocalTraining, out: Tensor) -> None:
        """`out` becomes the update of this client."""
        layout, inputs = self.problem.layout, self.problem.inputs
        weights = _weights_for_training(layout, job.start.detach(), inputs.shape[2:])
        sgd = _Sgd(weights, [velocity_like(part, settings) for part in weights], settings)
        images, labels = _nhwc(inputs[job.samples]), self.problem.labels[job.samples]
        for batch in batch_order(len(labels), settings, job.stream):
            chosen = images.index_select(0, batch).permute(0, 3, 1, 2)
            sgd.step(chosen, labels[batch])
        _copy_back(weights, layout, inputs.shape[2:], out)
        out.sub_(job.start)


@dataclass(frozen=True)
class _Sgd:
    """SGD on the eight parameters of one client, in place, each with its velocity.

    In the order of the layout: weight and bias of both convolutions, of the hidden and of the output layer.
    """

    weights: list[Tensor]
    velocities: list[Tensor | None]
    settings: LocalTraining

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Forward, backward, and each parameter moves as soon as nothing below needs its old value."""
        filter1, offset1, filter2, offset2, weights3, biases3, weights4, biases4 = self.weights
        raw1, pooled1, places1 = _convolve(images, filter1, offset1)
        raw2, pooled2, places2 = _convolve(pooled1, filter2, offset2)
        features = pooled2.permute(0, 2, 3, 1).reshape(len(labels), -1)
        hidden = torch.addmm(biases3, features, weights3.t()).relu_()
        delta4 = torch.softmax(torch.addmm(biases4, hidden, weights4.t()), 1)
        delta4[torch.arange(len(labels)), labels] -= 1.0
        delta4.div_(len(labels))
        delta3 = _through_relu(delta4.mm(weights4), hidden)
        self._linear(6, delta4, hidden)
        slope2 = _through_relu(delta3.mm(weights3), features)
        self._linear(4, delta3, features)
        _, channels, height, width = pooled2.shape
        slope2 = slope2.view(-1, height, width, channels).permute(0, 3, 1, 2)
        slope1 = self._convolution(2, slope2, raw2, places2, pooled1, wants_input=True)
        assert slope1 is not None
        slope1 = _through_relu(slope1, pooled1)
        self._convolution(0, slope1, raw1, places1, images, wants_input=False)

    def _linear(self, first: int, delta: Tensor, below: Tensor) -> None:
        """Parameters `first` (weights) and `first + 1` (biases) step."""
        step_by_product(self.weights[first], self.velocities[first], delta.t(), below, self.settings)
        step(self.weights[first + 1], self.velocities[first + 1], delta.sum(0), self.settings)

    def _convolution(
        self, first: int, slope: Tensor, raw: Tensor, places: Tensor, below: Tensor, *, wants_input: bool
    ) -> Tensor | None:
        """The same for a convolution under its pool; returns the slope in its input, with `wants_input`.

        slope, raw, places  in the pooled outputs, what was pooled, and where its maxima were
        below               the input of the convolution
        """
        kernel = self.weights[first]
        slope = _pool_backward(slope, raw, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
        below_slope: Tensor | None
        below_slope, kernel_slope, offset_slope = _convolution_backward(
            slope, below, kernel, [kernel.shape[0]], [1, 1], [_PADDING] * 2, [1, 1], False, [0, 0], 1,
            [wants_input, True, True],
        )  # fmt: skip
        step(kernel, self.velocities[first], kernel_slope, self.settings)
        step(self.weights[first + 1], self.velocities[first + 1], offset_slope, self.settings)
        return below_slope


def _convolve(images: Tensor, kernel: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convolution, then pool, then ReLU: the raw output, the result, and where each maximum was.

    The ReLU is behind the pool, where there is a quarter of the values; the order changes nothing.
    """
    raw = functional.conv2d(images, kernel, offset, padding=_PADDING)
    pooled, places = _pool(raw, [2, 2], [2, 2])
    return raw, pooled.relu_(), places


def _through_relu(slope: Tensor, output: Tensor) -> Tensor:
    """`slope` where the ReLU that made `output` let its input through, else 0; in place."""
    _relu_backward(slope, output, 0, grad_input=slope)
    return slope


def _nhwc(images: Tensor) -> Tensor:
    """[n, channels, height, width] as contiguous [n, height, width, channels].

    With a single channel torch cannot tell the two orders apart and falls back to the slow one: such
    images get a second channel of zeros, whose weights start at zero and have gradient zero.
    """
    if images.shape[1] == 1:
        images = torch.cat([images, torch.zeros_like(images)], 1)
    return images.permute(0, 2, 3, 1).contiguous()


def _weights_for_training(layout: FlatLayout, start: Tensor, extent: torch.Size) -> list[Tensor]:
    """Copies of the eight parameters in the memory order of training; `extent` is the images' height and width."""
    parts = [part.clone() for part in layout.split(start).values()]
    if parts[0].shape[1] == 1:
        parts[0] = torch.cat([parts[0], torch.zeros_like(parts[0])], 1)
    for place in (0, 2):
        parts[place] = parts[place].contiguous(memory_format=torch.channels_last)
    parts[4] = _columns(parts[4], extent).permute(0, 2, 3, 1).flatten(1)
    return parts


def _copy_back(weights: list[Tensor], layout: FlatLayout, extent: torch.Size, out: Tensor) -> None:
    """The inverse of `_weights_for_training`, into the vector `out`."""
    for place, (own, target) in enumerate(zip(weights, layout.split(out).values(), strict=True)):
        if place == 4:
            columns = _columns(target, extent)
            rows, _, height, width = columns.shape
            columns.copy_(own.view(rows, height, width, -1).permute(0, 3, 1, 2))
        else:
            target.copy_(own[:, : target.shape[1]] if place == 0 else own)


def _columns(weights: Tensor, extent: torch.Size) -> Tensor:
    """The first linear layer as [out, channels, height, width] of the pooled images."""
    return weights.view(weights.shape[0], -1, extent[0] // 2 // 2, extent[1] // 2 // 2)
