"""One method on its way through the rounds: its state, its folder, and what came of it in the end."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch import Tensor

from niss.accounting import Ledger, OutsiderClaim, Plan, Statement, make_statement, outsider_epsilon
from niss.learning import Job, Uploads
from niss.randomness import SimStream
from niss.simulation.config import Config, MethodConfig
from niss.simulation.exchange import ProtocolExchange
from niss.simulation.ledger_record import recorded
from niss.simulation.materials import Materials
from niss.simulation.records import PRIVACY, RESULT, Checkpoint, RunFolder, write_json
from niss.simulation.round import Federation, RoundOutcome, play_round
from niss.simulation.training import Trainer


@dataclass(frozen=True)
class RunResult:
    """A finished run: its summary line, a line per round, the statement and the model's tensors."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    statement: Statement
    state_dict: dict[str, Tensor]
    folder: Path | None


class MethodRun:
    """Opens a round, closes it with the updates of its clients, and so on; a context manager."""

    def __init__(
        self,
        config: Config,
        method: MethodConfig,
        materials: Materials,
        trainer: Trainer,
        folder: RunFolder | None,
        label: str | None = None,
    ) -> None:
        self.config, self.method, self._folder = config, method, folder
        self.label = label or method.title
        plan = config.plan(method)
        # A target per round promises nothing about the whole training, so it is no budget.
        filtered = plan.calibrated and config.privacy.scope == "training"
        budget = plan.budget(config.data.clients) if filtered else None
        state = Checkpoint(0, materials.start, Ledger.empty(config.data.clients, budget))
        self.metrics: list[dict[str, Any]] = []
        if folder is not None:
            state = folder.load_checkpoint(budget) or state
            self.metrics = folder.rewind_metrics(state.rounds)
        self.rounds_done, self._weights, self._ledger = state.rounds, state.weights, state.ledger
        self._module = materials.module
        self._federation = Federation(
            config=config,
            plan=plan,
            clients=materials.clients,
            test=materials.test,
            layout=materials.layout,
            trainer=trainer,
            stream=SimStream(config.seed),
            exchange=_protocol(config, plan, materials.layout.size),
        )
        self._open_files = ExitStack()
        self._seconds = 0.0

    @property
    def finished(self) -> bool:
        return self.rounds_done >= self.config.rounds

    def __enter__(self) -> Self:
        if not self.finished:
            path = None if self._folder is None else self._folder.path
            name = f"{self.config.name}/{self.method.title}"
            plan = self._federation.plan
            self._ledger = self._open_files.enter_context(
                recorded(self._ledger, path, plan, run=name, rounds=self.rounds_done)
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()

    def open_round(self) -> list[Job]:
        """Begin the next round; returns what its clients have to train."""
        began = time.perf_counter()
        self._round = play_round(self._federation, self._weights, self._ledger, self.rounds_done)
        jobs = next(self._round)
        self._seconds = time.perf_counter() - began
        return jobs

    def close_round(self, updates: Uploads, training_seconds: float) -> float:
        """End the round with its clients' updates, keep it, and return the seconds it took."""
        began = time.perf_counter()
        try:
            self._round.send(updates)
        except StopIteration as end:
            outcome: RoundOutcome = end.value
        else:
            raise AssertionError("a round trains once")
        self._weights = outcome.weights
        self.metrics.append(_metrics_line(self.rounds_done, outcome))
        self.rounds_done += 1
        self._seconds += training_seconds + time.perf_counter() - began
        if self._folder is not None:
            self._folder.append_round(self.metrics[-1], self._seconds)
            self._folder.save_checkpoint(Checkpoint(self.rounds_done, self._weights, self._ledger))
        return self._seconds

    def conclude(self) -> RunResult:
        """Write down what came of it."""
        federation, metrics, method = self._federation, self.metrics, self.method
        outsider = _outsider(federation, metrics)
        notes = _notes(metrics, shared=federation.plan.method == "niss")
        if federation.exchange is not None:
            notes += (_grid_note(metrics, federation.plan.delta),)
        statement = make_statement(
            federation.plan,
            self._ledger,
            notes=notes,
            outsider=outsider,
            noise_from="seed" if federation.exchange is None else "entropy",
        )
        state_dict = self._state_dict()
        is_niss = method.name == "niss"
        summary = {
            "label": method.title,
            "folder": method.title,
            "method": method.name,
            "kappa": method.kappa if is_niss else None,
            "tau2": float(np.mean([line["tau2"] for line in metrics])) if is_niss else None,
            "distortion": method.distortion if is_niss else None,
            "accuracy": metrics[-1]["accuracy"],
            "aggregate_variance": float(np.mean([line["aggregate_variance"] for line in metrics])),
            "aggregate_variance_predicted": float(
                np.mean([line["aggregate_variance_predicted"] for line in metrics])
            ),
            "epsilon_joint": statement.epsilon_joint,
            "epsilon_marginal": statement.epsilon_marginal,
            "epsilon_outsider": statement.epsilon_outsider,
            "adversary": statement.adversary,
            "guarantee": statement.words,
        }
        folder = self._folder
        if folder is not None:
            folder.save_model(state_dict)
            write_json(folder.path / PRIVACY, statement.to_json())
            write_json(folder.path / RESULT, summary)
        return RunResult(summary, metrics, statement, state_dict, None if folder is None else folder.path)

    def _state_dict(self) -> dict[str, Tensor]:
        module = copy.deepcopy(self._module)
        self._federation.layout.load(module, self._weights)
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _protocol(config: Config, plan: Plan, coordinates: int) -> ProtocolExchange | None:
    """The parties of the real protocol, where it is asked for and shares are exchanged at all."""
    if config.exchange != "protocol" or plan.method != "niss":
        return None
    settings = config.protocol
    return ProtocolExchange(
        plan,
        rounds=config.rounds,
        coordinates=coordinates,
        mode=settings.mode,
        grid_bits=settings.grid_bits,
        modulus_bits=settings.modulus_bits,
    )


def _outsider(federation: Federation, metrics: list[dict[str, Any]]) -> OutsiderClaim | None:
    """What someone learns who sees the released models and nothing else."""
    config, plan = federation.config, federation.plan
    if not plan.private or plan.heuristic:
        return None
    # Without a budget nothing caps how often a client is drawn, except that cohorts are dealt out in turn.
    shuffled = config.training.sampling == "shuffled"
    capped = shuffled or (plan.calibrated and config.privacy.scope == "training")
    return outsider_epsilon(
        noise_multipliers=[line["noise_multiplier"] for line in metrics],
        sampling=config.training.sampling,
        clients=config.data.clients,
        participants=config.training.participants,
        delta=plan.delta,
        participations=min(config.most_participations, len(metrics)) if capped else None,
    )


def _notes(metrics: list[dict[str, Any]], *, shared: bool) -> tuple[str, ...]:
    """What happened in the rounds that a reader of the statement must know."""
    notes = []
    if dropped := sum(line["dropped"] for line in metrics):
        lied = "; every round is charged as if the server had lied about it" if shared else ""
        notes.append(f"{_counted(dropped, 'upload')} never arrived{lied}.")
    if noisy := sum(not line.get("exact", True) for line in metrics):
        notes.append(f"In {_counted(noisy, 'round')} noise that should have cancelled was left in the sum.")
    if again := sum(line.get("attempts", 1) - 1 for line in metrics):
        notes.append(
            f"{_counted(again, 'graph')} would have cost more than was promised and {_was(again)} given up, before "
            "anything was sent, for another with more noise. Nothing was charged for that; delta pays for all attempts."
        )
    if zeroed := sum(line["zeroed_updates"] for line in metrics):
        notes.append(
            f"{_counted(zeroed, 'update')} {_was(zeroed)} NaN or infinite and {_was(zeroed)} replaced by zero."
        )
    if searched := [line["worst_of_search"] for line in metrics if line["worst_of_search"] is not None]:
        notes.append(
            f"The worst case over colluders is the worst of a search (at least {min(searched)} sets a round), "
            "not of all sets."
        )
    if unequal := [line["balance"] for line in metrics if line["balance"] is not None]:
        least = min(balance["least_received"] for balance in unequal)
        most = max(balance["most_received"] for balance in unequal)
        note = f"Clients received between {least:.2g} and {most:.2g} times the shares they sent"
        if kept := [balance["kept"] for balance in unequal if balance["kept"] is not None]:
            note += f"; the worst-off kept {min(kept):.0%} of the noise that a balanced graph leaves to its worst-off"
        notes.append(note + ".")
    return tuple(notes)


def _grid_note(metrics: list[dict[str, Any]], delta: float) -> str:
    """What the claim of a protocol run leaves out; from the metrics, so that a resumed run says the same."""
    # Metrics of an older version do not know.
    added = max(line.get("grid_delta", 1.0) for line in metrics)
    note = (
        f"Rounding to the grid, and the sampler's distance from the Gaussian, add at most {added:.2g} to delta; the "
        "claim is computational, as are the keys behind it."
    )
    if added >= delta:
        note += (
            " That is delta itself or more: at an epsilon this large the bound says nothing about the rounding, and "
            "the claim is that of exact Gaussian noise."
        )
    return note


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _metrics_line(number: int, outcome: RoundOutcome) -> dict[str, Any]:
    evaluation = outcome.evaluation
    line = {
        "round": number + 1,
        "accuracy": None if evaluation is None else evaluation.accuracy,
        "loss": None if evaluation is None else evaluation.loss,
        "participants": outcome.participants,
        "zeroed_updates": outcome.zeroed_updates,
        "dropped": outcome.dropped,
        "tau2": outcome.tau2,
        "aggregate_variance": outcome.aggregate_variance,
        "aggregate_variance_predicted": outcome.aggregate_variance_predicted,
        "mu_joint": outcome.joint_mu,
        "mu_marginal": outcome.marginal_mu,
        "noise_multiplier": outcome.noise_multiplier,
        "worst_of_search": outcome.worst_of_search,
        "balance": None if outcome.balance is None else asdict(outcome.balance),
    }
    protocol = outcome.protocol
    if outcome.dropped or protocol is not None:
        line["exact"] = outcome.exact
    if protocol is None:
        return line
    # Public: the round's beacon and what it was let out for. A simulated round has its beacon from the seed.
    played = {name: getattr(protocol, name) for name in ("attempts", "grid_delta")}
    return {**line, **played, "protocol": protocol.public}
