"""A statement straight from a graph: numbers, words, and what it does not claim."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import niss
from niss.mechanism import gdp_epsilon

GRAPH = niss.ShareGraph.regular(12, degree=4, beacon=b"statement")


def make(**changes: object) -> niss.Statement:
    settings: dict[str, object] = {
        "unit_variance": 0.25,
        "residual_variance": 0.2,
        "sensitivity": 0.5,
        "delta": 1e-5,
    }
    return niss.assess(GRAPH, **{**settings, **changes})  # type: ignore[arg-type]


def test_numbers_follow_from_the_effective_variance() -> None:
    made = make(participations=4)
    variance = niss.effective_variance(GRAPH, unit_variance=0.25, residual_variance=0.2)
    for client, value in zip(made.clients, variance, strict=True):
        assert client.mu_joint == pytest.approx(2 * 0.5 / math.sqrt(value))
        assert client.epsilon_joint == pytest.approx(gdp_epsilon(client.mu_joint, 1e-5))
        assert client.mu_marginal == pytest.approx(2 * 0.5 / math.sqrt(0.25 * 8 + 0.2))
    assert made.epsilon_joint == max(client.epsilon_joint for client in made.clients)
    assert json.loads(json.dumps(made.to_json()))["epsilon_joint"] == made.epsilon_joint


def test_without_residual_noise_there_is_no_guarantee_and_no_number() -> None:
    made = make(residual_variance=0.0)
    assert made.epsilon_joint is None
    assert made.words.startswith("No guarantee")
    assert made.epsilon_marginal is not None
    assert "what the paper counts" in made.paper


def test_colluders_drops_and_reveals_are_told_apart() -> None:
    plain = make()
    corrupted = make(colluders=[0, 1])
    assert [client.client for client in corrupted.clients] == list(range(2, 12))
    assert corrupted.epsilon_joint > plain.epsilon_joint
    assert "up to 2 participants" in corrupted.adversary
    dropped = make(dropped=[0, 1])
    assert dropped.epsilon_joint < corrupted.epsilon_joint
    pairs = [(2, int(other)) for other in GRAPH.neighbours(2)]
    bare = make(revealed=pairs)
    assert bare.clients[2].mu_joint == pytest.approx(0.5 / math.sqrt(0.2))
    assert f"{len(pairs)} edges were revealed" in bare.adversary


def test_sensitivities_may_differ_and_are_checked() -> None:
    made = make(sensitivity=np.linspace(0.1, 0.5, 12))
    assert made.clients[0].epsilon_joint < made.clients[11].epsilon_joint
    with pytest.raises(niss.errors.ConfigError, match="sensitivity"):
        make(sensitivity=[0.1, 0.2])
    with pytest.raises(niss.errors.ConfigError, match="participations"):
        make(participations=0)


def test_it_says_what_is_not_protected() -> None:
    assert any("took part" in line for line in make().not_protected)
