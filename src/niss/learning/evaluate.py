"""How good a model is on labelled samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from niss.learning.checks import require_logits, require_samples, require_whole
from niss.learning.scratch import in_mode


@dataclass(frozen=True)
class Evaluation:
    """Share of samples classified right, mean cross-entropy (nats), and how many samples were used."""

    accuracy: float
    loss: float
    examples: int


@torch.no_grad()
def evaluate(module: nn.Module, images: Tensor, labels: Tensor, *, batch_size: int = 1000) -> Evaluation:
    """Evaluate `module` in eval() mode; its own mode is restored.

    The loss is computed and averaged in float64 over all samples, and is reported as inf or nan when it
    is. The accuracy is always a number: a sample with a nan among its logits has no prediction and
    counts as wrong.
    """
    require_whole(batch_size, field="batch_size", at_least=1)
    highest_label = require_samples(images, labels)
    right = 0
    loss_sum = 0.0
    with in_mode(module, training=False):
        for some_images, some_labels in zip(
            torch.split(images, batch_size), torch.split(labels, batch_size), strict=True
        ):
            logits = require_logits(
                module(some_images), rows=some_labels.shape[0], highest_label=highest_label
            ).double()
            loss_sum += float(functional.cross_entropy(logits, some_labels, reduction="sum"))
            hits = (logits.argmax(dim=1) == some_labels) & ~logits.isnan().any(dim=1)
            right += int(hits.sum())
    examples = labels.shape[0]
    return Evaluation(accuracy=right / examples, loss=loss_sum / examples, examples=examples)
