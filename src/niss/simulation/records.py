"""The folder of a run: what was asked for, what happened, and enough to go on after a kill.

manifest.json           settings, versions, seeds, data checksums; written first
metrics.jsonl           one line a round, flushed; the same bytes on every repetition
ledger.jsonl            what each round cost each participant; a hash chain, flushed before the round is summed
timing.jsonl            seconds a round (kept apart: never the same twice)
checkpoint.safetensors  weights and ledger after the last whole round, replaced atomically
model.safetensors       the final model, by parameter name
privacy.json            the statement
result.json             the summary line of the run; written last, so its presence means "finished"
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from niss.accounting import Ledger
from niss.errors import RunFolderError

MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
TIMING = "timing.jsonl"
CHECKPOINT = "checkpoint.safetensors"
MODEL = "model.safetensors"
PRIVACY = "privacy.json"
RESULT = "result.json"
SUMMARY = "summary.json"
REPORT = "report.html"


@dataclass(frozen=True)
class Checkpoint:
    """The state after `rounds` whole rounds."""

    rounds: int
    weights: Tensor
    ledger: Ledger


class RunFolder:
    """One run's folder on disk. Every write is whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any], *, overwrite: bool = False) -> RunFolder:
        """A fresh folder with its manifest; refuses one that already holds something."""
        prepare_folder(path, overwrite=overwrite)
        write_json(path / MANIFEST, manifest)
        return cls(path)

    @property
    def finished(self) -> bool:
        return (self.path / RESULT).exists()

    def append_round(self, metrics: Mapping[str, Any], seconds: float) -> None:
        """Add one round's line to the metrics, on disk before this returns."""
        _append_line(self.path / METRICS, metrics)
        _append_line(self.path / TIMING, {"round": metrics["round"], "seconds": round(seconds, 4)})

    def rewind_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Drop whatever was written after the checkpoint; returns the lines kept."""
        kept = read_lines(self.path / METRICS)[:rounds]
        if len(kept) < rounds:
            raise RunFolderError(
                f"{self.path / METRICS} has {len(kept)} rounds, the checkpoint {rounds}",
                hint="the folder was changed by hand; start the run again in a new folder",
            )
        for name in (METRICS, TIMING):
            lines = read_lines(self.path / name)[:rounds]
            write_atomically(self.path / name, "".join(_line(line) for line in lines).encode())
        return kept

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        ledger = checkpoint.ledger
        tensors = {
            "weights": checkpoint.weights,
            "joint_squared": torch.from_numpy(ledger.joint_squared),
            "marginal_squared": torch.from_numpy(ledger.marginal_squared),
            "participations": torch.from_numpy(ledger.participations),
        }
        write_atomically(self.path / CHECKPOINT, save(tensors, {"rounds": str(checkpoint.rounds)}))

    def load_checkpoint(self, budget: np.ndarray[Any, np.dtype[np.float64]] | None) -> Checkpoint | None:
        """The last checkpoint, or None if the run was killed before its first."""
        path = self.path / CHECKPOINT
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                rounds = int(file.metadata()["rounds"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, KeyError, ValueError) as error:
            raise RunFolderError(
                f"{path} is damaged: {error}", hint="start the run again in a new folder"
            ) from None
        ledger = Ledger(
            tensors["joint_squared"].numpy(),
            tensors["marginal_squared"].numpy(),
            tensors["participations"].numpy(),
            budget,
        )
        return Checkpoint(rounds, tensors["weights"], ledger)

    def save_model(self, tensors: Mapping[str, Tensor]) -> None:
        write_atomically(
            self.path / MODEL, save({name: tensor.contiguous() for name, tensor in tensors.items()})
        )


def prepare_folder(path: Path, *, overwrite: bool) -> None:
    """Make `path` an empty folder; an earlier run in it is removed only when told to."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file", hint="give another folder with --out")
    if path.exists() and any(path.iterdir()):
        if not (path / MANIFEST).exists():
            raise RunFolderError(
                f"{path} is not empty and holds no run", hint="give another folder with --out"
            )
        if not overwrite:
            raise RunFolderError(
                f"{path} already holds a run",
                hint=f"continue it with --resume {path}, or replace it with --overwrite",
            )
        shutil.rmtree(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"cannot create {path}: {error.strerror}", hint="give another folder with --out"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk, or an error that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} does not exist", hint="give the folder of an earlier run") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} holds no JSON object")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole JSON lines of a file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    whole: list[dict[str, Any]] = []
    for line in lines[:-1]:
        try:
            whole.append(json.loads(line))
        except ValueError:
            break
    return whole


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically; infinite and NaN numbers become null."""
    text = json.dumps(plain_json(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves either the old one or the new one, never a part."""
    with _temporary_beside(path) as (descriptor, temporary):
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[tuple[int, Path]]:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        yield descriptor, temporary
    finally:
        temporary.unlink(missing_ok=True)


def _append_line(path: Path, value: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(value))
        file.flush()
        os.fsync(file.fileno())


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(plain_json(value), ensure_ascii=False, allow_nan=False) + "\n"


def plain_json(value: Any) -> Any:
    """JSON has no infinity: null stands for "no number"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value
