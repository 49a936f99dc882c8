"""What a round leaves behind: the new model, and its lines in the files of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from niss.accounting import Balance
from niss.learning import Evaluation
from niss.simulation.server import FRESH, ServerState, SumNoise


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What a round left behind; `to_metrics` is its line in metrics.jsonl, `to_diagnostics` that in diagnostics.jsonl.

    number              the round, counted from 1
    weights             of the global model after the round
    evaluation          of that model; None where this round is not tested
    participants        clients that were invited and trained
    zeroed_updates      of them, those whose training diverged and who contributed zero
    dropped             of them, those whose upload never arrived
    exact               nothing but the intended noise was left in the sum
    tau2                mean distortion of received shares
    noise_variance      measured, per coordinate of the sum of the uploads that arrived
    predicted_variance  what it should have been
    noise               of the sum that moved the model, predicted
    server              what the server remembers after the round, with the noise in the model, predicted
    under_way           of the noise in the model, what the next round takes out; an end here would leave it there
    joint_mu            most that the round cost a client against a server that sees everything
    marginal_mu         most that it cost a client whose upload is looked at alone
    outsider_mu         most that it cost a client against someone who sees nothing but the model made of the sum
    balance             how unequally shares were received, where they were
    lost                nothing was released: too few uploads arrived
    clip                of the round, where it moves
    below_clip          noisy fraction of the updates that it left as they were; None: nothing was released
    attempts            graphs drawn until one kept the promise (only in the real protocol, like all that follows)
    grid_delta          what rounding and the sampler add to delta
    public              the beacon and what it was let out for, from which the graph follows
    """

    number: int
    weights: Tensor
    evaluation: Evaluation | None = None
    participants: int
    zeroed_updates: int = 0
    dropped: int
    exact: bool
    tau2: float
    noise_variance: float
    predicted_variance: float
    noise: SumNoise
    server: ServerState = FRESH
    under_way: float = 0.0
    joint_mu: float
    marginal_mu: float
    outsider_mu: float
    balance: Balance | None = None
    lost: bool = False
    clip: float | None = None
    below_clip: float | None = None
    attempts: int | None = None
    grid_delta: float | None = None
    public: dict[str, str] | None = None

    def to_metrics(self) -> dict[str, Any]:
        """The round as one JSON object; the same in every repetition of a simulated run."""
        evaluation, in_model = self.evaluation, self.server.noise
        line: dict[str, Any] = {
            "round": self.number,
            "accuracy": None if evaluation is None else evaluation.accuracy,
            "loss": None if evaluation is None else evaluation.loss,
            "participants": self.participants,
            "dropped": self.dropped,
            "tau2": self.tau2,
            "aggregate_variance": self.noise_variance,
            "aggregate_variance_predicted": self.predicted_variance,
            "model_noise_variance": None if in_model is None else in_model.variance,
            "mu_joint": self.joint_mu,
            "mu_marginal": self.marginal_mu,
            "mu_outsider": self.outsider_mu,
            "balance": None if self.balance is None else asdict(self.balance),
        }
        if self.under_way:
            line["carried_variance"] = self.under_way
        if self.lost:
            line["lost"] = True
        if self.clip is not None:
            line |= {"clip": self.clip, "below_clip": self.below_clip}
        # A simulated round has its beacon from the seed; only the protocol's has to be recorded.
        if self.dropped or self.public is not None:
            line["exact"] = self.exact
        if self.public is not None:
            line |= {"attempts": self.attempts, "grid_delta": self.grid_delta, "protocol": self.public}
        return line

    def to_diagnostics(self) -> dict[str, Any]:
        """What follows from bare updates, with no noise on it: no server knows it, and no claim covers it."""
        return {"round": self.number, "zeroed_updates": self.zeroed_updates}
