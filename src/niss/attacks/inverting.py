"""Inverting Gradients (Geiping et al., 2020): pictures whose update points where the one seen points.

    minimise over pixels x in [0, 1]:   1 - cos(update(x), update seen) + weight * TV(x)

by Adam on the signs of the gradient, with the labels read off beforehand (`labels`). The direction of an update
survives clipping and unknown learning rates, total variation stands for what pictures look like, and signed steps get
through the flat regions of ReLU networks, where L-BFGS gives up. The imitation may take several local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from niss.attacks.dlg import Inversion
from niss.attacks.imitation import Imitation
from niss.attacks.labels import recover_labels
from niss.attacks.pictures import Pictures
from niss.errors import ConfigError
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]

_DECAYS = (3 / 8, 5 / 8, 7 / 8)


@dataclass(frozen=True)
class InvertSettings:
    """Signed Adam from `restarts` random starts; the rate falls tenfold at 3/8, 5/8 and 7/8 of the way.

    It stops early when the mismatch of the best restart is below `good_enough`.
    """

    iterations: int = 1200
    restarts: int = 2
    rate: float = 0.05
    total_variation: float = 1e-4
    frames: int = 6
    good_enough: float = 1e-9

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts", "frames"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", field=f"--{name}")
        if not self.rate > 0.0:
            raise ConfigError(f"must be above 0, not {self.rate!r}", field="--rate")
        if not self.total_variation >= 0.0:
            raise ConfigError(f"must not be negative, not {self.total_variation!r}", field="--tv")


def invert_update(
    gradient: FloatArray,
    imitation: Imitation,
    like: Pictures,
    settings: InvertSettings,
    *,
    stream: SimStream,
    device: torch.device | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Inversion:
    """Recover the pictures behind `gradient`; of `like` only what is public is used."""
    place = device or torch.device("cpu")
    imitate = imitation.to(place, torch.float32)
    seen = torch.from_numpy(gradient).to(place, torch.float32)
    seen = seen / seen.pow(2).sum().sqrt().clamp_min(1e-30)
    labels = recover_labels(gradient, imitate, like)
    targets = functional.one_hot(torch.from_numpy(labels), like.classes).to(place, torch.float32)

    def mismatch(pictures: Tensor) -> Tensor:
        guess = imitate(like.normalise(pictures), targets)
        return 1.0 - (guess * seen).sum() / guess.pow(2).sum().clamp_min(1e-30).sqrt()

    start = stream.generator().random((settings.restarts, len(like.pixels), *like.shape))
    pictures = torch.from_numpy(start).to(place, torch.float32).requires_grad_(True)
    optimiser = torch.optim.Adam([pictures], lr=settings.rate)
    steps = [int(part * settings.iterations) for part in _DECAYS]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, steps, gamma=0.1)
    marks = set(np.unique(np.geomspace(1, settings.iterations, settings.frames).astype(int)).tolist())
    found = Inversion(np.empty(0), labels)
    for number in range(1, settings.iterations + 1):
        losses = vmap(mismatch)(pictures)
        objective = losses + settings.total_variation * total_variation(pictures)
        (slopes,) = torch.autograd.grad(objective.sum(), pictures)
        losses = losses.detach()
        best = int(torch.nan_to_num(losses, nan=torch.inf).argmin())
        # Signed steps jump across the kinks of ReLU, so the best so far is kept, not the last.
        if not found.losses or float(losses[best]) < found.losses[-1]:
            found.pictures = pictures[best].detach().double().cpu().numpy()
        found.losses.append(min(float(losses[best]), found.losses[-1] if found.losses else torch.inf))
        if number in marks:
            found.frames.append((number, found.pictures))
        if progress is not None:
            progress(number, settings.iterations, f"1 - cos {found.losses[-1]:.3g}")
        if found.losses[-1] < settings.good_enough:
            found.stopped = "the update fits"
            break
        pictures.grad = slopes.sign()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            pictures.clamp_(0.0, 1.0)
    if not found.frames or found.frames[-1][0] != len(found.losses):
        found.frames.append((len(found.losses), found.pictures))
    return found


def total_variation(pictures: Tensor) -> Tensor:
    """The mean absolute step between neighbouring pixels of each restart, [R, B, C, H, W] -> [R]."""
    down = (pictures[..., 1:, :] - pictures[..., :-1, :]).abs().flatten(1).mean(1)
    across = (pictures[..., :, 1:] - pictures[..., :, :-1]).abs().flatten(1).mean(1)
    return down + across
