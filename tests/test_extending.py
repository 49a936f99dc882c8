"""One of each kind that can be added, added as CONTRIBUTING says, and used from the command line."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import pytest
from typer.testing import CliRunner
from typing_extensions import Doc

import niss.cli
from niss import attacks
from niss.attacks.experiment import Experiment, Findings
from niss.cli.options import Flags
from niss.data import catalog
from niss.graph import GRAPHS, Drawing, ShareGraph
from niss.mechanism.shares import DISTORTIONS, Distortion
from niss.methods import METHODS
from niss.methods.fedavg import DpFedAvg
from niss.settings import Count, Positive, check, described, settings

SMALL = [
    "--clients",
    "8",
    "--participants",
    "4",
    "--rounds",
    "1",
    "--epochs",
    "1",
    "--set",
    "data.samples_per_client=5",
]


def command(*arguments: str) -> Any:
    """What a command prints, as JSON where it is."""
    done = CliRunner().invoke(niss.cli.app, list(arguments))
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def run_json(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "run"
    command("run", *SMALL, "--out", str(out), "--quiet", *arguments)
    found: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return found


class Twin(DpFedAvg):
    """DP-FedAvg under another name."""

    name = "twin"


def test_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, Twin.name, Twin())
    assert run_json(tmp_path, "--method", "twin")["method"] == "twin"


def test_a_distortion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DISTORTIONS, "fresh", Distortion("fresh"))
    assert run_json(tmp_path, "--distortion", "fresh", "--neighbours", "2")["distortion"] == "fresh"


def test_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Drawing] = []

    def ring(drawing: Drawing) -> ShareGraph:
        drawn.append(drawing)
        return ShareGraph(
            drawing.size, [(k, (k + 1) % drawing.size, drawing.degree) for k in range(drawing.size)]
        )

    monkeypatch.setitem(GRAPHS, "ring", ring)
    run_json(tmp_path, "--graph", "ring", "--neighbours", "1")
    assert drawn[0].size == 4


def test_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = dataclasses.replace(catalog.MNIST_MINI, name="digits-again")
    monkeypatch.setattr(catalog, "CATALOG", (*catalog.CATALOG, copy))
    run_json(tmp_path, "--dataset", "digits-again")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["config"]["data"]["dataset"] == "digits-again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guess(Experiment):
    """Guess zero, and see how far off that is.

    niss attack guess --size 3
    """

    name = "guess"
    columns = {"error": "Error"}  # noqa: RUF012
    size: Annotated[Count, Doc("Length of the secret.")] = 2

    def attack(self, findings: Findings, progress: Any) -> None:
        progress("guess", 1, 1, "")
        findings.rows.append({"error": float(np.sqrt(self.size))})

    def charts(self, findings: Findings) -> list[Any]:
        del findings
        return []


def test_an_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("attack_that_guesses")
    module.Guess = Guess  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(attacks.EXPERIMENTS, "guess", "attack_that_guesses.Guess")
    from niss.cli import experiments

    commands = experiments._load_attacks()
    out = tmp_path / "attack"
    done = CliRunner().invoke(commands, ["guess", "--size", "9", "--out", str(out), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads((out / "attack.json").read_text(encoding="utf-8"))["rows"] == [{"error": 3.0}]


def test_a_setting() -> None:
    """A field is a flag, a key and a row of the reference at once."""

    @settings
    class Server:
        patience: Annotated[Positive, Doc("Seconds to wait.")] = 2.0

    (setting,) = described(Server)
    (flag,) = Flags.all_of(Server).parameters()
    assert (setting.in_words, setting.help, setting.default) == ("number > 0", "Seconds to wait.", 2.0)
    assert (flag.keyword, flag.settings["help"]) == ("patience", "Seconds to wait (default: 2).")
    assert check(Server, {"patience": 3}).patience == 3.0
