"""The search that tunes every method: as many trials for all, resumable, and played again by `niss verify`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from experiments.reproduce.beyond import tune
from experiments.reproduce.checks import _search
from experiments.reproduce.design import METHODS, VARIANTS, Choice, Contestant, contestants, trial_cell
from experiments.reproduce.results import Result, merge_results, read_result, result_path
from experiments.reproduce.runner import OutOfTime, Watch
from experiments.reproduce.tuning import AXES, Axes, axes_for, best_of, edges_of, next_trials, trials_of
from support.results import made_up_cell

SMALL = Axes((0.1, 0.5), (0.1, 0.2), (4, 8), start=Choice(hidden=8))


def searched(axes: Axes, accuracy) -> dict[Choice, float]:
    """The trials of a whole search."""
    tried: dict[Choice, float] = {}
    while wanted := next_trials(axes, tried):
        assert not set(wanted) & set(tried)
        tried |= {choice: accuracy(choice) for choice in wanted}
    return tried


@pytest.mark.parametrize("corner", [(0, 0, 0), (0.5, 0.5, 1), (1, 1, 1), (0.2, 1, 0)])
def test_every_search_has_the_same_number_of_trials_and_climbs(corner):
    axes = AXES
    sizes = len(axes.clip), len(axes.learning_rate), len(axes.hidden)
    optimum = tuple(round(part * (size - 1)) for part, size in zip(corner, sizes, strict=True))

    def accuracy(choice: Choice) -> float:
        return -math.dist(axes.place(choice), optimum)

    tried = searched(axes, accuracy)
    assert len(tried) == axes.trials == 12
    assert axes.place(best_of(tried, axes)) == optimum


def test_the_grid_reaches_small_clips_and_equals_go_to_the_least():
    assert min(AXES.clip) == 0.02
    assert best_of(searched(AXES, lambda _: 0.1), AXES).clip == 0.02


def test_a_method_without_noise_does_not_try_clips():
    assert axes_for(METHODS["fedavg"], AXES).clip == (AXES.start.clip,)
    assert axes_for(METHODS["dp-fedavg"], AXES) == AXES


def test_everyone_is_tuned_under_every_variant_that_matters_to_them():
    found = contestants((1.0, 3.0), tuple(METHODS), tuple(VARIANTS))
    names = {(one.method.name, one.variant.name, one.epsilon) for one in found}
    assert len(names) == len(found)
    assert ("fedavg", "none", None) in names
    assert {variant for method, variant, _ in names if method == "niss-planned"} == set(VARIANTS)
    assert {variant for method, variant, _ in names if method == "dp-fedavg"} == {"none"}
    assert {variant for method, variant, _ in names if method == "secagg-ddg"} == {
        "none",
        "collusion",
        "repair",
    }


def test_a_search_goes_on_where_it_stopped_and_parts_add_up(places, small_setting, tmp_path):
    common = {"methods": ("dp-fedavg", "central-dp"), "device": "cpu", "axes": SMALL}
    with pytest.raises(OutOfTime):
        tune(small_setting, epsilons=(8.0,), **places, **common, progress=Watch(until=0.0))
    whole = tune(small_setting, epsilons=(8.0,), **places, **common)
    mine = [Contestant(METHODS[name], VARIANTS["none"], 8.0) for name in common["methods"]]
    assert {len(trials_of(whole, small_setting, one)) for one in mine} == {SMALL.trials}
    parts = [tmp_path / name for name in common["methods"]]
    for out in parts:
        tune(
            small_setting,
            epsilons=(8.0,),
            out=out,
            work=tmp_path / "other",
            **common | {"methods": (out.name,)},
        )
    merge_results(parts, tmp_path / "merged")
    merged = read_result(result_path(tmp_path / "merged", "tuning", small_setting.name))
    assert merged is not None
    assert all(one.same_run(other) for one, other in zip(whole.cells, merged.cells, strict=True))
    # Of two values each is on the edge.
    trials = trials_of(whole, small_setting, mine[1])
    assert edges_of(trials, next(iter(trials))) == ["clip", "rate", "hidden"]


def test_verify_plays_the_search_again(places, small_setting):
    whole = tune(small_setting, epsilons=(8.0,), **places, methods=("central-dp",), device="cpu", axes=SMALL)
    model = whole.cells[0]

    def played(tried: dict[Choice, float]):
        cells = tuple(
            replace(
                model,
                id=f"{number}",
                accuracy=value,
                labels={**model.labels, **vars(choice)},
            )
            for number, (choice, value) in enumerate(tried.items())
        )
        return list(_search(replace(whole, cells=cells)))

    tried = searched(AXES, lambda choice: choice.clip + choice.hidden / 1000)
    assert played(tried) == []
    (fault,) = played(dict(list(tried.items())[:-1]))
    assert "was not tried" in fault.detail
    # Had another clip been better, other rates would have been tried.
    (fault,) = played({**tried, next(iter(tried)): 100.0})
    assert "was not tried" in fault.detail
    (fault,) = played({**tried, Choice(clip=0.02, learning_rate=0.05, hidden=16): 0.0})
    assert "13 trials" in fault.detail
    (fault,) = played({**tried, Choice(clip=0.3): 0.0})
    assert "not in the grid" in fault.detail


def test_a_trial_with_several_seeds_counts_once_all_are_there(small_setting):
    """Then it scores the mean over them of the last round and those before it."""
    setting, one = (
        replace(small_setting, trials=(1, 2)),
        Contestant(METHODS["central-dp"], VARIANTS["none"], 8.0),
    )
    choice = Choice(clip=0.1, learning_rate=0.1, hidden=8)
    cells = tuple(
        made_up_cell(trial_cell(labels), labels, 0.8, rounds=2, curve=((1, 0.4 + seed / 10), (2, 0.8)))
        for seed in (1, 2)
        for labels in [one.trial(choice, seed)]
    )
    assert len({cell.id for cell in cells}) == 2
    assert trials_of(Result("tuning", setting.name, {}, cells[:1]), setting, one) == {}
    found = trials_of(Result("tuning", setting.name, {}, cells), setting, one)
    assert found == {choice: pytest.approx((0.65 + 0.7) / 2)}
