"""What came of a run: its statement, the caveats that its rounds add to it, and the objects a user is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from niss.accounting import (
    Ledger,
    Outlook,
    OutsiderClaim,
    Statement,
    make_statement,
    outsider_epsilon,
    stated_relation,
)
from niss.claims import digits
from niss.mechanism.clipping import in_words
from niss.methods import distortion_named
from niss.runs import RoundRecord
from niss.session.books import grid_caveat
from niss.simulation import Config
from niss.simulation.federation import Federation
from niss.simulation.inputs import Inputs
from niss.simulation.sections import MethodConfig
from niss.version import __version__


@dataclass(frozen=True)
class RunResult:
    """A finished run of one method.

    settings    the method's own settings
    rounds      a `RoundRecord` each, as in metrics.jsonl: accuracy, noise measured and predicted, mu, dropouts, ...
    statement   what was promised to the clients, in words and numbers, with all caveats
    state_dict  the final model's tensors by name, for `module.load_state_dict`
    folder      where everything was written, if anywhere
    kappa       the strength of the shares, as it was planned or given
    outlook     whether such noise leaves anything to learn, judged before the first round; None: nothing is known
    label       its name in tables, unique within a comparison
    method      the name of the method
    accuracy    of the final model on the test data
    epsilon     of the worst-off client in the joint view, at `statement.delta`; None: there is no guarantee
    summary     the run in one JSON object, as in result.json

    >>> result = niss.run(niss.make_config({"rounds": 5}))
    >>> result.accuracy, result.epsilon, result.statement.words
    """

    settings: MethodConfig
    rounds: list[RoundRecord] = field(repr=False)
    statement: Statement = field(repr=False)
    state_dict: dict[str, Tensor] = field(repr=False)
    folder: Path | None
    kappa: float | None = None
    outlook: Outlook | None = None

    @property
    def label(self) -> str:
        """Its name in tables, unique within a comparison."""
        return self.settings.title

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.settings.name

    @property
    def accuracy(self) -> float:
        """Of the final model on the test data."""
        return float(self.rounds[-1].accuracy or 0.0)

    @property
    def epsilon(self) -> float | None:
        """The worst-off client's epsilon in the joint view, at `statement.delta`; None: there is no guarantee."""
        return self.statement.epsilon_joint

    @property
    def summary(self) -> dict[str, Any]:
        """The run in one JSON object, as in result.json; variances and tau2 are means over the rounds released."""
        settings, statement, method = self.settings, self.statement, self.settings.kind
        return {
            "label": settings.title,
            "folder": settings.title,
            "method": settings.name,
            "kappa": self.kappa if method.uses("kappa") else None,
            "tau2": self._mean("tau2") if method.uses("tau2") else None,
            "distortion": settings.distortion if method.uses("distortion") else None,
            "accuracy": self.rounds[-1].accuracy,
            "aggregate_variance": self._mean("aggregate_variance"),
            "aggregate_variance_predicted": self._mean("aggregate_variance_predicted"),
            "epsilon_joint": statement.epsilon_joint,
            "epsilon_marginal": statement.epsilon_marginal,
            "epsilon_outsider": statement.epsilon_outsider,
            "adversary": statement.adversary,
            "guarantee": statement.words,
        }

    def _mean(self, name: str) -> float:
        released = [one for one in self.rounds if not one.void]
        return float(np.mean([getattr(one, name) for one in released or self.rounds]))


@dataclass(frozen=True)
class Comparison:
    """Several finished runs on the same clients, batches and initial weights.

    results  the runs in the order of the config's methods; `comparison[label]` is the one of that label
    summary  all of them in one JSON object, as in summary.json
    folder   where everything was written, if anywhere

    >>> comparison = niss.compare(niss.preset("demo"))
    >>> comparison["niss"].accuracy - comparison["dp-fedavg"].accuracy
    """

    summary: dict[str, Any] = field(repr=False)
    results: list[RunResult]
    folder: Path | None

    def __getitem__(self, label: str) -> RunResult:
        for result in self.results:
            if result.label == label:
                return result
        raise KeyError(f"{label!r}; the labels are {', '.join(result.label for result in self.results)}")

    def __iter__(self) -> Iterator[RunResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)


def summarise(config: Config, inputs: Inputs, results: Sequence[RunResult]) -> dict[str, Any]:
    """What summary.json says of a comparison."""
    epsilon = config.privacy.epsilon
    return {
        "name": config.name,
        "title": f"{config.name}: {len(results)} methods on the same clients",
        "niss_version": __version__,
        "rounds": config.rounds,
        "clients": config.clients,
        "participants": config.participants,
        "participations": config.participations,
        "model_parameters": inputs.layout.size,
        "delta": config.privacy.delta,
        "target_epsilon": epsilon if isinstance(epsilon, float | int) else max(epsilon),
        "unit": config.privacy.unit,
        "relation": config.privacy.relation,
        "dataset": inputs.data["source"],
        "split": config.split,
        "methods": [result.summary for result in results],
    }


def state_guarantee(federation: Federation, ledger: Ledger, rounds: Sequence[RoundRecord]) -> Statement:
    """The statement of a finished run, from what its ledger was charged and its rounds recorded.

    It never rests on the plan alone: what the plan promises and what the rounds cost are both in there.
    """
    plan, real = federation.plan, federation.exchange.real
    caveats = _caveats(rounds, sharing=plan.kind.shares_noise)
    caveats += federation.optimizer.caveats(rounds[-1])
    if real:
        caveats.append(grid_caveat(plan, max(one.grid_delta or 0.0 for one in rounds)))
    released = [one.mu_outsider for one in rounds if not one.void]
    return make_statement(
        plan,
        ledger,
        notes=tuple(caveats),
        outsider=_outsider(federation, released),
        noise_from="entropy" if real else "seed",
        noise_multipliers=[1.0 / mu for mu in released if mu > 0.0],
    )


def _outsider(federation: Federation, mus: list[float]) -> OutsiderClaim | None:
    """What someone learns who sees the released models and nothing else; None where no noise is proved to protect.

    mus  of the rounds whose sums were released

    In a sum of shares that were multiplied by random factors the noise has the predicted variance but is no Gaussian.
    """
    config, plan, sampling = federation.config, federation.plan, federation.sampling
    multiplied = plan.kind.uses("distortion") and distortion_named(plan.distortion).multiplies and plan.tau2
    # A claim that is made for the whole run is an outsider's already.
    if not plan.private or plan.heuristic or multiplied or plan.kind.whole_run:
        return None
    # Draws that depend on the past are not credited; clients are then dealt out in turn, more or less.
    in_turn = sampling in ("shuffled", "cyclic", "alone") or plan.separation > 1
    # Without a budget nothing else caps how often a client is drawn.
    capped = in_turn or (plan.calibrated and config.privacy.scope == "training")
    # Whether the noise of a sum depends on who is in it.
    unlike = isinstance(plan.epsilon, tuple) or isinstance(plan.tau2, tuple) or plan.groups
    return outsider_epsilon(
        mus=mus,
        unit=plan.unit,
        relation=stated_relation(plan),
        sampling="shuffled" if in_turn else sampling,
        clients=config.clients,
        participants=config.participants,
        delta=plan.delta,
        participations=min(config.most_participations(sampling), len(mus)) if capped else None,
        alike=config.training.weights == "equal" and not unlike,
        batch=plan.batch,
    )


def _caveats(rounds: Sequence[RoundRecord], *, sharing: bool) -> list[str]:
    """What happened in the rounds that a reader of the statement must know.

    All of it is taken from the records, so that a resumed run says the same.
    """
    caveats = []
    if dropped := sum(one.dropped for one in rounds):
        lied = "; every round is charged as if the server had lied about it" if sharing else ""
        caveats.append(f"{_counted(dropped, 'upload')} never arrived{lied}.")
    if blanks := sum(one.blanks or 0.0 for one in rounds):
        caveats.append(
            f"{_counted(int(blanks), 'upload')} {_was(int(blanks))} blank, as the senders were late or failed: noise "
            "and nothing else, charged like any other."
        )
    if lost := sum(one.void for one in rounds):
        why = "fewer uploads arrived than the threshold asks for"
        caveats.append(f"{_counted(lost, 'round')} {_was(lost)} lost: {why}. They are charged all the same.")
    if noisy := sum(not (one.exact or one.void) for one in rounds):
        caveats.append(f"In {_counted(noisy, 'round')} noise that should have cancelled was left in the sum.")
    if under_way := max((one.carried_variance for one in rounds), default=0.0):
        left = rounds[-1].model_noise_variance
        caveats.append(
            f"Noise is carried from round to round: a run that ended early would have left up to "
            f"{digits(under_way, 2)} of it in every coordinate of the model (variance); after the last round the model "
            f"has {digits(left, 2)} in all."
        )
    if clips := [one.clip for one in rounds if one.clip is not None]:
        caveats.append(in_words(clips))
    if again := sum(one.attempts - 1 for one in rounds):
        caveats.append(
            f"{_counted(again, 'graph')} would have cost more than was promised and {_was(again)} given up, before "
            "anything was sent, for another with more noise. Nothing was charged for that; delta pays for all attempts."
        )
    if unequal := [one.balance for one in rounds if one.balance is not None]:
        least = min(balance["least_received"] for balance in unequal)
        most = max(balance["most_received"] for balance in unequal)
        caveat = f"Clients received between {least:.2g} and {most:.2g} times the shares they sent"
        if kept := [balance["kept"] for balance in unequal if balance["kept"] is not None]:
            caveat += f"; the worst-off kept {min(kept):.0%} of the noise that a balanced graph leaves to its worst-off"
        caveats.append(caveat + ".")
    return caveats


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
