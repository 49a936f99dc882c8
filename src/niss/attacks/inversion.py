"""From one client's update back to its pictures, by search: Deep Leakage from Gradients, and Inverting Gradients.

Both look for pictures whose update, computed as the client would (`UpdateFunction`), fits the one that was seen. The
restart with the least loss is the answer: the loss is all that the adversary can see. The loss alone does not tell
whether the attack succeeded: with noise it ends near the energy of the noise even where the picture is plain to see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from niss.attacks.estimates import FloatArray
from niss.attacks.experiment import Step
from niss.attacks.pictures import Pictures, UpdateFunction, recover_labels
from niss.learning import threads
from niss.randomness import SimStream

# Of a step: the best loss, its pictures and labels, and why to stop here; "": go on.
Found = tuple[float, Tensor, Tensor, str]
# Points [R, n] -> values [R] and gradients [R, n]; row r of each depends on row r alone.
Objective = Callable[[Tensor], tuple[Tensor, Tensor]]

# The rate of Inverting Gradients falls tenfold at these parts of the way.
_DECAYS = (3 / 8, 5 / 8, 7 / 8)
_ARMIJO, _SHRINK, _TRIES = 1e-4, 0.4, 12
_CURVATURE = 1e-10


@dataclass
class Inversion:
    """What a search ended with.

    pictures   [B, C, H, W], in pixels
    labels     as guessed, one per picture
    losses     the best loss by iteration
    frames     some iterations, and the pictures of the best restart as they were then
    stopped    why it stopped early; empty where all iterations were done
    """

    pictures: FloatArray
    labels: NDArray[np.int64]
    losses: list[float] = field(default_factory=list)
    frames: list[tuple[int, FloatArray]] = field(default_factory=list)
    stopped: str = ""


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """How long and how often a search tries.

    iterations   most steps
    restarts     random starts, tried side by side
    frames       about as many pictures on the way are kept
    """

    loss_name: ClassVar[str]

    iterations: int
    restarts: int
    frames: int = 6

    @abstractmethod
    def steps(
        self, gradient: FloatArray, compute: UpdateFunction, like: Pictures, stream: SimStream
    ) -> Iterator[Found]:
        """Step after step, without end."""

    @threads(1)
    def invert(
        self,
        gradient: FloatArray,
        update_function: UpdateFunction,
        like: Pictures,
        *,
        stream: SimStream,
        device: torch.device | None = None,
        progress: Step | None = None,
    ) -> Inversion:
        """The pictures behind a gradient. The frames that are kept are few late, many early.

        gradient   one client's, as guessed from its upload (`AttackedFederation.as_gradient`)
        like       of it only what is public is used: shape and number of pictures, classes, scaling
        stream     where the starts come from
        device     the CPU where none is given
        """
        compute = update_function.to(device or torch.device("cpu"), torch.float32)
        result = Inversion(np.empty(0), np.empty(0, dtype=np.int64))
        marks = {*np.geomspace(1, self.iterations, self.frames).astype(int).tolist(), self.iterations}
        steps = self.steps(gradient, compute, like, stream)
        for number in range(1, self.iterations + 1):
            loss, pictures, labels, result.stopped = next(steps)
            result.losses.append(loss)
            if progress is not None:
                progress(number, self.iterations, f"{self.loss_name} {loss:.3g}")
            if number in marks or result.stopped:
                result.pictures, result.labels = pictures.double().cpu().numpy(), labels.cpu().numpy()
                result.frames.append((number, result.pictures))
            if result.stopped:
                break
        return result


@dataclass(frozen=True, kw_only=True)
class DeepLeakage(Search):
    """Deep Leakage from Gradients (Zhu, Liu and Han, 2019): pictures and labels whose gradient fits the one seen.

        minimise over picture x and label logits l:   || grad loss(x, softmax(l)) - gradient ||^2

    by L-BFGS from several random starts, all at once. It stops early where nothing moves any more.

    patience         it stops when in so many iterations no restart has come down by the part `least_progress`,
    good_enough      or when the best loss has fallen below this part of its start
    """

    loss_name = "loss"

    patience: int = 60
    least_progress: float = 1e-5
    good_enough: float = 1e-10

    def steps(
        self, gradient: FloatArray, compute: UpdateFunction, like: Pictures, stream: SimStream
    ) -> Iterator[Found]:
        """Of L-BFGS."""
        seen = torch.from_numpy(gradient).to(compute.weights)
        batch, shape, classes = len(like.pixels), like.shape, like.classes
        pixels = batch * int(np.prod(shape))

        def unpack(points: Tensor) -> tuple[Tensor, Tensor]:
            images, logits = points[:, :pixels], points[:, pixels:]
            return images.reshape(-1, batch, *shape), logits.reshape(-1, batch, classes)

        def mismatch(pictures: Tensor, logits: Tensor) -> Tensor:
            guess = compute(like.normalise(pictures), logits.softmax(dim=-1))
            return (guess - seen).pow(2).sum()

        def objective(points: Tensor) -> tuple[Tensor, Tensor]:
            variable = points.detach().requires_grad_(True)
            losses = vmap(mismatch)(*unpack(variable))
            (slopes,) = torch.autograd.grad(losses.sum(), variable)
            return losses.detach(), slopes

        start = stream.generator().standard_normal((self.restarts, pixels + batch * classes))
        start[:, :pixels] = 0.5 + 0.25 * start[:, :pixels]
        search = BatchedLbfgs(objective, torch.from_numpy(start).to(seen))
        history = [search.values.clone()]
        while True:
            history.append(search.step().clone())
            best = int(torch.nan_to_num(history[-1], nan=torch.inf).argmin())
            pictures, logits = unpack(search.points[best : best + 1])
            stopped = self._reason_to_stop(history, search.stuck)
            yield float(history[-1][best]), pictures[0], logits[0].argmax(dim=-1), stopped

    def _reason_to_stop(self, history: list[Tensor], stuck: Tensor) -> str:
        first, best = float(history[0].min()), float(history[-1].min())
        if best <= self.good_enough * first:
            return "the gradient fits"
        if bool(stuck.all()):
            return "no way down is left"
        if len(history) > self.patience:
            falling = history[-1] < (1.0 - self.least_progress) * history[-1 - self.patience]
            # A restart that lags this far behind will not become the answer, however slowly it still falls.
            in_reach = history[-1] < 100.0 * best + 1e-3 * first
            if not bool((falling & in_reach).any()):
                return "nothing moves any more"
        return ""


@dataclass(frozen=True, kw_only=True)
class InvertingGradients(Search):
    """Inverting Gradients (Geiping et al., 2020): pictures whose update points where the one seen points.

        minimise over pixels x in [0, 1]:   1 - cos(update(x), gradient) + weight * TV(x)

    by Adam on the signs of the slope, with the labels read off beforehand (`recover_labels`). The direction of an
    update survives clipping and unknown learning rates, total variation stands for what pictures look like, and signed
    steps get through the flat regions of ReLU networks, where L-BFGS gives up. The client may take several local steps.

    rate              of the first steps
    total_variation   weight of the total variation in the objective
    good_enough       it stops when the mismatch of the best restart is below this
    """

    loss_name = "1 - cos"

    rate: float = 0.05
    total_variation: float = 1e-4
    good_enough: float = 1e-9

    def steps(
        self, gradient: FloatArray, compute: UpdateFunction, like: Pictures, stream: SimStream
    ) -> Iterator[Found]:
        """Of signed Adam."""
        seen = torch.from_numpy(gradient).to(compute.weights)
        seen = seen / seen.pow(2).sum().sqrt().clamp_min(1e-30)
        labels = torch.from_numpy(recover_labels(gradient, compute, like))
        targets = functional.one_hot(labels, like.classes).to(seen)

        def mismatch(pictures: Tensor) -> Tensor:
            guess = compute(like.normalise(pictures), targets)
            return 1.0 - (guess * seen).sum() / guess.pow(2).sum().clamp_min(1e-30).sqrt()

        start = stream.generator().random((self.restarts, len(like.pixels), *like.shape))
        pictures = torch.from_numpy(start).to(seen).requires_grad_(True)
        optimiser = torch.optim.Adam([pictures], lr=self.rate)
        decays = [int(part * self.iterations) for part in _DECAYS]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, decays, gamma=0.1)
        least, shown = torch.inf, pictures[0].detach().clone()
        while True:
            losses = vmap(mismatch)(pictures)
            objective = losses + self.total_variation * total_variation(pictures)
            (slopes,) = torch.autograd.grad(objective.sum(), pictures)
            losses = losses.detach()
            best = int(torch.nan_to_num(losses, nan=torch.inf).argmin())
            # Signed steps jump across the kinks of ReLU, so the best so far is kept, not the last.
            if float(losses[best]) < least:
                least, shown = float(losses[best]), pictures[best].detach().clone()
            yield least, shown, labels, "the update fits" if least < self.good_enough else ""
            pictures.grad = slopes.sign()
            optimiser.step()
            schedule.step()
            with torch.no_grad():
                pictures.clamp_(0.0, 1.0)


def total_variation(pictures: Tensor) -> Tensor:
    """The mean absolute step between neighbouring pixels of each restart, [R, B, C, H, W] -> [R]."""
    down = (pictures[..., 1:, :] - pictures[..., :-1, :]).abs().flatten(1).mean(1)
    across = (pictures[..., :, 1:] - pictures[..., :, :-1]).abs().flatten(1).mean(1)
    return down + across


class BatchedLbfgs:
    """L-BFGS for R independent problems at once (Liu and Nocedal, 1989; backtracking to the Armijo condition).

    Every restart of an attack is its own minimisation. They are stacked, so that one evaluation serves all of them, and
    each has its own curvature pairs, step and state of convergence. `values` and `points` are the best so far of each.

    objective   see `Objective`
    start       [R, n], the first points
    memory      how many curvature pairs are remembered
    """

    def __init__(self, objective: Objective, start: Tensor, *, memory: int = 20) -> None:
        self._objective = objective
        self._pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=memory)
        self.points = start.clone()
        self.values, self._slopes = objective(self.points)
        self.stuck = ~torch.isfinite(self.values)

    def step(self) -> Tensor:
        """One iteration of each; returns the values. A problem without a way down is `stuck` and stays."""
        direction = self._direction()
        rate = (self._slopes * direction).sum(1)
        uphill = rate >= 0
        direction = torch.where(uphill[:, None], -self._slopes, direction)
        rate = torch.where(uphill, -(self._slopes**2).sum(1), rate)
        direction[self.stuck] = 0.0
        points, values, slopes, moved = self._search(direction, rate)
        self._remember(points - self.points, slopes - self._slopes)
        self.stuck = self.stuck | ~moved
        self.points, self.values, self._slopes = points, values, slopes
        return values

    def _direction(self) -> Tensor:
        """The two-loop recursion."""
        turned = self._slopes.clone()
        parts: list[Tensor] = []
        for step, change, inverse in reversed(self._pairs):
            part = inverse * (step * turned).sum(1)
            turned -= part[:, None] * change
            parts.append(part)
        turned *= self._scale()[:, None]
        for (step, change, inverse), part in zip(self._pairs, reversed(parts), strict=True):
            turned += (part - inverse * (change * turned).sum(1))[:, None] * step
        return -turned

    def _scale(self) -> Tensor:
        first = (1.0 / self._slopes.abs().sum(1).clamp_min(1e-30)).clamp(max=1.0)
        if not self._pairs:
            return first
        step, change, inverse = self._pairs[-1]
        fitted = (step * change).sum(1) / (change**2).sum(1).clamp_min(1e-30)
        return torch.where(inverse > 0, fitted, first)

    def _search(self, direction: Tensor, rate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Shorten the steps that do not descend enough; whoever finds none stays where it is."""
        length = torch.ones_like(self.values)
        for _ in range(_TRIES):
            tried = self.points + length[:, None] * direction
            values, slopes = self._objective(tried)
            good = (values <= self.values + _ARMIJO * length * rate) & torch.isfinite(slopes).all(1)
            if bool((good | self.stuck).all()):
                break
            length = torch.where(good, length, length * _SHRINK)
        good = good & ~self.stuck
        return (
            torch.where(good[:, None], tried, self.points),
            torch.where(good, values, self.values),
            torch.where(good[:, None], slopes, self._slopes),
            good,
        )

    def _remember(self, step: Tensor, change: Tensor) -> None:
        product = (step * change).sum(1)
        usable = product > _CURVATURE * (change**2).sum(1)
        inverse = torch.where(usable, 1.0 / product.clamp_min(1e-30), torch.zeros_like(product))
        self._pairs.append((step, change, inverse))
