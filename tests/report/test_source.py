from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from niss.errors import RunFolderError
from niss.report import read_report_input, summary_rows, write_report


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


def test_an_unfinished_run_shows_its_last_evaluation_and_no_epsilon(run_folder: Path) -> None:
    report = read_report_input(run_folder)
    method = report.methods[0]
    assert not report.finished
    assert not method.finished
    assert method.accuracy == method.evaluations[-1][1]
    assert method.epsilon_joint is None
    assert (method.label, method.method, method.kappa) == ("niss-kappa-4", "niss", 4.0)
    assert method.tau2 == pytest.approx(0.01)
    assert method.aggregate_variance == pytest.approx(4.4e-8)
    assert (report.title, report.target_epsilon, report.niss_version) == ("demo: niss-kappa-4", 3.0, "0.1.0")


def test_an_unfinished_comparison_is_read_from_its_method_folders(demo: Path) -> None:
    (demo / "summary.json").unlink()
    report = read_report_input(demo)
    assert report.is_comparison
    assert not report.finished
    assert [method.label for method in report.methods][:3] == ["fedavg", "central-dp", "dp-fedavg"]
    assert len(report.methods) == 6
    assert (report.name, report.rounds, report.target_epsilon) == ("demo", 30, 3.0)


def test_a_comparison_that_has_only_begun_has_no_methods_yet(demo: Path) -> None:
    (demo / "summary.json").unlink()
    for folder in [path for path in demo.iterdir() if path.is_dir()]:
        shutil.rmtree(folder)
    report = read_report_input(demo)
    assert report.is_comparison
    assert report.methods == ()


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


def test_a_method_that_this_version_does_not_know_is_still_read(compare: Callable[..., Path]) -> None:
    folder = compare({"dp-fedavg": {"method": "method-of-tomorrow"}})
    method = read_report_input(folder).methods[2]
    assert method.method == "method-of-tomorrow"
    assert method.is_private
    assert not method.trusts_the_server
    assert not method.shares_noise
    assert write_report(folder).is_file()


def test_rows_are_formatted_for_reading(demo: Path) -> None:
    header, rows = summary_rows(read_report_input(demo))
    assert len(header) == 8
    assert {len(row) for row in rows} == {8}
    by_label = {row[0]: row[1:] for row in rows}
    assert by_label["fedavg"] == ("–", "–", "85.0 %", "none", "none", "not private", "not private")
    assert by_label["niss-kappa-4"] == ("4", "0.01", "82.1 %", "4.4e-08", "4.36e-08", "3.00", "1.10")
    assert by_label["niss-as-printed"][-2:] == ("no guarantee", "1.10")


def test_an_unfinished_run_claims_neither_guarantee_nor_its_absence(run_folder: Path) -> None:
    row = summary_rows(read_report_input(run_folder)).rows[0]
    assert row[3].endswith("% (round 30)")
    assert row[6:] == ("unfinished", "unfinished")


def test_a_run_without_rounds_does_not_claim_to_be_free_of_noise(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").write_text("", encoding="utf-8")
    assert summary_rows(read_report_input(run_folder)).rows[0][3:6] == ("–", "–", "–")
