"""`niss attack` as a user meets it: help, refusals, what is written, and Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from niss.attacks import EXPERIMENTS, inversion
from niss.attacks.runs import SERVERS
from niss.attacks.silo import BARE
from niss.charts import charts_from_json, charts_to_json
from niss.cli.experiments import attack_app as app
from niss.errors import ConfigError

# The attacks that train, on what device they are told, and those that show pictures too.
SEARCHES = {"dlg", "joint", "invert", "silo"}
PICTURES = SEARCHES | {"average", "rerun"}
PNG = b"\x89PNG\r\n"


def niss_attack(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), terminal_width=120)


def refusal(*arguments: str) -> ConfigError:
    error = niss_attack(*arguments).exception
    assert isinstance(error, ConfigError), error
    return error


def run(tmp_path: Path, line: str) -> dict[str, Any]:
    """What an attack prints, which is what it writes, whole; its charts and pictures are drawn without a display."""
    result = niss_attack(*line.split(), "--out", str(tmp_path / "out"), "--json", "--quiet")
    assert result.exception is None, result.exception
    printed: dict[str, Any] = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "out" / "attack.json").read_text())
    assert (tmp_path / "out" / "attack.png").read_bytes().startswith(PNG)
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == [
        *("attack.json", "attack.png", "report.html")
    ]
    assert printed["finished"]
    assert printed["headline"]
    assert all(set(printed["columns"]) <= set(row) or "refusal" in row for row in printed["rows"])
    charts = charts_from_json(printed["charts"])
    assert charts
    assert json.loads(json.dumps(charts_to_json(charts))) == printed["charts"]
    assert all(chart.across for chart in charts)
    assert printed["pictures"] == (line.split()[0] in PICTURES)
    return printed


@pytest.mark.parametrize("command", EXPERIMENTS)
def test_help_shows_the_flags_and_an_example(command: str) -> None:
    shown = niss_attack(command, "--help").stdout
    assert f"niss attack {command} " in shown
    for flag in ("--out", "--seed", "--epsilon", "--overwrite", "--json"):
        assert flag in shown
    # Only these train or search; the others are plain arithmetic on the CPU.
    assert ("--device" in shown) == (command in SEARCHES)


def test_dlg_writes_figure_table_and_json(tmp_path: Path) -> None:
    result = run(tmp_path, "dlg --methods fedavg,niss --clients 4 --iterations 30 --restarts 1")
    assert [row["method"] for row in result["rows"]] == ["fedavg", "niss"]
    for row in result["rows"]:
        assert {"loss", "mse", "psnr", "ssim", "label_found", "iterations"} <= set(row)
    assert result["rows"][0]["epsilon_joint"] is None
    assert result["rows"][1]["epsilon_joint"] == pytest.approx(3.0, abs=0.01)
    assert result["rows"][0]["psnr"] > result["rows"][1]["psnr"]
    assert len(result["curves"]["losses"]["fedavg"]) == 30


def test_the_papers_setting_from_the_joint_view(tmp_path: Path) -> None:
    paper = "dlg --plan paper --view joint --methods niss --clients 11 --iterations 5 --restarts 1"
    (row,) = run(tmp_path, paper)["rows"]
    assert row["noise"] < 1e-9
    assert row["epsilon_joint"] is None
    assert row["epsilon_marginal"] == pytest.approx(6.86, abs=0.01)


def test_joint(tmp_path: Path) -> None:
    result = run(tmp_path, "joint --clients 5 --iterations 20 --restarts 1")
    noise = {row["case"]: row["noise"] for row in result["rows"]}
    assert noise["τ = 0, all uploads"] < 1e-9
    assert noise["τ = 0, upload alone"] > 50
    assert noise["calibrated τ², all uploads"] > 50
    sweep = result["curves"]["sweep"]
    assert sweep["measured"] == pytest.approx(sweep["predicted"], rel=0.05)


def test_invert(tmp_path: Path) -> None:
    line = "invert --batch 2 --steps 2 --methods fedavg --clients 3 --iterations 15 --restarts 1"
    assert len(run(tmp_path, line)["rows"][0]["labels"]) == 2


def test_collude(tmp_path: Path) -> None:
    result = run(tmp_path, "collude --clients 8 --neighbours 3 --rho 0,1 --points 2 --hidden 4")
    all_known = [row for row in result["rows"] if row["rho"] == row["tau2"] == 1.0]
    broken = {row["distortion"]: row["fraction"] for row in all_known}
    assert broken["scalar"] > 0.99
    assert max(broken["coordinate"], broken["additive"]) < 0.05
    projection = result["curves"]["projection"]
    assert projection["measured"] == pytest.approx(projection["predicted"], rel=0.2)


def test_average(tmp_path: Path) -> None:
    result = run(tmp_path, "average --rounds 30 --participations 3")
    rows = {row["rounds"]: row for row in result["rows"]}
    assert rows[30]["error"] == pytest.approx(rows[30]["predicted_error"], rel=0.1)
    assert rows[30]["error"] < rows[1]["error"] / 4
    assert (rows[3]["within_budget"], rows[10]["within_budget"]) == (True, False)
    assert result["curves"]["allowed_rounds"] == 3
    assert rows[3]["epsilon"] == pytest.approx(3.0, abs=0.01)


def test_fake_dropout(tmp_path: Path) -> None:
    result = run(tmp_path, "fake-dropout --clients 8")
    left = {(row["story"], row["rule"]): row["left"] for row in result["rows"]}
    assert left["graded", "off"] < 0.8
    assert all(value >= 1.0 - 1e-9 for (_, rule), value in left.items() if rule == "on")


def test_rerun(tmp_path: Path) -> None:
    result = run(tmp_path, "rerun --clients 6 --repeats 16")
    first, *others = result["rows"]
    assert first["refusal"].startswith("refused")
    assert [row["answers"] for row in others] == [2, 8, 32]
    assert others[-1]["error"] == pytest.approx(others[-1]["predicted_error"], rel=0.1)


def test_carried(tmp_path: Path) -> None:
    line = "carried --clients 5 --rounds 9 --separation 3 --colluders 1 --dropped 1 --runs 400"
    rows = {(row["attack"], row["rule"]): row for row in run(tmp_path, line)["rows"]}
    assert {name for name, rule in rows if rule} == set(SERVERS)
    assert rows["likelihood ratio", None]["ratio"] == pytest.approx(1.0, abs=1e-9)
    assert rows["likelihood ratio", None]["outcome"] == "reaches the claim"
    for (_, rule), row in rows.items():
        assert rule == "off" or row["ratio"] <= 1.0 + 1e-9
        assert rule != "off" or row["outcome"] == "more than was charged"
    assert rows["seats a client again", "on"]["outcome"].startswith("refused")


def test_audit(tmp_path: Path) -> None:
    result = run(tmp_path, "audit --rounds 4000")
    rows = {row["case"]: row for row in result["rows"]}
    calibrated, bare = rows["niss, calibrated τ²"], rows["niss, τ = 0"]
    assert 0.0 < calibrated["proved"] < calibrated["joint"]
    assert bare["joint"] is None
    assert bare["proved"] > bare["marginal"]
    assert bare["verdict"] == "the marginal claim is refuted"


def test_an_audit_of_records_goes_through_the_protocol(tmp_path: Path) -> None:
    """100 canaries each way: mu to within 7 standard deviations."""
    (row,) = run(tmp_path, "audit --unit record --clients 3 --batches 1 --rounds 100")["rows"]
    assert row["joint"] == pytest.approx(16.0, abs=0.01)
    assert row["measured"] == pytest.approx(row["mu"], abs=1.4)
    assert row["verdict"] == "consistent with the claims"


def test_a_picture_shows_in_a_bare_upload_and_not_in_that_of_niss(tmp_path: Path) -> None:
    """An AUC of 0.69 from 20 scores each way: all 20 above all others, or below 0.2, at rates below 1e-6."""
    found = run(tmp_path, "silo --clients 3 --records 3 --runs 20 --iterations 60 --restarts 1")
    bare, hidden = found["rows"]
    assert (bare["case"], bare["auc"], bare["epsilon_joint"]) == (BARE, 1.0, None)
    assert bare["noise"] < 1e-4, "single precision"
    assert bare["psnr"] > found["curves"]["blind_guess_psnr"] > hidden["psnr"]
    assert hidden["epsilon_joint"] == pytest.approx(3.0, abs=0.01)
    assert hidden["noise"] > 50.0
    assert 0.2 < hidden["auc"] < 1.0
    assert len(found["curves"]["scores"]["present"]) == 20


def test_the_oracle_measures_what_a_blank_gives_away(tmp_path: Path) -> None:
    """10 runs each way at mu 0.7: 30 clips are 21 deviations, measured to 16 %, and none to 0.6 clips; 5 of each."""
    found = run(tmp_path, "oracle --runs 10 --seed 3")
    rows = {(row["failure"], row["rule"], row["sum"]): row for row in found["rows"]}
    for (_, rule, _), row in rows.items():
        assert rule == "off" or row["reach"] < 1e-3
        assert row["verdict"] == ("the claim is void" if rule == "off" else "nothing beyond its clip")
    off, on = rows["overflows", "off", 30], rows["overflows", "on", 30]
    assert off["measured"] == pytest.approx(30.0, rel=0.8)
    assert abs(on["measured"]) < 4.0
    assert on["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert rows["overflows", "off", 3]["epsilon"] == pytest.approx(3.9, rel=0.02)
    assert rows["overflows", "off", 10]["epsilon"] == pytest.approx(52.6, rel=0.02)
    assert off["epsilon"] == pytest.approx(976.0, rel=0.02)
    assert "turns epsilon 1 into 3.94" in found["headline"]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("dlg --methods fedavg,sgd", "--methods"),
        ("dlg --methods niss,niss", "--methods"),
        ("dlg --methods ,", "--methods"),
        ("dlg --view sideways", "--view"),
        ("dlg --plan best", "--plan"),
        ("dlg --image no-such.png", "--image"),
        ("dlg --iterations 0", "--iterations"),
        ("invert --restarts 0", "--restarts"),
        ("dlg --device tpu", "--device"),
        ("dlg --clients 2", "--clients"),
        ("dlg --epsilon -1", "epsilon"),
        ("dlg --tau2 -1", "tau2"),
        ("dlg --seed -1", "seed"),
        ("invert --methods secagg-ddg", "--methods"),
        ("invert --model vgg", "--model"),
        ("invert --steps 0", "--steps"),
        ("invert --batch 0", "--batch"),
        ("invert --tv -1", "--tv"),
        ("invert --tv inf", "--tv"),
        ("joint --delta 2", "delta"),
        ("collude --rho 0,x", "--rho"),
        ("collude --rho 1.5", "--rho"),
        ("collude --tau2 0", "--tau2"),
        ("collude --distortions square", "--distortions"),
        ("collude --distortions scalar,scalar", "--distortions"),
        ("collude --neighbours 29", "--neighbours"),
        ("average --rounds 0", "--rounds"),
        ("fake-dropout --clients 5", "--clients"),
        ("rerun --repeats 0", "--repeats"),
        ("carried --clients 3", "--colluders"),
        ("carried --clients 6 --colluders 5", "--colluders"),
        ("carried --rounds 10", "--separation"),
        ("carried --separation 1", "--separation"),
        ("carried --confidence 1", "--confidence"),
        ("carried --kappa 0", "--kappa"),
        ("carried --runs 10", "--runs"),
        ("carried --dropped 11", "--dropped"),
        ("audit --confidence 1", "--confidence"),
        ("audit --rounds 10", "--rounds"),
        ("audit --unit person", "--unit"),
        ("audit --unit record --batches 0", "--batches"),
        ("silo --records 0", "--records"),
        ("oracle --runs 1", "--runs"),
    ],
)
def test_bad_settings_are_refused_by_name_before_any_work(line: str, field: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert refusal(*line.split(), "--out", str(folder)).field == field
    assert not folder.exists()


def test_results_are_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "attack.json").write_text("{}")
    assert refusal("audit", "--out", str(tmp_path / "attack.json")).field == "--out", "a file is no folder"
    error = refusal("audit", "--rounds", "200", "--out", str(tmp_path))
    assert error.field == "--out"
    assert "--overwrite" in str(error.hint)
    result = niss_attack("audit", "--rounds", "200", "--out", str(tmp_path), "--overwrite")
    assert result.exit_code == 0
    assert json.loads((tmp_path / "attack.json").read_text())["finished"]


def test_without_out_a_new_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert niss_attack("audit", "--rounds", "200", "-q").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["attack-audit-1", "attack-audit-2"]


def test_the_table_says_what_was_found(tmp_path: Path) -> None:
    result = niss_attack("audit", "--rounds", "2000", "--out", str(tmp_path / "out"))
    assert "ε proved" in result.stdout
    assert "the marginal" in result.stdout
    assert f"report: {tmp_path / 'out' / 'report.html'}" in result.stderr
    assert "2000/2000" in result.stderr


def test_ctrl_c_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = inversion.Search.invert, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(inversion.Search, "invert", interrupted)
    line = "dlg --clients 4 --iterations 5 --restarts 1 --out"
    result = niss_attack(*line.split(), str(tmp_path / "out"))
    assert result.exit_code == 130
    kept = json.loads((tmp_path / "out" / "attack.json").read_text())
    assert not kept["finished"]
    assert [row["method"] for row in kept["rows"]] == ["fedavg"]
    assert (tmp_path / "out" / "attack.png").read_bytes().startswith(PNG)
    assert "interrupted" in result.stderr
