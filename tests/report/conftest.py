"""Folders of runs, comparisons and attacks as a report finds them, and the page that it makes of them."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from niss.accounting import Charge, LedgerFile, LedgerHeader
from niss.report import write_report

ROUNDS = 30


SERVER = "the server, which sees every upload"
PROMISE = "No client can be told from its absence beyond the stated epsilon."
OUTSIDERS = "those who see the released models; the server is trusted"
RELEASED = "The released models are (3.00, 1e-5)-differentially private for one client."
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
                    "model_noise_variance": number * (method["aggregate_variance_predicted"] or 0.0),
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


VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Collects tags, their attributes and the text, and refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def text_of(folder: Path | list[Path], out: Path | None = None) -> str:
    """The page on a folder, or on several."""
    return write_report(folder, out).read_text(encoding="utf-8")


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAfbLI3wAAAABJRU5ErkJggg=="
)


def write_attack(folder: Path, picture: bytes = PNG, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "attack": "joint",
        "niss": "0.1.0",
        "finished": True,
        "headline": "All uploads together give the picture away (17.3 dB).",
        "settings": {"image": "mnist-mini:0", "clients": 5, "epsilon": None, "dlg": {"iterations": 60}},
        "rows": [
            {"case": "τ = 0 <b>", "epsilon_joint": None, "psnr": 17.25, "label_found": True, "trace": [1, 2]},
            {"case": "calibrated", "epsilon_joint": 3.0, "psnr": 3.0, "label_found": False, "trace": []},
        ],
        "curves": {},
    } | changes
    (folder / "attack.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "attack.png").write_bytes(picture)
    return folder


def add_ledger(folder: Path, *, clients: int = 4, rounds: int = 3, heuristic: bool = False) -> Path:
    """Client 1 pays in every round, the others in the first alone, client 0 never."""
    with LedgerFile.create(
        folder / "ledger.jsonl",
        LedgerHeader(run="spending", budgets={str(client): 4.0 for client in range(clients)}, delta=1e-5),
    ) as ledger:
        for number in range(1, rounds + 1):
            paying = range(1, clients) if number == 1 else range(1, 2)
            ledger.charge(
                number, 0, {str(one): Charge.of(0.3, 0.1) for one in paying}, {"heuristic": heuristic}
            )
    return folder


def write_graph_run(
    folder: Path, *, clients: int = 60, seed: int = 4, dropped: int = 0, **changes: Any
) -> Path:
    """A run of one round whose participants are the even clients."""
    folder.mkdir(parents=True)
    method = {"name": "niss", "kappa": 4.0, "neighbours": 6.0, "graph": "regular", "groups": []}
    config: dict[str, Any] = {
        "name": "graph",
        "seed": seed,
        "rounds": 1,
        "exchange": "simulated",
        "data": {"clients": 2 * clients},
        "training": {"participants": clients, "weights": "equal", "sampling": "shuffled"},
        "privacy": {"unit": "client", "epsilon": 3.0, "delta": 1e-5, "collusion": 0.0, "dropout": 0.0},
        "methods": [method],
    }
    for key, value in changes.items():
        parts = (method, *(part for part in config.values() if isinstance(part, dict)))
        next((part for part in parts if key in part), config)[key] = value
    (folder / "manifest.json").write_text(json.dumps({"kind": "run", "config": config}), encoding="utf-8")
    line = {"round": 1, "accuracy": 0.5, "tau2": 0.01, "participants": 20, "survivors": 20 - dropped}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    members = {str(2 * seat): Charge.of(0.3 + 0.0001 * (seat == 7), 0.1) for seat in range(clients)}
    with LedgerFile.create(
        folder / "ledger.jsonl",
        LedgerHeader(run="graph", budgets={str(client): 2.0 for client in range(2 * clients)}, delta=1e-5),
    ) as ledger:
        ledger.charge(1, 0, members, {"method": "niss"})
    return folder
