"""The numbers of runs for MLflow and Weights & Biases, offline: nothing here opens a connection.

MLflow's file store is plain text and is written without the package, the same bytes for the same run. The files of
Weights & Biases have a format of their own; the package `wandb` writes them, offline and without what it would note
of the machine, and `wandb sync` sends them where their owner likes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from niss.errors import ConfigError
from niss.files import write_output
from niss.report.export import TAGS, Series, check_free

_FINISHED, _LOCAL = 3, 4
_META = "meta.yaml"


def write_mlruns(series: Sequence[Series], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """A file store for `mlflow ui --backend-store-uri FOLDER`: an experiment for each run, in it a run for each method.

    overwrite  replaces the runs of an earlier export and nothing else; without it they are a `RunFolderError`

    Returns the folders of the runs. Names of experiments and runs follow from those of the series.
    """
    root = folder.resolve()
    places = [root / _number(one.run) / _digest(one.run, one.label)[:32] for one in series]
    check_free(places, overwrite=overwrite)
    for one, place in zip(series, places, strict=True):
        if place.exists():
            shutil.rmtree(place)
        began = round(1000 * one.began)
        _write_meta(
            place.parent,
            {
                "artifact_location": place.parent.as_uri(),
                "creation_time": began,
                "experiment_id": place.parent.name,
                "last_update_time": began,
                "lifecycle_stage": "active",
                "name": one.run,
            },
        )
        _write_run(one, place, began)
    return places


def _write_run(one: Series, place: Path, began: int) -> None:
    metrics: dict[str, list[str]] = {}
    clock = float(began)
    for number, values in sorted(one.rounds.items()):
        clock += 1000 * (values["seconds"] or 0.0)
        for name, value in values.items():
            if value is not None:
                metrics.setdefault(TAGS[name], []).append(f"{round(clock)} {float(value)!r} {number}\n")
    _write_meta(
        place,
        {
            "artifact_uri": (place / "artifacts").as_uri(),
            "end_time": round(clock),
            "entry_point_name": "",
            "experiment_id": place.parent.name,
            "lifecycle_stage": "active",
            "run_id": place.name,
            "run_name": one.label,
            "run_uuid": place.name,
            "source_name": "niss",
            "source_type": _LOCAL,
            "source_version": "",
            "start_time": began,
            "status": _FINISHED,
            "tags": [],
            "user_id": "",
        },
    )
    (place / "artifacts").mkdir(exist_ok=True)
    write_output(place / "params" / "method", one.label.encode())
    write_output(place / "tags" / "mlflow.runName", one.label.encode())
    for tag, lines in metrics.items():
        write_output(place / "metrics" / tag, "".join(lines).encode())


def _write_meta(place: Path, values: Mapping[str, Any]) -> None:
    # JSON is YAML, so that no label needs quoting of ours.
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in values.items()]
    write_output(place / _META, "".join(lines).encode())


def _digest(*names: str) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def _number(name: str) -> str:
    """MLflow numbers its experiments."""
    return str(int(_digest(name)[:14], 16) + 1)


def write_wandb(series: Sequence[Series], folder: Path) -> list[Path]:
    """Offline runs of Weights & Biases below `folder`, one for each method; `wandb sync` sends them.

    Returns their folders, which are new each time. Raises `ConfigError` where the package `wandb` is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError:
        raise ConfigError(
            "this export needs wandb", field="--wandb", hint="pip install 'niss[wandb]'"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        save_code=False,
        silent=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    written = []
    for one in series:
        run = wandb.init(
            project="niss",
            group=one.run,
            name=one.label,
            config={"run": one.run, "method": one.label},
            dir=str(folder),
            mode="offline",
            settings=settings,
            reinit="finish_previous",
        )
        for number, values in sorted(one.rounds.items()):
            run.log({TAGS[name]: value for name, value in values.items() if value is not None}, step=number)
        written.append(Path(run.dir).parent)
        run.finish()
    return written
