"""Pictures as an adversary knows them: what update they would cause, what can be read from one, and how near it came.

The adversary can compute everything public that a client does (`UpdateFunction`), and so test a guess. Some things
need no guess: the labels stand in the bias of the last layer, and a picture in a first layer that is linear.

All scores look at pictures cut to the range [0, 1]: whoever attacks knows that pixels lie there, and a wild
value far outside would only make an attack look worse than it is. A picture that says nothing still has a
score, so `blind_guess` gives the PSNR of an even grey, the line below which nothing was learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.signal import convolve2d
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from niss.accounting import Plan
from niss.attacks.estimates import FloatArray
from niss.data.partition import largest_remainder
from niss.errors import ConfigError
from niss.learning import FlatLayout

# Of the structural similarity: the window and its spread in pixels, and its two constants.
_WINDOW, _SPREAD = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2


@dataclass(frozen=True)
class Pictures:
    """Private pictures and their labels.

    name        dataset:index, as the user gave it, or the name of the file
    pixels      [N, C, H, W], in [0, 1]
    labels      one class per picture
    classes     how many classes there are
    mean, std   per channel: the model reads (pixels - mean) / std
    """

    name: str
    pixels: FloatArray
    labels: NDArray[np.int64]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels as the model reads them."""
        return (pixels - _per_channel(self.mean, pixels)) / _per_channel(self.std, pixels)

    def inputs(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The pictures as the model reads them."""
        return self.normalise(torch.from_numpy(self.pixels)).to(dtype)

    def raw(self) -> Pictures:
        """The same pictures for a model that reads pixels as they are."""
        channels = self.shape[0]
        return replace(self, mean=(0.0,) * channels, std=(1.0,) * channels)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).reshape(-1, 1, 1)


@dataclass(frozen=True)
class UpdateFunction:
    """The update that given pictures would cause: `steps` local steps on all of them, then the clip of `plan`.

    `__call__` is differentiable in pictures and labels, and can be batched with `torch.func.vmap`.

    module, layout   the network, and where each parameter lies in `weights`
    weights          the public global model from which the client starts
    plan             None: no clip
    """

    module: nn.Module
    layout: FlatLayout
    weights: Tensor
    learning_rate: float
    steps: int = 1
    plan: Plan | None = None

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The update in the units of a gradient, -update / (learning_rate * steps), as one vector.

        inputs   [B, C, H, W], as the model reads them
        labels   [B, classes], rows that sum to 1
        """
        slope = grad(self._loss)
        start = self.layout.split(self.weights)
        moved = start
        for _ in range(self.steps):
            slopes = slope(moved, inputs, labels)
            moved = {name: moved[name] - self.learning_rate * slopes[name] for name in moved}
        update = torch.cat([(moved[name] - start[name]).reshape(-1) for name in start])
        return -self._clipped(update) / (self.learning_rate * self.steps)

    def _loss(self, parts: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy, mean_i -sum_c labels_ic log softmax(logits_i)_c, for labels that may be soft."""
        logits = functional_call(self.module, parts, (inputs,))
        return -(labels * functional.log_softmax(logits, dim=-1)).sum(dim=-1).mean()

    def _clipped(self, update: Tensor) -> Tensor:
        """As `niss.attacks.rounds.clip_update`, differentiable."""
        plan = self.plan
        if plan is None or not plan.private:
            return update
        if plan.unit == "nbafl":
            return update.clamp(-plan.clip, plan.clip)
        norm = update.pow(2).sum().clamp_min(1e-24).sqrt()
        return update * (plan.clip / norm).clamp(max=1.0)

    def to(self, device: torch.device, dtype: torch.dtype) -> UpdateFunction:
        """The same function on another device; the module itself moves."""
        module = self.module.to(device=device, dtype=dtype)
        return replace(self, module=module, weights=self.weights.to(device=device, dtype=dtype))


def recover_labels(
    gradient: FloatArray, update_function: UpdateFunction, like: Pictures
) -> NDArray[np.int64]:
    """As many labels as `like` has pictures, in rising order; of `like` only what is public is used.

    For cross-entropy the gradient of the last bias is mean_i p_i - n / B, with p_i the predicted probabilities and n
    the count of each label. Of a single picture only the entry of its own label is negative: the sign rule of iDLG
    (Zhao, Mopuri and Bilen, 2020). In a batch, the probabilities the model gives to even grey pictures stand for p_i.
    """
    parts = update_function.layout.split(torch.from_numpy(gradient))
    bias, count = np.asarray(next(reversed(parts.values())).numpy()), len(like.pixels)
    if count == 1:
        return np.array([int(np.argmin(bias))])
    expected = _expected_probabilities(update_function.module, like)
    # A clip shrinks the whole gradient by one factor, which the labels that do not occur give away.
    positive = bias > 0.0
    scale = float(np.median(bias[positive] / expected[positive])) if positive.any() else 1.0
    counts = np.maximum(expected - bias / max(scale, 1e-12), 0.0)
    return np.sort(np.repeat(np.arange(like.classes), largest_remainder(count, counts)))


def _expected_probabilities(module: nn.Module, like: Pictures) -> FloatArray:
    """What the model makes of an even grey, which stands for pictures that the adversary does not know."""
    grey = torch.full((1, *like.shape), 0.5, dtype=torch.float64)
    first = next(module.parameters())
    with torch.no_grad():
        logits = module(like.normalise(grey).to(first.device, first.dtype))
    return np.asarray(logits[0].double().softmax(dim=0).cpu().numpy())


def read_picture(
    gradient: FloatArray,
    update_function: UpdateFunction,
    like: Pictures,
    variance: FloatArray | None = None,
) -> FloatArray:
    """The one picture [1, C, H, W], in pixels, behind one step of a network that begins with a linear layer.

    For z = W x + b the gradients are dL/dW = (dL/dz) x^T and dL/db = dL/dz, so every row of the first is x times an
    entry of the second, and least squares over the rows gives x = sum_i b_i W_i / sum_i b_i^2 (Phong et al., 2017;
    Geiping et al., 2020, Proposition 3.1). No search, no restarts, whatever the scale.

    like       of it only shape and scaling are used
    variance   of each entry of the gradient: the rows are weighted by its inverse, pixel by pixel

    Raises `ConfigError` where the first layer is not linear.
    """
    parts = list(update_function.layout.split(torch.from_numpy(gradient)).values())
    weight, bias = parts[0].numpy(), parts[1].numpy()
    inputs = int(np.prod(like.shape))
    if weight.shape != (bias.size, inputs):
        raise ConfigError(
            "the first layer of this model is not linear",
            field="model",
            hint="use the mlp, or a search",
        )
    trust = np.ones_like(weight)
    if variance is not None and float(variance.min()) > 0.0:
        trust = 1.0 / variance[: weight.size].reshape(weight.shape)
    energy = bias**2 @ trust
    flat = (bias @ (trust * weight)) / np.where(energy > 0.0, energy, 1.0)
    mean, std = np.asarray(like.mean), np.asarray(like.std)
    picture = flat.reshape(like.shape) * std[:, None, None] + mean[:, None, None]
    return np.asarray(picture[None])


@dataclass(frozen=True)
class PictureScores:
    """How near recovered pictures come to the originals.

    mse    mean squared error of a pixel in [0, 1]
    psnr   peak signal-to-noise ratio in dB, -10 log10(mse); infinite for a perfect copy
    ssim   structural similarity (Wang et al., 2004), 1 for a perfect copy
    """

    mse: float
    psnr: float
    ssim: float


def score_pictures(recovered: FloatArray, original: FloatArray) -> PictureScores:
    """Scores of pictures [N, C, H, W] against the originals: of the mean error, and the mean SSIM.

    A gradient does not say in which order its pictures came, so the order that fits best is taken.
    """
    if recovered.shape != original.shape or original.ndim != 4:
        raise ConfigError(f"shape {recovered.shape} beside {original.shape}", field="recovered")
    cut = np.clip(np.nan_to_num(recovered, nan=0.5), 0.0, 1.0)
    ordered = cut[best_order(cut, original)]
    mse = float(np.mean((ordered - original) ** 2))
    similar = [structural_similarity(one, other) for one, other in zip(ordered, original, strict=True)]
    return PictureScores(mse, peak_ratio(mse), float(np.mean(similar)))


def best_order(recovered: FloatArray, original: FloatArray) -> NDArray[np.int64]:
    """Which recovered picture belongs to which original, by the least total squared error."""
    flat, wanted = recovered.reshape(len(recovered), -1), original.reshape(len(original), -1)
    costs = np.array([[float(np.mean((one - other) ** 2)) for other in flat] for one in wanted])
    return np.asarray(linear_sum_assignment(costs)[1], dtype=np.int64)


def peak_ratio(mse: float) -> float:
    """PSNR in dB for pixels in [0, 1]: -10 log10(mse)."""
    return math.inf if mse == 0.0 else -10.0 * math.log10(mse)


def blind_guess(original: FloatArray) -> float:
    """The PSNR in dB of the even grey that fits best: what is reached without any knowledge of the picture.

    -10 log10 of the variance of the pixels.
    """
    return peak_ratio(float(np.mean((original - original.mean()) ** 2)))


def structural_similarity(one: FloatArray, other: FloatArray) -> float:
    """SSIM of two pictures [C, H, W] in [0, 1] (Wang et al., 2004): 11 x 11 Gaussian window, mean over channels.

    ((2 m1 m2 + c1)(2 s12 + c2)) / ((m1^2 + m2^2 + c1)(s1^2 + s2^2 + c2)), c1 = 0.01^2, c2 = 0.03^2.
    """
    width = min(_WINDOW, *one.shape[1:])
    line = np.exp(-0.5 * ((np.arange(width) - (width - 1) / 2.0) / _SPREAD) ** 2)
    window = np.outer(line, line) / np.outer(line, line).sum()
    values = [_similarity_map(a, b, window) for a, b in zip(one, other, strict=True)]
    return float(np.mean(values))


def _similarity_map(one: FloatArray, other: FloatArray, window: FloatArray) -> FloatArray:
    def local(values: FloatArray) -> FloatArray:
        return np.asarray(convolve2d(values, window, mode="valid"))

    mean_one, mean_other = local(one), local(other)
    spread_one = local(one * one) - mean_one**2
    spread_other = local(other * other) - mean_other**2
    common = local(one * other) - mean_one * mean_other
    above = (2.0 * mean_one * mean_other + _C1) * (2.0 * common + _C2)
    below = (mean_one**2 + mean_other**2 + _C1) * (spread_one + spread_other + _C2)
    return np.asarray(above / below)
