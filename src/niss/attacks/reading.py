"""Reading a picture straight from the update of a network that begins with a linear layer.

For z = W x + b the gradients are dL/dW = (dL/dz) x^T and dL/db = dL/dz, so every row of the first is x times an entry
of the second, and least squares over the rows gives x = sum_i b_i W_i / sum_i b_i^2 (Phong et al., 2017; Geiping et
al., 2020, Proposition 3.1). No search, no restarts, whatever the scale: one picture, one step.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from niss.attacks.imitation import Imitation
from niss.attacks.pictures import Pictures
from niss.errors import ConfigError

FloatArray = NDArray[np.float64]


def read_picture(
    gradient: FloatArray, imitation: Imitation, like: Pictures, variance: FloatArray | None = None
) -> FloatArray:
    """The picture [1, C, H, W] in pixels; of `like` only its shape and scaling are used.

    With the `variance` of each entry the rows are weighted by its inverse, pixel by pixel.
    """
    parts = list(imitation.layout.split(torch.from_numpy(gradient)).values())
    weight, bias = parts[0].numpy(), parts[1].numpy()
    inputs = int(np.prod(like.shape))
    if weight.shape != (bias.size, inputs):
        raise ConfigError(
            "the first layer of this model is not linear", field="model", hint="use the mlp, or invert_update"
        )
    trust = np.ones_like(weight)
    if variance is not None and float(variance.min()) > 0.0:
        trust = 1.0 / variance[: weight.size].reshape(weight.shape)
    energy = bias**2 @ trust
    flat = (bias @ (trust * weight)) / np.where(energy > 0.0, energy, 1.0)
    mean, std = np.asarray(like.mean), np.asarray(like.std)
    shown = flat.reshape(like.shape) * std[:, None, None] + mean[:, None, None]
    return np.asarray(shown[None])
