"""`niss reproduce` and `niss verify`: numbers in a text come from the files, and a wrong one is found."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from experiments.reproduce.claims import check_claims
from experiments.reproduce.results import Result, read_result, write_result
from experiments.reproduce.text import TABLES, computed_text, disagreements, fill, results_folder
from niss.cli import experiments
from niss.cli.experiments import verify_command
from niss.errors import ConfigError, RunFolderError
from support.results import keep, made_up_cell

SMALL = [
    f"--set={setting}"
    for setting in (
        "data.clients=20",
        "data.samples_per_client=40",
        "training.participants=6",
        "training.epochs=1",
        "training.workers=1",
        "model.hidden=[8]",
    )
]
verify = typer.Typer()
verify.command()(verify_command)


BASE = read_result(Path(__file__).parents[2] / "results/paper/figure-3/mnist-mlp-iid.json").base


def made_up(accuracies: dict[float, list[float]], *, rounds: int = 100) -> Result:
    """A panel with these final accuracies by X and seed."""
    cells = tuple(
        made_up_cell(
            f"nbafl/X={x:g}/seed-{seed}",
            {"reading": "nbafl", "sigma_k": 0.00434, "x": x, "seed": seed},
            accuracy,
            rounds=rounds,
            curve=tuple((at, accuracy if at >= 50 else 0.3) for at in range(1, rounds + 1)),
        )
        for x, values in accuracies.items()
        for seed, accuracy in enumerate(values, start=1)
    )
    return Result("figure-3", "mnist-mlp-iid", BASE | {"rounds": rounds}, cells)


GOOD = {0.0: [0.976, 0.974], 0.3: [0.95, 0.951], 0.6: [0.93, 0.93], 1.0: [0.851, 0.849]}


def test_a_panel_on_the_command_line(tmp_path):
    out, work = tmp_path / "results" / "paper", tmp_path / "work"
    common = ["--rounds=2", "--device=cpu", *SMALL, f"--out={out}", f"--work={work}"]
    run = CliRunner().invoke(
        experiments.reproduce_app, ["figure-3", "--panel=mnist-mini-mlp-iid", "--seeds=1", "--x=0,1", *common]
    )
    assert run.exit_code == 0, run.output
    assert "mnist-mini-mlp-iid (1 of 1)" in run.stderr
    result = read_result(out / "figure-3" / "mnist-mini-mlp-iid.json")
    assert result is not None
    assert len(result.cells) == 2
    assert (out / "figure-3.png").stat().st_size < 1_000_000
    assert "## claims" in (out / "tables.md").read_text(encoding="utf-8")

    # Another X elsewhere, then both together.
    other = tmp_path / "elsewhere"
    arguments = ["figure-3", "--panel=mnist-mini-mlp-iid", "--seeds=1", "--x=0.3"]
    arguments += [*common[:-2], f"--out={other}", f"--work={work}", "--quiet"]
    assert CliRunner().invoke(experiments.reproduce_app, arguments).exit_code == 0
    assert CliRunner().invoke(experiments.reproduce_app, ["merge", str(other), f"--out={out}"]).exit_code == 0
    merged = read_result(out / "figure-3" / "mnist-mini-mlp-iid.json")
    assert merged is not None
    assert {cell.labels["x"] for cell in merged.cells} == {0.0, 0.3, 1.0}

    checked = CliRunner().invoke(
        verify, [str(tmp_path / "results"), "--partial", "--json", f"--text={tmp_path / 'none.md'}"]
    )
    assert checked.exit_code == 0
    claims = {claim["name"]: claim["holds"] for claim in json.loads(checked.stdout)["claims"]}
    assert "mnist-mini-mlp-iid: accuracy falls in X, within seed noise" in claims


def test_what_would_be_run(tmp_path):
    keep(tmp_path, made_up({0.0: [0.9]}))
    run = CliRunner().invoke(experiments.reproduce_app, ["figure-3", "--dry-run", f"--out={tmp_path}"])
    assert run.exit_code == 0
    lines = run.stdout.splitlines()
    assert lines[0] == "mnist-mlp-iid: 11 cells left, about 30 s on an H200"
    assert len(lines) == 8
    assert "`nbafl`" in CliRunner().invoke(experiments.reproduce_app, ["readings"]).stdout


@pytest.mark.parametrize(
    "arguments", [["figure-3", "--x=a"], ["figure-3", "--panel=x"], ["beyond", "--setting=x"]]
)
def test_bad_flags(arguments, tmp_path):
    run = CliRunner().invoke(experiments.reproduce_app, [*arguments, f"--out={tmp_path}"])
    assert isinstance(run.exception, ConfigError)


def test_claims_that_hold(tmp_path):
    keep(tmp_path, made_up(GOOD))
    claims = {claim.name: claim for claim in check_claims(tmp_path)}
    assert claims["mnist-mlp-iid reaches 96.5% by round 60 at X = 0"].holds
    assert claims["mnist-mlp-iid: accuracy falls in X, within seed noise"].holds
    assert "| 12.5 (50 to 59) | rounds 59 to 100 |" in computed_text(tmp_path, "gaps")


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        ({0.0: [0.96, 0.96]}, "reaches 96.5%"),
        ({0.3: [0.92, 0.921]}, "accuracy falls in X"),
    ],
)
def test_claims_that_do_not_hold_fail(tmp_path, changed, claim):
    keep(tmp_path, made_up({**GOOD, **changed}))
    failed = [one for one in check_claims(tmp_path) if one.required and one.holds is False]
    assert len(failed) == 1
    assert claim in failed[0].name
    run = CliRunner().invoke(verify, [str(tmp_path), "--partial", f"--text={tmp_path / 'none.md'}"])
    assert run.exit_code == 1
    assert "does not hold" in run.stdout


def test_a_rise_within_seed_noise_is_no_rise(tmp_path):
    keep(tmp_path, made_up({**GOOD, 0.3: [0.90, 0.95], 0.6: [0.94, 0.93]}))
    claim = next(one for one in check_claims(tmp_path) if "mlp-iid: accuracy falls" in one.name)
    assert claim.holds


def test_a_short_run_says_nothing_about_round_60(tmp_path):
    keep(tmp_path, made_up(GOOD, rounds=55))
    assert next(iter(check_claims(tmp_path))).holds is None


def test_numbers_in_a_text_come_from_the_files(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "early <!-- result: mnist-mlp-iid.early -->?<!-- end -->, "
        "<!-- result: mnist-cnn-iid.early -->?<!-- end -->.\n\n<!-- result: figure-3 -->\nold\n<!-- end -->\n",
        encoding="utf-8",
    )
    path = keep(tmp_path / "results" / "paper", made_up(GOOD))
    folder = results_folder(tmp_path / "results")
    assert next(one.key for one in disagreements(page, folder)) == "mnist-mlp-iid.early"
    page.write_text(fill(page.read_text(encoding="utf-8"), folder), encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    assert "mnist-mlp-iid.early -->97.5 ± 0.1 %<!--" in text
    assert "not measured yet" in text
    run = CliRunner().invoke(verify, [str(tmp_path / "results"), "--partial", f"--text={page}"])
    assert "text is wrong     " + str(page) not in run.stdout

    # Somebody changes a number by hand, or the files change under the text.
    page.write_text(text.replace("-->97.5 ±", "-->98.5 ±"), encoding="utf-8")
    run = CliRunner().invoke(verify, [str(tmp_path / "results"), "--partial", f"--text={page}"])
    assert run.exit_code == 1
    assert "mnist-mlp-iid.early" in run.stdout
    page.write_text(text, encoding="utf-8")
    result = read_result(path)
    assert result is not None
    write_result(path, replace(result, cells=result.cells[1:]))
    assert {one.key for one in disagreements(page, folder)} == {"mnist-mlp-iid.early", "figure-3"}


def test_every_table_can_be_made_of_nothing(tmp_path):
    for key in TABLES:
        assert computed_text(tmp_path, key).startswith("\n")
    with pytest.raises(ConfigError, match="unknown key"):
        computed_text(tmp_path, "nonsense")


def test_the_repository_s_own_text_agrees_with_its_results():
    root = Path(__file__).parents[2]
    folder = results_folder(root / "results")
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    assert [one for page in pages for one in disagreements(page, folder)] == []


def test_marks_within_a_sentence_do_not_begin_a_line():
    """Markdown takes a comment at the beginning of a line for a block and ends the paragraph there."""
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    within = re.compile(r"^\s*<!-- result: \S+ -->.*<!-- end -->.", re.MULTILINE)
    found = [(page.name, one.group()) for page in pages for one in within.finditer(page.read_text("utf-8"))]
    assert found == []


def test_no_results_folder(tmp_path):
    run = CliRunner().invoke(verify, [str(tmp_path / "nowhere")])
    assert isinstance(run.exception, RunFolderError)


def test_settled_accuracy_is_that_of_the_last_tenth():
    (cell,) = made_up({0.0: [0.9]}).cells
    cell = replace(cell, curve=((89, 0.1), (91, 0.7), (95, 0.8), (100, 0.9)))
    assert cell.settled == pytest.approx(0.8)
