"""What is written down: findings, charts and pictures, drawn without a display."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niss.attacks import EXPERIMENTS, load_experiment
from niss.attacks.experiment import Experiment, Findings, drawn, write_results
from niss.charts import Curves, charts_from_json
from niss.errors import ConfigError
from niss.settings import check, described

# Options with which each attack is quick.
CASES: dict[str, dict[str, Any]] = {
    "dlg": {"methods": ("niss",), "clients": 3, "iterations": 3, "restarts": 1},
    "joint": {"clients": 4, "points": 3, "iterations": 3, "restarts": 1},
    "invert": {"methods": ("fedavg",), "clients": 3, "iterations": 3, "restarts": 1},
    "collude": {
        **{"clients": 6, "neighbours": 2.0, "rho": (0.0, 1.0), "points": 2, "hidden": 2},
        "distortions": ("additive",),
    },
    "average": {"clients": 3, "rounds": 4},
    "fake-dropout": {"clients": 6},
    "rerun": {"clients": 3, "repeats": 2},
    "carried": {"clients": 4, "rounds": 6, "separation": 3, "colluders": 1, "dropped": 1, "runs": 100},
    "silo": {"clients": 3, "records": 1, "runs": 20, "iterations": 3, "restarts": 1},
    "oracle": {"clients": 3, "runs": 10},
    "audit": {"rounds": 200},
}


def found(name: str, **options: Any) -> tuple[Experiment, Findings]:
    """The attack, and what it finds."""
    experiment = load_experiment(name)(**options)
    findings = experiment.start()
    assert drawn(experiment, findings) == ([], []), "nothing found, nothing drawn"
    experiment.run(findings, lambda *_: None)
    assert findings.finished
    assert findings.headline
    return experiment, findings


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_is_drawn_without_a_display(name: str, tmp_path: Path) -> None:
    experiment, findings = found(name, **CASES[name])
    for row in findings.rows:
        assert set(findings.columns) <= set(row) or "refusal" in row
    charts, strips = drawn(experiment, findings)
    assert charts
    assert all(chart.across for chart in charts)
    assert all(np.ndim(pixels) == 3 for strip in strips for _, pixels in strip.pictures)
    write_results(experiment, findings, tmp_path)
    assert (tmp_path / "attack.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["attack.json", "attack.png"]
    written = json.loads((tmp_path / "attack.json").read_text())
    assert charts_from_json(written["charts"]) == charts
    assert written["pictures"] == bool(strips)


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


def test_the_same_seed_finds_the_same() -> None:
    first, second = (found("audit", rounds=300, seed=9)[1].to_json() for _ in range(2))
    assert first == second


def test_the_list_of_experiments_is_that_of_the_commands() -> None:
    assert set(EXPERIMENTS) == set(CASES)
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        assert experiment.name == name
        assert experiment.summary.endswith(".")
        assert all(line.startswith(f"niss attack {name}") for line in experiment.examples)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_option_has_a_help_and_a_default(name: str) -> None:
    experiment = load_experiment(name)
    assert check(experiment, {}) == experiment(), "its defaults are within its ranges"
    options = {setting.name: setting.help for setting in described(experiment)}
    assert all(options.values())
    others = {field.name for field in fields(experiment)} - set(options)
    assert others == ({"points"} if name == "joint" else set())


@pytest.mark.parametrize(
    ("name", "options", "flag"),
    [
        ("fake-dropout", {"clients": 5}, "--clients"),
        ("invert", {"methods": ("secagg-ddg",)}, "--methods"),
        ("collude", {"distortions": ("scalar", "scalar")}, "--distortions"),
        ("carried", {"clients": 3}, "--colluders"),
        ("carried", {"clients": 6, "colluders": 5}, "--colluders"),
        ("carried", {"separation": 1}, "--separation"),
        ("carried", {"confidence": 1.0}, "--confidence"),
        ("carried", {"kappa": 0.0}, "--kappa"),
        ("carried", {"runs": 10}, "--runs"),
    ],
)
def test_options_out_of_range_are_refused_by_their_flag(
    name: str, options: dict[str, Any], flag: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment(name)(**options).start()
    assert caught.value.field == flag


@pytest.mark.parametrize(
    ("done", "heavy"),
    [
        ("all(load_experiment(name)() for name in EXPERIMENTS)", "torch scipy matplotlib pydantic numpy"),
        ("(audit := load_experiment('audit')(rounds=200)).run(audit.start(), print)", "torch matplotlib"),
    ],
    ids=["options are read", "an audit is run"],
)
def test_what_is_done_without_anything_heavy(done: str, heavy: str) -> None:
    code = f"import sys; from niss.attacks import EXPERIMENTS, load_experiment; {done}; "
    code += f"sys.exit([name for name in {heavy.split()} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr == "[]\n", "what was loaded, or went wrong"


def test_a_method_without_a_guarantee_is_marked_in_the_chart_of_its_losses() -> None:
    options = {"plan": "paper", "methods": ("dp-fedavg", "niss")}
    experiment, findings = found("dlg", **CASES["dlg"] | options)
    [chart], _ = drawn(experiment, findings)
    assert isinstance(chart, Curves)
    assert [one.name for one in chart.series] == ["dp-fedavg", "niss (unprotected)"]
