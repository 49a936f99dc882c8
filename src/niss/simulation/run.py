"""The loop over rounds: one method (`run`), several on the same clients (`compare`), several comparisons at once
(`compare_together`), and `resume`.

All methods go through the rounds in step, and their clients train as one cohort. Every random number of round t
depends on the seed and on t alone, so a run that was killed at any moment and resumed ends with the same bytes as one
that was not, and a method ends the same alone and beside others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from niss.data import Dataset
from niss.errors import ConfigError, RunFolderError
from niss.files import MANIFEST, SUMMARY, read_json, write_json
from niss.learning import threads
from niss.runs import RoundRecord
from niss.simulation.config import Config, make_config
from niss.simulation.materials import (
    Datasets,
    Materials,
    ModelSource,
    fit_to_datasets,
    gather,
    gather_together,
    make_manifest,
)
from niss.simulation.method_run import CheckpointFolder, MethodRun
from niss.simulation.ranks import Ranks, joined
from niss.simulation.results import Comparison, RunResult, summarise
from niss.simulation.round import begin_round
from niss.simulation.training import Trainer, local_work


@dataclass(frozen=True)
class RoundEvent:
    """Told to `progress` after every round of every method.

    label          of the method, or of the config and the method where several are compared
    method_number  its place among all methods, from 1
    methods        how many methods there are
    round, rounds  the round just done, and of how many
    accuracy       after it; None where it was not tested
    seconds        that it took
    """

    label: str
    method_number: int
    methods: int
    round: int
    rounds: int
    accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class TrainingEvent:
    """Told to `progress.training` while clients train.

    labels         of the methods whose clients are trained now, as one cohort
    methods        how many methods there are in all
    round, rounds  the round that is under way, and of how many
    done, clients  clients of these methods that have been trained, and how many there are
    """

    labels: tuple[str, ...]
    methods: int
    round: int
    rounds: int
    done: int
    clients: int


Progress = Callable[[RoundEvent], None]
"""Told of every round. Where it has a method `training`, that is told of every group of clients."""

OnRound = Callable[[RoundRecord], None]


def run(
    config: Config,
    *,
    out: str | Path | None = None,
    model: ModelSource | None = None,
    clients: Datasets | None = None,
    test: tuple[Any, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_round: OnRound | None = None,
) -> RunResult:
    """Run one method.

    config     the settings; exactly one method
    out        a folder for everything that is written; the run can be resumed from it after a kill
    model      any module that maps a batch of inputs to class scores, or a function that makes one; None: the
               network that the config names
    clients    your own datasets, one (inputs, labels) pair of arrays or tensors per client; None: the dataset that
               the config names, dealt out to `config.data.clients` clients
    test       (inputs, labels) to evaluate on; needed with `clients`
    overwrite  replace an earlier run in `out`; anything else in there is never touched
    progress   called after every round with a `RoundEvent`
    on_round   called with the `RoundRecord` of every round, once it is on disk

    Returns a `RunResult`. Raises `ConfigError` before any work starts where settings, data and model do not go
    together, `RunFolderError` where `out` cannot be used, and `PrivacyError` where a round would break its promise.

    >>> config = niss.make_config({"rounds": 5, "methods": [{"name": "niss", "kappa": 4}]})
    >>> result = niss.run(config, out="runs/first")
    >>> print(result.accuracy, result.epsilon)
    """
    if len(config.methods) != 1:
        raise ConfigError(
            f"expected one method, got {len(config.methods)}",
            field="methods",
            hint="use compare for several",
        )
    with joined(out) as ranks:
        config = fit_to_datasets(config, clients)
        materials = gather(config, model, clients, test)
        with Trainer(config, materials, ranks) as trainer:
            folder = None
            if out is not None and ranks.first:
                manifest = make_manifest("run", config, materials, trainer.engine)
                folder = CheckpointFolder.create(Path(out), manifest, overwrite=overwrite)
            return play_runs([MethodRun(config, materials, trainer, folder)], trainer, progress, on_round)[0]


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
    """Run every method of the config, paired: same clients, same batches, same initial weights.

    The arguments are those of `run`; with `out`, each method has a folder of its own in there, called by its label.

    >>> comparison = niss.compare(niss.preset("demo"), out="runs/demo")
    >>> for result in comparison:
    ...     print(result.label, result.accuracy, result.epsilon)
    """
    with joined(out) as ranks:
        config = fit_to_datasets(config, clients)
        materials = gather(config, model, clients, test)
        entry = _Entry(config, materials, _folder(ranks, out))
        with Trainer(config, materials, ranks) as trainer:
            if entry.folder is not None:
                manifest = make_manifest("comparison", config, materials, trainer.engine)
                CheckpointFolder.create(entry.folder.path, manifest, overwrite=overwrite)
            return _play_entries([entry], trainer, progress)[0]


def resume(
    folder: str | Path,
    *,
    model: ModelSource | None = None,
    clients: Datasets | None = None,
    test: tuple[Any, Any] | None = None,
    progress: Progress | None = None,
    on_round: OnRound | None = None,
) -> RunResult | Comparison:
    """Go on with a run or comparison that was stopped; one that had finished is read back unchanged.

    folder                what `run` or `compare` was given as `out`
    model, clients, test  the same as then, where they were given
    progress, on_round    as in `run`; a comparison has only the first, which is told whose round it is

    Returns what `run` or `compare` would have returned, with the same bytes in the folder. Raises `RunFolderError`
    where the folder is not that of a run, is damaged, or was begun with other data or another model.

    >>> result = niss.resume("runs/first")
    """
    path = Path(folder)
    with joined(path) as ranks:
        manifest = _begun(path, ranks)
        config = make_config(manifest["config"])
        materials = gather(config, model, clients, test)
        if (
            manifest.get("data") != materials.data
            or manifest.get("model_parameters") != materials.layout.size
        ):
            raise RunFolderError(
                f"{path} was begun with other data or another model",
                hint="resume with the data, the datasets and the model the run was begun with",
            )
        run_folder = _folder(ranks, path)
        with Trainer(config, materials, ranks) as trainer:
            if manifest["kind"] == "comparison":
                if on_round is not None:
                    raise ConfigError(
                        "a comparison has several", field="on_round", hint="give progress instead"
                    )
                return _play_entries([_Entry(config, materials, run_folder)], trainer, progress)[0]
            return play_runs(
                [MethodRun(config, materials, trainer, run_folder)], trainer, progress, on_round
            )[0]


def _begun(path: Path, ranks: Ranks) -> dict[str, Any]:
    """The manifest of a run, which rank 0 reads for all."""
    found = read_json(path / MANIFEST) if ranks.first else {}
    if ranks.first and ("config" not in found or "kind" not in found):
        raise RunFolderError(
            f"{path / MANIFEST} is not the manifest of a run", hint="give the folder of an earlier run"
        )
    manifest: dict[str, Any] = json.loads(ranks.from_first(json.dumps(found).encode()))
    return manifest


def _folder(ranks: Ranks, path: str | Path | None) -> CheckpointFolder | None:
    """The folder at that path, which only rank 0 has."""
    return None if path is None or not ranks.first else CheckpointFolder(Path(path))


def compare_seeds(
    config: Config,
    seeds: Sequence[int],
    *,
    out: str | Path | None = None,
    dataset: Dataset | None = None,
    progress: Progress | None = None,
) -> dict[int, Comparison]:
    """`compare` with each of these seeds; all methods of all seeds train as one cohort.

    A seed decides partition, initial weights, participants, batches and noise. With `out`, seed s is kept in
    `out/seed-s`, and what is already there is continued.
    """
    configs = {f"seed-{seed}": replace(config, seed=seed) for seed in seeds}
    comparisons = compare_together(configs, out=out, dataset=dataset, progress=progress)
    return {seed: comparisons[f"seed-{seed}"] for seed in seeds}


def compare_together(
    configs: Mapping[str, Config],
    *,
    out: str | Path | None = None,
    dataset: Dataset | None = None,
    progress: Progress | None = None,
) -> dict[str, Comparison]:
    """`compare` for each config, by name, in one cohort: they may differ in all but dataset, model and engine.

    Each ends with the same bytes as if it had run alone (on the processor). With `out`, each is kept in the folder
    of its name there; one that was begun is continued, and one that was begun with other settings is refused.
    `dataset` stands in for the one the configs name.
    """
    if not configs:
        raise ConfigError("nothing to compare", field="configs")
    for one, other in pairwise(configs.values()):
        _require_one_cohort(one, other)
    with joined() as ranks:
        materials = gather_together(list(configs.values()), dataset)
        entries = [
            _Entry(config, items, _folder(ranks, None if out is None else Path(out) / name), name)
            for (name, config), items in zip(configs.items(), materials, strict=True)
        ]
        with Trainer(entries[0].config, materials[0], ranks) as trainer:
            for entry in entries:
                entry.begin_or_continue(trainer.engine)
            return dict(zip(configs, _play_entries(entries, trainer, progress), strict=True))


@dataclass(frozen=True)
class _Entry:
    """One comparison among those that are played in step; `name` tells its runs from those of the others."""

    config: Config
    materials: Materials
    folder: CheckpointFolder | None
    name: str | None = None

    def begin_or_continue(self, engine: str) -> None:
        """Make the folder, or make sure that the one there is this comparison."""
        if self.folder is None:
            return
        manifest, path = make_manifest("comparison", self.config, self.materials, engine), self.folder.path
        if not self.folder.begun:
            CheckpointFolder.create(path, manifest)
            return
        earlier = read_json(path / MANIFEST)
        if any(_settings(earlier, key) != _settings(manifest, key) for key in ("config", "data")):
            raise RunFolderError(
                f"{path} was begun with other settings or other data",
                hint="give another folder, or remove it to start again",
            )

    def runs(self, trainer: Trainer) -> list[MethodRun]:
        """The runs of all methods, each in a folder of its own, made where it is missing."""
        runs = []
        for method in self.config.methods:
            config = replace(self.config, methods=(method,))
            folder = None
            if self.folder is not None:
                folder = CheckpointFolder(self.folder.path / method.title)
                if not folder.begun:
                    manifest = make_manifest("run", config, self.materials, trainer.engine)
                    folder = CheckpointFolder.create(folder.path, manifest)
            label = self.name
            if self.name is not None and len(self.config.methods) > 1:
                label = f"{self.name} {method.title}"
            runs.append(MethodRun(config, self.materials, trainer, folder, label))
        return runs

    def conclude(self, results: list[RunResult]) -> Comparison:
        """Write down what came of all methods together."""
        summary = summarise(self.config, self.materials, results)
        if self.folder is not None:
            write_json(self.folder.path / SUMMARY, summary)
        return Comparison(summary, results, None if self.folder is None else self.folder.path)


def _play_entries(entries: Sequence[_Entry], trainer: Trainer, progress: Progress | None) -> list[Comparison]:
    groups = [entry.runs(trainer) for entry in entries]
    results = iter(play_runs([one for group in groups for one in group], trainer, progress))
    return [
        entry.conclude([next(results) for _ in group]) for entry, group in zip(entries, groups, strict=True)
    ]


def play_runs(
    runs: Sequence[MethodRun],
    trainer: Trainer,
    progress: Progress | None,
    on_round: OnRound | None = None,
) -> list[RunResult]:
    """Play the rounds that are still missing, all runs in step, then write down what came of it.

    Runs whose clients do the same local work train as one cohort, as many as have room for their updates.
    """
    if not trainer.ranks.first:
        progress = on_round = None
    with ExitStack() as stack, threads(runs[0].config.training.threads):
        for one in runs:
            stack.enter_context(one)
        while waiting := [one for one in runs if not one.finished]:
            first = min(waiting, key=lambda one: one.rounds_done)
            alike = [
                one
                for one in waiting
                if one.rounds_done == first.rounds_done and local_work(one.config) == local_work(first.config)
            ]
            turn = alike[: trainer.together(first.config)]
            _play_round(runs, turn, trainer, progress)
            if on_round is not None:
                for one in turn:
                    on_round(one.rounds[-1])
    return [one.conclude() for one in runs]


def _play_round(
    runs: Sequence[MethodRun], turn: Sequence[MethodRun], trainer: Trainer, progress: Progress | None
) -> None:
    """One round of the methods whose turn it is, their clients trained as one cohort.

    The seconds of a method are its part of what all did together and those in which it finished the round.
    """
    began = time.perf_counter()
    opened = [
        begin_round(one.federation, one.weights, one.ledger, one.rounds_done, one.clip, one.server)
        for one in turn
    ]
    if (tell := getattr(progress, "outlook", None)) is not None:
        for one, each in zip(turn, opened, strict=True):
            if one.rounds_done == 0 and (judged := each.outlook) is not None:
                tell(one.label, judged)
    jobs = [each.jobs for each in opened]
    done = _client_progress(runs, turn, sum(map(len, jobs)), progress)
    updates = trainer.train(jobs, turn[0].config, done)
    together = (time.perf_counter() - began) / len(turn)
    for one, each, rows in zip(turn, opened, updates, strict=True):
        began = time.perf_counter()
        result = each.finish(rows)
        seconds = together + time.perf_counter() - began
        one.record(result, seconds)
        if progress is not None:
            place, rounds = runs.index(one) + 1, one.config.rounds
            accuracy = one.rounds[-1].accuracy
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


def _require_one_cohort(one: Config, other: Config) -> None:
    """One engine trains one module on one set of examples."""
    settings = ("engine", "device", "workers", "tf32", "threads")
    same = one.data.dataset == other.data.dataset and one.model == other.model
    if not same or any(getattr(one.training, name) != getattr(other.training, name) for name in settings):
        raise ConfigError(
            "dataset, model and engine must be the same for all",
            field="configs",
            hint="compare settings with another dataset or model in a call of their own",
        )


def _settings(manifest: Mapping[str, Any], key: str) -> Any:
    """What must not change between two parts of a run; where its clients train changes only the last bits."""
    value = manifest.get(key)
    if key != "config" or not isinstance(value, dict):
        return value
    config = make_config(value)
    return replace(config, training=replace(config.training, device="auto", workers=None))
