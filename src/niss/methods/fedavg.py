"""Methods without noise that cancels: clients add none (FedAvg), all of it, or their part of it behind masks."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from niss.errors import ConfigError
from niss.methods.base import FloatArray, Method, UploadRows, server_adversary
from niss.methods.look import DASHED, DOTTED, INK, PINK, PURPLE, SHORT, Look
from niss.randomness import SimStream
from niss.settings import Count, settings
from niss.views.numerics import binomial_quantile

if TYPE_CHECKING:
    from niss.accounting.plans import Plan, RoundPlan


class FedAvg(Method):
    """Updates are uploaded as they are; all variances are zero and every mu is infinite."""

    name = "fedavg"
    look = Look(INK, "p", DOTTED, hollow=True)
    trusts = "all who see the updates"
    private = False

    def adversary(self, plan: Plan) -> str:
        return "none: the server sees every bare update"


class DpFedAvg(Method):
    """Client k adds `N(0, sigma_k^2 I)` to its upload; the sum of m uploads carries `m sigma_k^2`.

    Each upload is protected by its own noise alone, so it makes no difference what the server does with the others or
    how many clients collude.
    """

    name = "dp-fedavg"
    look = Look(PINK, "v", SHORT)
    trusts = "nobody"
    adds_own_noise = True

    def add_client_noise(self, uploads: UploadRows, round: RoundPlan, stream: SimStream) -> RoundPlan:
        uploads.add_own_noise(np.sqrt(round.own_variance), stream)
        return round

    def adversary(self, plan: Plan) -> str:
        return server_adversary(0)


@settings
class SecAggDdg(Method):
    """Every client adds `sigma^2 / (t - c)` to its masked upload, so that a sum of m carries `sigma^2 m / (t - c)`.

    t is the threshold, the fewest uploads of which a sum is opened (by default all m), c the colluders, `sigma^2` the
    largest `sigma_k^2`. Of t uploads at least t - c are honest, and colluders can only take their own noise out, so at
    least `sigma^2` stays: with t = m that is 1 / (1 - rho) of a trusted server's noise. Dropouts have to be planned
    for: a low threshold costs noise in every round, and a round with fewer uploads than the threshold is lost.

    What is assumed: masks that only the sum of all survivors cancels (Bonawitz et al. 2017), with clients that stay
    online for several messages a round; at least t - c honest clients among those that upload, who add their noise and
    do not tell it; a server that cannot pass off clients of its own as more than c of them. Nobody can check that.

    What is computed is continuous Gaussian noise. In a finite ring the noise is discrete, a sum of discrete Gaussians
    is not one, and rounding lengthens updates: `discrete_mu` bounds what that costs. Kairouz, Liu and Steinke 2021
    (2102.06387). An upload looked at alone is counted without its mask.

    threshold  t; None: those of all participants
    """

    name = "secagg-ddg"
    look = Look(PURPLE, "^", DASHED)
    trusts = "{clients} to add noise, and not to help the server"
    masks_uploads = True
    settings = frozenset(("collusion",))

    threshold: Count | None = None

    def add_client_noise(self, uploads: UploadRows, round: RoundPlan, stream: SimStream) -> RoundPlan:
        uploads.add_own_noise(np.sqrt(self.marginal_variance(round)), stream)
        return round

    def loses(self, round: RoundPlan) -> bool:
        """Whether fewer uploads arrived than the threshold asks for."""
        return round.here.size < self._opened(round)

    def _opened(self, round: RoundPlan) -> int:
        """The fewest uploads of which the sum of this round is opened."""
        size = round.participants.size
        return size if self.threshold is None else min(self.threshold, size)

    def joint_variance(self, round: RoundPlan) -> FloatArray:
        """What is left of the noise of the fewest uploads without that of the colluders."""
        return np.full(round.participants.size, round.own_variance.max())

    def variance_against(self, round: RoundPlan, colluders: Collection[int]) -> FloatArray:
        size = round.participants.size
        honest = max(self._opened(round) - len(colluders), 0)
        return np.full(size - len(colluders), honest * self.marginal_variance(round)[0])

    def marginal_variance(self, round: RoundPlan) -> FloatArray:
        """The part of each client, without the mask."""
        colluders = round.plan.assumed(round.participants.size).colluders
        honest = self._opened(round) - colluders
        if honest < 1:
            raise ConfigError(
                f"{colluders} colluders among {self._opened(round)} uploads leave nobody whose "
                "noise is unknown",
                field="threshold",
                hint="assume fewer colluders, or ask for more uploads",
            )
        return np.full(round.participants.size, round.own_variance.max() / honest)

    def left_over_variance(self, round: RoundPlan) -> float:
        return float(self.marginal_variance(round)[round.here].sum())

    def adversary(self, plan: Plan) -> str:
        helpers = "no client colludes with it"
        if plan.collusion:
            helpers = f"up to {100.0 * plan.collusion:.3g} % of a round's participants tell it all they know"
        return f"a server that sees the sum of a round's uploads and no single one; {helpers}"

    def why_no_guarantee(self, plan: Plan) -> str:
        return "The sums of the honest clients carry no noise."

    def caveats(self, plan: Plan) -> tuple[str, ...]:
        needed = "all participants upload" if self.threshold is None else f"at least {self.threshold} upload"
        return (
            f"Secure aggregation is assumed, not run: a round is lost unless {needed}, every client stays online for "
            "several messages, and all but the assumed colluders must add their noise and keep it to themselves.",
            "The numbers are those of continuous Gaussian noise; discrete noise on a grid costs slightly more "
            "(niss.methods.discrete_mu), which a fine grid makes negligible.",
        )

    def ledger_basis(self, plan: Plan) -> dict[str, Any]:
        return {"collusion": plan.collusion, "threshold": self.threshold}


def enough_uploads(participants: int, dropout: float) -> int | None:
    """The threshold that one round in a million does not reach, where each client drops out with that probability.

    None without dropouts: everyone is waited for.
    """
    return max(participants - binomial_quantile(1e-6, participants, dropout), 1) if dropout else None


def discrete_mu(
    *, clients: int, sensitivity: float, deviation: float, coordinates: int, step: float
) -> float:
    """A bound on `sqrt(2 rho)` of a sum of discrete Gaussians, rho as in concentrated privacy; with Gaussians it is mu.

    clients      honest ones, whose noise counts
    sensitivity  how far one client can move the sum, in L2 norm, before rounding
    deviation    of each client's discrete noise, at least half a step
    step         of the grid; rounding an entry moves it by less than that, so the sensitivity is at most
                 `sensitivity + step sqrt(coordinates)`

    In each coordinate a sum of n discrete Gaussians is within a max-divergence of `tau = 10 sum_{k<n} exp(-2 pi^2 s^2 k
    / (k + 1))` of a single one, s the deviation in steps (Kairouz, Liu and Steinke 2021, Proposition 14). With four
    steps in a deviation tau is below 1e-60 for a million clients.

    >>> gaussian = 1.0 / (10.0 * 0.3)
    >>> discrete = discrete_mu(clients=100, sensitivity=1.0, deviation=0.3, coordinates=10_000, step=2.0**-20)
    >>> 1.0 < discrete / gaussian < 1.0002
    True
    """
    if not deviation >= 0.5 * step > 0.0:
        raise ConfigError(f"must be at least half a step of {step!r}, not {deviation!r}", field="deviation")
    k = np.arange(1.0, clients)
    tau = 10.0 * float(np.sum(np.exp(-2.0 * math.pi**2 * (deviation / step) ** 2 * k / (k + 1.0))))
    moved = sensitivity + step * math.sqrt(coordinates)
    gaussian = moved / (math.sqrt(clients) * deviation)
    return min(math.sqrt(gaussian**2 + 2.0 * tau * coordinates), gaussian + tau * math.sqrt(coordinates))
