"""One local step on clipped per-sample gradients: the step whose sensitivity is known.

`clipped_gradient_step` is the reference, for any module, `clipped_gradient_steps` the same for many clients at
once. For an MLP the same step needs no gradient per
sample: the gradient of sample i in a linear layer is the outer product of delta_i, the slope of its loss in the
layer's outputs, and (a_i, 1), the layer's inputs, so its norm is known from the two vectors alone ("ghost
norm": Goodfellow 2015, Li et al. 2022), and the clipped sum is one product of matrices:

    ||g_i||^2 = sum over layers of ||delta_i||^2 (||a_i||^2 + 1),   sum_i f_i g_i = (f * delta)^T a.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from niss.checks import require_real, require_whole
from niss.errors import ConfigError
from niss.learning.local import (
    FlatLayout,
    batch_statistics_layers,
    borrowed,
    mean_loss,
    require_logits,
    require_samples,
    trainable_parameters,
)
from niss.learning.stackable import as_function

if TYPE_CHECKING:
    from niss.learning.cohort import Problem

_CHUNK = 256
# Of one layer, sample by sample: what came in, and the delta of what came out.
_Flow = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ClippedStep:
    """The other thing a client can do in a round: one `clipped_gradient_step`, in eval() mode, nothing drawn."""

    clip: float
    learning_rate: float

    def __post_init__(self) -> None:
        require_real(self.clip, field="clip", zero_allowed=False)
        require_real(self.learning_rate, field="learning_rate", zero_allowed=False)


def clipped_gradient_step(
    module: nn.Module,
    layout: FlatLayout,
    start: Tensor,
    images: Tensor,
    labels: Tensor,
    work: ClippedStep,
    *,
    chunk: int = _CHUNK,
) -> Tensor:
    """The update of one step from `start`, with d = number of samples:

        -learning_rate / d * sum_i g_i * min(1, clip / ||g_i||_2)

    g_i is the gradient of the cross-entropy of sample i alone, its norm taken over all trainable
    parameters together. Entries of buffers and of frozen parameters are zero.

    module, layout  what is trained, as scratch space, and the layout of its vector
    start           the weights to begin at, as `layout.flatten` gives them
    images, labels  the client's samples, on the device of the module
    work            the bound on ||g_i||_2, and the learning rate
    chunk           how many samples are differentiated at once

    Guarantee, up to floating-point rounding: replacing one sample moves the update by at most
    2 * learning_rate * clip / d in L2 norm; adding or removing one at fixed d moves it by at most
    learning_rate * clip / d. A sample whose gradient norm is not finite contributes zero, which is
    within the bound; finding such samples is left to the caller.

    The module runs in eval() mode, so Dropout is off and nothing is drawn. BatchNorm and its like are refused: a
    gradient of one sample alone does not exist there. The module is scratch space; its mode and its other
    buffers are restored. Memory is O(chunk * layout.size).
    """
    require_whole(chunk, field="chunk", at_least=1)
    highest_label = require_samples(images, labels)
    gradients_of = _sample_gradients(module, layout, start, highest_label)
    total = torch.zeros(layout.size, dtype=torch.float64, device=start.device)
    parts = layout.split(total)
    with borrowed(module, layout, None):
        for some_images, some_labels in zip(
            torch.split(images, chunk), torch.split(labels, chunk), strict=True
        ):
            gradients, factors = _with_factors(gradients_of(some_images, some_labels), work.clip)
            for name, gradient in gradients.items():
                parts[name].add_(torch.tensordot(factors.to(gradient.dtype), gradient, dims=1))
    return total.mul_(-work.learning_rate / labels.shape[0]).to(start.dtype)


@torch.no_grad()
def clipped_gradient_steps(
    problem: Problem,
    start: Tensor,
    samples: Sequence[Tensor],
    work: ClippedStep,
    *,
    chunk: int,
    products: bool = False,
) -> Tensor:
    """Row k is `clipped_gradient_step` for the k-th client's `samples`, its rows of the data, all from one start.

    chunk           how many samples are differentiated at once, whosever they are
    products        how convolutions are computed, as in `stackable_operations`

    The clipped gradients of a chunk are added up by a product with [clients, chunk], whose entry is the factor of a
    sample in the row of its client, and always in the same order. Memory is O(chunk * layout.size) beyond the result.
    """
    module, layout, inputs, labels = problem.module, problem.layout, problem.inputs, problem.labels
    highest_label = require_samples(inputs, labels)
    gradients_of = _sample_gradients(module, layout, start, highest_label, products=products)
    counts = torch.tensor([len(own) for own in samples])
    rows = torch.cat(list(samples))
    owners = torch.repeat_interleave(torch.arange(len(samples)), counts)
    sums = torch.zeros((len(samples), layout.size), dtype=start.dtype, device=start.device)
    pieces = dict(zip(layout.names, torch.split(sums, layout.sizes, dim=1), strict=True))
    with borrowed(module, layout, None):
        for some, own in zip(torch.split(rows, chunk), torch.split(owners, chunk), strict=True):
            first, last = int(own[0]), int(own[-1]) + 1
            gradients, factors = _with_factors(gradients_of(inputs[some], labels[some]), work.clip)
            shares = torch.zeros((last - first, len(some)), dtype=start.dtype, device=start.device)
            place = (own - first).to(start.device)[None]
            shares.scatter_(0, place, factors.to(start.dtype)[None])
            for name, gradient in gradients.items():
                pieces[name][first:last].addmm_(shares, gradient.flatten(1))
    rates = -work.learning_rate / counts.to(torch.float64)
    return sums.mul_(rates.to(start)[:, None])


def _sample_gradients(
    module: nn.Module, layout: FlatLayout, start: Tensor, highest_label: int, *, products: bool = False
) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """What gives the gradient of each sample's loss at `start`, by name, [samples, ...] of the trained parameters."""
    if layers := batch_statistics_layers(module):
        raise ConfigError(
            f"per-sample gradients are undefined with batch statistics: {', '.join(layers)}",
            field="model",
            hint="use GroupNorm or LayerNorm in place of BatchNorm",
        )
    layout.load(module, start)
    weights = {name: value.detach() for name, value in trainable_parameters(module).items()}
    forward = as_function(module, products=products)

    def sample_loss(trial: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        wanted = label.unsqueeze(0)
        logits = forward(trial, image.unsqueeze(0))
        return mean_loss(require_logits(logits, shape=wanted.shape, highest_label=highest_label), wanted)

    gradients = vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="different")
    return lambda images, labels: gradients(weights, images, labels)


@torch.no_grad()
def _with_factors(gradients: dict[str, Tensor], clip: float) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients, samples first, and min(1, clip / ||g_i||) for each; both zero where a norm is not finite."""
    parts = [_row_norms(gradient.flatten(1)) for gradient in gradients.values()]
    norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    usable = norms.isfinite()
    factors = torch.where(usable, (clip / norms).clamp(max=1.0), 0.0)
    if not bool(usable.all()):
        # A factor of zero is not enough: 0 * inf and 0 * nan are nan.
        gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient[~usable] = 0.0
    return gradients, factors


@torch.no_grad()
def clipped_mlp_step(problem: Problem, start: Tensor, samples: Tensor, work: ClippedStep) -> Tensor:
    """What `clipped_gradient_step` returns, for an `Mlp` as built and a client with these rows of the data."""
    total = torch.zeros(problem.layout.size, dtype=torch.float64)
    sums = list(problem.layout.split(total).values())
    for some in torch.split(samples, _CHUNK):
        for number, (below, delta) in enumerate(_clipped_flows(problem, start, some, work.clip)):
            sums[2 * number].add_(delta.t().mm(below))
            sums[2 * number + 1].add_(delta.sum(0))
    return total.mul_(-work.learning_rate / len(samples)).to(start.dtype)


@torch.no_grad()
def clipped_mlp_steps(
    problem: Problem, start: Tensor, samples: Sequence[Tensor], work: ClippedStep
) -> Tensor:
    """Row k is `clipped_mlp_step` for the k-th client's `samples`, all from one start, as one computation.

    For a device on which many small products cost more than few large ones; memory is O(all samples).
    """
    counts = [len(own) for own in samples]
    pieces: list[Tensor] = []
    for below, delta in _clipped_flows(problem, start, torch.cat(list(samples)), work.clip):
        if len(set(counts)) == 1:
            deltas, belows = (flow.view(len(counts), counts[0], -1) for flow in (delta, below))
            products, sums = deltas.transpose(1, 2).bmm(belows), deltas.sum(1)
        else:
            parts = zip(torch.split(delta, counts), torch.split(below, counts), strict=True)
            each = [(some.t().mm(arriving), some.sum(0)) for some, arriving in parts]
            products, sums = (torch.stack(column) for column in zip(*each, strict=True))
        pieces += [products.flatten(1), sums]
    rates = torch.tensor([-work.learning_rate / count for count in counts], dtype=torch.float64)
    return torch.cat(pieces, dim=1).mul_(rates.to(start)[:, None])


def _clipped_flows(problem: Problem, start: Tensor, rows: Tensor, clip: float) -> list[_Flow]:
    """Of each layer of an `Mlp`, for these rows of the data: its inputs, and its deltas times min(1, clip / ||g_i||);
    both zero where a sample has no finite gradient.

    Forward and backward for every sample alone: the loss is the sum of cross-entropies. The layout is weight, bias,
    weight and so on.
    """
    weights, labels = list(problem.layout.split(start).values()), problem.labels[rows]
    arriving = [problem.inputs[rows].flatten(1)]
    for weight, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        arriving.append(functional.relu(functional.linear(arriving[-1], weight, bias)))
    delta = torch.softmax(functional.linear(arriving[-1], weights[-2], weights[-1]), 1)
    delta[torch.arange(len(labels), device=labels.device), labels] -= 1.0
    flows = [(arriving[-1], delta)]
    for weight, below, output in zip(weights[-2:0:-2], arriving[-2::-1], arriving[:0:-1], strict=True):
        delta = torch.ops.aten.threshold_backward(delta.mm(weight), output, 0)
        flows.insert(0, (below, delta))
    parts = [_row_norms(delta) * _row_norms(below).square().add(1.0).sqrt() for below, delta in flows]
    norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    usable = norms.isfinite()
    for below, delta in flows:
        # The largest entry of the gradient, in the model's own precision: inf there is inf in the gradient.
        usable &= (delta.abs().amax(1) * below.abs().amax(1).clamp(min=1.0)).isfinite()
    factors = torch.where(usable, (clip / norms).clamp(max=1.0), 0.0)
    if not bool(usable.all()):
        # A factor of zero is not enough: 0 * inf and 0 * nan are nan.
        lost = ~usable[:, None]
        flows = [(below.masked_fill(lost, 0.0), delta.masked_fill(lost, 0.0)) for below, delta in flows]
    return [(below, delta * factors[:, None].to(delta.dtype)) for below, delta in flows]


def _row_norms(rows: Tensor) -> Tensor:
    # In float64: float32 squares under- or overflow long before the gradients themselves do.
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms
