"""What is printed fits the terminal, and no number is ever cut."""

from __future__ import annotations

from typing import Any

import pytest

from niss.accounting import outlook
from niss.cli.services import list_command
from niss.cli.terminal import RoundProgress, print_aligned, print_sentence, print_table, results, width_asked
from niss.methods import METHODS
from niss.report.summary import RESULTS

HEADER = ("Method", "Accuracy", "ε against the server", "Noise in a round, measured", "Who is trusted")
ROWS = [
    ("central-dp", "86.6 %", "no guarantee", "7.24e-5", "the server (ε 3.00 against others)"),
    ("niss-as-printed", "88.6 %", "no guarantee", "2.02e-16", "–"),
]


@pytest.fixture(params=[20, 40, 60, 80, 100, 140, 200])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def test_no_cell_is_cut_at_any_width(width: int, capsys: Any) -> None:
    print_table(HEADER, ROWS)
    printed = capsys.readouterr().out
    assert "…" not in printed
    for row in ROWS:
        assert all(cell in printed for cell in row), (width, printed)
    # Below this even one line of a block is longer than the window, and the terminal breaks it.
    assert max(map(len, printed.splitlines())) <= width or width < 80


def test_the_results_of_the_demo_are_a_table_at_80_columns(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    compared = ("fedavg", "central-dp", "niss-carried", "niss", "dp-fedavg")
    trusted = [METHODS[name].trusts.format(clients="all clients") for name in compared]
    longest = max([*trusted, "the server (ε 3.00 against others)"], key=len)
    print_table(RESULTS, [("niss-as-printed", "88.6 %", "88.0 %", "no guarantee", longest)], left=(0, 4))
    lines = capsys.readouterr().out.splitlines()
    assert "┃" in lines[0]
    assert max(map(len, lines)) <= 80
    # Its words are broken between lines, and all of them are there.
    assert " ".join(line.split("│")[-1].strip() for line in lines if "│" in line) == longest


def test_columns_decides_in_a_pipe_too(monkeypatch: Any) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert width_asked() is None
    assert results().width == 140
    monkeypatch.setenv("COLUMNS", "72")
    assert results().width == width_asked() == 72
    monkeypatch.setenv("COLUMNS", "wide")
    assert width_asked() is None


def test_sentences_and_remarks_are_broken_between_words(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    print_sentence("a sentence of many words " * 5)
    print_aligned([("name", "1.25e-5", "a remark that goes on and on for a while"), ("name", "2", "short")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 50
    remark = next(number for number, line in enumerate(lines) if line.startswith("name"))
    assert lines[remark + 1].startswith(" " * 15)
    monkeypatch.delenv("COLUMNS")
    print_sentence("a sentence of many words " * 10)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_plan_fits_80_columns(monkeypatch: Any, capsys: Any) -> None:
    from niss.cli.plan import plan_command

    monkeypatch.setenv("COLUMNS", "80")
    plan_command(
        participants=200, epsilon=3.0, participations=6, collusion=0.1, dropout=0.02, parameters=200_000
    )
    plan_command(participants=20, clients=100, rounds=30, carry=True)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_what_is_said_of_a_run_before_it_starts_fits_too(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    judged = outlook(parameters=200_000, rounds=30, clip=0.5, variance=0.01)
    assert judged.verdict != "good"
    RoundProgress().outlook("dp-fedavg", judged)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60


def test_the_time_left_is_that_of_the_command_and_the_first_round_is_announced(capsys: Any) -> None:
    from niss.simulation.method_run import RoundEvent, TrainingEvent

    shown = RoundProgress()
    shown.training(TrainingEvent(("a", "b"), 2, 1, 10, 1, 20))
    shown.training(TrainingEvent(("a", "b"), 2, 1, 10, 20, 20))
    shown(RoundEvent("a", 1, 2, 1, 10, None, 60.0))
    shown(RoundEvent("b", 2, 2, 1, 10, 0.5, 20.0))
    shown(RoundEvent("a", 1, 2, 10, 10, 0.5, 60.0))
    shown(RoundEvent("b", 2, 2, 10, 10, 0.5, 20.0))
    assert capsys.readouterr().err.splitlines() == [
        "training round 1 of 10",
        "a (1/2): round 1/10, accuracy –, 18 min left in all",
        "b (2/2): round 1/10, accuracy 50.0 %, 12 min left in all",
        "a (1/2): round 10/10, accuracy 50.0 %, 3 min left in all",
        "b (2/2): round 10/10, accuracy 50.0 %, done",
    ]


def test_one_slow_round_does_not_double_the_time_left(capsys: Any) -> None:
    from niss.simulation.method_run import RoundEvent

    shown = RoundProgress()
    for number in range(1, 11):
        shown(RoundEvent("a", 1, 1, number, 20, None, 70.0 if number == 10 else 30.0))
    assert capsys.readouterr().err.splitlines()[-1].endswith("6 min left in all")


def test_the_list_of_datasets_is_a_table_at_80_columns(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    list_command(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (plays,) = (line for line in lines if line.startswith("shakespeare"))
    assert "627" in plays
