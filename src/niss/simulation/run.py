"""The loop over rounds: one method (`run`), several on the same clients and batches (`compare`), `resume`.

Every random number of round t depends on the seed and on t alone, so a run that was killed at any moment
and resumed ends with the same bytes as one that was not.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from niss.accounting import Ledger, OutsiderClaim, Plan, Statement, make_statement, outsider_epsilon
from niss.errors import ConfigError, RunFolderError
from niss.randomness import SimStream
from niss.simulation.config import Config, MethodConfig, make_config
from niss.simulation.exchange import ProtocolExchange
from niss.simulation.ledger_record import recorded
from niss.simulation.materials import Datasets, Materials, ModelSource, fit_to_datasets, gather, make_manifest
from niss.simulation.records import (
    MANIFEST,
    PRIVACY,
    RESULT,
    SUMMARY,
    Checkpoint,
    RunFolder,
    prepare_folder,
    read_json,
    write_json,
)
from niss.simulation.round import Federation, RoundOutcome, play_round
from niss.version import __version__


@dataclass(frozen=True)
class RoundEvent:
    """Told to `progress` after every round: the round just done, of how many, and its metrics."""

    label: str
    method_number: int
    methods: int
    round: int
    rounds: int
    accuracy: float | None
    seconds: float


Progress = Callable[[RoundEvent], None]


@dataclass(frozen=True)
class RunResult:
    """A finished run: its summary line, a line per round, the statement and the model's tensors."""

    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    statement: Statement
    state_dict: dict[str, Tensor]
    folder: Path | None


@dataclass(frozen=True)
class Comparison:
    """Several finished runs on the same clients, batches and initial weights."""

    summary: dict[str, Any]
    results: list[RunResult]
    folder: Path | None


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    model: ModelSource | None = None,
    clients: Datasets | None = None,
    test: tuple[Any, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> RunResult:
    """Run one method. With `out` everything is kept in that folder and can be resumed after a kill.

    `model` is any module that maps a batch of inputs to class scores (or a function that makes one);
    `clients` are your own datasets, one (inputs, labels) pair per client, with `test` beside them.
    """
    if len(config.methods) != 1:
        raise ConfigError(
            f"{len(config.methods)} methods given, one expected",
            field="methods",
            hint="use compare for several",
        )
    config = fit_to_datasets(config, clients)
    materials = gather(config, model, clients, test)
    folder = None
    if out is not None:
        folder = RunFolder.create(Path(out), make_manifest("run", config, materials), overwrite=overwrite)
    with _threads(config.training.threads):
        return _play(config, config.methods[0], materials, folder, progress, (1, 1))


def compare(
    config: Config,
    *,
    out: str | Path | None = None,
    model: ModelSource | None = None,
    clients: Datasets | None = None,
    test: tuple[Any, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Run every method of the config, paired: same clients, same batches, same initial weights."""
    config = fit_to_datasets(config, clients)
    materials = gather(config, model, clients, test)
    if out is not None:
        prepare_folder(Path(out), overwrite=overwrite)
        write_json(Path(out) / MANIFEST, make_manifest("comparison", config, materials))
    return _play_all(config, materials, None if out is None else Path(out), progress)


def resume(
    folder: str | Path,
    *,
    model: ModelSource | None = None,
    clients: Datasets | None = None,
    test: tuple[Any, Any] | None = None,
    progress: Progress | None = None,
) -> RunResult | Comparison:
    """Go on with a run or comparison that was stopped; one that had finished is read back unchanged."""
    path = Path(folder)
    manifest = read_json(path / MANIFEST)
    if "config" not in manifest or "kind" not in manifest:
        raise RunFolderError(
            f"{path / MANIFEST} is no manifest of a run", hint="give the folder of an earlier run"
        )
    config = make_config(manifest["config"])
    materials = gather(config, model, clients, test)
    if manifest.get("data") != materials.data or manifest.get("model_parameters") != materials.layout.size:
        raise RunFolderError(
            f"{path} was begun with other data or another model",
            hint="resume with the data, the datasets and the model the run was begun with",
        )
    if manifest["kind"] == "comparison":
        return _play_all(config, materials, path, progress)
    with _threads(config.training.threads):
        return _play(config, config.methods[0], materials, RunFolder(path), progress, (1, 1))


def _play_all(
    config: Config, materials: Materials, out: Path | None, progress: Progress | None
) -> Comparison:
    results = []
    with _threads(config.training.threads):
        for number, method in enumerate(config.methods, start=1):
            alone = config.model_copy(update={"methods": (method,)})
            folder = None
            if out is not None:
                folder = RunFolder(out / method.title)
                if not (folder.path / MANIFEST).exists():
                    folder = RunFolder.create(folder.path, make_manifest("run", alone, materials))
            results.append(_play(alone, method, materials, folder, progress, (number, len(config.methods))))
    summary = _comparison_summary(config, materials, results)
    if out is not None:
        write_json(out / SUMMARY, summary)
    return Comparison(summary, results, out)


def _play(
    config: Config,
    method: MethodConfig,
    materials: Materials,
    folder: RunFolder | None,
    progress: Progress | None,
    place: tuple[int, int],
) -> RunResult:
    """Play the rounds that are still missing, then write down what came of it."""
    plan = config.plan(method)
    # A target per round promises nothing about the whole training, so it is no budget.
    filtered = plan.calibrated and config.privacy.scope == "training"
    budget = plan.budget(config.data.clients) if filtered else None
    state = Checkpoint(0, materials.start, Ledger.empty(config.data.clients, budget))
    metrics: list[dict[str, Any]] = []
    if folder is not None:
        state = folder.load_checkpoint(budget) or state
        metrics = folder.rewind_metrics(state.rounds)
    federation = Federation(
        config=config,
        plan=plan,
        clients=materials.clients,
        test=materials.test,
        module=copy.deepcopy(materials.module),
        layout=materials.layout,
        stream=SimStream(config.seed),
        exchange=_protocol(config, plan, materials.layout.size),
    )
    weights, ledger = state.weights, state.ledger
    if state.rounds < config.rounds:
        path = None if folder is None else folder.path
        run_name = f"{config.name}/{method.title}"
        with recorded(ledger, path, plan, run=run_name, rounds=state.rounds) as ledger:
            for number in range(state.rounds, config.rounds):
                began = time.perf_counter()
                outcome = play_round(federation, weights, ledger, number)
                weights = outcome.weights
                metrics.append(_metrics_line(number, outcome))
                seconds = time.perf_counter() - began
                if folder is not None:
                    folder.append_round(metrics[-1], seconds)
                    folder.save_checkpoint(Checkpoint(number + 1, weights, ledger))
                if progress is not None:
                    accuracy = metrics[-1]["accuracy"]
                    progress(RoundEvent(method.title, *place, number + 1, config.rounds, accuracy, seconds))
    return _conclude(method, federation, weights, ledger, metrics, folder)


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


def _conclude(
    method: MethodConfig,
    federation: Federation,
    weights: Tensor,
    ledger: Ledger,
    metrics: list[dict[str, Any]],
    folder: RunFolder | None,
) -> RunResult:
    outsider = _outsider(federation, metrics)
    notes = _notes(metrics)
    if federation.exchange is not None:
        notes += (
            f"Rounding to the grid, and the sampler's distance from the Gaussian, add at most "
            f"{federation.exchange.grid_delta:.2g} to delta; the claim is computational, as are the keys behind it.",
        )
    statement = make_statement(federation.plan, ledger, notes=notes, outsider=outsider)
    federation.layout.load(federation.module, weights)
    state_dict = {name: tensor.detach().clone() for name, tensor in federation.module.state_dict().items()}
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
    if folder is not None:
        folder.save_model(state_dict)
        write_json(folder.path / PRIVACY, statement.to_json())
        write_json(folder.path / RESULT, summary)
    return RunResult(summary, metrics, statement, state_dict, None if folder is None else folder.path)


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


def _notes(metrics: list[dict[str, Any]]) -> tuple[str, ...]:
    """What happened in the rounds that a reader of the statement must know."""
    notes = []
    if dropped := sum(line["dropped"] for line in metrics):
        notes.append(
            f"{dropped} uploads never arrived; every round is charged as if the server had lied about it."
        )
    if zeroed := sum(line["zeroed_updates"] for line in metrics):
        notes.append(f"{zeroed} updates were NaN or infinite and were replaced by zero.")
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


def _metrics_line(number: int, outcome: RoundOutcome) -> dict[str, Any]:
    evaluation = outcome.evaluation
    return {
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


def _comparison_summary(config: Config, materials: Materials, results: list[RunResult]) -> dict[str, Any]:
    epsilon = config.privacy.epsilon
    return {
        "name": config.name,
        "title": f"{config.name}: {len(results)} methods on the same clients",
        "niss_version": __version__,
        "rounds": config.rounds,
        "clients": config.data.clients,
        "participants": config.training.participants,
        "participations": config.participations,
        "model_parameters": materials.layout.size,
        "delta": config.privacy.delta,
        "target_epsilon": epsilon if isinstance(epsilon, float | int) else max(epsilon),
        "unit": config.privacy.unit,
        "relation": config.privacy.relation,
        "dataset": materials.data["source"],
        "split": config.data.split,
        "methods": [result.summary for result in results],
    }


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run torch and BLAS with that many threads: small steps are fastest, and repeatable, on one.

    More threads than free cores make both collapse, since they spin while they wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(limits=count):
            yield
    finally:
        torch.set_num_threads(before)
