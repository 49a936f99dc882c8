"""The server's optimiser: how the sums of the rounds become models.

Round t releases the noisy mean update d_t. With the rate `r_t = server_rate * a_t` (`rate_factors`), and b, c and e for
`server_momentum`, `server_beta2` and `server_epsilon`, coordinate by coordinate,

    sgd        w += r_t d_t                                                        FedAvg
    momentum   m = b m + d_t                  w += r_t m                           FedAvgM, as `torch.optim.SGD`
    adam       m = b m + (1 - b) d_t          w += r_t m / (sqrt(v) + e)           FedAdam
               v = c v + (1 - c) d_t^2
    yogi       v = v - (1 - c) d_t^2 sign(v - d_t^2), the rest as adam             FedYogi

with m = 0 and v = e^2 before the first round and no correction of the bias (Reddi et al. 2021, "Adaptive Federated
Optimization", 2003.00295, algorithm 2; FedAvgM is Hsu et al. 2019, 1909.06335). A round that was lost moves nothing.

Privacy: none of this looks at anything but what the rounds have released, so it is post-processing and costs nothing.

Noise in the model: sgd and momentum are linear filters of the sums, so the noise in the model follows exactly from the
variance of each sum and its covariances with earlier ones (`SumNoise`, `ModelNoise`). Noise that round t adds and round
t + 1 takes out leaves the model at once with sgd; with momentum and a constant rate r, `r b^k` times it is left after
round t + k. Adam and Yogi divide by what depends on the noise itself: nothing is predicted, and noise of two rounds
cancels as far as v has stayed the same in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan
from niss.claims import digits
from niss.runs import RoundRecord, SumNoise

if TYPE_CHECKING:
    from torch import Tensor

    from niss.simulation.sections import OptimizerName, ServerRateSchedule, TrainingConfig

FloatArray = NDArray[np.float64]


def rate_factors(schedule: ServerRateSchedule, rounds: int) -> tuple[float, ...]:
    """The factor a_t of every round; () where all are alike.

        linear     1 - t / T           t = 0, ..., T - 1
        cosine     (1 + cos(pi t / T)) / 2

    All are above 0. Noise that one round adds and another takes out needs a constant rate.
    """
    if schedule == "linear":
        return tuple(1.0 - number / rounds for number in range(rounds))
    if schedule == "cosine":
        return tuple((1.0 + math.cos(math.pi * number / rounds)) / 2.0 for number in range(rounds))
    return ()


@dataclass(frozen=True)
class ModelNoise:
    """The noise in the model and in the server's momentum, in each coordinate.

    variance  of it in the model
    crossed   covariance of both
    momentum  variance of it in the momentum
    """

    variance: float = 0.0
    crossed: float = 0.0
    momentum: float = 0.0


@dataclass(frozen=True)
class ServerState:
    """What the server remembers from round to round, besides the model.

    momentum, second_moment  m and v; None: the optimiser has none, or this is before the first round
    noise                    what is known of the noise in the model; None: nothing
    """

    momentum: FloatArray | None = None
    second_moment: FloatArray | None = None
    noise: ModelNoise | None = ModelNoise()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it; nothing with sgd, whose variance is in the metrics."""
        import torch  # not with this file: settings are read without it

        kept = {}
        if self.momentum is not None:
            kept["server_momentum"] = torch.from_numpy(self.momentum)
            if self.noise is not None:
                kept["server_noise"] = torch.tensor(
                    [self.noise.crossed, self.noise.momentum], dtype=torch.float64
                )
        if self.second_moment is not None:
            kept["server_second_moment"] = torch.from_numpy(self.second_moment)
        return kept

    @classmethod
    def restored(cls, tensors: dict[str, Tensor], variance: float | None) -> ServerState:
        """From the tensors of a checkpoint, and the noise in the model that the last line of the metrics has."""
        momentum, second_moment = (
            tensors[name].numpy() if name in tensors else None
            for name in ("server_momentum", "server_second_moment")
        )
        if second_moment is not None or variance is None:
            return cls(momentum, second_moment, None)
        known = tensors["server_noise"].tolist() if "server_noise" in tensors else (0.0, 0.0)
        return cls(momentum, noise=ModelNoise(variance, *known))


FRESH = ServerState()
"""Before the first round."""


@dataclass(frozen=True)
class Optimizer:
    """Moves the model by what the rounds release.

    name       of it, as above
    plan       under which the sums were released
    rate       of the first round, where it falls
    factors    a_t, with which the rate follows its schedule; (): it is constant
    momentum   b; 0: none
    beta2, epsilon  c and e
    """

    name: OptimizerName
    plan: Plan
    rate: float
    momentum: float
    beta2: float
    epsilon: float
    factors: tuple[float, ...]

    @classmethod
    def of(cls, training: TrainingConfig, plan: Plan, rounds: int) -> Optimizer:
        """As the settings ask for."""
        name, momentum = training.server_optimizer, training.server_momentum
        if momentum is None:
            momentum = 0.0 if name == "sgd" else 0.9
        beta2 = 0.99 if training.server_beta2 is None else training.server_beta2
        epsilon = 1e-3 if training.server_epsilon is None else training.server_epsilon
        factors = rate_factors(training.server_rate_schedule, rounds)
        return cls(name, plan, training.server_rate, momentum, beta2, epsilon, factors)

    @property
    def adaptive(self) -> bool:
        """Whether coordinates have rates of their own, which follow what was released."""
        return self.name in ("adam", "yogi")

    @property
    def at_once(self) -> bool:
        """Whether a sum moves the model in its own round alone."""
        return self.name == "sgd"

    def rate_of(self, number: int) -> float:
        """r_t of round `number` (from 0)."""
        return self.rate * self.factors[number] if self.factors else self.rate

    def step(
        self, state: ServerState, total: FloatArray, number: int, noise: SumNoise
    ) -> tuple[FloatArray, ServerState]:
        """How far round `number` (from 0), which released `total`, moves the model, and the state after it."""
        rate = self.rate_of(number)
        known = None if self.adaptive else self._noise_after(state.noise, noise, number)
        if self.at_once:
            return rate * total, ServerState(noise=known)
        before = np.zeros_like(total) if state.momentum is None else state.momentum
        if not self.adaptive:
            momentum = self.momentum * before + total
            return rate * momentum, ServerState(momentum, noise=known)
        square = total**2
        second = state.second_moment
        if second is None:
            second = np.full_like(total, self.epsilon**2)
        momentum = self.momentum * before + (1.0 - self.momentum) * total
        if self.name == "adam":
            second = self.beta2 * second + (1.0 - self.beta2) * square
        else:
            second = second - (1.0 - self.beta2) * square * np.sign(second - square)
        moved = rate * momentum / (np.sqrt(second) + self.epsilon)
        return moved, ServerState(momentum, second, None)

    def _noise_after(self, before: ModelNoise | None, noise: SumNoise, number: int) -> ModelNoise | None:
        """`m = b m + n, w += r m` for variances and covariances.

        The noise of round s has the weight `b^(t - 1 - s)` in the momentum before round t, and in the model
        `sum of r_u b^(u - s)` over the rounds u from s to t - 1.
        """
        if before is None:
            return None
        b, rate = self.momentum, self.rate_of(number)
        with_momentum = with_model = in_model = 0.0
        for lag, covariance in enumerate(noise.covariances, start=1):
            in_model = self.rate_of(number - lag) + b * in_model
            with_momentum += covariance * b ** (lag - 1)
            with_model += covariance * in_model
        momentum = b**2 * before.momentum + 2.0 * b * with_momentum + noise.variance
        crossed = b * before.crossed + with_model
        variance = before.variance + 2.0 * rate * crossed + rate**2 * momentum
        return ModelNoise(variance, crossed + rate * momentum, momentum)

    def caveats(self, last: RoundRecord) -> tuple[str, ...]:
        """What has to be said of noise that one round adds and another takes out; `last` is the run's last round."""
        if not self.plan.kind.correlates or self.at_once:
            return ()
        if self.adaptive:
            return (
                f"The server's optimiser ({self.name}) divides every coordinate by what depends on the rounds "
                "released so far, so that noise that one round adds and another takes out does not cancel exactly in "
                "the model. How much stays there is not known. What is promised does not depend on it.",
            )
        left, has = last.model_noise_variance, ""
        if left is not None:
            has = f": after the last round the model has {digits(left, 2)} in every coordinate (variance)"
        return (
            "The server's momentum spreads every round over those after it, so that noise that one round adds and "
            f"another takes out fades from the model instead of leaving it at once{has}.",
        )
