"""The two apps of silos: their own parts on a grid in this process, and `flwr run` on Flower's simulation engine."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from examples.test_flower_app import needs_ray, simulated
from flower.grid import FakeGrid
from niss.cli.up import app_settings

EXAMPLES = Path(__file__).parents[2] / "examples"
APPS = {"silos-hospitals": "silos_hospitals", "silos-images": "silos_images"}
SILOS = 8


@pytest.fixture(params=APPS)
def app(request: pytest.FixtureRequest) -> Iterator[str]:
    sys.path.insert(0, str(EXAMPLES / request.param))
    yield request.param
    sys.path.remove(str(EXAMPLES / request.param))


def part(app: str, name: str) -> Any:
    return import_module(f"{APPS[app]}.{name}")


def test_the_records_of_all_silos_are_as_many_as_the_plan_says(app: str) -> None:
    config, client = app_settings(EXAMPLES / app), part(app, "client_app")
    held = [
        client.records(
            Context(1, number, {"partition-id": number, "num-partitions": SILOS}, RecordDict(), {})
        )
        for number in range(SILOS)
    ]
    assert sum(map(len, held)) == config["records"]
    assert len({one.weights.size for one in held}) == 1
    # As in the plan: a silo knows nothing of the others' sizes.
    assert max(map(len, held)) > 2 * min(map(len, held))


def test_hospitals_scale_by_published_patients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other private patients, and the tables of the tests are the same: nothing of them is in the scale."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "silos-hospitals"))
    task = part("silos-hospitals", "task")
    before = task._tables()
    measured, benign = task.load_breast_cancer(return_X_y=True)
    private = np.random.default_rng(7).permutation(len(benign))[task.PUBLISHED + task.TESTS :]
    changed = measured.copy()
    changed[private] *= 5.0
    monkeypatch.setattr(task, "load_breast_cancer", lambda **_: (changed, benign))
    after = task._tables.__wrapped__()
    np.testing.assert_array_equal(after[0][0], before[0][0])
    assert any((one[0] != other[0]).any() for one, other in zip(after[1:], before[1:], strict=True))
    assert [len(labels) for _, labels in after[1:]] == list(task.SIZES)


def played(app: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """What the app's own ServerApp and ClientApp come to, on a grid in this process."""
    grid = FakeGrid(SILOS, part(app, "client_app").app)
    for number, context in enumerate(grid.contexts.values()):
        context.node_config.update({"partition-id": number, "num-partitions": SILOS})
    config = app_settings(EXAMPLES / app) | {"report": str(folder / "report.json")} | changes
    part(app, "server_app").main(grid, Context(1, 1, {}, RecordDict(), config))
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_every_record_is_promised_what_the_settings_say(app: str, tmp_path: Path) -> None:
    """Every record in every batch, so that accounting is quick."""
    rounds = 4 if app == "silos-hospitals" else 1
    report = played(app, tmp_path, rounds=rounds, batch=1.0, epsilon=6.0)
    assert [one["survivors"] for one in report["rounds"]] == [SILOS] * rounds
    assert report["statement"]["epsilon_joint"] <= 6.0
    assert "one record" in report["statement"]["words"]
    if rounds == 4:
        accuracy = [report["metrics"]["server"][number]["accuracy"] for number in ("0", "4")]
        assert accuracy[1] > accuracy[0] + 0.25


@pytest.mark.slow
def test_the_apps_learn_with_their_own_settings(app: str, tmp_path: Path) -> None:
    report = played(app, tmp_path, rounds=20)
    last = report["metrics"]["server"]["20"]["accuracy"]
    assert last > (0.88 if app == "silos-hospitals" else 0.7)
    assert report["statement"]["epsilon_joint"] <= app_settings(EXAMPLES / app)["epsilon"]


def test_settings_are_those_of_records(app: str) -> None:
    project = tomllib.loads((EXAMPLES / app / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert (config["unit"], config["mode"]) == ("record", "repair")


@needs_ray
@pytest.mark.slow
def test_two_rounds_in_simulation(app: str, tmp_path: Path) -> None:
    report = simulated(tmp_path, EXAMPLES / app, {"rounds": 2}, SILOS)
    assert [one["survivors"] for one in report["rounds"]] == [SILOS] * 2
    assert "one record" in report["statement"]["words"]
