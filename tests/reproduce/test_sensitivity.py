"""Every reading of the paper's sensitivity gives the noise it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments.reproduce.figure3 import base_config, cell_config, panel_cells, setup_of
from experiments.reproduce.paper import NBAFL, PANELS, READINGS, Setup, find_panel, find_reading
from niss.errors import ConfigError

GAUSSIAN = math.sqrt(2 * math.log(1.25 / 1e-4)) / 10


def test_the_paper_s_numbers():
    assert NBAFL.sigma(Setup()) == pytest.approx(0.00434, abs=5e-6)
    expected = {
        "nbafl": 6 / 600,
        "nbafl-weighted": 6 / 600 / 30,
        "one-step": 0.06 / 600,
        "minibatch": 0.6,
        "unit": 1.0,
        "clip": 3.0,
        "replace": 6.0,
        "unit-noise": math.sqrt(0.1) / GAUSSIAN,
    }
    found = {reading.name: reading.sigma(Setup()) for reading in READINGS}
    assert found == pytest.approx({name: value * GAUSSIAN for name, value in expected.items()})


@pytest.mark.parametrize("name", [*(reading.name for reading in READINGS), "0.05"])
def test_the_noise_that_runs_is_the_noise_of_the_reading(name):
    """sigma_k of the plan that would run, and sigma^2 = sigma_k^2 / v of its unit share."""
    base = base_config(find_panel("mnist-mlp-iid"), rounds=1)
    reading = find_reading(name)
    config = cell_config(base, x=0.3, seed=1, reading=reading)
    plan = config.plan(config.methods[0]).for_round(
        np.arange(30), weights=np.full(30, 1 / 30), records=np.full(30, 600), beacon=b"b" * 32
    )
    sigma = reading.sigma(setup_of(base))
    assert np.sqrt(plan.own_variance) == pytest.approx(sigma, rel=1e-9)
    assert plan.unit_variance == pytest.approx(sigma**2 / 10, rel=1e-9)
    assert plan.aggregate_variance == pytest.approx(30 * 0.3 * sigma**2, rel=1e-9)


def test_panels_are_the_paper_s():
    assert len(PANELS) == len({panel.name for panel in PANELS}) == 8
    for panel in PANELS:
        config = base_config(panel, rounds=100)
        assert (config.data.clients, config.training.participants) == (100, 30)
        assert (config.training.batch_size, config.training.epochs) == (10, 5)
        assert config.training.learning_rate == 0.01
        assert (config.privacy.epsilon, config.privacy.delta, config.privacy.clip) == (10.0, 1e-4, 3.0)
        assert config.model.hidden == ((200, 200) if panel.model == "mlp" else None)
        assert config.data.split == ("iid" if panel.split == "iid" else "shards")
        cells = panel_cells(config, xs=(0.0, 1.0), seeds=(1, 2), reading=NBAFL)
        assert list(cells) == ["nbafl/X=0/seed-1", "nbafl/X=0/seed-2", "nbafl/X=1/seed-1", "nbafl/X=1/seed-2"]
        (method,) = cells["nbafl/X=1/seed-2"][1].methods
        assert (method.distortion, method.tau2, method.neighbours) == ("scalar", 1.0, 10.0)


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="unknown panel"):
        find_panel("mnist-lstm-iid")
    for name in ("nothing", "-1", "inf"):
        with pytest.raises(ConfigError, match="unknown reading"):
            find_reading(name)
