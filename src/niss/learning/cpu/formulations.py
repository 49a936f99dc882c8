"""How one process trains a group of clients: one after another, an MLP stacked, a CNN channels-last.

An MLP is trained for many clients at once: batched products, a backward pass by hand, updates in place. For layer l of
every client, with a_0 the inputs and z_l = a_{l-1} W_l^T + b_l, a_l = relu(z_l):

    delta_L = (softmax(z_L) - onehot(y)) * weight,   delta_{l-1} = (delta_l W_l) * [a_{l-1} > 0],
    grad W_l = delta_l^T a_{l-1},                    grad b_l = sum over the batch of delta_l,

`weight` being one over the size of the batch. Clients never meet in any of these: one that diverges leaves the others
alone. Gradients are never formed: each product is added to the weights at once, and all activations of a step are
written into the same memory.

A CNN is trained client by client: a convolution of one client already keeps a core busy, and its weights stay in the
cache. Convolutions and pools run on NHWC memory, where torch's kernels are fastest. So the convolution weights lie
channels-last while training, and the columns of the first linear layer follow the order in which an NHWC image is
flattened; both are put back at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from niss.learning.cohort import BatchTable, Job, Problem
from niss.learning.local import FlatLayout, LocalTraining, batch_order, sgd_step, velocity_like

# Weights of one group: what stays in the cache of a core. Half or twice as much costs a few percent.
GROUP_BYTES = 6 * 2**20
# Clients of one group at most, however small the model: more gain nothing, and leave workers without a group.
MOST_CLIENTS = 16
# Of the convolutions of a `Cnn`.
_PADDING = 2
_pool = torch.ops.aten.max_pool2d_with_indices
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward
_relu_backward = torch.ops.aten.threshold_backward.grad_input
_convolution_backward = torch.ops.aten.convolution_backward


@dataclass(frozen=True)
class PlainLoop:
    """A formulation of the work of a group, in one process: here the reference, one client at a time.

    The others inherit from it, and fall back on it for work they have no better way for. `reason` is why the
    module is trained by no faster one.
    """

    problem: Problem
    reason: str = ""

    @property
    def name(self) -> str:
        """The formulation in a few words."""
        return f"plain loop, one client at a time, because {self.reason}"

    @property
    def largest_group(self) -> int:
        """How many clients to train at once, at most."""
        return 1

    def gains(self, work: LocalTraining, jobs: Sequence[Job]) -> bool:  # noqa: ARG002
        """Whether these clients, in falling order of their samples, are trained faster together than one by one.

        By what does not change between a run and its resumption, never by a clock: the last bits depend on it.
        """
        return True

    def perform(self, work: LocalTraining, jobs: Sequence[Job], out: Tensor) -> None:
        """Row g of `out` becomes the update of job g; jobs come in falling order of their samples."""
        for row, job in zip(out, jobs, strict=True):
            row.copy_(self.problem.update_of(job, work))


@dataclass(frozen=True)
class ChannelsLastLoop(PlainLoop):
    """The reference with weights of convolutions that lie channels-last, which brings their outputs into that order.

    Of a network whose layers are known to take it and to gain: 1.15 times on a ResNet-14, 1.4 on a CNN with tanh. A
    module of the user's may lose (0.85 with depthwise convolutions), or refuse where it calls `view`.
    """

    def __post_init__(self) -> None:
        self.problem.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def name(self) -> str:
        return "plain loop, one client at a time, channels-last"


class GroupLoop(PlainLoop):
    """A formulation that gains from many clients at once, as long as their weights fit into the cache."""

    @property
    def largest_group(self) -> int:
        layout = self.problem.layout
        return min(MOST_CLIENTS, max(1, GROUP_BYTES // (layout.size * layout.dtype.itemsize)))


@dataclass(frozen=True)
class GroupBatches:
    """The steps of a group: a `BatchTable` as tensors.

    Nobody is padded in time: clients stand in falling order of their number of steps, so that those still at
    work at a step are the first `working[step]`. What fills a short batch has weight zero, and repeats a sample
    of the batch: then whatever a zero multiplies is finite if the batch itself is.
    """

    # [steps, clients, width] int64: row numbers of the data.
    rows: Tensor
    # [steps, clients, width, 1]: what each sample counts in the mean of its batch, 1 / size or 0.
    weights: Tensor
    # How many clients still have a batch, step by step.
    working: tuple[int, ...]


def group_batches(jobs: Sequence[Job], settings: LocalTraining, dtype: torch.dtype) -> GroupBatches:
    """The schedule of jobs given in falling order of size; `dtype` is that of the weights."""
    table = BatchTable(jobs, settings)
    for _ in table.fill():
        pass
    sizes = torch.from_numpy(table.sizes)[:, :, None]
    real = torch.arange(table.width) < sizes
    weights = real.to(dtype) / sizes.clamp(min=1).to(dtype)
    working = tuple((table.sizes > 0).sum(axis=1).tolist())
    return GroupBatches(torch.from_numpy(table.rows).long(), weights[..., None], working)


def step_by_product(
    weights: Tensor, velocity: Tensor | None, left: Tensor, right: Tensor, settings: LocalTraining
) -> None:
    """`sgd_step` along the gradient `left @ right` (of one client, or of many stacked), which is never formed:

    w <- (1 - learning_rate * weight_decay) w - learning_rate * left @ right    without momentum.
    """
    if velocity is None:
        decay = 1.0 - settings.learning_rate * settings.weight_decay
        _add_product(weights)(left, right, beta=decay, alpha=-settings.learning_rate)
        return
    _add_product(velocity)(left, right, beta=settings.momentum, alpha=1.0)
    if settings.weight_decay:
        velocity.add_(weights, alpha=settings.weight_decay)
    weights.add_(velocity, alpha=-settings.learning_rate)


def _add_product(total: Tensor) -> Callable[..., Tensor]:
    """total <- beta total + alpha left @ right, of one client or of many stacked."""
    return total.baddbmm_ if total.ndim == 3 else total.addmm_


@dataclass(frozen=True)
class _Layer:
    """One linear layer of every client in the group, and what flows through it."""

    weights: Tensor  # [clients, out, in]
    biases: Tensor  # [clients, 1, out]
    weights_velocity: Tensor | None
    biases_velocity: Tensor | None
    output: Tensor  # [clients, batch, out]
    delta: Tensor  # [clients, batch, out]

    def first(self, clients: int) -> _Layer:
        """Views of the first so many clients."""
        return _Layer(
            *(None if part is None else part[:clients] for part in vars(self).values())  # type: ignore[arg-type]
        )


class MlpGroups(GroupLoop):
    """`Mlp` as built, in groups."""

    @property
    def name(self) -> str:
        return f"MLP groups of up to {self.largest_group}"

    @torch.no_grad()
    def perform(self, work: LocalTraining, jobs: Sequence[Job], out: Tensor) -> None:
        layout, labels = self.problem.layout, self.problem.labels
        inputs = self.problem.inputs.flatten(1)
        schedule = group_batches(jobs, work, layout.dtype)
        everyone = _layers(layout, jobs, schedule.rows.shape[2], work)
        _run(everyone, schedule, inputs, labels, work)
        for client, job in enumerate(jobs):
            parts = list(layout.split(out[client]).values())
            for weights, biases, layer in zip(parts[::2], parts[1::2], everyone, strict=True):
                weights.copy_(layer.weights[client])
                biases.copy_(layer.biases[client, 0])
            out[client].sub_(job.start)


def _layers(layout: FlatLayout, jobs: Sequence[Job], width: int, settings: LocalTraining) -> list[_Layer]:
    """The layers of all clients at their starts; the layout is weight, bias, weight, bias and so on."""
    parts = [list(layout.split(job.start.detach()).values()) for job in jobs]
    layers = []
    for number in range(0, len(layout.names), 2):
        weights = torch.stack([own[number] for own in parts])
        biases = torch.stack([own[number + 1] for own in parts]).unsqueeze(1)
        velocities = velocity_like(weights, settings), velocity_like(biases, settings)
        output, delta = (weights.new_empty(len(jobs), width, weights.shape[1]) for _ in range(2))
        layers.append(_Layer(weights, biases, *velocities, output, delta))
    return layers


def _run(
    everyone: list[_Layer], schedule: GroupBatches, inputs: Tensor, labels: Tensor, settings: LocalTraining
) -> None:
    """All steps of the schedule, in place; at each step the clients that still have a batch, and no other.

    everyone        the layers of all clients of the group, changed in place
    inputs, labels  the data of all clients, [all, features] and [all]
    """
    targets = labels[schedule.rows].unsqueeze(-1)
    minus_one = everyone[-1].delta.new_full((1, 1, 1), -1.0)
    clients, width = schedule.rows.shape[1:]
    batch = inputs.new_empty(clients, width, inputs.shape[1])
    ones = everyone[0].biases.new_ones(clients, 1, width)
    working = 0
    for number, now_working in enumerate(schedule.working):
        if now_working != working:
            working = now_working
            layers = [layer.first(working) for layer in everyone]
            images = batch[:working]
            rows_of_batch = images.view(-1, inputs.shape[1])
            ones_now, minus_now = ones[:working], minus_one.expand(working, width, 1)
        rows = schedule.rows[number, :working]
        torch.index_select(inputs, 0, rows.view(-1), out=rows_of_batch)
        _forward(layers, images)
        last = layers[-1]
        torch.softmax(last.output, 2, out=last.delta)
        last.delta.scatter_add_(2, targets[number, :working], minus_now)
        last.delta.mul_(schedule.weights[number, :working])
        _backward(layers, images, ones_now, settings)


def _forward(layers: list[_Layer], images: Tensor) -> None:
    """Every layer's `output` from `images` [clients, batch, features]: behind its ReLU, but for the last one."""
    below = images
    for layer in layers[:-1]:
        torch.baddbmm(layer.biases, below, layer.weights.transpose(1, 2), out=layer.output)
        below = functional.relu_(layer.output)
    last = layers[-1]
    torch.baddbmm(last.biases, below, last.weights.transpose(1, 2), out=last.output)


def _backward(layers: list[_Layer], images: Tensor, ones: Tensor, settings: LocalTraining) -> None:
    """From the delta of the last layer: every layer steps as soon as the one below has its delta."""
    for layer, below in zip(reversed(layers[1:]), reversed(layers[:-1]), strict=True):
        torch.bmm(layer.delta, layer.weights, out=below.delta)
        _relu_backward(below.delta, below.output, 0, grad_input=below.delta)
        _step(layer, below.output, ones, settings)
    _step(layers[0], images, ones, settings)


def _step(layer: _Layer, below: Tensor, ones: Tensor, settings: LocalTraining) -> None:
    """One layer moves; the sum over the batch in its bias is a product with `ones`."""
    step_by_product(layer.weights, layer.weights_velocity, layer.delta.transpose(1, 2), below, settings)
    step_by_product(layer.biases, layer.biases_velocity, ones, layer.delta, settings)


class CnnLoop(PlainLoop):
    """`Cnn` as built, client by client."""

    @property
    def name(self) -> str:
        return "CNN client by client, channels-last"

    def perform(self, work: LocalTraining, jobs: Sequence[Job], out: Tensor) -> None:
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
        sgd_step(self.weights[first + 1], self.velocities[first + 1], delta.sum(0), self.settings)

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
        sgd_step(kernel, self.velocities[first], kernel_slope, self.settings)
        sgd_step(self.weights[first + 1], self.velocities[first + 1], offset_slope, self.settings)
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
