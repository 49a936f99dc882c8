from __future__ import annotations

from pathlib import Path

from niss.report import read_report_input, summary_rows


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
