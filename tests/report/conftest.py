from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROUNDS = 30


SERVER = "the server, which sees every upload"
PROMISE = "No client can be told from its absence beyond the stated epsilon."
OUTSIDERS = "those who see the released models; the server is trusted"
RELEASED = "The released models are (3.00, 1e-05)-differentially private for one client."
NOBODY = "None: the server sees every update in the clear."
CANCELS = "None in the joint view: the shares cancel exactly when the server adds all uploads up."
FIELDS = (
    *("label", "method", "accuracy", "aggregate_variance", "kappa", "tau2"),
    *("epsilon_joint", "epsilon_marginal", "adversary", "guarantee"),
)
METHODS = (
    ("fedavg", "fedavg", 0.85, None, None, None, None, None, "no one", NOBODY),
    ("central-dp", "central-dp", 0.84, 4.1e-9, None, None, 3.0, 3.0, OUTSIDERS, RELEASED),
    ("dp-fedavg", "dp-fedavg", 0.21, 8.2e-7, None, None, 3.0, 3.0, SERVER, PROMISE),
    ("niss-kappa-1", "niss", 0.792, 1.6e-7, 1.0, 0.01, 3.0, 2.2, SERVER, PROMISE),
    ("niss-kappa-4", "niss", 0.821, 4.4e-8, 4.0, 0.01, 3.0, 1.1, SERVER, PROMISE),
    ("niss-as-printed", "niss", 0.848, 3e-19, None, 0.01, None, 1.1, SERVER, CANCELS),
)


def demo_entries() -> list[dict[str, Any]]:
    """The methods of a comparison as its summary lists them; where shares cancel exactly, no noise is predicted."""
    entries = []
    for method in METHODS:
        entry: dict[str, Any] = dict(zip(FIELDS, method, strict=True))
        variance = entry["aggregate_variance"]
        predicted = None if variance is None else 0.99 * variance if variance > 1e-12 else 0.0
        entries.append(entry | {"folder": entry["label"], "aggregate_variance_predicted": predicted})
    return entries


def metrics_lines(method: dict[str, Any], rounds: int = ROUNDS) -> list[str]:
    lines = []
    for number in range(1, rounds + 1):
        rise = (1 - math.exp(-number / 6)) / (1 - math.exp(-ROUNDS / 6))
        wobble = 0.012 * math.sin(2.1 * number + len(method["label"])) * (1 - number / ROUNDS)
        evaluated = number % 5 != 4
        lines.append(
            json.dumps(
                {
                    "round": number,
                    "accuracy": 0.1 + (method["accuracy"] - 0.1) * rise + wobble if evaluated else None,
                    "loss": 2.3 - 1.6 * rise,
                    "aggregate_variance": method["aggregate_variance"],
                    "aggregate_variance_predicted": method["aggregate_variance_predicted"],
                    "participants": 200,
                    "tau2": method["tau2"],
                }
            )
        )
    return lines


def manifest(methods: list[dict[str, Any]], kind: str, seed: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "created": "2025-11-15T11:20:00+00:00",
        "config": {
            "name": "demo",
            "rounds": ROUNDS,
            "data": {"dataset": "mnist-mini", "split": "iid", "clients": 1000},
            "model": {"name": "mlp", "hidden": [32]},
            "training": {"participants": 200, "learning_rate": 0.1},
            "privacy": {"unit": "client", "relation": "zero-out", "epsilon": 3.0, "delta": 1e-5},
            "methods": [
                {"name": one["method"], "label": one["label"], "kappa": one["kappa"] or 1.0}
                for one in methods
            ],
        },
        "seed": seed,
        "data": {"source": "mnist-mini", "checksums": {"mnist-mini.npz": "sha256:" + "ab12" * 16}},
        "model_parameters": 25450,
        "versions": {"niss": "0.1.0", "python": "3.11.9", "torch": "2.6.0", "numpy": "2.1.0"},
    }


def write_run(folder: Path, method: dict[str, Any], *, rounds: int = ROUNDS, seed: int = 7) -> Path:
    """An unfinished single run: everything but result.json."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(metrics_lines(method, rounds)) + "\n", encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(manifest([method], "run", seed)), encoding="utf-8")
    return folder


def write_comparison(folder: Path, methods: list[dict[str, Any]], **changes: Any) -> Path:
    for number, method in enumerate(methods):
        write_run(folder / method["folder"], method, seed=7 + number)
    (folder / "manifest.json").write_text(json.dumps(manifest(methods, "comparison", 7)), encoding="utf-8")
    summary = {
        "name": "demo",
        "niss_version": "0.1.0",
        "title": "Noise that cancels against noise that adds up",
        "rounds": ROUNDS,
        "clients": 1000,
        "participants": 200,
        "model_parameters": 25450,
        "delta": 1e-5,
        "target_epsilon": 3.0,
        "unit": "client",
        "relation": "zero-out",
        "dataset": "mnist-mini",
        "split": "iid",
        "methods": methods,
    } | changes
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "demo", demo_entries())


@pytest.fixture
def one() -> dict[str, Any]:
    return demo_entries()[4]


@pytest.fixture
def run_folder(tmp_path: Path, one: dict[str, Any]) -> Path:
    return write_run(tmp_path / "single", one)


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., Path]:
    """Writes the demo with entries changed or (None) left out, and settings of the summary changed."""

    def write(changes: dict[str, dict[str, Any] | None], **summary: Any) -> Path:
        methods = []
        for method in demo_entries():
            change = changes.get(method["label"], {})
            if change is not None:
                methods.append(method | change)
        return write_comparison(tmp_path / "changed", methods, **summary)

    return write
