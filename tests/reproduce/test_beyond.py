"""Beyond the paper: tuning on held-out images, the same epsilon for all, and the claims about it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.reproduce.beyond import hold_out, load, run_setting, tune
from experiments.reproduce.chart import write_figures
from experiments.reproduce.comparisons import (
    accuracies_table,
    differences_table,
    tuning_table,
    verdicts_table,
)
from experiments.reproduce.design import (
    METHODS,
    VARIANTS,
    Choice,
    Contestant,
    Search,
    as_stored,
    find_setting,
)
from experiments.reproduce.results import Result, difference, select
from experiments.reproduce.text import computed_text
from experiments.reproduce.tuning import chosen
from niss.data import load_dataset
from niss.errors import ConfigError, RunFolderError
from support.results import keep, made_up_cell


def test_tuned_and_run_at_the_same_epsilon(places, small_setting):
    grid = Search((0.1, 0.5), (0.1,), (8,), start=Choice(0.1, 0.1, 8), epsilons=(8.0,))
    small_setting = replace(small_setting, search=grid)
    tuned = tune(small_setting, **places, device="cpu")
    # The method without noise needs no trial for each clip.
    assert {len(select(tuned, method=name)) for name in ("dp-fedavg", "central-dp", "niss-planned")} == {6}
    assert len(select(tuned, method="fedavg")) == 3
    # Every trial says what its epsilon was made of.
    trial = select(tuned, method="niss-planned")[0].mechanism
    assert trial["participations"] == 1
    assert trial["mu_joint"] < trial["mu_marginal"] * 10
    result = run_setting(
        small_setting, **places, epsilons=(8.0,), variants=("none", "collusion"), seeds=(1,), device="cpu"
    )
    assert {cell.labels["tuned_for"] for cell in result.cells} == {
        "fedavg",
        *(f"{name} at epsilon 8" for name in METHODS if name not in ("fedavg", "alone")),
    }
    by_method = {cell.labels["method"]: cell for cell in select(result, variant="none")}
    assert set(by_method) == set(METHODS) - {"alone"}
    for name, cell in by_method.items():
        assert cell.epsilon_joint == (pytest.approx(8.0, rel=1e-3) if METHODS[name].private else None)
    (colluded,) = select(result, variant="collusion", method="niss-planned")
    assert colluded.labels["rho"] == 0.2
    assert colluded.epsilon_joint <= 8.0

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


def compared(accuracies: dict[str, list[float]], before: float = 0.0, epsilons=(1.0, 3.0, 8.0)) -> Result:
    """A setting with these accuracies at the last round by method and seed; before it less by so much."""
    setting = as_stored(find_setting("mnist-iid-client-100-of-1000"))
    cells = tuple(
        made_up_cell(
            f"none/{method}/epsilon={epsilon:g}/seed-{seed}",
            {
                "method": method,
                "variant": "none",
                "epsilon": epsilon,
                "seed": seed,
                "tuned_for": "x at epsilon 3",
            },
            accuracy,
            rounds=6,
            curve=(*((at, accuracy - before) for at in range(1, 6)), (6, accuracy)),
            epsilon_joint=epsilon,
        )
        for method, values in accuracies.items()
        for epsilon in epsilons
        for seed, accuracy in enumerate(values, start=1)
    )
    return Result("beyond", setting.name, setting.base, cells)


@pytest.mark.parametrize(
    ("niss", "shown", "verdict"),
    [
        ([0.50, 0.51, 0.52], "**+10.00 ± 0.00**", "1 / 0 / 0"),
        ([0.50, 0.40, 0.42], "+3.00 ± 15.11", "0 / 0 / 1"),
        ([0.38, 0.39, 0.41], "**−1.67 ± 1.43**", "0 / 1 / 0"),
    ],
)
def test_ahead_is_who_the_interval_of_paired_differences_says(tmp_path, niss, shown, verdict):
    """Student's t over three seeds, by hand: 4.303 times the standard error."""
    keep(tmp_path, compared({"dp-fedavg": [0.40, 0.41, 0.42], "niss-planned": niss}))
    (row,) = [line for line in accuracies_table(tmp_path).splitlines() if "| niss-planned |" in line]
    assert row.endswith(f"{' / '.join([shown] * 3)} |")
    assert shown in differences_table(tmp_path)
    assert verdict in verdicts_table(tmp_path)
    found = difference(
        *(select(compared({"a": one}), epsilon=1.0) for one in ([0.5, 0.4, 0.6], [0.4, 0.4, 0.4]))
    )
    assert found.half == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)


def test_what_is_scored_where_noise_is_gone_is_shown_before_too(tmp_path):
    """Ahead at the last round, behind on average over the five before: both are said."""
    result = compared({"central-mf": [0.7, 0.71, 0.72]})
    late = compared({"niss-carried": [0.8, 0.81, 0.82]}, before=0.2)
    keep(tmp_path, replace(result, cells=result.cells + late.cells))
    (row,) = [line for line in accuracies_table(tmp_path).splitlines() if "| niss-carried |" in line]
    assert "81.0 ± 1.0 (61.0)" in row
    last, before = [line for line in verdicts_table(tmp_path).splitlines() if "central-mf" in line]
    # Only at the epsilon that its methods were tuned at.
    assert (last.count("1 / 0 / 0"), before.count("0 / 1 / 0")) == (1, 1)
    words = "Tuned at epsilon 3 on one seed, run with 3; at epsilon 1 and 8 they have what was chosen there"
    assert f"- {words}: `mnist-iid-client-100-of-1000`.\n" in accuracies_table(tmp_path)
    assert computed_text(tmp_path, "mnist-iid-client-100-of-1000.niss-carried.1.before") == "61.0 %"
    assert computed_text(tmp_path, "mnist-iid-client-100-of-1000.niss-carried.1") == "81.0 %"


def test_the_five_rounds_before_the_last():
    cell = made_up_cell("x", {}, 0.9, rounds=8, curve=tuple((at, at / 10) for at in range(1, 9)))
    assert cell.before == pytest.approx((0.3 + 0.4 + 0.5 + 0.6 + 0.7) / 5)
    assert cell.score == pytest.approx((0.9 + 0.5) / 2)
    assert made_up_cell("x", {}, 0.9).before == 0.9


def test_held_out_images_come_from_the_training_set_alone():
    whole = load_dataset("mnist-mini")
    cut = hold_out(whole)
    assert len(cut.train_labels) + len(cut.test_labels) == len(whole.train_labels)
    together = np.sort(
        np.concatenate([cut.train_images, cut.test_inputs]).sum(axis=(1, 2, 3), dtype=np.int64)
    )
    assert np.array_equal(together, np.sort(whole.train_images.sum(axis=(1, 2, 3), dtype=np.int64)))
    assert np.array_equal(hold_out(whole).test_labels, cut.test_labels)
    assert cut.name != whole.name


def test_a_table_is_cut_once_for_all_and_keeps_its_measurements():
    """256 steps over six deviations: within half a step of the table, cut where it goes further."""
    sklearn = pytest.importorskip("sklearn.datasets")
    values, labels = sklearn.load_breast_cancer(return_X_y=True)
    table = load("breast-cancer")
    assert (len(table.train_labels), len(table.test_labels), table.classes) == (455, 114, 2)
    assert sorted([*table.train_labels, *table.test_labels]) == sorted(labels)
    scaled = np.clip((values - values.mean(axis=0)) / values.std(axis=0), -3.0, 3.0)
    rows = np.concatenate([table.train_inputs, table.test_inputs])[:, 0, 0] / 255.0
    found = (rows - table.mean[0]) / table.std[0]
    assert np.abs(np.sort(found, axis=0) - np.sort(scaled, axis=0)).max() < 0.51 * 6.0 / 255.0


def test_what_was_not_tuned_takes_the_usual_choice(small_setting):
    one = Contestant(METHODS["niss-planned"], VARIANTS["none"], 3.0)
    assert chosen(None, small_setting, one) == (small_setting.search.start, "nothing")


def test_unknown_methods_are_refused(places, small_setting):
    with pytest.raises(ConfigError, match="unknown name 'magic'"):
        run_setting(small_setting, **places, methods=("magic",))
