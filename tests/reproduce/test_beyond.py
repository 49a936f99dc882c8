"""Beyond the paper: tuning on held-out images, the same epsilon for all, and the claims about it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.reproduce.beyond import hold_out, run_setting, tune
from experiments.reproduce.chart import write_figures
from experiments.reproduce.claims import check_claims
from experiments.reproduce.design import METHODS, Choice, find_setting
from experiments.reproduce.results import Result, select
from experiments.reproduce.tables import beyond_table, headline_table, tuning_table
from experiments.reproduce.text import computed_text
from experiments.reproduce.tuning import Axes, chosen
from niss.data import load_dataset
from niss.errors import ConfigError, RunFolderError
from support.results import keep, made_up_cell


def test_tuned_and_run_at_the_same_epsilon(places, small_setting):
    grid = Axes((0.1, 0.5), (0.1, 0.2), (8, 16), start=Choice(hidden=8))
    tuned = tune(small_setting, (8.0,), **places, axes=grid, device="cpu")
    # The method without noise needs no trial for each clip.
    assert {len(select(tuned, method=name)) for name in ("dp-fedavg", "central-dp", "niss-planned")} == {8}
    assert len(select(tuned, method="fedavg")) == 4
    # Every trial says what its epsilon was made of.
    trial = select(tuned, method="niss-planned")[0].mechanism
    assert trial["participations"] == 1
    assert trial["mu_joint"] < trial["mu_marginal"] * 10
    result = run_setting(
        small_setting, **places, epsilons=(8.0,), variants=("none", "collusion"), seeds=(1,), device="cpu"
    )
    assert {cell.labels["tuned_for"] for cell in result.cells} == {
        "fedavg",
        *(f"{name} at epsilon 8" for name in METHODS if name != "fedavg"),
    }
    by_method = {cell.labels["method"]: cell for cell in select(result, variant="none")}
    assert set(by_method) == set(METHODS)
    for name, cell in by_method.items():
        assert cell.epsilon_joint == (pytest.approx(8.0, rel=1e-3) if METHODS[name].private else None)
    (colluded,) = select(result, variant="collusion", method="niss-planned")
    assert colluded.labels["rho"] == 0.2
    assert colluded.epsilon_joint <= 8.0

    honest = [claim for claim in check_claims(places["out"]) if "joint view" in claim.name]
    assert len(honest) == 1
    assert all(claim.holds for claim in honest)
    assert "8.00, server trusted" in beyond_table(places["out"])
    assert "8.00, server trusted" in computed_text(places["out"], "beyond")
    assert "Held-out" in tuning_table(places["out"])
    assert write_figures(places["out"])[0].stat().st_size < 1_000_000

    # What was tuned for rounds of this size says nothing of rounds of another.
    smaller = replace(small_setting, rounds=1, participants=small_setting.participants // 2)
    other = run_setting(smaller, **places, epsilons=(8.0,), methods=("central-dp",), seeds=(1,), device="cpu")
    assert [cell.labels["tuned_for"] for cell in other.cells] == ["nothing"]

    # A tuning that came later does not mix with what was run before it.
    worst = {
        cell.labels["method"]: cell.accuracy for cell in sorted(tuned.cells, key=lambda one: -one.accuracy)
    }
    best = [
        replace(cell, accuracy=1.0) if cell.accuracy == worst[cell.labels["method"]] else cell
        for cell in tuned.cells
    ]
    keep(places["out"], replace(tuned, cells=tuple(best)))
    with pytest.raises(RunFolderError, match="other settings"):
        run_setting(small_setting, **places, epsilons=(8.0,), seeds=(1,), device="cpu")


def compared(accuracies: dict[tuple[str, str], float]) -> Result:
    """A setting with these accuracies by method and variant, at epsilon 3, the same for two seeds."""
    setting = find_setting("mnist-iid-client-100-of-1000")
    cells = tuple(
        made_up_cell(
            f"{variant}/{method}/epsilon=3/seed-{seed}",
            {"method": method, "variant": variant, "epsilon": 3.0, "seed": seed, "clip": 1.0},
            accuracy,
            epsilon_joint=3.0,
            aggregate_variance=1.0,
        )
        for (method, variant), accuracy in accuracies.items()
        for seed in (1, 2)
    )
    return Result("beyond", setting.name, setting.base, cells)


@pytest.mark.parametrize(
    ("repaired", "holds", "words"),
    [(0.5, True, "10.0 points ahead"), (0.397, True, "-0.3 points"), (0.39, False, "-1.0 points ahead")],
)
def test_what_dropouts_leave_is_claimed_and_drawn(tmp_path, repaired, holds, words):
    result = compared({("dp-fedavg", "none"): 0.4, ("niss-planned", "repair"): repaired})
    keep(tmp_path, result)
    (claim,) = [one for one in check_claims(tmp_path) if "dropping out" in one.name]
    assert (claim.holds, claim.required) == (holds, True)
    assert words in claim.detail
    assert tmp_path / "faults.png" in write_figures(tmp_path)


def test_held_out_images_come_from_the_training_set_alone():
    whole = load_dataset("mnist-mini")
    cut = hold_out(whole)
    assert len(cut.train_labels) + len(cut.test_labels) == len(whole.train_labels)
    together = np.sort(
        np.concatenate([cut.train_images, cut.test_images]).sum(axis=(1, 2, 3), dtype=np.int64)
    )
    assert np.array_equal(together, np.sort(whole.train_images.sum(axis=(1, 2, 3), dtype=np.int64)))
    assert np.array_equal(hold_out(whole).test_labels, cut.test_labels)
    assert cut.name != whole.name


def test_what_was_not_tuned_takes_the_usual_choice(small_setting):
    assert chosen(None, small_setting, "niss-planned", 3.0) == (Choice(), "nothing")


def test_unknown_methods_are_refused(places, small_setting):
    with pytest.raises(ConfigError, match="unknown name 'magic'"):
        run_setting(small_setting, **places, methods=("magic",))


@pytest.mark.parametrize(
    ("tolerated", "verdict", "words"), [(0.5, "holds", "+10.0"), (0.35, "behind", "−5.0; **behind**")]
)
def test_the_table_says_where_tolerated_dropouts_lose(tmp_path, tolerated, verdict, words):
    """They may cost more than the whole lead: that is said, and no reason to fail."""
    result = compared({("dp-fedavg", "none"): 0.4, ("niss-planned", "tolerate"): tolerated})
    every = tuple(
        replace(cell, id=f"{cell.id}/{epsilon:g}", labels={**cell.labels, "epsilon": epsilon})
        for cell in result.cells
        for epsilon in (1.0, 3.0, 8.0)
    )
    keep(tmp_path, replace(result, cells=every))
    (claim,) = [one for one in check_claims(tmp_path) if "tolerated" in one.name]
    assert (claim.verdict, claim.required) == (verdict, False)
    (row,) = [
        line
        for line in headline_table(tmp_path).splitlines()
        if "niss-planned" in line and "tolerated" in line
    ]
    assert words in row
    assert words in beyond_table(tmp_path)
    assert "not measured yet" in headline_table(tmp_path)
