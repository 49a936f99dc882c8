"""What is written down: findings, charts and pictures, drawn without a display."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niss.attacks import EXPERIMENTS, load_experiment
from niss.attacks.experiment import Experiment, Findings, drawn
from niss.charts import Curves
from niss.settings import check, described


def test_findings_are_plain_json() -> None:
    findings = Findings("x", {"path": Path("a"), "t": (1, 2)}, {"a": "A"})
    findings.rows.append({"a": np.float64("inf"), "b": np.int64(3), "c": float("nan"), "d": np.bool_(True)})
    findings.curves["e"] = np.arange(3)
    written = json.loads(json.dumps(findings.to_json()))
    assert written["rows"] == [{"a": None, "b": 3, "c": None, "d": True}]
    assert written["settings"] == {"path": "a", "t": [1, 2]}
    assert written["curves"] == {"e": [0, 1, 2]}
    assert written["columns"] == {"a": "A"}
    assert written["finished"] is False


def found(name: str, **options: Any) -> tuple[Experiment, Findings]:
    experiment = load_experiment(name)(**options)
    findings = experiment.start()
    experiment.run(findings, lambda *_: None)
    return experiment, findings


def test_the_same_seed_finds_the_same() -> None:
    first, second = (found("audit", rounds=300, seed=9)[1].to_json() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_attack_describes_itself_and_draws_nothing_where_nothing_was_found(name: str) -> None:
    experiment = load_experiment(name)
    assert experiment.name == name
    assert experiment.summary.endswith(".")
    assert all(line.startswith(f"niss attack {name}") for line in experiment.examples)
    assert check(experiment, {}) == experiment(), "its defaults are within its ranges"
    options = {setting.name: setting.help for setting in described(experiment)}
    assert all(options.values())
    others = {field.name for field in fields(experiment)} - set(options)
    assert others == ({"points"} if name == "joint" else set())
    assert drawn(experiment(), experiment().start()) == ([], [])


def test_a_method_without_a_guarantee_is_marked_in_the_chart_of_its_losses() -> None:
    options = {"methods": ("dp-fedavg", "niss"), "clients": 3, "iterations": 3, "restarts": 1}
    [chart], _ = drawn(*found("dlg", plan="paper", **options))
    assert isinstance(chart, Curves)
    assert [one.name for one in chart.series] == ["dp-fedavg", "niss (unprotected)"]
