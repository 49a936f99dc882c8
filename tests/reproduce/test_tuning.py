"""The search that tunes every method: as many trials for all, resumable, and played again by `niss verify`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from experiments.reproduce.beyond import tune
from experiments.reproduce.checks import _search
from experiments.reproduce.design import (
    METHODS,
    MLP_SEARCH,
    NOT_RUN_AGAIN,
    VARIANTS,
    Choice,
    Contestant,
    Search,
    as_stored,
    contestants,
    find_setting,
    trial_cell,
    walk,
)
from experiments.reproduce.results import Result, merge_results, read_result, result_path
from experiments.reproduce.runner import OutOfTime, Watch
from experiments.reproduce.tuning import beginning, best_of, edges_of, next_trials, open_trials, trials_of
from support.results import made_up_cell

SMALL = Search((0.1, 0.5), (0.1, 0.2), (8,), Choice(0.1, 0.1, 8), epsilons=(8.0, 1.0), seeds=(1,))
COARSE = as_stored(find_setting("mnist-iid-client-100-of-1000")).search


def searched(search: Search, accuracy) -> dict[Choice, float]:
    """The trials of a whole search."""
    tried: dict[Choice, float] = {}
    while wanted := next_trials(search, search.start, tried):
        assert not set(wanted) & set(tried)
        tried |= {choice: accuracy(choice) for choice in wanted}
    return tried


def hill(search: Search, optimum: tuple[int, ...]):
    return lambda choice: -math.dist(search.place(choice), optimum)


@pytest.mark.parametrize("search", [MLP_SEARCH, COARSE], ids=["walk", "coarse"])
@pytest.mark.parametrize("corner", [(0, 0, 0), (0.5, 0.5, 1), (1, 1, 1), (0.2, 1, 0)])
def test_every_search_climbs(search, corner):
    sizes = len(search.clip), len(search.learning_rate), len(search.hidden)
    optimum = tuple(round(part * (size - 1)) for part, size in zip(corner, sizes, strict=True))
    tried = searched(search, hill(search, optimum))
    assert search.place(best_of(tried, search)) == optimum
    assert search.walks or len(tried) == 12


def test_whoever_is_chosen_was_tried_beside_all_its_neighbours():
    search = MLP_SEARCH
    tried = searched(search, hill(search, (2, 5, 0)))
    best = best_of(tried, search)
    for axis, factor in ((axis, factor) for axis in ("clip", "learning_rate") for factor in (0.5, 2.0)):
        assert replace(best, **{axis: factor * getattr(best, axis)}) in tried
    assert edges_of(tried, best) == []
    # At the end of an axis there is no neighbour, and that is said.
    tried = searched(search, hill(search, (0, 5, 0)))
    assert edges_of(tried, best_of(tried, search)) == ["clip"]


def test_equals_go_to_the_least():
    assert best_of(searched(COARSE, lambda _: 0.1), COARSE).clip == 0.02
    assert best_of(searched(MLP_SEARCH, lambda _: 0.1), MLP_SEARCH).clip == 0.0125


def test_a_method_without_noise_does_not_try_clips():
    assert MLP_SEARCH.of(METHODS["fedavg"]).clip == (MLP_SEARCH.start.clip,)
    assert MLP_SEARCH.of(METHODS["dp-fedavg"]) == MLP_SEARCH


def test_a_further_epsilon_begins_at_what_the_first_one_chose(small_setting):
    setting = replace(small_setting, search=replace(SMALL, clip=(0.1, 0.2, 0.4), seeds=(1,)))
    first, other = (Contestant(METHODS["central-dp"], VARIANTS["none"], epsilon) for epsilon in (8.0, 1.0))

    def tuned(clips: dict[float, float]) -> Result:
        choices = [(Choice(clip, rate, 8), value) for clip, value in clips.items() for rate in (0.1, 0.2)]
        made = [(first.trial(choice), value - choice.learning_rate) for choice, value in choices]
        cells = (made_up_cell(trial_cell(labels), labels, value) for labels, value in made)
        return Result("tuning", setting.name, {}, tuple(cells))

    assert open_trials(None, setting, other) == []
    begun = tuned({0.1: 0.5, 0.2: 0.6})
    assert open_trials(begun, setting, first) == [Choice(0.4, 0.1, 8)]
    assert open_trials(begun, setting, other) == []
    whole = tuned({0.1: 0.5, 0.2: 0.6, 0.4: 0.7})
    assert open_trials(whole, setting, first) == []
    assert beginning(whole, setting, other) == Choice(0.4, 0.1, 8)
    wanted = {Choice(0.2, 0.1, 8), Choice(0.4, 0.1, 8), Choice(0.4, 0.2, 8)}
    assert set(open_trials(whole, setting, other)) == wanted


def test_how_a_setting_was_tuned_is_said_by_its_file():
    name = "mnist-iid-client-100-of-1000"
    new = find_setting(name)
    assert new.base["tuned"] == new.search.words == "at epsilon 1, 3 and 8 on 3 seeds"
    assert as_stored(new).search.words == "at epsilon 3 on one seed"
    assert "tuned" not in as_stored(new).base
    assert (len(new.seeds), new.bands) == (5, "optimised")
    assert all(as_stored(find_setting(one)).bands == "square-root" for one in NOT_RUN_AGAIN)
    assert walk(Choice(0.1, 4.0, 0), 2.93).words == "at epsilon 2.93 on 3 seeds"


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
    setting = replace(small_setting, search=SMALL)
    common = {"methods": ("dp-fedavg", "central-dp"), "device": "cpu"}
    with pytest.raises(OutOfTime):
        tune(setting, **places, **common, progress=Watch(until=0.0))
    whole = tune(setting, **places, **common)
    mine = [
        Contestant(METHODS[name], VARIANTS["none"], epsilon)
        for name in common["methods"]
        for epsilon in SMALL.epsilons
    ]
    assert all(open_trials(whole, setting, one) == [] and trials_of(whole, setting, one) for one in mine)
    parts = [tmp_path / name for name in common["methods"]]
    for out in parts:
        tune(setting, out=out, work=tmp_path / "other", **common | {"methods": (out.name,)})
    merge_results(parts, tmp_path / "merged")
    merged = read_result(result_path(tmp_path / "merged", "tuning", setting.name))
    assert merged is not None
    assert all(one.same_run(other) for one, other in zip(whole.cells, merged.cells, strict=True))


@pytest.mark.parametrize("way", ["walk", "coarse"])
def test_verify_plays_the_search_again(small_setting, way):
    """From a file: what it says of its search, and the accuracies."""
    one = Contestant(METHODS["central-dp"], VARIANTS["none"], 3.0)
    setting = small_setting if way == "walk" else as_stored(small_setting)
    search = setting.search
    seeds = (None,) if len(search.seeds) == 1 else search.seeds

    def played(tried: dict[Choice, float]):
        made = [(one.trial(choice, seed), value) for choice, value in tried.items() for seed in seeds]
        cells = (made_up_cell(trial_cell(labels), labels, value) for labels, value in made)
        return [fault.detail for fault in _search(Result("tuning", setting.name, setting.base, tuple(cells)))]

    tried = searched(search, lambda choice: choice.clip + choice.hidden / 1000)
    assert played(tried) == []
    (fault,) = played(dict(list(tried.items())[:-1]))
    assert "was not tried" in fault
    # Had another choice been better, others would have been tried.
    (fault,) = played({**tried, next(iter(tried)): 100.0})
    assert "was not tried" in fault or "no part of the search" in fault
    (fault,) = played({**tried, Choice(search.clip[0], search.learning_rate[0], search.hidden[0]): 0.0})
    assert "1 trials are no part of the search" in fault
    (fault,) = played({**tried, Choice(clip=0.3): 0.0})
    assert "not in the grid" in fault


def test_a_trial_with_several_seeds_counts_once_all_are_there(small_setting):
    """Then it scores the mean over them of the last round and those before it."""
    setting, one = (
        replace(small_setting, search=replace(SMALL, seeds=(1, 2))),
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
