"""The Flower example as users run it: `flwr run` on Flower's simulation engine, and what comes out of it."""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app"
needs_ray = pytest.mark.skipif(
    find_spec("flwr") is None or find_spec("ray") is None,
    reason="Flower's simulation engine is not installed: pip install 'niss[flower]' 'flwr[simulation]'",
)


def simulated(folder: Path, app: Path, wanted: dict[str, Any], nodes: int = 6) -> dict[str, Any]:
    """The report of a run of the app with so many clients that Flower simulates."""
    from niss.local.deployment import Deployment, Settings

    settings = Settings(nodes=nodes, tls=False, tracker=False, pinned=False, simulated=True)
    with Deployment(folder, settings) as federation:
        run, end = federation.submit(app, wanted), time.monotonic() + 300.0
        while not federation.status(run).startswith("finished"):
            assert time.monotonic() < end, "the run did not end in time"
            time.sleep(1.0)
        log = (folder / "logs" / "superlink.log").read_text()[-4000:]
        assert federation.status(run) == "finished:completed", log
        report: dict[str, Any] = json.loads(federation.report.read_text())
    return report


@needs_ray
def test_two_rounds_in_simulation(tmp_path):
    report = simulated(tmp_path, EXAMPLE, {"rounds": 2, "noisy-accuracy": True})
    assert [one["survivors"] for one in report["rounds"]] == [6, 6]
    assert all(one["exact"] for one in report["rounds"])
    statement = report["statement"]
    assert statement["epsilon_joint"] <= 8.0
    assert statement["collusion"] == 0.2
    assert "The server holds the beacon itself" in "\n".join(statement["caveats"])
    assert "inside the noisy sum, protected as the updates are: accuracy" in "\n".join(statement["caveats"])
    reported = report["metrics"]["train"]
    for number in ("1", "2"):
        true = report["metrics"]["server"][str(int(number) - 1)]["accuracy"]
        # Ten deviations, and what a fifth of the digits says about the others.
        assert abs(reported[number]["accuracy"] - true) < 10 * reported[number]["accuracy_noise_sd"] + 0.1
    # Six clients at this epsilon learn little: what is asked is that it is above the guessing it starts from.
    accuracy = [report["metrics"]["server"][number]["accuracy"] for number in ("0", "2")]
    assert accuracy[0] < 0.2 < accuracy[1] + 0.1


@needs_ray
@pytest.mark.slow
def test_noise_that_cancels_across_rounds_in_simulation(tmp_path):
    wanted = {"rounds": 4, "carry": True, "separation": 2, "collusion": 0.0}
    report = simulated(tmp_path, EXAMPLE, wanted)
    assert [one["survivors"] for one in report["rounds"]] == [3] * 4
    assert all(one["exact"] for one in report["rounds"])
    assert report["rounds"][-1]["carried_variance"] == 0.0 < report["rounds"][0]["carried_variance"]
    assert report["statement"]["epsilon_joint"] <= 8.0
    assert "over a run of 4 committed rounds as a whole" in report["statement"]["words"]


@pytest.fixture
def task():
    sys.path.insert(0, str(EXAMPLE))
    try:
        from flower_app import task as module
    finally:
        sys.path.remove(str(EXAMPLE))
    return module


def test_every_client_has_its_own_digits_and_all_of_them_have_all(task):
    parts = [task.client_data(number, 30) for number in range(30)]
    sizes = [len(labels) for _, labels in parts]
    assert sum(sizes) == 10_000
    assert max(sizes) - min(sizes) <= 1


def test_the_task_can_be_learned(task):
    model = task.make_model()
    before = task.accuracy(model)
    task.train(model, task.client_data(0, 5), epochs=2, rate=0.5, batch=20, seed=1)
    assert before < 0.15
    assert task.accuracy(model) > 0.75
