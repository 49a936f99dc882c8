"""What a method is: which noise is added, where and by whom, what that is worth, and whom it asks to trust.

A method holds no state. Everything it answers follows from a `Plan` or from the numbers of one round (`RoundPlan`),
both of `niss.accounting`, which is built on this room and is imported here for its types alone; the rows that it adds
noise to are `UploadRows`, wherever they lie.
A new method is one file with a subclass of `Method`, and one line in `niss.methods`.
"""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.errors import ConfigError
from niss.mechanism import add_gaussian, add_shares
from niss.mechanism.shares import Common, Edges, add_spread
from niss.methods.look import OLIVE, Look
from niss.randomness import SimStream
from niss.views import WorstCase

if TYPE_CHECKING:
    from niss.accounting.plans import Plan, RoundPlan

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Rows = NDArray[np.floating[Any]]

# Neighbouring updates of a client lie this many times the clip apart.
RELATIONS = {"zero-out": 1.0, "replace-one": 2.0}

Needs = Mapping[str, tuple[Any, str]]
"""By setting, the value that it must have (`float`: one number for all clients) and why. Names of a plan stand alone,
those of a simulation with their section: `training.weights`."""

_WHOLE_RUN: Needs = {"privacy.scope": ("training", "its claim is about the whole training")}
_CORRELATED: Needs = {
    "unit": (
        "client",
        "it takes noise of one round out in another: silos are in every round, where that gains nothing, and what a "
        "participation adds to the run does not pay for the records in its secret batch",
    ),
    "privacy.quantile": (
        None,
        "it takes noise of one round out in another, which fails if the clip, and the noise with it, has changed in "
        "between",
    ),
    "training.server_rate_schedule": (
        "constant",
        "it takes noise of one round out in another, which fails if the rate has changed in between",
    ),
}


def require_needs(needs: Needs, given: Mapping[str, Any], *, who: str, otherwise: str = "") -> None:
    """Refuse the first of the given settings that is not what `who` needs; `otherwise` is another way out."""
    for key, (wanted, why) in needs.items():
        value = given.get(key, wanted)
        several = isinstance(value, tuple)
        if several if wanted is float else value != wanted:
            fix = "leave it out" if wanted is None else f"use {key.rpartition('.')[2]} = {wanted!r}"
            raise ConfigError(
                f"{who}: {why}" + ("" if several else f" (got {value!r})"),
                field=key,
                hint=("give one number" if wanted is float else fix) + otherwise,
            )


class UploadRows(Protocol):
    """The rows of one round, a client each, to which noise is added in place; see `niss.learning.Uploads`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Clients and coordinates."""

    def add_own_noise(self, deviations: FloatArray, stream: SimStream) -> None:
        """Add simulated `N(0, deviations[k]^2 I)` to row k."""

    def add_shares(
        self,
        edges: Edges,
        *,
        unit_variance: float,
        tau2: ArrayLike,
        distortion: str,
        stream: SimStream,
        keep_factors: bool = False,
    ) -> Rows | None:
        """As `niss.mechanism.add_shares`."""

    def add_spread(
        self, seats: IntArray, variance: float, common: Sequence[Common], stream: SimStream
    ) -> None:
        """As `niss.mechanism.shares.add_spread`."""


@dataclass(frozen=True)
class PlainRows:
    """A matrix as `UploadRows`: every share of every edge is drawn, which is the reference."""

    rows: Rows

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.rows.shape[1]

    def add_own_noise(self, deviations: FloatArray, stream: SimStream) -> None:
        for seat, (row, deviation) in enumerate(zip(self.rows, deviations, strict=True)):
            add_gaussian(row, float(deviation), stream.child("own", seat))

    def add_shares(self, edges: Edges, **settings: Any) -> Rows | None:
        return add_shares(self.rows, edges, **settings)

    def add_spread(self, *noise: Any) -> None:
        add_spread(self.rows, *noise)


@dataclass(frozen=True)
class NoiseHistory:
    """What a server draws its noise from, and what it needs to know of earlier rounds in order to correlate with it.

    stream_of  the stream that the noise of a round (from 0) is drawn from
    kept       noise of the latest rounds; what is missing, as after an interruption, is drawn again
    """

    stream_of: Callable[[int], SimStream]
    kept: dict[int, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class CarriedEdges:
    """What is carried from one round to the next, everyone to everyone.

    stream    what is carried is drawn from, by both rounds
    absent    seats of the first round that never uploaded
    repaired  the shares that they would have carried were taken out of the second round's sum
    """

    stream: SimStream
    absent: tuple[int, ...] = ()
    repaired: bool = False

    def senders(self, size: int) -> int:
        """Of the first round, of that size, whose shares the second takes out: the lost too, unless repaired."""
        return size - len(self.absent) if self.repaired else size


class Method(ABC):
    """One way of hiding updates.

    name            as in configurations, files and tables
    look            how it is drawn, the same in every figure
    private         whether any noise is added at all
    trusts          in words, whom a client has to trust; `{clients}` stands for those that are assumed not to collude
    trusts_server   whether its epsilon holds only if the server is trusted with every bare update
    adds_own_noise  whether every client hides its upload with noise of its own that nothing cancels
    shares_noise    whether clients share noise over a graph, so that it cancels in the sum
    has_protocol    whether `niss.protocol` can run it, with real keys and a real server; its plans keep a part of
                    delta for noise on a grid, even where they are only simulated
    masks_uploads   whether the server sees nothing of an upload but the sum that it is part of
    settings        the fields of a plan that mean something to it and nothing to the other methods
    samplings       how participants may be drawn, the one to fall back on first; empty: in any way. `alone`: nobody is
                    drawn, one client trains by itself
    secret_draw     whether its epsilon holds only against those who do not learn who took part
    whole_run       whether its noise is planned for a whole run of a known length, not for a round
    correlates      whether noise of a round is taken out again in another, so that all must have the same clip
    carries         whether clients carry noise from one round to the next
    carrying        the method that does the same with noise carried between rounds, where there is one
    defaults        settings that are not what they are for other methods, unless they are given
    needs           settings that must have one value, beside those that follow from the above
    """

    name: ClassVar[str]
    look: ClassVar[Look] = Look(OLIVE, "h")
    trusts: ClassVar[str]
    private: ClassVar[bool] = True
    trusts_server: ClassVar[bool] = False
    adds_own_noise: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False
    has_protocol: ClassVar[bool] = False
    masks_uploads: ClassVar[bool] = False
    settings: ClassVar[frozenset[str]] = frozenset()
    samplings: ClassVar[tuple[str, ...]] = ()
    secret_draw: ClassVar[bool] = False
    whole_run: ClassVar[bool] = False
    correlates: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    carrying: ClassVar[str | None] = None
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    needs: ClassVar[Needs] = MappingProxyType({})

    @property
    def own(self) -> dict[str, Any]:
        """The settings that are fields of this method itself, by name: `CentralMf(bands=5)` has its bands."""
        return {one.name: getattr(self, one.name) for one in fields(self)} if is_dataclass(self) else {}

    def uses(self, setting: str) -> bool:
        """Whether that setting (`kappa`, `tau2`, `collusion`, ...) means anything to this method."""
        return setting in self.settings or setting in self.own

    def require(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigError where this method cannot run with these settings."""
        whole_run, correlated = _WHOLE_RUN if self.whole_run else {}, _CORRELATED if self.correlates else {}
        require_needs({**whole_run, **correlated, **self.needs}, given, who=self.name)

    def check(self, plan: Plan) -> None:
        """Raise ConfigError where this method cannot keep such a plan."""
        self.require(vars(plan))

    # What runs. By default nothing is shared and nobody adds anything.

    def share(self, round: RoundPlan, beacon: bytes) -> RoundPlan:
        """The same round with whom each participant shares noise, how much of it, and how it is distorted.

        beacon  public randomness of the round, from which the graph follows
        """
        return round

    def add_client_noise(self, uploads: UploadRows, round: RoundPlan, stream: SimStream) -> RoundPlan:
        """Turn `p_k x_k` into what each client uploads, in place; returns the round with what was drawn.

        Of a round that was repaired the rows are the uploads without the shares that were taken out.
        """
        return round

    def add_server_noise(  # noqa: B027
        self, total: FloatArray, round: RoundPlan, history: NoiseHistory
    ) -> None:
        """Add what a trusted server adds to the sum before releasing it, in place."""

    def loses(self, round: RoundPlan) -> bool:
        """Whether nothing comes of a round that lost its absent seats."""
        return False

    # What it costs. By default a target is spent in equal parts, and Gaussian rounds compose.

    def round_mu(self, plan: Plan, epsilon: float) -> float | None:
        """mu of a round under which the target holds; None: an equal part of what the target allows."""
        return None

    def planned_mu(
        self, plan: Plan, participants: IntArray, number: int, history: Sequence[IntArray] = ()
    ) -> FloatArray:
        """What round `number` (from 0) will cost each of these clients, as planned.

        history  the participants of all rounds before it
        """
        return plan.round_mu(participants)

    def epsilon_of_run(self, plan: Plan, noise_multipliers: Sequence[float]) -> float | None:
        """Epsilon of every client over these rounds, where it is no sum over a client's participations; else None.

        noise_multipliers  of the rounds that were released, see `RoundPlan.noise_multiplier`
        """
        return None

    # What it is worth, per coordinate of the uploads. By default an upload carries `own_variance` and nothing else.

    def joint_variance(self, round: RoundPlan) -> FloatArray | None:
        """Effective variance per client against the method's adversary (`adversary`); None: not computed."""
        return round.own_variance

    def variance_against(self, round: RoundPlan, colluders: Collection[int]) -> FloatArray:
        """Effective variance of each honest client, in the order of seats, against exactly these colluders."""
        return np.delete(round.own_variance, sorted(colluders))

    def worst(self, round: RoundPlan) -> WorstCase | None:
        """The worst case over colluders; None where nobody is assumed to collude, or none is computed."""
        return None

    def marginal_variance(self, round: RoundPlan) -> FloatArray:
        """Noise variance of one upload looked at alone: the paper's view."""
        return round.own_variance

    def left_over_variance(self, round: RoundPlan) -> float:
        """Predicted noise variance of the sum of the uploads that arrived, with what the server adds."""
        return float(round.own_variance[round.here].sum())

    def earlier_covariances(self, round: RoundPlan) -> FloatArray:
        """Covariances of the noise in the sum with that in the sums of earlier rounds, the latest first, in each
        coordinate; as many as are not zero. Empty: rounds are independent.
        """
        return np.zeros(0)

    def under_way(self, round: RoundPlan) -> float:
        """Of the noise in the model after this round, what a later one takes out: an end here would leave it there."""
        return 0.0

    def joint_mu(self, round: RoundPlan, *, repairing: bool = False) -> FloatArray:
        """mu of the joint view; infinite where there is no guarantee or none was computed.

        repairing  dropouts of the round are repaired, so that edges may be revealed to a server that lies about them
        """
        variance = round.joint_variance
        if variance is None:
            return np.full(round.participants.size, np.inf)
        return mu_of(round.sensitivity, variance)

    def calibrated(self, plan: Plan) -> bool:
        """Whether the target holds in the joint view by construction, so that it can serve as a budget."""
        return self.private

    # What is said about it.

    @abstractmethod
    def adversary(self, plan: Plan) -> str:
        """Whom the epsilon of the joint view holds against, in words."""

    def why_no_guarantee(self, plan: Plan) -> str:
        """Why there is no epsilon in the joint view, as a sentence; asked only where there is none."""
        return "Some upload carries no noise."

    def over(self, plan: Plan, participations: int) -> str:
        """What the epsilon is composed over, in words; `participations` is the most of any client."""
        return f"over {participations} participation{'s' if participations != 1 else ''}"

    def caveats(self, plan: Plan) -> tuple[str, ...]:
        """What a reader of the statement has to know of this method under this plan."""
        return ()

    def ledger_basis(self, plan: Plan) -> dict[str, Any]:
        """What a charge in a ledger rests on, beyond the method's name."""
        return {}

    def ledger_note(self, basis: Mapping[str, Any]) -> str | None:
        """What the charges of a ledger mean, where it is not what they mean for other methods, in a sentence."""
        return None


def mu_of(sensitivity: ArrayLike, variance: ArrayLike) -> FloatArray:
    """`Delta / sqrt(variance)`: the mu of a Gaussian mechanism; infinite without noise."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.asarray(sensitivity) / np.sqrt(variance))


def of_participants(values: float | tuple[float, ...], participants: IntArray, field: str) -> list[float]:
    """A setting of a plan for each of these clients: the one number, or theirs among one for every client."""
    if not isinstance(values, tuple):
        return [float(values)] * participants.size
    if participants.size and int(participants.max()) >= len(values):
        raise ConfigError(
            f"{len(values)} values for at least {int(participants.max()) + 1} clients", field=field
        )
    return [values[client] for client in participants]


def server_adversary(collusion: float, *, before_graph: bool = False, revealed: int = 0) -> str:
    """The server of the joint view and the share of a round's participants that help it, in words.

    before_graph  whether the claim rests on their being fixed before the graph of the round was drawn
    """
    server = "a server that sees every upload, knows the share graph and may know all other clients' data"
    helpers = "no client colludes with it"
    if collusion:
        fixed = ", fixed before its graph was drawn," if before_graph else ""
        helpers = f"up to {100.0 * collusion:.3g} % of a round's participants{fixed} tell it all they know"
    edges = f"; {revealed} edges were revealed to it in repairs" if revealed else ""
    return f"{server}; {helpers}{edges}"


def marginal_variance(
    *,
    unit_variance: float,
    sent: ArrayLike,
    received: ArrayLike,
    tau2: ArrayLike = 0.0,
    residual_variance: ArrayLike = 0.0,
) -> FloatArray:
    """Noise variance of one upload looked at alone: `sigma^2 (sent + (1 + tau^2) received) + residual`.

    sent, received     unit shares (of variance `unit_variance`) that the client sends and receives
    tau2               distortion of what it receives; leave it out where the residual is given itself
    residual_variance  eta^2, the fresh noise that the client adds; with v shares each way, 2 v sigma^2 + eta^2
    """
    undistorted = np.asarray(sent) + (1.0 + np.asarray(tau2)) * np.asarray(received)
    return np.asarray(unit_variance * undistorted + np.asarray(residual_variance))


def marginal_mu(sensitivity: ArrayLike, **noise: Any) -> FloatArray:
    """mu of one upload looked at alone: `sensitivity / sqrt(marginal_variance(...))`, the only place that says so.

    `sensitivity` is how far one client can move its upload `p_k x_k`, in L2 norm: `p_k clip` where its update becomes
    zero, twice that where it becomes any other. The noise is that of `marginal_variance`, whose arguments it takes.
    """
    return mu_of(sensitivity, marginal_variance(**noise))


def client_sensitivity(weight: ArrayLike, clip: float, relation: str) -> FloatArray:
    """`p_k clip`, or twice that: how far a client whose update has norm <= clip can move `p_k x_k`."""
    return np.asarray(np.asarray(weight) * clip * RELATIONS[relation])
