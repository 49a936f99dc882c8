"""Seeds, and other settings, that train as one cohort end as if each had run alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import niss
from niss.errors import ConfigError, RunFolderError
from niss.simulation import make_config, with_overrides
from niss.simulation.method_run import CheckpointFolder
from niss.simulation.results import Comparison
from niss.simulation.runner import compare_together
from support.federation import assert_same_run, killed

SAME_BYTES = ("metrics.jsonl", "ledger.jsonl", "model.safetensors", "privacy.json", "result.json")


def mini(**changes: object) -> niss.Config:
    values: dict[str, object] = {
        "rounds": 2,
        "data": {"dataset": "mnist-mini", "clients": 20, "samples_per_client": 20},
        "model": {"hidden": [8]},
        "training": {"participants": 6, "epochs": 1, "device": "cpu", "workers": 1},
        "privacy": {"epsilon": 50.0},
        "methods": [{"name": "dp-fedavg"}, {"name": "niss", "neighbours": 3}],
    }
    return make_config({**values, **changes})


def compare_seeds(config: niss.Config, seeds: list[int], out: Path | None = None) -> dict[int, Comparison]:
    configs = {f"seed-{seed}": with_overrides(config, {"seed": seed}) for seed in seeds}
    return dict(zip(seeds, compare_together(configs, out=out).values(), strict=True))


def test_seeds_together_equal_each_seed_alone(tmp_path):
    found = compare_seeds(mini(), [4, 7], out=tmp_path / "all")
    assert list(found) == [4, 7]
    for seed, together in found.items():
        alone = niss.compare(with_overrides(mini(), {"seed": seed}), out=tmp_path / f"alone-{seed}")
        assert together.summary == alone.summary
        for method in ("dp-fedavg", "niss"):
            for name in SAME_BYTES:
                one = tmp_path / "all" / f"seed-{seed}" / method / name
                assert one.read_bytes() == (tmp_path / f"alone-{seed}" / method / name).read_bytes(), name


def test_seeds_differ_in_partition_weights_and_noise():
    first, second = compare_seeds(mini(), [1, 2]).values()
    one, other = (comparison.results[0].state_dict for comparison in (first, second))
    assert not any(np.allclose(one[name], other[name]) for name in one)


def test_other_local_work_trains_in_its_own_cohort():
    configs = {
        "slow": mini(),
        "fast": with_overrides(mini(), {"training.learning_rate": 0.3}),
        "short": with_overrides(mini(), {"training.batch_size": 3, "rounds": 3}),
    }
    for name, comparison in compare_together(configs).items():
        assert comparison.summary == niss.compare(configs[name]).summary


def test_killed_and_continued(tmp_path, monkeypatch):
    whole, calls = compare_seeds(mini(), [1, 2], out=tmp_path / "whole"), itertools.count(1)
    with killed(monkeypatch, CheckpointFolder, "append_round", lambda *_: next(calls) == 6):
        compare_seeds(mini(), [1, 2], out=tmp_path / "cut")
    cut = compare_seeds(mini(), [1, 2], out=tmp_path / "cut")
    assert [one.summary for one in cut.values()] == [one.summary for one in whole.values()]
    for path in (tmp_path / "whole").rglob("metrics.jsonl"):
        assert_same_run(path.parent, tmp_path / "cut" / path.parent.relative_to(tmp_path / "whole"))


def test_a_folder_with_other_settings_is_refused(tmp_path):
    compare_seeds(mini(), [1], out=tmp_path)
    with pytest.raises(RunFolderError, match="other settings"):
        compare_seeds(mini(rounds=3), [1], out=tmp_path)
    # Where the clients train is no setting of the experiment.
    compare_seeds(with_overrides(mini(), {"training.device": "auto"}), [1], out=tmp_path)


def test_one_cohort_has_one_model():
    with pytest.raises(ConfigError, match="the same"):
        compare_together({"a": mini(), "b": mini(model={"hidden": [9]})})
    with pytest.raises(ConfigError, match="nothing"):
        compare_together({})
