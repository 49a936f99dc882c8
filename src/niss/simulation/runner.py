"""Runs: one method (`run`), several on the same clients (`compare`), several comparisons at once
(`compare_together`), and `resume`.

All methods go through the rounds in step, and their clients train as one cohort. Every random number of round t
depends on the seed and on t alone, so a run that was killed at any moment and resumed ends with the same bytes as one
that was not, and a method ends the same alone and beside others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from niss.data import Dataset
from niss.errors import ConfigError, RunFolderError
from niss.files import MANIFEST, SUMMARY, read_json, write_json
from niss.simulation import Config, make_config
from niss.simulation.inputs import Datasets, Inputs, ModelSource, gather, gather_together, make_manifest
from niss.simulation.method_run import CheckpointFolder, MethodRun, OnRound, Progress, play_runs
from niss.simulation.ranks import Ranks, joined
from niss.simulation.results import Comparison, RunResult, summarise
from niss.simulation.training import Trainer


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
    clients    your own datasets, one (inputs, labels) pair of arrays or tensors per client, in a list or by name, as
               many as the config says, where it does; None: the dataset that the config names, dealt out to
               `config.data.clients` clients
    test       (inputs, labels) to evaluate on; needed with `clients`
    overwrite  replace an earlier run in `out`; anything else in there is never touched
    progress   called after every round with a `RoundEvent`
    on_round   called with the `RoundRecord` of every round, once it is on disk

    Returns a `RunResult`; warns where its noise leaves little to learn, unless `progress.outlook` is told. Raises
    `ConfigError` before any work starts where settings, data and model do not go together, `RunFolderError` where `out`
    cannot be used, and `PrivacyError` where a round would break its promise.

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
        config, inputs = gather(config, model, clients, test)
        with Trainer(config, inputs, ranks) as trainer:
            folder = _begin("run", out, config, inputs, trainer, overwrite=overwrite)
            return play_runs([MethodRun(config, inputs, trainer, folder)], trainer, progress, on_round)[0]


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
        config, inputs = gather(config, model, clients, test)
        with Trainer(config, inputs, ranks) as trainer:
            folder = _begin("comparison", out, config, inputs, trainer, overwrite=overwrite)
            return _play_entries([_Entry(config, inputs, folder)], trainer, progress)[0]


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
        config, inputs = gather(make_config(manifest["config"]), model, clients, test)
        now = make_manifest(manifest["kind"], config, inputs, "")
        if any(manifest.get(name) != now[name] for name in ("data", "model_parameters", "precision")):
            raise RunFolderError(
                f"{path} was begun with other data or another model",
                hint="resume with the data, the datasets and the model the run was begun with",
            )
        run_folder = CheckpointFolder(path) if ranks.first else None
        with Trainer(config, inputs, ranks) as trainer:
            if manifest["kind"] == "comparison":
                if on_round is not None:
                    raise ConfigError(
                        "a comparison has several", field="on_round", hint="give progress instead"
                    )
                return _play_entries([_Entry(config, inputs, run_folder)], trainer, progress)[0]
            return play_runs([MethodRun(config, inputs, trainer, run_folder)], trainer, progress, on_round)[0]


def _begun(path: Path, ranks: Ranks) -> dict[str, Any]:
    """The manifest of a run, which rank 0 reads for all."""
    found = read_json(path / MANIFEST) if ranks.first else {}
    if ranks.first and ("config" not in found or "kind" not in found):
        raise RunFolderError(
            f"{path / MANIFEST} is not the manifest of a run", hint="give the folder of an earlier run"
        )
    manifest: dict[str, Any] = json.loads(ranks.from_all(json.dumps(found).encode())[0])
    return manifest


def _begin(
    kind: str,
    path: str | Path | None,
    config: Config,
    inputs: Inputs,
    trainer: Trainer,
    *,
    overwrite: bool = False,
    go_on: bool = False,
) -> CheckpointFolder | None:
    """The folder at that path with its manifest, which only rank 0 has; the one that is there, if it may `go_on`.

    Raises `RunFolderError` where that was begun with other settings or other data.
    """
    if path is None or not trainer.ranks.first:
        return None
    path, manifest = Path(path), make_manifest(kind, config, inputs, trainer.engine)
    if not go_on or not (path / MANIFEST).exists():
        return CheckpointFolder.create(path, manifest, overwrite=overwrite)
    earlier = read_json(path / MANIFEST)
    if any(_settings(earlier, key) != _settings(manifest, key) for key in ("config", "data")):
        raise RunFolderError(
            f"{path} was begun with other settings or other data",
            hint="give another folder, or remove it to start again",
        )
    return CheckpointFolder(path)


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
        gathered = gather_together(list(configs.values()), dataset)
        with Trainer(next(iter(configs.values())), gathered[0], ranks) as trainer:
            entries = []
            for (name, config), inputs in zip(configs.items(), gathered, strict=True):
                path = None if out is None else Path(out) / name
                folder = _begin("comparison", path, config, inputs, trainer, go_on=True)
                entries.append(_Entry(config, inputs, folder, name))
            return dict(zip(configs, _play_entries(entries, trainer, progress), strict=True))


@dataclass(frozen=True)
class _Entry:
    """One comparison among those that are played in step; `name` tells its runs from those of the others."""

    config: Config
    inputs: Inputs
    folder: CheckpointFolder | None
    name: str | None = None

    def runs(self, trainer: Trainer) -> list[MethodRun]:
        """The runs of all methods, each in a folder of its own, made where it is missing."""
        runs = []
        for method in self.config.methods:
            config = replace(self.config, methods=(method,))
            path = None if self.folder is None else self.folder.path / method.title
            folder = _begin("run", path, config, self.inputs, trainer, go_on=True)
            label = self.name
            if self.name is not None and len(self.config.methods) > 1:
                label = f"{self.name} {method.title}"
            runs.append(MethodRun(config, self.inputs, trainer, folder, label))
        return runs


def _play_entries(entries: Sequence[_Entry], trainer: Trainer, progress: Progress | None) -> list[Comparison]:
    groups = [entry.runs(trainer) for entry in entries]
    results = iter(play_runs([run for group in groups for run in group], trainer, progress))
    comparisons = []
    for entry, group in zip(entries, groups, strict=True):
        found = [next(results) for _ in group]
        summary, path = summarise(entry.config, entry.inputs, found), None
        if entry.folder is not None:
            path = entry.folder.path
            write_json(path / SUMMARY, summary)
        comparisons.append(Comparison(summary, found, path))
    return comparisons


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
