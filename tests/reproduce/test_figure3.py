"""A panel from scratch: cells, resumption, merging, figure, claims and text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.reproduce import runner
from experiments.reproduce.chart import write_figures
from experiments.reproduce.claims import check_claims, gap
from experiments.reproduce.figure3 import run_panel, run_sweep
from experiments.reproduce.paper import IMAGES, find_panel, find_reading
from experiments.reproduce.results import merge_results, read_result, read_results, select, write_result
from experiments.reproduce.runner import OutOfTime, Watch
from niss.errors import RunFolderError

ROOT = Path(__file__).resolve().parents[2]


def test_a_panel_from_scratch(places, panel, slice_settings, monkeypatch):
    # Noise large enough to be seen within three rounds.
    strong = find_reading("0.02")
    result = run_panel(panel, **places, **slice_settings, seeds=(1, 2), xs=(0.0, 1.0), reading=strong)
    assert [cell.id for cell in result.cells] == [
        f"sigma-0.02/X={x}/seed-{seed}" for x in (0, 1) for seed in (1, 2)
    ]
    found = gap(result, reading=strong.name)
    assert found is not None
    assert found.mean > 0.05
    for cell in result.cells:
        assert [number for number, _ in cell.curve] == [1, 2, 3]
        assert cell.accuracy == cell.settled == cell.curve[-1][1]
        assert cell.at(3) == max(accuracy for _, accuracy in cell.curve)
        assert cell.at(4) is None
    # At X = 0 what is left is rounding; at X = 1 the noise of 6 clients, as 180 scalars happened to fall.
    assert max(cell.aggregate_variance for cell in select(result, x=0.0)) < 1e-12
    for cell in select(result, x=1.0):
        assert cell.aggregate_variance == pytest.approx(6 * 0.02**2, rel=0.6)
    assert read_result(places["out"] / "figure-3" / f"{panel.name}.json") == result

    # What is there is not run again.
    monkeypatch.setattr(runner, "compare_together", None)
    again = run_panel(panel, **places, **slice_settings, seeds=(1, 2), xs=(0.0, 1.0), reading=strong)
    assert again == result


def test_cells_run_apart_are_the_cells_run_together(tmp_path, panel, slice_settings):
    def run(name, **chosen):
        return run_panel(
            panel, out=tmp_path / name, work=tmp_path / f"{name}-work", **slice_settings, **chosen
        )

    whole = run("whole", seeds=(1, 2), xs=(0.3, 1.0))
    run("one", seeds=(1,), xs=(0.3, 1.0))
    run("two", seeds=(2,), xs=(0.3,))
    run("three", seeds=(2,), xs=(1.0,))
    merge_results([tmp_path / "one", tmp_path / "two"], tmp_path / "merged")
    (path,) = merge_results([tmp_path / "three"], tmp_path / "merged")
    merged = read_result(path)
    assert merged is not None
    timeless = [[replace(cell, seconds=0.0) for cell in result.cells] for result in (whole, merged)]
    assert timeless[0] == timeless[1]
    assert write_figures(tmp_path / "merged")[0].stat().st_size < 1_000_000


def test_merging_refuses_what_does_not_belong_together(tmp_path, panel, slice_settings):
    result = run_panel(
        panel, out=tmp_path / "a", work=tmp_path / "w", **slice_settings, seeds=(1,), xs=(1.0,)
    )
    (cell,) = result.cells
    other = replace(cell, curve=((1, 0.5),))
    write_result(tmp_path / "b" / "figure-3" / "b.json", replace(result, cells=(other,)))
    with pytest.raises(RunFolderError, match="two different runs"):
        merge_results([tmp_path / "b"], tmp_path / "a")
    write_result(tmp_path / "c" / "figure-3" / "c.json", replace(result, base={**result.base, "rounds": 9}))
    with pytest.raises(RunFolderError, match=r"other settings .* rounds"):
        merge_results([tmp_path / "c"], tmp_path / "a")
    with pytest.raises(RunFolderError, match="no results"):
        merge_results([tmp_path / "nowhere"], tmp_path / "a")
    (tmp_path / "d" / "figure-3").mkdir(parents=True)
    (tmp_path / "d" / "figure-3" / "d.json").write_text(json.dumps({"cells": [{}]}))
    with pytest.raises(RunFolderError, match="does not contain results"):
        read_results(tmp_path / "d", "figure-3")


def test_out_of_time_and_on_again(tmp_path, panel, slice_settings):
    chosen = {**slice_settings, "seeds": (1,), "xs": (0.0, 1.0)}
    whole = run_panel(panel, out=tmp_path / "a", work=tmp_path / "aw", **chosen)
    with pytest.raises(OutOfTime):
        run_panel(panel, out=tmp_path / "b", work=tmp_path / "bw", **chosen, progress=Watch(until=0.0))
    assert list((tmp_path / "bw").rglob("checkpoint.safetensors"))
    cut = run_panel(panel, out=tmp_path / "b", work=tmp_path / "bw", **chosen)
    assert [cell.curve for cell in cut.cells] == [cell.curve for cell in whole.cells]


def test_a_sweep_over_sigma(places, panel, slice_settings):
    result = run_sweep(panel, **places, **slice_settings, sigmas=(0.001, 0.2))
    weak, strong = (select(result, x=1.0, sigma_k=pytest.approx(sigma))[0] for sigma in (0.001, 0.2))
    (clean,) = select(result, x=0.0)
    assert weak.accuracy == pytest.approx(clean.accuracy, abs=0.02)
    assert strong.accuracy < clean.accuracy - 0.2


def test_claims_say_when_nothing_is_measured(tmp_path):
    claims = check_claims(tmp_path)
    assert len(claims) == 10 + 5 * len(IMAGES)
    assert all(claim.holds is None for claim in claims)


def test_cells_can_be_added_to_the_committed_files():
    """What a file says of its settings is what a new run would say."""
    for experiment in ("figure-3", "sweep"):
        for result in read_results(ROOT / "results" / "paper", experiment).values():
            assert result.base == find_panel(result.name).base
