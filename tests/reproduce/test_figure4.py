"""Figure 4 from scratch on the embedded digits: cells, resumption, merging, figure, table and flags."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.reproduce import figure4
from experiments.reproduce.chart import write_figures
from experiments.reproduce.figure4 import level_setting, run_picture
from experiments.reproduce.paper import LEVELS, NBAFL, attack_cells, find_reading
from experiments.reproduce.results import kept_pictures, merge_results, read_result, select
from experiments.reproduce.runner import OutOfTime, Watch
from experiments.reproduce.tables import figure_4_table, leaks_in_order
from niss.cli import experiments
from niss.errors import ConfigError, RunFolderError

IMAGE = "mnist-mini:0"
RESULTS = Path(__file__).parents[2] / "results" / "paper"
QUICK = {"iterations": 12, "restarts": 1, "device": "cpu"}


def quick(places, levels, **changes):
    """At the noise of Figure 3."""
    whole = attack_cells([1]).items()
    cells = {name: cell for name, cell in whole if cell[1].name in levels and cell[2] == NBAFL}
    return run_picture(IMAGE, cells=cells, out=places["out"], **{**QUICK, **changes})


def test_a_picture_from_scratch(places, monkeypatch):
    names = ["fedavg", "dp-fedavg", "niss", "niss-joint", "client-niss-joint"]
    leaks = quick(places, names)
    assert [cell.id for cell in leaks.cells] == [
        "client/client-niss-joint/seed-1",
        "nbafl/dp-fedavg/seed-1",
        "nbafl/niss-joint/seed-1",
        "nbafl/niss/seed-1",
        "none/fedavg/seed-1",
    ]
    by_level = {cell.labels["level"]: cell for cell in leaks.cells}
    # Where the noise cancels, the server works with the update itself, whatever the noise was.
    assert by_level["fedavg"].noise == 0.0
    assert max(by_level[name].noise for name in ("niss-joint", "client-niss-joint")) < 1e-6
    # Twice the variance of DP-FedAvg on one upload alone.
    ratio = by_level["niss"].noise / by_level["dp-fedavg"].noise
    assert ratio == pytest.approx(2**0.5, rel=0.05)
    assert by_level["niss-joint"].epsilon_joint is None
    assert by_level["dp-fedavg"].epsilon_joint == pytest.approx(10.6, abs=0.1)
    assert by_level["fedavg"].epsilon_joint is None
    for cell in leaks.cells:
        assert cell.iterations == 12
        assert cell.losses[-1] == (12, pytest.approx(cell.loss, rel=1e-5))
        assert cell.frames[-1] == (12, cell.psnr)
        assert cell.best_psnr >= cell.psnr
    assert read_result(places["out"] / "figure-4" / "mnist-mini-0.json") == leaks

    figures = write_figures(places["out"])
    assert sorted(path.name for path in figures) == ["figure-4-dark.png", "figure-4.png"]
    assert figures[0].stat().st_size < 1_000_000
    drawn = [path.read_bytes() for path in figures]
    assert [path.read_bytes() for path in write_figures(places["out"])] == drawn
    (places["out"] / "figure-4" / "mnist-mini-0.npz").unlink()
    assert write_figures(places["out"]) == []
    assert "| NISS as printed, all uploads | 0.00434 |" in figure_4_table(places["out"])

    # What is there is not run again; other settings do not mix with it.
    monkeypatch.setattr(figure4.DeepLeakage, "invert", None)
    assert quick(places, names) == leaks
    with pytest.raises(RunFolderError, match=r"other settings .* iterations"):
        quick(places, names, iterations=13)


def test_cells_run_apart_merge(tmp_path):
    for name, levels in (("one", ["fedavg"]), ("two", ["niss"])):
        quick({"out": tmp_path / name}, levels)
    (path,) = merge_results([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    merged = read_result(path)
    assert merged is not None
    assert [cell.labels["level"] for cell in merged.cells] == ["niss", "fedavg"]
    assert kept_pictures(tmp_path / "both", merged.name).keys() == {
        "original",
        *(one.id for one in merged.cells),
    }


def test_out_of_time_keeps_whole_cells(places):
    quick(places, ["fedavg"])
    with pytest.raises(OutOfTime):
        quick(places, ["fedavg", "niss"], progress=Watch(until=0.0))
    leaks = read_result(places["out"] / "figure-4" / "mnist-mini-0.json")
    assert leaks is not None
    assert [cell.labels["level"] for cell in leaks.cells] == ["fedavg"]
    assert select(quick(places, ["fedavg", "niss"]), level="niss")


def test_readings_scale_the_paper_s_noise_alone():
    strong = find_reading("0.0434")
    plans = [level_setting(LEVELS["niss"], reading).plan for reading in (NBAFL, strong)]
    assert plans[0].epsilon / plans[1].epsilon == pytest.approx(10.0, rel=1e-3)
    cells = attack_cells([1])
    assert len(cells) == len(LEVELS) + 2
    assert cells["sigma-0.013/niss/seed-1"][0]["sigma_k"] == pytest.approx(0.013)
    assert cells["client/client-niss/seed-1"][0]["sigma_k"] is None


def test_calibrated_noise_in_the_sum_is_a_sixteenth_of_dp_fedavg_s():
    """At the same promise to every client, as docs/concepts/paper.md says."""
    left = [
        level_setting(LEVELS[name], NBAFL)
        .plan.for_round(
            np.arange(30), weights=np.full(30, 1 / 30), records=np.full(30, 600.0), beacon=b"b" * 32
        )
        .aggregate_variance
        for name in ("client-dp-fedavg", "client-niss-calibrated")
    ]
    assert left[0] / left[1] == pytest.approx(16.0, rel=0.05)


def test_on_the_command_line(places, tmp_path):
    flags = ["figure-4", f"--image={IMAGE}", "--seeds=1", "--iterations=5", "--restarts=1", "--device=cpu"]
    flags.append(f"--out={places['out']}")
    run = CliRunner().invoke(experiments.reproduce_app, flags)
    assert run.exit_code == 0, run.output
    assert str(places["out"] / "figure-4.png") in run.stdout.splitlines()
    again = CliRunner().invoke(experiments.reproduce_app, ["figures", f"--out={places['out']}"])
    assert again.exit_code == 0, again.output
    nowhere = CliRunner().invoke(experiments.reproduce_app, ["figures", f"--out={tmp_path / 'nowhere'}"])
    assert isinstance(nowhere.exception, RunFolderError)


@pytest.mark.parametrize("flag", ["--image=photo.png", "--image=mnist-mini:x"])
def test_bad_flags(flag, tmp_path):
    run = CliRunner().invoke(
        experiments.reproduce_app, ["figure-4", f"--image={IMAGE}", flag, f"--out={tmp_path}"]
    )
    assert isinstance(run.exception, ConfigError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("leaks", leaks_in_order(RESULTS), ids=lambda leaks: leaks.name)
def test_the_kept_pictures_are_those_of_the_results(leaks):
    """By their PSNR, as far as pixels of 8 bits tell; one in the figure for every level."""
    kept = kept_pictures(RESULTS, leaks.name)
    original = kept.pop("original") / 255.0
    cells = {cell.id: cell for cell in leaks.cells}
    assert {cells[name].labels["level"] for name in kept} == set(LEVELS)
    for name, picture in kept.items():
        found = -10.0 * np.log10(np.mean((picture / 255.0 - original) ** 2))
        if cells[name].psnr < 45.0:
            assert found == pytest.approx(cells[name].psnr, abs=0.2)
        else:
            assert found > 55.0
