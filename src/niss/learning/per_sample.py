"""One local step on clipped per-sample gradients: the step whose sensitivity is known."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from niss.errors import ConfigError
from niss.learning.checks import require_logits, require_real, require_samples, require_whole
from niss.learning.flat import FlatLayout
from niss.learning.scratch import batch_statistics_layers, in_mode, kept_buffers
from niss.learning.seeding import seeded_torch
from niss.randomness import SimStream


def clipped_gradient_step(
    module: nn.Module,
    layout: FlatLayout,
    start: Tensor,
    images: Tensor,
    labels: Tensor,
    *,
    clip: float,
    learning_rate: float,
    chunk: int = 256,
    stream: SimStream | None = None,
) -> Tensor:
    """The update of one step from `start`, with d = number of samples:

        -learning_rate / d * sum_i g_i * min(1, clip / ||g_i||_2)

    g_i is the gradient of the cross-entropy of sample i alone, its norm taken over all trainable
    parameters together. Entries of buffers and of frozen parameters are zero.

    Guarantee, up to floating-point rounding: replacing one sample moves the update by at most
    2 * learning_rate * clip / d in L2 norm; adding or removing one at fixed d moves it by at most
    learning_rate * clip / d. A sample whose gradient norm is not finite contributes zero, which is
    within the bound; finding such samples is left to the caller.

    Without a `stream` the module runs in eval() mode, so Dropout is off and nothing is drawn. With one
    it runs in train() mode, each sample under its own masks drawn from `stream.child("torch")`; which
    masks these are then depends on `chunk`, and the bounds hold for equal masks. BatchNorm and its like
    are refused: a gradient of one sample alone does not exist there. The module is scratch space; its
    mode and its other buffers are restored. Memory is O(chunk * layout.size).
    """
    require_real(clip, field="clip", low_allowed=False)
    require_real(learning_rate, field="learning_rate", low_allowed=False)
    require_whole(chunk, field="chunk", at_least=1)
    highest_label = require_samples(images, labels)
    if layers := batch_statistics_layers(module):
        raise ConfigError(
            f"per-sample gradients are undefined with batch statistics: {', '.join(layers)}",
            field="model",
            hint="use GroupNorm or LayerNorm in place of BatchNorm",
        )
    if len(list(module.modules())) < len(list(module.named_modules(remove_duplicate=False))):
        # Under vmap, functional_call leaves its tensors behind in a layer with two names (torch 2.13).
        module = copy.deepcopy(module)
    layout.load(module, start)
    weights = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    if not weights:
        raise ConfigError(
            "has no trainable parameters", field="model", hint="set requires_grad on what shall be trained"
        )

    def sample_loss(trial: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(module, trial, (image.unsqueeze(0),))
        checked = require_logits(logits, rows=1, highest_label=highest_label)
        return functional.cross_entropy(checked, label.unsqueeze(0))

    sample_gradients = vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="different")
    total = torch.zeros(layout.size, dtype=torch.float64, device=start.device)
    parts = layout.split(total)
    with (
        kept_buffers(module, layout),
        in_mode(module, training=stream is not None),
        nullcontext() if stream is None else seeded_torch(stream.child("torch")),
    ):
        for some_images, some_labels in zip(
            torch.split(images, chunk), torch.split(labels, chunk), strict=True
        ):
            gradients = sample_gradients(weights, some_images, some_labels)
            for name, clipped_sum in _clipped_sums(gradients, clip).items():
                parts[name].add_(clipped_sum)
    return total.mul_(-learning_rate / labels.shape[0]).to(start.dtype)


@torch.no_grad()
def _clipped_sums(gradients: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
    """sum_i g_i * min(1, clip / ||g_i||) by parameter name; the samples are the first dimension."""
    # Norms in float64: float32 squares under- or overflow long before the gradients themselves do.
    norms = torch.linalg.vector_norm(
        torch.stack(
            [
                torch.linalg.vector_norm(gradient.flatten(1), dim=1, dtype=torch.float64)
                for gradient in gradients.values()
            ]
        ),
        dim=0,
    )
    usable = norms.isfinite()
    factors = torch.where(usable, (clip / norms).clamp(max=1.0), 0.0)
    if not bool(usable.all()):
        # A factor of zero is not enough: 0 * inf and 0 * nan are nan.
        gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient[~usable] = 0.0
    return {
        name: torch.tensordot(factors.to(gradient.dtype), gradient, dims=1)
        for name, gradient in gradients.items()
    }
