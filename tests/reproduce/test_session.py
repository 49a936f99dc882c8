"""All rivals side by side on one machine: in time, going on where it stopped, without libraries for terminals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.reproduce import session
from experiments.reproduce.design import find_setting
from experiments.reproduce.results import read_result, result_path
from experiments.reproduce.session import Comparison
from niss.errors import ConfigError

NAME = "mnist-mini-iid-client-10-of-40"
ROOT = Path(__file__).parents[2]


def comparison(folder: Path, **more: object) -> Comparison:
    small = {
        "setting": (NAME,),
        "rounds": 2,
        "device": "cpu",
        "epsilons": (3.0, 8.0),
        "seeds": 1,
        "processes": 2,
    }
    places = {"out": folder / "out", "work": folder / "work", "methods": ("central-dp", "secagg-ddg")}
    return Comparison(**{**small, **places, **more})


def cells(folder: Path, experiment: str) -> dict[str, float]:
    result = read_result(result_path(folder / "out", experiment, NAME))
    return {cell.id: cell.accuracy for cell in result.cells} if result else {}


@pytest.mark.slow
def test_a_session_stops_in_time_and_goes_on_from_what_it_left(tmp_path):
    assert session.play(comparison(tmp_path, stop_after=1.0)) == [NAME]
    assert session.play(comparison(tmp_path, methods=("central-dp",))) == []
    tuned = cells(tmp_path, "tuning")
    # At both epsilons a choice beside its neighbours, each on three seeds.
    assert all(sum(f"epsilon={epsilon}/" in name for name in tuned) >= 9 for epsilon in (3, 8))
    # What is in the results need not be run again, although nothing else is left of it.
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    assert session.play(comparison(tmp_path)) == []
    after = cells(tmp_path, "tuning")
    assert {name: after[name] for name in tuned} == tuned
    assert len(after) >= 2 * len(tuned) - 6
    assert len(cells(tmp_path, "beyond")) == 2 * 4


def test_the_first_epsilon_comes_before_those_that_begin_at_its_choice(tmp_path):
    waits = session.parts_of(comparison(tmp_path, methods=("fedavg", "niss-planned"), epsilons=None))
    setting = find_setting(NAME, rounds=2)
    first = session.Part(setting, "niss-planned", 3.0)
    others = dict.fromkeys((session.Part(setting, "niss-planned", epsilon) for epsilon in (1.0, 8.0)), first)
    assert waits == {session.Part(setting, "fedavg", None): None, first: None, **others}


def test_what_fails_does_not_end_the_others(tmp_path):
    small = comparison(tmp_path)
    part = session.Part(find_setting(NAME, rounds=2), "nobody", 3.0)
    assert "unknown name 'nobody'" in session.perform(part, small, None)
    with pytest.raises(ConfigError, match="unknown name 'nobody'"):
        session.play(comparison(tmp_path, methods=("nobody",)))


def test_nothing_that_draws_or_talks_is_needed():
    """On the machine with the GPU there is neither matplotlib nor what the command line is made of."""
    blocked = (
        "import sys\nfor name in ('typer', 'rich', 'matplotlib', 'click'):\n    sys.modules[name] = None\n"
    )
    load = "import experiments.reproduce.session, experiments.reproduce.beyond, niss.simulation\n"
    subprocess.run([sys.executable, "-c", blocked + load], check=True, cwd=ROOT)
