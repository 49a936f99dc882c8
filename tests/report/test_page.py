"""The page: its structure, what it says and escapes, what was promised, attacks, and several folders at once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from niss.errors import ConfigError, RunFolderError
from niss.report import read_report_input, write_report
from niss.runs.privacy import read_promise
from report.conftest import PROMISE, Page, add_ledger, text_of, write_attack, write_run


def page_of(folder: Path) -> Page:
    return Page(text_of(folder))


def test_the_page_is_structured_for_all_readers(demo: Path) -> None:
    page = page_of(demo)
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(page.all("caption")) == len(page.all("table")) == 3
    # Results: 5 columns, noise: 7, 6 methods; values: a column for each method and the round, 24 rounds.
    assert Counter(cell.get("scope") for cell in page.all("th")) == {"col": 5 + 7 + 7, "row": 6 + 6 + 24}
    # Two charts, each for a window and for a phone.
    assert [svg["role"] for svg in page.all("svg") if "x" not in svg] == ["img"] * 4
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_loads_nothing_from_anywhere(demo: Path) -> None:
    text = text_of(demo)
    assert not re.search("https?://", text)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_the_page_says_what_was_measured_and_where_it_comes_from(demo: Path) -> None:
    text = page_of(demo).text
    for said in (
        "niss-kappa-4 reaches 82.1 %, 2.9 percentage points below fedavg",
        "no guarantee",
        "not private",
        "The server sees all uploads of a round",
        "This is what the paper counts",
        "Against: those who see the released models; the server is trusted",
        "the shares cancel exactly",
        "mnist-mini",
        "zero-out",
        "versions.torch",
        "sha256:ab12",
        "seed",
        "the server (ε 3.00 against others)",
    ):
        assert said in text, said
    assert "Unfinished" not in text


def test_everything_from_the_folder_is_escaped(compare: Callable[..., Path]) -> None:
    nasty = '<script>alert("x")</script>'
    texts = {"label": nasty, "adversary": nasty, "guarantee": nasty}
    settings = dict.fromkeys(("title", "name", "dataset", "split", "unit", "relation", "created"), nasty)
    folder = compare({"niss-kappa-4": texts}, **settings, niss_version=nasty)
    path = folder / "niss-kappa-4" / "manifest.json"
    path.write_text(json.dumps({nasty: nasty, "config": {nasty: nasty}}), encoding="utf-8")
    text = text_of(folder)
    assert "<script" not in text
    page = Page(text)
    assert not page.all("script")
    assert page.text.count(nasty) >= 14


def test_characters_that_no_page_may_carry_become_question_marks(compare: Callable[..., Path]) -> None:
    text = page_of(compare({"dp-fedavg": {"label": "dp\x00\x1b\ud800\ufffeend"}})).text
    assert "dp????end" in text


def test_an_unfinished_run_says_so_and_shows_its_curve(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"round": 31, "accu')
    page = page_of(run_folder)
    assert "This run is unfinished" in page.text
    assert "there is no result.json" in page.text
    assert "cut off" in page.text
    assert "(Round 30)" in (page.all("svg")[0]["aria-label"] or "")


def test_a_run_that_has_only_begun_still_gets_a_page(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    text = page_of(run_folder).text
    assert "No evaluation yet" in text
    assert "not measured yet" in text


def test_a_comparison_that_has_only_begun_still_gets_a_page(demo: Path) -> None:
    (demo / "summary.json").unlink()
    for folder in [path for path in demo.iterdir() if path.is_dir()]:
        shutil.rmtree(folder)
    report = read_report_input(demo)
    assert report.is_comparison
    assert report.methods == ()
    assert "This comparison is unfinished: 0 methods have begun" in page_of(demo).text


def test_long_lists_in_the_manifest_are_cut_short(run_folder: Path) -> None:
    path = run_folder / "manifest.json"
    path.write_text(json.dumps({"data": {"sizes": list(range(1000))}}), encoding="utf-8")
    text = page_of(run_folder).text
    assert "(1000 in all)" in text
    assert "999" not in text


def test_the_page_goes_where_it_is_told_and_leaves_nothing_else(demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    assert write_report(demo, out) == out
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    assert not (demo / "report.html").exists()
    assert write_report(demo) == demo / "report.html"


def test_a_failed_write_keeps_the_old_page_and_no_leftovers(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(demo)
    before = (demo / "report.html").read_bytes()
    names = sorted(path.name for path in demo.iterdir())

    def full(_self: Path, _target: Path) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunFolderError, match="No space left"):
        write_report(demo)
    assert (demo / "report.html").read_bytes() == before
    assert sorted(path.name for path in demo.iterdir()) == names


def test_importing_the_room_loads_neither_matplotlib_nor_torch() -> None:
    heavy = ("matplotlib", "torch", "niss.simulation")
    code = f"import sys, niss.report; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def finish(folder: Path, one: dict[str, Any], **statement: Any) -> Path:
    """Make a finished run of a begun one, with a statement."""
    (folder / "result.json").write_text(json.dumps(one), encoding="utf-8")
    values = {
        "delta": 1e-5,
        "unit": "client",
        "relation": "zero-out",
        "budget_epsilon": 3.2,
        "caveats": ["Clients that collude are not counted."],
        "clients": 2,
        "mu_joint": 0.7,
    }
    (folder / "privacy.json").write_text(json.dumps(values | statement), encoding="utf-8")
    return folder


def test_a_run_says_what_it_promised_and_what_that_is_worth(run_folder: Path, one: dict[str, Any]) -> None:
    promise = read_promise(add_ledger(finish(run_folder, one | {"epsilon_joint": 2.9912})))
    assert promise.amount == "ε = 3.00, δ = 1e-5"
    # Phi(0.35) = 0.6368, against 0.952 for epsilon alone.
    assert promise.odds is not None
    assert "at most 63.7 % of the time" in promise.odds
    assert promise.trust == "The server is not trusted; the promise holds against it."
    assert promise.budget == "At most ε = 3.20 was promised in advance; the worst-off client has spent 3.00."
    assert promise.verified is not None
    assert "3 rounds were charged" in promise.verified
    assert "hash chain over them is unbroken" in promise.verified


def test_without_mu_only_epsilon_bounds_the_guess_and_no_budget_is_compared(
    run_folder: Path, one: dict[str, Any]
) -> None:
    promise = read_promise(finish(run_folder, one, mu_joint=None))
    assert promise is not None
    assert promise.odds is not None
    assert "at most 95.3 % of the time" in promise.odds
    assert promise.budget is None
    assert promise.verified is None


def test_a_broken_ledger_is_never_called_verified(run_folder: Path, one: dict[str, Any]) -> None:
    path = add_ledger(finish(run_folder, one)) / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b":0.09", b":0.04", 1))
    promise = read_promise(run_folder)
    assert promise is not None
    assert promise.verified is not None
    assert "does not verify" in promise.verified


@pytest.mark.parametrize("statement", ["[]", "{", '{"delta": "x", "unit": 3, "mu_joint": [7]}'])
def test_a_damaged_statement_is_no_reason_to_fail(demo: Path, statement: str) -> None:
    (demo / "niss-kappa-4" / "privacy.json").write_text(statement, encoding="utf-8")
    said = text_of(demo).partition("What was promised")[2].partition("</section>")[0]
    assert len(re.findall("<summary>[a-z0-9-]+: ", said)) == 6
    assert PROMISE in said


def test_the_page_opens_with_the_finding_the_accuracy_and_the_results(demo: Path, tmp_path: Path) -> None:
    text = text_of(demo)
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings[:4] == ["Accuracy", "Results", "What was promised", "Noise"]
    assert text.index('class="finding"') < text.index("<h2>")
    unfinished = write_run(tmp_path / "begun", {**_entry(demo), "folder": "begun"})
    assert read_promise(unfinished) is None


def _entry(demo: Path) -> dict[str, Any]:
    summary = json.loads((demo / "summary.json").read_text(encoding="utf-8"))
    return summary["methods"][4]  # type: ignore[no-any-return]


def test_the_settings_a_researcher_looks_for_are_on_the_page(demo: Path) -> None:
    text = text_of(demo)
    for name, value in {
        "Model": "mlp, hidden layers 32",
        "Learning rate": "0.1",
        "Clients": "1,000",
    }.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in text
    assert "<dt>Clip</dt>" in text


def test_it_shows_finding_picture_numbers_and_settings(tmp_path: Path) -> None:
    folder = write_attack(tmp_path / "a")
    page = write_report(folder)
    assert page == folder / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "All uploads together give the picture away" in text
    assert 'src="data:image/png;base64,' in text
    assert ">17.2</td>" in text
    assert ">no guarantee</td>" in text
    assert "τ = 0 &lt;b&gt;" in text
    assert "trace" not in text, "what does not fit into a cell is left out"
    assert "iterations 60" in text
    assert '<th scope="col">label found</th>' in text, "without headings every key is a column"
    assert "<b>" not in text


def test_columns_have_the_headings_of_the_attack(tmp_path: Path) -> None:
    columns = {"case": "Case", "psnr": "PSNR, dB", "label_found": "Label <found>", "predicted": "Predicted"}
    text = text_of(write_attack(tmp_path / "a", columns=columns))
    head = text.partition("<thead>")[2].partition("</thead>")[0]
    assert head == (
        '<tr><th scope="col">Case</th><th scope="col">PSNR, dB</th><th scope="col">Label &lt;found&gt;</th></tr>'
    )
    assert "no guarantee" not in text, "a key without a heading is no column"


def test_an_interrupted_one_says_so(tmp_path: Path) -> None:
    folder = write_attack(tmp_path / "a", finished=False, headline="", rows=[])
    text = text_of(folder)
    assert "Interrupted" in text
    assert "Nothing was found yet" in text


def test_it_stands_beside_runs_on_one_page(demo: Path, tmp_path: Path) -> None:
    page = write_report([demo, write_attack(tmp_path / "a")], tmp_path / "both.html")
    text = page.read_text(encoding="utf-8")
    assert "2 reports: demo, a" in text
    assert "<h2>Attack: joint</h2>" in text
    assert "Overview" in text
    alone = write_report([write_attack(tmp_path / "b"), tmp_path / "a"], tmp_path / "attacks.html")
    assert "Overview" not in alone.read_text(encoding="utf-8")


@pytest.mark.parametrize("change", [{"rows": 3}, {"settings": []}, {"columns": ["case"]}])
def test_a_damaged_one_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(RunFolderError, match="does not contain the results of an attack"):
        write_report(write_attack(tmp_path / "a", **change))


def test_several_folders_make_one_page(demo: Path, run_folder: Path) -> None:
    out = write_report([demo, run_folder])
    assert out == demo.parent / "reports.html"
    text = out.read_text(encoding="utf-8")
    levels = [int(level) for level in re.findall(r"<h([1-6])>", text)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'href="#([^"]+)"', text):
        assert target in ids
    assert text.count("<article") == 2
    assert "<h2>Overview</h2>" in text
    assert len(re.findall(r">single</td>", text)) == 1
    assert not re.search(r"<script|<link", text)


def test_one_folder_in_a_list_is_one_report(demo: Path, tmp_path: Path) -> None:
    assert write_report([demo]) == demo / "report.html"
    assert write_report([demo], tmp_path / "x.html") == tmp_path / "x.html"
    with pytest.raises(ConfigError, match="no folder"):
        write_report([])


def test_attacks_are_shown_with_their_words(demo: Path) -> None:
    assert "<h2>Attacks</h2>" not in text_of(demo)
    write_attack(demo, attack="dlg", headline="PSNR: fedavg 74.0 dB <b>")
    write_attack(demo / "attacks" / "second", attack="dlg", finished=False)
    write_attack(demo / "niss-kappa-4" / "attacks" / "third")
    text = text_of(demo)
    assert {"<h2>Attacks</h2>", "<h2>Accuracy</h2>"} <= set(re.findall("<h2>.*?</h2>", text))
    assert text.count("<img") == 3
    assert text.count('src="data:image/png;base64,') == 3
    assert 'alt="Pictures of the attack dlg. PSNR: fedavg 74.0 dB &lt;b&gt;' in text
    assert "dlg (attacks/second)" in text
    assert "This attack was interrupted" in text


def test_a_picture_that_is_none_is_left_out_and_said_to_be(demo: Path) -> None:
    write_attack(demo, b"<svg onload=alert(1)>")
    (demo / "attacks" / "broken").mkdir(parents=True)
    (demo / "attacks" / "broken" / "attack.json").write_text("{", encoding="utf-8")
    text = text_of(demo)
    assert "<img" not in text
    assert "is not a PNG picture" in text
    assert "An attack was left out" in text


def test_limits_of_the_statement_are_listed_once(demo: Path) -> None:
    for name in ("niss-kappa-1", "niss-kappa-4"):
        statement = {"not_protected": ["that a client took part <now>"], "caveats": ["a simulation"]}
        (demo / name / "privacy.json").write_text(json.dumps(statement), encoding="utf-8")
    text = text_of(demo)
    assert text.count("that a client took part &lt;now&gt;") == 1
    assert text.count("<li>a simulation</li>") == 1
