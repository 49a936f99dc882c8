"""What is written down, and figures that can be read: drawn without a display, every axis with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure, SubFigure

import niss.attacks
from niss.attacks.dlg import DlgSettings
from niss.attacks.drawing import save
from niss.attacks.experiments.audit import AuditExperiment
from niss.attacks.experiments.average import AverageExperiment
from niss.attacks.experiments.collude import ColludeExperiment
from niss.attacks.experiments.fake_dropout import FakeDropoutExperiment
from niss.attacks.experiments.invert import InvertExperiment
from niss.attacks.experiments.joint import JointExperiment
from niss.attacks.figures.audit import draw_audit
from niss.attacks.figures.batches import draw_batches
from niss.attacks.figures.collusion import draw_collusion
from niss.attacks.figures.steps import draw_steps
from niss.attacks.figures.stories import draw_stories
from niss.attacks.figures.strips import draw_strips
from niss.attacks.findings import Experiment, Findings, no_progress, plain, write_findings
from niss.attacks.inverting import InvertSettings

SHORT = DlgSettings(iterations=3, restarts=1)
CASES: dict[str, tuple[Experiment, Callable[[Findings], Figure | None]]] = {
    "joint": (JointExperiment(clients=4, points=3, dlg=SHORT), draw_strips),
    "invert": (
        InvertExperiment(methods=("fedavg",), clients=3, search=InvertSettings(iterations=3, restarts=1)),
        draw_batches,
    ),
    "collude": (
        ColludeExperiment(
            clients=6, neighbours=2.0, rhos=(0.0, 1.0), points=2, hidden=2, distortions=("additive",)
        ),
        draw_collusion,
    ),
    "average": (AverageExperiment(clients=3, rounds=4), draw_steps),
    "fake-dropout": (FakeDropoutExperiment(clients=6), draw_stories),
    "audit": (AuditExperiment(rounds=200), draw_audit),
}


def charts(figure: Figure | SubFigure) -> list[Any]:
    """The axes that are no pictures and no labels of pictures."""
    return [axes for axes in figure.get_axes() if axes.axison and not axes.images]


@pytest.mark.parametrize("name", CASES)
def test_every_chart_names_its_axes_and_is_saved_without_a_display(name: str, tmp_path: Path) -> None:
    experiment, draw = CASES[name]
    findings = experiment.start()
    assert draw(findings) is None, "nothing found, nothing drawn"
    experiment.run(findings, no_progress)
    assert findings.finished
    for row in findings.rows:
        assert set(findings.columns) <= set(row) | {"predicted"}
    figure = draw(findings)
    assert figure is not None
    for axes in charts(figure):
        shared = axes.get_shared_x_axes().get_siblings(axes)
        assert any(other.get_xlabel() for other in shared), name
        assert any(other.get_ylabel() for other in axes.get_shared_y_axes().get_siblings(axes)) or any(
            label.get_text() for label in axes.get_yticklabels()
        )
    path = save(figure, tmp_path / "figure.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [one.name for one in tmp_path.iterdir()] == ["figure.png"]


def test_findings_are_plain_json(tmp_path: Path) -> None:
    findings = Findings("x", {"path": Path("a"), "t": (1, 2)}, {"a": "A"})
    findings.rows.append({"a": np.float64("inf"), "b": np.int64(3), "c": float("nan"), "d": np.bool_(True)})
    findings.curves["e"] = np.arange(3)
    written = json.loads(write_findings(findings, tmp_path).read_text())
    assert written["rows"] == [{"a": None, "b": 3, "c": None, "d": True}]
    assert written["settings"] == {"path": "a", "t": [1, 2]}
    assert written["curves"] == {"e": [0, 1, 2]}
    assert written["columns"] == {"a": "A"}
    assert written["finished"] is False
    assert plain({1: None}) == {"1": None}


def test_the_same_seed_finds_the_same() -> None:
    found = []
    for _ in range(2):
        findings = (experiment := AuditExperiment(rounds=300, seed=9)).start()
        experiment.run(findings, no_progress)
        found.append(findings.to_json())
    assert found[0] == found[1]


def test_names_of_the_room() -> None:
    assert sorted(niss.attacks.__all__) == niss.attacks.__all__
    assert all(hasattr(niss.attacks, name) for name in niss.attacks.__all__)
