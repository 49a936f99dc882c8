"""Deep Leakage from Gradients (Zhu, Liu and Han, 2019): pictures and labels whose gradient fits the one seen.

    minimise over picture x and label logits l:   || grad loss(x, softmax(l)) - gradient seen ||^2

by L-BFGS from several random starts, all at once. The restart with the least loss is the answer: the loss is
all that the adversary can see. The loss alone does not tell whether the attack succeeded: with noise it ends near the
energy of the noise even where the picture is plain to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from niss.attacks.imitation import Imitation
from niss.attacks.lbfgs import BatchedLbfgs
from niss.attacks.pictures import Pictures
from niss.errors import ConfigError
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class DlgSettings:
    """How long and how often DLG tries; it stops early where nothing moves any more.

    A run stops when the best loss has fallen below `good_enough` of its start, or when in `patience` iterations
    no restart has come down by the part `least_progress`.
    """

    iterations: int = 2000
    restarts: int = 4
    frames: int = 6
    patience: int = 60
    least_progress: float = 1e-5
    good_enough: float = 1e-10

    def __post_init__(self) -> None:
        for name in ("iterations", "restarts", "frames", "patience"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", field=f"--{name}")


@dataclass
class Inversion:
    """What an inversion found: `pictures` in pixels, `labels` guessed, the best loss by iteration, and some frames.

    `frames` pairs iterations with the pictures of the best restart as they were then.
    """

    pictures: FloatArray
    labels: NDArray[np.int64]
    losses: list[float] = field(default_factory=list)
    frames: list[tuple[int, FloatArray]] = field(default_factory=list)
    stopped: str = ""


def deep_leakage(
    gradient: FloatArray,
    imitation: Imitation,
    like: Pictures,
    settings: DlgSettings,
    *,
    stream: SimStream,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Inversion:
    """Recover the pictures behind `gradient` (one client's, as guessed from its upload).

    Of `like` only what is public is used: the shape and number of pictures, the classes and the scaling.
    """
    place = device or torch.device("cpu")
    imitate = imitation.to(place, torch.float32)
    seen = torch.from_numpy(gradient).to(place, torch.float32)
    batch, shape, classes = len(like.pixels), like.shape, like.classes
    pixels = batch * int(np.prod(shape))

    def unpack(points: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(points)
        return points[:, :pixels].reshape(rows, batch, *shape), points[:, pixels:].reshape(
            rows, batch, classes
        )

    def mismatch(pictures: Tensor, logits: Tensor) -> Tensor:
        guess = imitate(like.normalise(pictures), logits.softmax(dim=-1))
        return (guess - seen).pow(2).sum()

    def objective(points: Tensor) -> tuple[Tensor, Tensor]:
        variable = points.detach().requires_grad_(True)
        losses = vmap(mismatch)(*unpack(variable))
        (slopes,) = torch.autograd.grad(losses.sum(), variable)
        return losses.detach(), slopes

    start = stream.generator().standard_normal((settings.restarts, pixels + batch * classes))
    start[:, :pixels] = 0.5 + 0.25 * start[:, :pixels]
    search = BatchedLbfgs(objective, torch.from_numpy(start).to(place, torch.float32))
    found = Inversion(np.empty(0), np.empty(0, dtype=np.int64))
    marks = set(np.unique(np.geomspace(1, settings.iterations, settings.frames).astype(int)).tolist())
    history = [search.values.clone()]
    first = float(search.values.min())
    for number in range(1, settings.iterations + 1):
        values = search.step()
        history.append(values.clone())
        best = int(torch.nan_to_num(values, nan=torch.inf).argmin())
        found.losses.append(float(values[best]))
        if progress is not None:
            progress(number, settings.iterations, f"loss {found.losses[-1]:.3g}")
        found.stopped = _reason_to_stop(history, search.stuck, first, settings)
        if number in marks or found.stopped or number == settings.iterations:
            pictures, logits = unpack(search.points[best : best + 1])
            found.pictures = pictures[0].double().cpu().numpy()
            found.labels = logits[0].argmax(dim=-1).cpu().numpy()
            found.frames.append((number, found.pictures))
        if found.stopped:
            break
    return found


def _reason_to_stop(history: list[Tensor], stuck: Tensor, first: float, settings: DlgSettings) -> str:
    best = float(history[-1].min())
    if best <= settings.good_enough * first:
        return "the gradient fits"
    if bool(stuck.all()):
        return "no way down is left"
    if len(history) > settings.patience:
        earlier = history[-1 - settings.patience]
        falling = history[-1] < (1.0 - settings.least_progress) * earlier
        # A restart that lags this far behind will not become the answer, however slowly it still falls.
        in_reach = history[-1] < 100.0 * best + 1e-3 * first
        if not bool((falling & in_reach).any()):
            return "nothing moves any more"
    return ""
