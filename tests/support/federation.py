"""Settings of a small federation, shared by the tests of this folder."""

from __future__ import annotations

from niss.simulation import Config, make_config


def small_config(**changes: object) -> Config:
    """Twelve clients, six a round, four rounds, calibrated niss; any section may be replaced."""
    values: dict[str, object] = {
        "name": "small",
        "seed": 3,
        "rounds": 4,
        "data": {"clients": 12},
        "training": {"participants": 6, "epochs": 2, "batch_size": 4, "learning_rate": 0.1},
        "privacy": {"epsilon": 20.0, "clip": 1.0},
        "methods": [{"name": "niss", "neighbours": 3}],
    }
    return make_config({**values, **changes})
