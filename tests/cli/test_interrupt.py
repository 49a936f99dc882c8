"""Ctrl-C: every command says what it kept, once, and ends with 130."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytest

with warnings.catch_warnings():
    # Some releases of typer use names that click has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from niss.cli import main


def interrupt(*_arguments: Any, **_options: Any) -> NoReturn:
    raise KeyboardInterrupt


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs a command in which `where` is interrupted; returns what it said."""

    def run(where: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(where, interrupt)
        monkeypatch.setattr(sys, "argv", ["niss", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 130
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("interrupted") == 1
        return shown.err

    return run


def test_a_command_that_keeps_nothing_says_so(interrupted: Any) -> None:
    said = interrupted("niss.accounting.planner.forecast", "plan", "--participants", "12")
    assert "keeps nothing" in said


def test_a_download_goes_on(interrupted: Any) -> None:
    said = interrupted("niss.data.fetch_dataset", "data", "get", "mnist")
    assert "niss data get mnist" in said


def test_a_run_that_had_not_begun_says_so(interrupted: Any) -> None:
    said = interrupted("niss.simulation.run", "run", "--out", "r")
    assert "nothing was started" in said


def test_a_run_that_had_begun_can_be_resumed(interrupted: Any, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "manifest.json").touch()
    said = interrupted("niss.simulation.run", "run", "--out", "r", "--overwrite")
    assert "every whole round is kept" in said
    assert "niss run --resume r" in said


def test_quiet_does_not_hide_what_was_kept(interrupted: Any) -> None:
    said = interrupted("niss.data.fetch_dataset", "--quiet", "data", "get", "mnist")
    assert "niss data get mnist" in said


def test_an_attack_keeps_what_it_found(interrupted: Any, tmp_path: Path) -> None:
    said = interrupted(
        "niss.attacks.canary.canary_scores", "attack", "audit", "--rounds", "200", "--out", "a"
    )
    assert str(Path("a") / "report.html") in said
    assert "Interrupted" in (tmp_path / "a" / "report.html").read_text()
