"""Which labels a gradient was made of, read from the bias of the last layer.

For cross-entropy the gradient of the last bias is mean_i p_i - n / B, with p_i the predicted probabilities and n the
count of each label. Of a single picture only the entry of its own label is negative: the sign rule of iDLG (Zhao,
Mopuri and Bilen, 2020). In a batch, the probabilities the model gives to even grey pictures stand for p_i.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from niss.attacks.imitation import Imitation
from niss.attacks.pictures import Pictures

FloatArray = NDArray[np.float64]


def recover_labels(gradient: FloatArray, imitation: Imitation, like: Pictures) -> NDArray[np.int64]:
    """As many labels as `like` has pictures, in rising order; of `like` only what is public is used."""
    bias = last_bias(gradient, imitation)
    count = len(like.pixels)
    if count == 1:
        return np.array([int(np.argmin(bias))])
    expected = _expected_probabilities(imitation, like)
    # A clip shrinks the whole gradient by one factor, which the labels that do not occur give away.
    positive = bias > 0.0
    scale = float(np.median(bias[positive] / expected[positive])) if positive.any() else 1.0
    counts = np.maximum(expected - bias / max(scale, 1e-12), 0.0)
    counts = counts * count / max(float(counts.sum()), 1e-12)
    return np.sort(np.repeat(np.arange(like.classes), _rounded(counts, count)))


def last_bias(gradient: FloatArray, imitation: Imitation) -> FloatArray:
    """The gradient of the last layer's bias, one entry per class."""
    parts = imitation.layout.split(torch.from_numpy(gradient))
    return np.asarray(next(reversed(parts.values())).numpy())


def _expected_probabilities(imitation: Imitation, like: Pictures) -> FloatArray:
    grey = torch.full((1, *like.shape), 0.5, dtype=torch.float64)
    module = imitation.module
    first = next(module.parameters())
    with torch.no_grad():
        logits = module(like.normalise(grey).to(first.device, first.dtype))
    return np.asarray(logits[0].double().softmax(dim=0).cpu().numpy())


def _rounded(counts: FloatArray, total: int) -> NDArray[np.int64]:
    """Whole numbers with that sum, by the largest remainders."""
    whole = np.floor(counts).astype(np.int64)
    for place in np.argsort(whole - counts, kind="stable")[: total - int(whole.sum())]:
        whole[place] += 1
    return whole
