"""The loop over rounds: one method (`run`), several in step on the same clients (`compare`), `resume`.

Every random number of round t depends on the seed and on t alone, so a run that was killed at any moment
and resumed ends with the same bytes as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from niss.errors import ConfigError, RunFolderError
from niss.simulation.config import Config, make_config
from niss.simulation.materials import Datasets, Materials, ModelSource, fit_to_datasets, gather, make_manifest
from niss.simulation.method_run import MethodRun, RunResult
from niss.simulation.records import MANIFEST, SUMMARY, RunFolder, prepare_folder, read_json, write_json
from niss.simulation.training import Trainer, local_work
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


@dataclass(frozen=True)
class TrainingEvent:
    """Told to `progress.training` within a round: how many of the methods' clients have been trained."""

    labels: tuple[str, ...]
    methods: int
    round: int
    rounds: int
    done: int
    clients: int


Progress = Callable[[RoundEvent], None]
"""Told of every round. Where it has a method `training`, that is told of every group of clients."""


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
    with Trainer(config, materials) as trainer:
        folder = None
        if out is not None:
            manifest = make_manifest("run", config, materials, trainer.engine)
            folder = RunFolder.create(Path(out), manifest, overwrite=overwrite)
        return _play_all(config, materials, [folder], trainer, progress)[0]


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
    with Trainer(config, materials) as trainer:
        if out is not None:
            prepare_folder(Path(out), overwrite=overwrite)
            write_json(Path(out) / MANIFEST, make_manifest("comparison", config, materials, trainer.engine))
        return _compare(config, materials, trainer, None if out is None else Path(out), progress)


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
    with Trainer(config, materials) as trainer:
        if manifest["kind"] == "comparison":
            return _compare(config, materials, trainer, path, progress)
        return _play_all(config, materials, [RunFolder(path)], trainer, progress)[0]


def _compare(
    config: Config, materials: Materials, trainer: Trainer, out: Path | None, progress: Progress | None
) -> Comparison:
    folders = method_folders(config, materials, trainer, out)
    results = _play_all(config, materials, folders, trainer, progress)
    return conclude_comparison(config, materials, results, out)


def method_folders(
    config: Config, materials: Materials, trainer: Trainer, out: Path | None
) -> list[RunFolder | None]:
    """The folder of each method inside `out`, made where it is missing."""
    folders: list[RunFolder | None] = [None] * len(config.methods)
    if out is not None:
        for number, method in enumerate(config.methods):
            folder = RunFolder(out / method.title)
            if not (folder.path / MANIFEST).exists():
                alone = config.model_copy(update={"methods": (method,)})
                manifest = make_manifest("run", alone, materials, trainer.engine)
                folder = RunFolder.create(folder.path, manifest)
            folders[number] = folder
    return folders


def conclude_comparison(
    config: Config, materials: Materials, results: list[RunResult], out: Path | None
) -> Comparison:
    """Write down what came of all methods together."""
    summary = _comparison_summary(config, materials, results)
    if out is not None:
        write_json(out / SUMMARY, summary)
    return Comparison(summary, results, out)


def make_runs(
    config: Config,
    materials: Materials,
    folders: Sequence[RunFolder | None],
    trainer: Trainer,
    name: str | None = None,
) -> list[MethodRun]:
    """The runs of all methods of a config; `name` tells them from those of another config."""
    return [
        MethodRun(
            config.model_copy(update={"methods": (method,)}),
            method,
            materials,
            trainer,
            folder,
            label=name if len(config.methods) == 1 or name is None else f"{name} {method.title}",
        )
        for method, folder in zip(config.methods, folders, strict=True)
    ]


def _play_all(
    config: Config,
    materials: Materials,
    folders: Sequence[RunFolder | None],
    trainer: Trainer,
    progress: Progress | None,
) -> list[RunResult]:
    return play_runs(make_runs(config, materials, folders, trainer), trainer, progress)


def play_runs(runs: Sequence[MethodRun], trainer: Trainer, progress: Progress | None) -> list[RunResult]:
    """Play the rounds that are still missing, all runs in step, then write down what came of it.

    Runs whose clients do the same local work train as one cohort.
    """
    with ExitStack() as stack, _threads(runs[0].config.training.threads):
        for one in runs:
            stack.enter_context(one)
        while waiting := [one for one in runs if not one.finished]:
            first = min(waiting, key=lambda one: one.rounds_done)
            alike = [
                one
                for one in waiting
                if one.rounds_done == first.rounds_done and local_work(one.config) == local_work(first.config)
            ]
            _play_turn(runs, alike[: trainer.together(first.config)], trainer, progress)
    return [one.conclude() for one in runs]


def _play_turn(
    runs: Sequence[MethodRun], turn: Sequence[MethodRun], trainer: Trainer, progress: Progress | None
) -> None:
    """One round of some methods, their clients trained as one cohort."""
    requests = [one.open_round() for one in turn]
    began = time.perf_counter()
    done = _client_progress(runs, turn, sum(map(len, requests)), progress)
    updates = trainer.train(requests, done, turn[0].config)
    each = (time.perf_counter() - began) / len(turn)
    for one, rows in zip(turn, updates, strict=True):
        seconds = one.close_round(rows, each)
        if progress is not None:
            place, rounds = runs.index(one) + 1, one.config.rounds
            accuracy = one.metrics[-1]["accuracy"]
            progress(RoundEvent(one.label, place, len(runs), one.rounds_done, rounds, accuracy, seconds))


def _client_progress(
    runs: Sequence[MethodRun], turn: Sequence[MethodRun], clients: int, progress: Progress | None
) -> Callable[[int], None] | None:
    """A function that tells `progress.training`, where there is such a method, of clients newly done."""
    tell = getattr(progress, "training", None)
    if tell is None:
        return None
    titles, done = tuple(one.label for one in turn), 0
    number, rounds = turn[0].rounds_done + 1, turn[0].config.rounds

    def count(more: int) -> None:
        nonlocal done
        done += more
        tell(TrainingEvent(titles, len(runs), number, rounds, done, clients))

    return count


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
