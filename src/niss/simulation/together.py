"""Several comparisons as one: all seeds, or all settings, of an experiment train as one cohort.

Each ends with the same bytes as if it had run alone (on the processor), in a folder of its own that the other
commands can read, and goes on from there after a kill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from niss.data import Dataset
from niss.errors import ConfigError, RunFolderError
from niss.simulation.config import Config
from niss.simulation.materials import Materials, gather_together, make_manifest
from niss.simulation.records import MANIFEST, prepare_folder, read_json, write_json
from niss.simulation.run import (
    Comparison,
    Progress,
    conclude_comparison,
    make_runs,
    method_folders,
    play_runs,
)
from niss.simulation.training import Trainer


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
    named = {f"seed-{seed}": config.model_copy(update={"seed": seed}) for seed in seeds}
    found = compare_together(named, out=out, dataset=dataset, progress=progress)
    return {seed: found[f"seed-{seed}"] for seed in seeds}


def compare_together(
    configs: Mapping[str, Config],
    *,
    out: str | Path | None = None,
    dataset: Dataset | None = None,
    progress: Progress | None = None,
) -> dict[str, Comparison]:
    """`compare` for each config, by name, in one cohort: they may differ in all but dataset, model and engine.

    With `out`, each is kept in the folder of its name there; one that was begun is continued, and one that was begun
    with other settings is refused. `dataset` stands in for the one the configs name.
    """
    if not configs:
        raise ConfigError("nothing to compare", field="configs")
    names, wanted = list(configs), list(configs.values())
    for one, other in pairwise(wanted):
        _require_one_cohort(one, other)
    materials = gather_together(wanted, dataset)
    folders = [None if out is None else Path(out) / name for name in names]
    with Trainer(wanted[0], materials[0]) as trainer:
        for config, items, folder in zip(wanted, materials, folders, strict=True):
            if folder is not None:
                _open(folder, config, items, trainer.engine)
        runs = [
            make_runs(config, items, method_folders(config, items, trainer, folder), trainer, name)
            for name, config, items, folder in zip(names, wanted, materials, folders, strict=True)
        ]
        results = iter(play_runs([one for group in runs for one in group], trainer, progress))
    return {
        name: conclude_comparison(config, items, [next(results) for _ in group], folder)
        for name, config, items, folder, group in zip(names, wanted, materials, folders, runs, strict=True)
    }


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


def _open(folder: Path, config: Config, materials: Materials, engine: str) -> None:
    """Make the folder of a comparison, or make sure that the one there is this comparison."""
    manifest = make_manifest("comparison", config, materials, engine)
    if not (folder / MANIFEST).exists():
        prepare_folder(folder, overwrite=False)
        write_json(folder / MANIFEST, manifest)
        return
    found = read_json(folder / MANIFEST)
    # Where the clients train changes nothing that is recorded but the last bits.
    if any(_settings(found, key) != _settings(manifest, key) for key in ("config", "data")):
        raise RunFolderError(
            f"{folder} was begun with other settings or other data",
            hint="give another folder, or remove it to start again",
        )


def _settings(manifest: Mapping[str, object], key: str) -> object:
    value = manifest.get(key)
    if key != "config" or not isinstance(value, dict):
        return value
    training = {name: item for name, item in value["training"].items() if name not in ("device", "workers")}
    return {**value, "training": training}
