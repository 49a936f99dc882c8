"""What is written down: findings, charts and pictures, drawn without a display."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import niss.attacks
from niss.attacks import EXPERIMENTS, load_experiment
from niss.attacks.audit import AuditExperiment
from niss.attacks.average import AverageExperiment, RerunExperiment
from niss.attacks.carried import CarriedExperiment
from niss.attacks.collude import ColludeExperiment
from niss.attacks.experiment import (
    Experiment,
    Findings,
    Help,
    drawn,
    no_progress,
    write_results,
)
from niss.attacks.fake_dropout import FakeDropoutExperiment
from niss.attacks.invert import DlgExperiment, InvertExperiment, JointExperiment
from niss.charts import Curves, charts_from_json
from niss.errors import ConfigError

CASES: dict[str, Experiment] = {
    "dlg": DlgExperiment(methods=("niss",), clients=3, iterations=3, restarts=1),
    "joint": JointExperiment(clients=4, points=3, iterations=3, restarts=1),
    "invert": InvertExperiment(methods=("fedavg",), clients=3, iterations=3, restarts=1),
    "collude": ColludeExperiment(
        clients=6, neighbours=2.0, rhos=(0.0, 1.0), points=2, hidden=2, distortions=("additive",)
    ),
    "average": AverageExperiment(clients=3, rounds=4),
    "fake-dropout": FakeDropoutExperiment(clients=6),
    "rerun": RerunExperiment(clients=3, repeats=2),
    "carried": CarriedExperiment(clients=4, rounds=6, separation=3, colluders=1, dropped=1, runs=100),
    "audit": AuditExperiment(rounds=200),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_is_drawn_without_a_display(name: str, tmp_path: Path) -> None:
    experiment = CASES[name]
    findings = experiment.start()
    assert drawn(experiment, findings) == ([], []), "nothing found, nothing drawn"
    experiment.run(findings, no_progress)
    assert findings.finished
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
    found = []
    for _ in range(2):
        findings = (experiment := AuditExperiment(rounds=300, seed=9)).start()
        experiment.run(findings, no_progress)
        found.append(findings.to_json())
    assert found[0] == found[1]


def test_the_list_of_experiments_is_that_of_the_commands() -> None:
    assert set(EXPERIMENTS) == set(CASES)
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        assert type(CASES[name]) is experiment
        assert experiment.name == name
        assert experiment.summary.endswith(".")
        assert all(line.startswith(f"niss attack {name}") for line in experiment.examples)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_option_has_a_help_and_a_default(name: str) -> None:
    experiment = load_experiment(name)
    defaults = experiment()
    for field in fields(experiment):
        kind = get_type_hints(experiment, include_extras=True)[field.name]
        if get_origin(kind) is not Annotated:
            assert (name, field.name) == ("joint", "points"), "all others are options"
            continue
        note = get_args(kind)[1]
        assert isinstance(note, Help)
        assert note.text
        value = getattr(defaults, field.name)
        choices = note.choices() if callable(note.choices) else note.choices
        assert not choices or set(choices) >= set(value if isinstance(value, tuple) else [value])
        assert note.least is None or value >= note.least


def test_options_out_of_range_are_refused_by_their_flag() -> None:
    for experiment, flag in (
        (AverageExperiment(rounds=0), "--rounds"),
        (FakeDropoutExperiment(clients=5), "--clients"),
        (InvertExperiment(total_variation=-1.0), "--tv"),
        (InvertExperiment(model="vgg"), "--model"),
        (InvertExperiment(methods=("secagg-ddg",)), "--methods"),
        (ColludeExperiment(distortions=("scalar", "scalar")), "--distortions"),
    ):
        with pytest.raises(ConfigError) as caught:
            experiment.start()
        assert caught.value.field == flag


def test_options_can_be_read_without_anything_heavy() -> None:
    code = (
        "import sys\n"
        "from niss.attacks import EXPERIMENTS, load_experiment\n"
        "assert all(load_experiment(name)() for name in EXPERIMENTS)\n"
        "heavy = ('torch', 'scipy', 'matplotlib', 'pydantic', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_audit_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from niss.attacks.audit import AuditExperiment\n"
        "experiment = AuditExperiment(rounds=200)\n"
        "experiment.run(experiment.start(), lambda *_: None)\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_of_the_room() -> None:
    assert dir(niss.attacks) == sorted(niss.attacks.__all__)
    assert all(hasattr(niss.attacks, name) for name in niss.attacks.__all__)


def test_a_method_without_a_guarantee_is_marked_in_the_chart_of_its_losses() -> None:
    experiment = DlgExperiment(
        plan="paper", methods=("dp-fedavg", "niss"), clients=3, iterations=3, restarts=1
    )
    findings = experiment.start()
    experiment.run(findings, no_progress)
    [chart], _ = drawn(experiment, findings)
    assert isinstance(chart, Curves)
    assert [one.name for one in chart.series] == ["dp-fedavg", "niss (unprotected)"]
