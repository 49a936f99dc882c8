"""Colours, animation and quiet: in a terminal, in a pipe, and as the environment asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from cli import terminals
from cli.terminals import COLOUR, MOVES

SMALL = [
    *("--rounds", "2", "--clients", "20", "--participants", "5"),
    *("--set", "data.samples_per_client=4", "--set", "model.hidden=[4]"),
]
RUN = ["run", *SMALL, "--out", "r", "--overwrite"]
AUDIT = ["attack", "audit", "--rounds", "200", "--out", "a", "--overwrite"]
PLAN = ["plan", "--participants", "12"]
COMMANDS = {
    "help": ["--help"],
    "run --help": ["run", "--help"],
    "run": RUN,
    "plan": PLAN,
    "data": ["data", "list"],
    "usage": ["run", "--roundz", "3"],
    "error": ["report", "absent"],
}


InTerminal = Callable[..., str]
InPipe = Callable[..., CompletedProcess[str]]


def remembering(call: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`call` in `folder`, but only once for the same arguments: every run costs seconds."""
    known: dict[Any, Any] = {}

    def once(*arguments: str, **environment: str) -> Any:
        key = (arguments, *sorted(environment.items()))
        if key not in known:
            known[key] = call(*arguments, cwd=folder, **environment)
        return known[key]

    return once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("terminal")


@pytest.fixture(scope="module")
def in_terminal(folder: Path) -> InTerminal:
    return remembering(terminals.in_terminal, folder)


@pytest.fixture(scope="module")
def in_pipe(folder: Path) -> InPipe:
    return remembering(terminals.in_pipe, folder)


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_no_color_means_no_colour_in_a_terminal(in_terminal: InTerminal, arguments: list[str]) -> None:
    shown = in_terminal(*arguments, NO_COLOR="1", FORCE_COLOR="1")
    assert shown.strip()
    assert not COLOUR.search(shown), shown


@pytest.mark.parametrize("arguments", [["--help"], RUN], ids=["help", "run"])
def test_a_terminal_has_colours_unless_told_otherwise(in_terminal: InTerminal, arguments: list[str]) -> None:
    assert COLOUR.search(in_terminal(*arguments))


def test_the_bars_of_a_run_move_in_a_terminal_alone(in_terminal: InTerminal, in_pipe: InPipe) -> None:
    assert MOVES.search(in_terminal(*RUN))
    for environment in ({}, {"FORCE_COLOR": "1"}):
        piped = in_pipe(*RUN, **environment)
        assert piped.returncode == 0, piped.stderr
        assert not MOVES.search(piped.stderr + piped.stdout)
        assert "round 2/2" in piped.stderr
    dumb = in_terminal(*RUN, TERM="dumb")
    assert "\x1b" not in dumb
    assert "round 2/2" in dumb


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_pipe_gets_plain_text(in_pipe: InPipe, arguments: list[str]) -> None:
    piped = in_pipe(*arguments)
    assert "\x1b" not in piped.stdout + piped.stderr


def test_force_color_colours_a_pipe(in_pipe: InPipe) -> None:
    assert COLOUR.search(in_pipe("--help", FORCE_COLOR="1").stdout)


@pytest.mark.parametrize(
    "arguments", [RUN, AUDIT, PLAN, ["data", "list"]], ids=["run", "attack", "plan", "data"]
)
def test_quiet_leaves_the_result_alone(in_pipe: InPipe, arguments: list[str]) -> None:
    loud = in_pipe(*arguments)
    quiet = in_pipe("--quiet", *arguments)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert quiet.stdout == loud.stdout
    assert quiet.stdout.strip()


def test_quiet_may_stand_behind_a_long_command(in_pipe: InPipe) -> None:
    done = in_pipe(*RUN, "--tau2", "0.3", "-q", "--json")
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert (result["method"], result["tau2"]) == ("niss", pytest.approx(0.3))


def test_quiet_shows_nothing_that_moves_in_a_terminal(in_terminal: InTerminal) -> None:
    assert not MOVES.search(in_terminal("--quiet", *RUN))
    assert not MOVES.search(in_terminal("-q", *PLAN))


def test_quiet_hides_no_error(in_pipe: InPipe) -> None:
    done = in_pipe("--quiet", "run", "--set", "privacy.epsiln=3")
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert "hint:" in done.stderr


@pytest.mark.parametrize(
    "arguments", [RUN, ["compare", "--methods", "fedavg,niss", *SMALL, "--out", "c"], AUDIT]
)
def test_what_trains_or_attacks_ends_by_naming_its_report(
    in_pipe: InPipe, folder: Path, arguments: list[str]
) -> None:
    done = in_pipe(*arguments)
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("report: ")
    assert (folder / last.removeprefix("report: ")).read_text().startswith("<!DOCTYPE html>")
