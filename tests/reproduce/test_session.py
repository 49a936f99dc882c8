"""All rivals side by side on one machine: in time, going on where it stopped, without libraries for terminals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from queue import Queue

import pytest

from experiments.reproduce import session
from experiments.reproduce.design import METHODS
from experiments.reproduce.results import read_result, result_path
from experiments.reproduce.session import Comparison

NAME = "mnist-mini-iid-client-10-of-40"
ROOT = Path(__file__).parents[2]


def comparison(folder: Path, **more: object) -> Comparison:
    small = {"setting": (NAME,), "rounds": 2, "device": "cpu", "epsilons": (3.0,), "seeds": 1, "processes": 2}
    places = {"out": folder / "out", "work": folder / "work", "methods": ("central-dp", "secagg-ddg")}
    return Comparison(**{**small, **places, **more})


def cells(folder: Path, experiment: str) -> dict[str, float]:
    result = read_result(result_path(folder / "out", experiment, NAME))
    return {cell.id: cell.accuracy for cell in result.cells} if result else {}


@pytest.mark.slow
def test_a_session_stops_in_time_and_goes_on_from_what_it_left(tmp_path):
    assert len(session.play(comparison(tmp_path, stop_after=1.0))) == 4
    assert session.play(comparison(tmp_path, stage="tune")) == []
    tuned = cells(tmp_path, "tuning")
    assert len(tuned) == 4 * 12
    # What is in the results need not be run again, although nothing else is left of it.
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    assert session.play(comparison(tmp_path)) == []
    assert cells(tmp_path, "tuning") == tuned
    assert len(cells(tmp_path, "beyond")) == 4


def test_tasks_are_those_that_make_a_difference():
    tasks = Comparison(setting=(NAME,)).tasks("tune")
    names = [(task.method, task.variant) for task in tasks]
    assert len(names) == len(set(names))
    assert ("secagg-ddg", "repair") in names
    assert ("secagg-ddg", "tolerate") not in names
    assert {method for method, _ in names} == set(METHODS) - {"alone"}
    assert {task.experiment for task in tasks} == {"tuning"}


def test_nothing_that_draws_or_talks_is_needed():
    """On the machine with the GPU there is neither matplotlib nor what the command line is made of."""
    blocked = (
        "import sys\nfor name in ('typer', 'rich', 'matplotlib', 'click'):\n    sys.modules[name] = None\n"
    )
    load = "import experiments.reproduce.session, experiments.reproduce.beyond, niss.simulation\n"
    subprocess.run([sys.executable, "-c", blocked + load], check=True, cwd=ROOT)


def test_processes_take_the_gpus_in_turn(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert session.gpus("cpu") == []
    names, numbers, taken = session.gpus("auto"), Queue(), []
    for number in range(3):
        numbers.put(number)
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    for _ in range(3):
        session.take_gpu(names, numbers, 0.475)
        taken.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert taken == ["4", "6", "4"]
    session.take_gpu([], numbers, None)
    assert limits == [0.475] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert session.gpus("cuda") == []


@pytest.mark.parametrize("processes", range(1, 9))
@pytest.mark.parametrize("gpus", range(4))
def test_the_processes_of_a_gpu_have_room_beside_each_other(processes, gpus):
    share = session.memory_share(processes, gpus)
    on_a_gpu = [sum(n % max(gpus, 1) == gpu for n in range(processes)) for gpu in range(max(gpus, 1))]
    assert max(on_a_gpu) * share == pytest.approx(0.95)
