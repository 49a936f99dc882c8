"""What is read from a folder, and what is said of it: the finding, the table, the digits everywhere, and the CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niss.accounting import Charge, Ledger, LedgerFile, Plan, forecast, make_statement
from niss.claims import rounded_up
from niss.cli.plan import plan_command
from niss.cli.services import export_command
from niss.errors import ConfigError, RunFolderError
from niss.report import read_report_input, remarks, summary_rows, write_report
from niss.report.attacks import attack_cell
from niss.report.page import render_page
from niss.report.summary import COLUMNS, caveats, finding, noise_rows, read_rows, write_csv
from report.conftest import ROUNDS, Page, write_graph_run


def test_a_comparison_is_read_with_its_settings_curves_and_manifests(demo: Path) -> None:
    report = read_report_input(demo)
    assert report.finished
    assert report.is_comparison
    assert (report.rounds, report.clients, report.participants) == (30, 1000, 200)
    assert report.notes == ()
    assert [method.label for method in report.methods][:2] == ["fedavg", "central-dp"]
    kappa_four = report.methods[4]
    assert (kappa_four.kappa, kappa_four.accuracy, kappa_four.epsilon_marginal) == (4.0, 0.821, 1.1)
    assert len(kappa_four.curve) == 30
    assert len(kappa_four.evaluations) == 24
    assert kappa_four.manifest["seed"] == 11
    assert report.created == "2025-11-15T11:20:00+00:00"


def test_a_single_run_takes_its_settings_from_the_manifest_and_privacy_files(
    run_folder: Path, one: Any
) -> None:
    (run_folder / "result.json").write_text(json.dumps(one), encoding="utf-8")
    report = read_report_input(run_folder)
    assert report.finished
    assert not report.is_comparison
    assert [method.label for method in report.methods] == ["niss-kappa-4"]
    assert (report.rounds, report.clients, report.dataset, report.split) == (30, 1000, "mnist-mini", "iid")
    assert (report.delta, report.unit, report.relation) == (1e-5, "client", "zero-out")


def test_an_unfinished_run_shows_its_last_evaluation_and_claims_nothing(run_folder: Path) -> None:
    report = read_report_input(run_folder)
    method = report.methods[0]
    assert not report.finished
    assert not method.finished
    assert method.accuracy == method.evaluations[-1][1]
    assert method.epsilon_joint is None
    assert (method.label, method.method, method.kappa) == ("niss-kappa-4", "niss", 4.0)
    assert method.tau2 == pytest.approx(0.01)
    assert method.aggregate_variance == pytest.approx(4.4e-8)
    assert (report.title, report.target_epsilon, report.niss_version) == (
        "single: niss-kappa-4",
        3.0,
        "0.1.0",
    )
    row = summary_rows(report).rows[0]
    assert row[1].endswith("% (round 30)")
    assert row[3] == noise_rows(report).rows[0][-1] == "unfinished", "neither a guarantee nor its absence"
    assert finding(report).startswith("This run is unfinished: 30 of 30 rounds are done")
    assert caveats(report) == []


def test_an_unfinished_comparison_is_read_from_its_method_folders(demo: Path) -> None:
    (demo / "summary.json").unlink()
    report = read_report_input(demo)
    assert report.is_comparison
    assert not report.finished
    assert [method.label for method in report.methods][:3] == ["fedavg", "central-dp", "dp-fedavg"]
    assert len(report.methods) == 6
    assert (report.name, report.rounds, report.target_epsilon) == ("demo", 30, 3.0)


def test_a_summary_without_a_target_has_none(compare: Callable[..., Path]) -> None:
    assert read_report_input(compare({}, target_epsilon=None)).target_epsilon is None


def test_a_cut_off_last_line_is_left_out_and_noted(run_folder: Path) -> None:
    whole = read_report_input(run_folder)
    with (run_folder / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"round": 99, "accuracy": 0.5\xc3')
    report = read_report_input(run_folder)
    assert report.methods[0].curve == whole.methods[0].curve
    assert "cut off" in report.notes[0]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(run_folder: Path) -> None:
    path = run_folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[3] = lines[3][:10]
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(RunFolderError, match="line 4"):
        read_report_input(run_folder)


def test_a_round_written_again_after_a_resume_replaces_the_first(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"round": 2, "accuracy": 0.77}\n')
    curve = read_report_input(run_folder).methods[0].curve
    assert [point.round for point in curve] == list(range(1, 31))
    assert curve[1].accuracy == 0.77


def test_an_infinite_epsilon_is_no_guarantee(run_folder: Path, one: Any) -> None:
    (run_folder / "result.json").write_text(
        json.dumps(one | {"epsilon_joint": float("inf")}), encoding="utf-8"
    )
    assert read_report_input(run_folder).methods[0].epsilon_joint is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot read"),
        ("[]", "does not hold a JSON object"),
        ('{"methods": []}', "lists no methods"),
        ('{"methods": [{"label": "a", "folder": "../elsewhere"}]}', "outside"),
        ('{"methods": [{"label": "a", "accuracy": "high"}]}', "accuracy should be a number"),
        ('{"methods": [{"label": 3}]}', "label should be a text"),
    ],
)
def test_a_summary_that_cannot_be_used_is_an_error_with_a_hint(demo: Path, content: str, said: str) -> None:
    (demo / "summary.json").write_text(content, encoding="utf-8")
    with pytest.raises(RunFolderError, match=said) as caught:
        read_report_input(demo)
    assert caught.value.hint


@pytest.mark.parametrize("make", [True, False])
def test_a_folder_that_is_no_run_is_an_error_with_a_hint(tmp_path: Path, make: bool) -> None:
    folder = tmp_path / "holiday"
    if make:
        folder.mkdir()
        (folder / "photo.txt").write_text("sea", encoding="utf-8")
    with pytest.raises(RunFolderError, match="holiday") as caught:
        read_report_input(folder)
    assert caught.value.hint
    assert caught.value.exit_code == 5


def test_a_folder_that_is_nearly_named_is_suggested(demo: Path) -> None:
    with pytest.raises(RunFolderError) as caught:
        read_report_input(demo.with_name("dmo"))
    assert caught.value.hint == "did you mean 'demo'?"


def test_a_method_that_this_version_does_not_know_is_still_read(compare: Callable[..., Path]) -> None:
    folder = compare({"dp-fedavg": {"method": "method-of-tomorrow"}})
    method = read_report_input(folder).methods[2]
    assert method.method == "method-of-tomorrow"
    assert method.is_private
    assert not method.trusts_the_server
    assert not method.shares_noise
    assert write_report(folder).is_file()


def test_rows_are_formatted_for_reading(demo: Path) -> None:
    report = read_report_input(demo)
    results = {row[0]: row[1:] for row in summary_rows(report).rows}
    assert results == {
        "fedavg": ("85.0 %", "84.4 %", "not private", "all who see the updates"),
        "central-dp": ("84.0 %", "83.5 %", "no guarantee", "the server (ε 3.00 against others)"),
        "dp-fedavg": ("21.0 %", "20.9 %", "3.00", "nobody"),
        "niss-kappa-1": ("79.2 %", "78.7 %", "3.00", "all clients not to help the server"),
        "niss-kappa-4": ("82.1 %", "81.6 %", "3.00", "all clients not to help the server"),
        "niss-as-printed": ("84.8 %", "84.2 %", "no guarantee", "–"),
    }
    noise = {row[0]: row[1:] for row in noise_rows(report).rows}
    assert noise["fedavg"] == ("–", "–", "none", "none", "none", "not private")
    assert noise["niss-kappa-4"] == ("4", "0.01", "4.4e-8", "4.36e-8", "1.31e-6", "1.10")
    assert noise["niss-as-printed"][-1] == "1.10"


def test_a_share_of_colluders_is_part_of_who_is_trusted(run_folder: Path) -> None:
    manifest = run_folder / "manifest.json"
    for unit, collusion, said in (("client", 0.2, "80 % of the clients"), ("record", 0.0, "all silos")):
        values = json.loads(manifest.read_text())
        values["config"]["privacy"] |= {"collusion": collusion, "unit": unit}
        manifest.write_text(json.dumps(values))
        assert summary_rows(read_report_input(run_folder)).rows[0][4] == f"{said} not to help the server"


def test_a_run_without_rounds_does_not_claim_to_be_free_of_noise(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").write_text("", encoding="utf-8")
    assert noise_rows(read_report_input(run_folder)).rows[0][2:6] == ("–", "–", "–", "–")


def test_noise_that_is_gone_after_the_last_round_only_is_said_with_the_mean_of_the_five_before(
    demo: Path,
) -> None:
    metrics = demo / "niss-kappa-4" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        line["carried_variance"] = 0.0 if line["round"] == len(lines) else 1e-7
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = read_report_input(demo)
    assert "niss-kappa-4 reaches 82.1 % (81.6 % over the five before), 2.9 percentage points" in finding(
        report
    )
    (said,) = (remark for remark in remarks(report) if "after the last one only" in remark)
    assert said.startswith("The noise that niss-kappa-4 carries")
    assert said in caveats(report)


def test_a_method_whose_noise_cancels_altogether_is_explained_beside_the_table(demo: Path) -> None:
    report = read_report_input(demo)
    (said,) = remarks(report)
    assert said.startswith("All noise of niss-as-printed cancels")
    assert "its ε of 1.10 is that of one upload alone" in said
    assert said in caveats(report)


def test_a_column_of_accuracies_says_whether_every_round_was_evaluated(demo: Path) -> None:
    assert summary_rows(read_report_input(demo)).header[2] == "Five evaluations before"
    for metrics in demo.glob("*/metrics.jsonl"):
        lines = [json.loads(line) | {"accuracy": 0.5} for line in metrics.read_text().splitlines()]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summary_rows(read_report_input(demo)).header[2] == "Five rounds before"


@pytest.mark.parametrize(("rounds", "shown"), [(3, False), (5, False), (9, True)])
def test_the_mean_before_the_last_round_needs_five_rounds(run_folder: Path, rounds: int, shown: bool) -> None:
    metrics = run_folder / "metrics.jsonl"
    lines = [json.dumps(json.loads(line) | {"accuracy": 0.5}) for line in metrics.read_text().splitlines()]
    metrics.write_text("\n".join(lines[:rounds]) + "\n")
    assert summary_rows(read_report_input(run_folder)).rows[0][2] == ("50.0 %" if shown else "–")


UNPROVEN = {"epsilon_joint": None}
SAME = "At the same ε of 3.00 against the server, "


@pytest.mark.parametrize(
    ("changes", "summary", "said"),
    [
        (
            {},
            {},
            f"{SAME}niss-kappa-4 reaches 82.1 %, 2.9 percentage points below fedavg without privacy (85.0 %); "
            "dp-fedavg reaches 21.0 %.",
        ),
        (
            {"dp-fedavg": {"accuracy": 0.83}},
            {},
            f"{SAME}dp-fedavg reaches 83.0 %, 2.0 percentage points below fedavg without privacy (85.0 %); "
            "niss-kappa-4 reaches 82.1 %.",
        ),
        ({"fedavg": None}, {}, f"{SAME}niss-kappa-4 reaches 82.1 %; dp-fedavg reaches 21.0 %."),
        ({"niss-kappa-4": {"epsilon_joint": 9.0}}, {}, "niss-kappa-1 reaches 79.2 %"),
        (
            {"niss-kappa-4": {"epsilon_joint": 9.0}},
            {"target_epsilon": None},
            "At an ε of at most 9.00 against the server, niss-kappa-4 reaches",
        ),
        ({"niss-kappa-1": {"accuracy": 0.82104}}, {}, "niss-kappa-1 and niss-kappa-4 reach 82.1 %"),
        ({"niss-kappa-4": {"accuracy": 0.85}}, {}, "niss-kappa-4 reaches 85.0 %, as much as fedavg"),
        ({"niss-kappa-4": {"accuracy": 0.86}}, {}, "86.0 %, 1 percentage point above fedavg without privacy"),
        (
            dict.fromkeys(("dp-fedavg", "niss-kappa-1", "niss-kappa-4"), UNPROVEN),
            {},
            "No method here has both",
        ),
    ],
    ids=[
        *("best", "dp-fedavg wins", "no fedavg", "over the target", "other budgets"),
        *("a tie", "level", "above", "nothing proven"),
    ],
)
def test_the_finding_says_what_the_numbers_support(
    compare: Callable[..., Path], changes: dict[str, Any], summary: dict[str, Any], said: str
) -> None:
    found = finding(read_report_input(compare(changes, **summary)))
    assert found == said if said.endswith(".") else said in found
    assert found.startswith(("At the same ε", "At an ε of at most 9.00 against the server", "No method"))


def test_methods_that_trust_the_server_prove_nothing_or_spend_more_are_left_out_and_said_to_be(
    compare: Callable[..., Path],
) -> None:
    report = read_report_input(compare({"niss-kappa-1": {"epsilon_joint": 9.0}}))
    assert not {"central-dp", "niss-as-printed", "niss-kappa-1"} & set(finding(report).split())
    beside = " ".join(caveats(report))
    for why, which in {
        "since the server is trusted": "central-dp (84.0 %)",
        "for want of a guarantee against the server": "niss-as-printed (84.8 %)",
        "for more than the target ε": "niss-kappa-1 (79.2 %)",
    }.items():
        assert f"Left out of the finding: {which}, {why}" in beside


# Two digits after the point, nearest, would be 7.97 and 2.34.
JOINT, MARGINAL = 7.9712, 2.3412
_NUMBERS = re.compile(r"\d+\.\d\d(?![\d%])")


@pytest.fixture
def folder(compare: Callable[..., Path]) -> Path:
    """A comparison in which NISS and central DP have the same two epsilons, with statements to match."""
    same = {
        "epsilon_joint": JOINT,
        "epsilon_marginal": MARGINAL,
        "guarantee": "(7.98, 1e-5)-differential privacy.",
    }
    changes = {"niss-kappa-4": same, "niss-kappa-1": None, "dp-fedavg": None, "niss-as-printed": None}
    return compare({**changes, "central-dp": {**same, "epsilon_marginal": None}}, target_epsilon=8.0)


def test_page_table_and_finding_show_the_same_digits(folder: Path) -> None:
    report = read_report_input(folder)
    page = Page(render_page(report))
    named = [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("aria-label", "alt")
    ]
    shown = " ".join([page.text, *map(str, named)])
    assert "7.98" in shown
    assert "2.35" in shown
    assert "7.97" not in shown
    assert "2.34" not in shown
    results, noise = ({row[0]: row for row in table(report).rows} for table in (summary_rows, noise_rows))
    assert (results["niss-kappa-4"][3], noise["niss-kappa-4"][-1]) == ("7.98", "2.35")
    assert (results["central-dp"][3], noise["central-dp"][-1]) == ("no guarantee", "no guarantee")
    assert "ε 7.98 against others" in results["central-dp"][4]
    words = " ".join([finding(report), *caveats(report)])
    assert set(_NUMBERS.findall(words)) == {"7.98"}


@pytest.fixture
def odd_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is planned has these two epsilons."""
    planned = forecast(participants=20, epsilon=3.0)
    odd = dataclasses.replace(planned, epsilon_joint=JOINT, epsilon_marginal=MARGINAL)
    monkeypatch.setattr("niss.accounting.planner.forecast", lambda **_: odd)


@pytest.mark.usefixtures("odd_plan")
def test_the_terminal_shows_the_digits_of_the_page(capsys: Any) -> None:
    plan_command(participants=20)
    printed = capsys.readouterr().out
    assert re.search("epsilon of each client +7.98 ", printed)
    assert re.search("epsilon of one upload +2.35 ", printed)


@pytest.mark.usefixtures("odd_plan")
def test_the_ui_is_given_the_digits_by_the_same_function() -> None:
    pytest.importorskip("fastapi", reason="FastAPI is not installed: pip install 'niss[ui]'")
    from niss.ui import pages

    pages.answer.cache_clear()
    printed = pages.answer(pages.PlanQuestion(participants=20))["printed"]
    pages.answer.cache_clear()
    assert (printed["epsilon_joint"], printed["epsilon_marginal"]) == ("7.98", "2.35")


def test_the_statement_in_json_says_what_the_table_says() -> None:
    plan = Plan(method="dp-fedavg", epsilon=3.0, delta=1e-5, participations=2)
    ledger = Ledger.empty(1)
    ledger.charge(np.array([0]), Charge.of(0.8137, 0.8137))
    statement = make_statement(plan, ledger, noise_from="clients")
    text = json.dumps(statement.to_json())
    assert statement.epsilon_joint is not None
    assert f"({rounded_up(statement.epsilon_joint)}, 1e-5)" in text


def test_attacks_round_what_was_claimed_up_and_nothing_else() -> None:
    row = {
        "epsilon_joint": JOINT,
        "epsilon": MARGINAL,
        "joint": float("inf"),
        "proved": 1.2345,
        "promised": 3.0,
    }
    cells = {key: attack_cell(row, key) for key in row}
    assert list(cells.values()) == ["7.98", "2.35", "no guarantee", "1.23", "3.00"]


def test_epsilon_spent_comes_from_the_ledger_and_none_from_a_damaged_one(tmp_path: Path) -> None:
    run = write_graph_run(tmp_path / "run", clients=20)
    ledger = LedgerFile.read(run / "ledger.jsonl")
    worst = ledger.epsilon(max(ledger.spent(client) for client in ledger.clients))
    [(*_, values)] = read_rows([run])
    assert values["epsilon_spent"] == pytest.approx(worst, rel=1e-12)
    (run / "ledger.jsonl").write_text("nonsense\n")
    [(_, _, number, values)] = read_rows([run])
    assert (number, values["epsilon_spent"], values["accuracy"]) == (1, None, 0.5)


def test_the_table_holds_a_line_for_each_round_of_each_method(demo: Path, tmp_path: Path) -> None:
    path = write_csv(read_rows([demo]), tmp_path / "m.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * ROUNDS
    assert list(rows[0]) == ["run", "method", "round", *COLUMNS]
    metrics = (demo / "niss-kappa-1" / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in metrics]
    mine = [row for row in rows if row["method"] == "niss-kappa-1"]
    for row, line in zip(mine, lines, strict=True):
        assert row["accuracy"] == ("" if line["accuracy"] is None else repr(line["accuracy"]))
        assert float(row["noise_variance_measured"]) == line["aggregate_variance"]


def test_runs_of_the_same_name_are_kept_apart(tmp_path: Path) -> None:
    one, two = write_graph_run(tmp_path / "a" / "run"), write_graph_run(tmp_path / "b" / "run")
    assert [run for run, *_ in read_rows([one, two])] == ["run", "run-2"]


def test_the_command_refuses_a_table_that_is_there(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere to export"):
        export_command(folders=[demo])
    (tmp_path / "m.csv").write_text("mine")
    with pytest.raises(RunFolderError, match="exists") as refused:
        export_command(folders=[demo], csv=tmp_path / "m.csv")
    assert "--overwrite" in (refused.value.hint or "")
    assert (tmp_path / "m.csv").read_text() == "mine"
    export_command(folders=[demo], csv=tmp_path / "m.csv", overwrite=True)
    assert (tmp_path / "m.csv").read_text().startswith("run,method,round")


def test_reading_and_exporting_need_no_matplotlib(demo: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.modules['matplotlib'] = None; sys.modules['torch'] = None\n"
        "from niss.report import read_report_input, summary_rows\n"
        "from niss.report.summary import read_rows, write_csv\n"
        f"folder = Path({str(demo)!r}); print(len(summary_rows(read_report_input(folder)).rows))\n"
        f"write_csv(read_rows([folder]), Path({str(tmp_path / 'm.csv')!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6"
    assert (tmp_path / "m.csv").is_file()
