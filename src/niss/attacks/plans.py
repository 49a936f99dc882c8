"""The two settings in which pictures are attacked: the package's default plan, and the paper's.

`default` is what `niss.Plan` promises: client-level privacy, epsilon = 3 at delta = 1e-5 in one round. `paper`
is the reading of the paper's Figure 4 that comes closest to it: noise of deviation 2 zeta sqrt(2 ln(1.25 / delta)) /
(epsilon d_k), zeta = 3, d_k = 600, epsilon = 10, delta = 1e-4, put on the gradient itself; it is a heuristic and
proves nothing. As printed, NISS without colluders distorts nothing: tau = 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import METHODS, Plan
from niss.attacks.staging import Staged, stage_round
from niss.errors import ConfigError
from niss.mechanism import gdp_epsilon
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]

VIEWS = ("alone", "joint")
PRESETS = ("default", "paper")
_PAPER_RECORDS = 600.0


@dataclass(frozen=True)
class Setting:
    """A plan, and how the updates it hides come about."""

    name: str
    plan: Plan
    learning_rate: float
    unit_weights: bool

    def with_method(self, method: str) -> Setting:
        return replace(self, plan=replace(self.plan, method=method))

    def with_distortion(self, distortion: str, tau2: float) -> Setting:
        return replace(self, plan=replace(self.plan, distortion=distortion, tau2=tau2))

    def with_tau2(self, tau2: float | None) -> Setting:
        return replace(self, plan=replace(self.plan, tau2=tau2))

    def stage(
        self, updates: FloatArray, weights: NDArray[np.floating[Any]], *, stream: SimStream, **known: Any
    ) -> Staged:
        """Play the round; equal weights 1/m, or 1 where the setting puts the noise on the gradient itself."""
        share = np.ones(len(updates)) if self.unit_weights else None
        return stage_round(
            updates, weights, self.plan, stream=stream, share=share, records=_PAPER_RECORDS, **known
        )

    def claimed_epsilon(self, staged: Staged, victim: int) -> tuple[float, float]:
        """What is promised to the victim at the plan's delta: in the joint and in the marginal view."""
        plan = staged.plan
        joint = float(plan.joint_mu[victim])
        marginal = float(plan.marginal_mu[victim])
        return gdp_epsilon(joint, self.plan.delta), gdp_epsilon(marginal, self.plan.delta)


def make_setting(
    preset: str,
    *,
    clients: int,
    epsilon: float | None = None,
    delta: float | None = None,
    tau2: float | None = None,
    neighbours: float | None = None,
    kappa: float | None = None,
) -> Setting:
    """The named setting, with whatever is given in place of its own numbers."""
    if preset not in PRESETS:
        raise ConfigError(
            f"unknown setting {preset!r}", field="--plan", hint="use one of: " + ", ".join(PRESETS)
        )
    if clients < 3:
        raise ConfigError(
            f"must be at least 3, not {clients}",
            field="--clients",
            hint="one victim and others to hide among",
        )
    given = {"epsilon": epsilon, "delta": delta, "tau2": tau2, "neighbours": neighbours, "kappa": kappa}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    plan = Plan(neighbours=float(min(10, clients - 1)))
    if preset == "paper":
        plan = replace(
            plan,
            unit="nbafl",
            clip=3.0,
            epsilon=10.0,
            delta=1e-4,
            mechanism="classical",
            allow_invalid=True,
            distortion="scalar",
            tau2=0.0,
        )
    plan = replace(plan, **changes)
    # A wrong epsilon or delta is refused here, before any work.
    if plan.private:
        plan.round_mu(np.zeros(1, dtype=np.int64))
    paper = preset == "paper"
    return Setting(preset, plan, 1.0 if paper else 0.1, paper)


def check_view(view: str) -> None:
    """Refuse a view that nobody has."""
    if view not in VIEWS:
        raise ConfigError(f"unknown view {view!r}", field="--view", hint="use one of: " + ", ".join(VIEWS))


def check_methods(methods: tuple[str, ...]) -> None:
    """Refuse unknown or repeated methods."""
    for method in methods:
        if method not in METHODS:
            raise ConfigError(
                f"unknown method {method!r}", field="--methods", hint="use some of: " + ", ".join(METHODS)
            )
    if not methods or len(set(methods)) != len(methods):
        raise ConfigError("names no method, or one twice", field="--methods", hint="for example fedavg,niss")
