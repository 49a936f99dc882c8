"""The network of the DLG experiments: a small LeNet with sigmoids, whose gradients have gradients everywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from niss.learning import seeded_torch
from niss.randomness import SimStream

_CHANNELS, _KERNEL = 12, 5


class SigmoidLeNet(nn.Module):
    """Three 5x5 convolutions of 12 channels (strides 2, 2, 1) with sigmoids, then a linear output.

    The network of Zhu et al. (Deep Leakage from Gradients, 2019): 768 -> 100 at the end for 3x32x32 pictures
    of 100 classes. Weights and biases start uniform in [-0.5, 0.5], which keeps the sigmoids away from their
    flat ends and the gradients rich.
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        layers: list[nn.Module] = []
        for incoming, stride in ((channels, 2), (_CHANNELS, 2), (_CHANNELS, 1)):
            layers += [nn.Conv2d(incoming, _CHANNELS, _KERNEL, stride, _KERNEL // 2), nn.Sigmoid()]
        self.features = nn.Sequential(*layers, nn.Flatten())
        left = _CHANNELS * -(-height // 4) * -(-width // 4)
        self.output = nn.Linear(left, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.output(self.features(images))
        return logits


def build_lenet(image_shape: tuple[int, int, int], classes: int, stream: SimStream) -> nn.Module:
    """A fresh network whose weights depend on `stream` alone."""
    with seeded_torch(stream):
        module = SigmoidLeNet(image_shape, classes)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.uniform_(-0.5, 0.5)
    return module
