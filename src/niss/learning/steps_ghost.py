"""One clipped step of MLP clients without ever forming a gradient per sample.

The gradient of sample i in a linear layer is the outer product of delta_i and (a_i, 1), so its norm is
known from the two vectors alone ("ghost norm"), and the clipped sum is one product of matrices:

    ||g_i||^2 = sum over layers of ||delta_i||^2 (||a_i||^2 + 1),   sum_i f_i g_i = (f * delta)^T a.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from niss.learning.flat import FlatLayout

_CHUNK = 256
_Flow = tuple[Tensor, Tensor]  # of one layer, sample by sample: what came in, and the delta of what came out


@torch.no_grad()
def clipped_mlp_step(
    layout: FlatLayout,
    inputs: Tensor,
    labels: Tensor,
    start: Tensor,
    samples: Tensor,
    *,
    clip: float,
    learning_rate: float,
    out: Tensor,
) -> None:
    """`out` becomes what `clipped_gradient_step` returns without a stream; `inputs` is [all, features]."""
    weights = list(layout.split(start).values())
    total = torch.zeros(layout.size, dtype=torch.float64)
    sums = list(layout.split(total).values())
    for some in torch.split(samples, _CHUNK):
        flows = _usable(_flows(weights, inputs[some], labels[some]), clip)
        for number, (below, delta) in enumerate(flows):
            sums[2 * number].add_(delta.t().mm(below))
            sums[2 * number + 1].add_(delta.sum(0))
    out.copy_(total.mul_(-learning_rate / len(samples)))


@torch.no_grad()
def clipped_mlp_steps(
    layout: FlatLayout,
    inputs: Tensor,
    labels: Tensor,
    start: Tensor,
    samples: Sequence[Tensor],
    *,
    clip: float,
    learning_rate: float,
) -> Tensor:
    """Row k is `clipped_mlp_step` for the k-th client's `samples`, all from one start, as one computation.

    For a device on which many small products cost more than few large ones; memory is O(all samples).
    """
    rows = torch.cat(list(samples))
    weights = list(layout.split(start).values())
    flows = _usable(_flows(weights, inputs[rows], labels[rows]), clip)
    counts = [len(one) for one in samples]
    pieces: list[Tensor] = []
    for below, delta in flows:
        if len(set(counts)) == 1:
            deltas, belows = (flow.view(len(counts), counts[0], -1) for flow in (delta, below))
            products, sums = deltas.transpose(1, 2).bmm(belows), deltas.sum(1)
        else:
            parts = zip(torch.split(delta, counts), torch.split(below, counts), strict=True)
            each = [(some.t().mm(arriving), some.sum(0)) for some, arriving in parts]
            products, sums = (torch.stack(column) for column in zip(*each, strict=True))
        pieces += [products.flatten(1), sums]
    rates = torch.tensor([-learning_rate / count for count in counts], dtype=torch.float64)
    return torch.cat(pieces, dim=1).mul_(rates.to(start)[:, None])


def _flows(weights: list[Tensor], images: Tensor, labels: Tensor) -> list[_Flow]:
    """Forward and backward for every sample alone: the loss is the sum of cross-entropies."""
    arriving = [images]
    for weight, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        arriving.append(functional.relu(functional.linear(arriving[-1], weight, bias)))
    delta = torch.softmax(functional.linear(arriving[-1], weights[-2], weights[-1]), 1)
    delta[torch.arange(len(labels), device=labels.device), labels] -= 1.0
    flows = [(arriving[-1], delta)]
    for weight, below, output in zip(weights[-2:0:-2], arriving[-2::-1], arriving[:0:-1], strict=True):
        delta = torch.ops.aten.threshold_backward(delta.mm(weight), output, 0)
        flows.append((below, delta))
    return flows[::-1]


def _usable(flows: list[_Flow], clip: float) -> list[_Flow]:
    """The deltas times min(1, clip / ||g_i||); a sample without a finite gradient is all zeros."""
    # In float64: float32 squares under- or overflow long before the gradients themselves do.
    norms = torch.stack(
        [
            torch.linalg.vector_norm(delta, dim=1, dtype=torch.float64)
            * torch.linalg.vector_norm(below, dim=1, dtype=torch.float64).square().add(1.0).sqrt()
            for below, delta in flows
        ]
    )
    norms = torch.linalg.vector_norm(norms, dim=0)
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
