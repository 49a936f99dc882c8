"""Who takes part: cohorts that return in turn, rests that are kept, draws in secret."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import niss
from niss.randomness import SimStream
from niss.simulation.federation import aggregation_weights, choose_participants
from support.federation import small_config

TRAINING = {"participants": 3, "epochs": 1, "batch_size": 4, "learning_rate": 0.1}
EVERYONE = np.ones(12, dtype=bool)


def drawn(
    number: int, sampling: str, size: int = 3, eligible: np.ndarray = EVERYONE, resting=()
) -> np.ndarray:
    return choose_participants(
        number,
        sampling=sampling,  # type: ignore[arg-type]
        size=size,
        eligible=eligible,
        stream=SimStream(1).child("participants"),
        resting=resting,
    )


def test_cyclic_cohorts_return_after_exactly_their_separation() -> None:
    rounds = [drawn(number, "cyclic").tolist() for number in range(12)]
    assert rounds[:4] == rounds[4:8] == rounds[8:]
    assert sorted(np.concatenate(rounds[:4])) == list(range(12))
    assert rounds[0] == drawn(0, "shuffled").tolist()


def test_those_who_rest_are_not_drawn() -> None:
    rounds: list[np.ndarray] = []
    for number in range(40):
        rounds.append(drawn(number, "uniform", resting=rounds[-2:]))
        assert rounds[-1].size == 3
        assert not np.isin(rounds[-1], np.concatenate([*rounds[-3:-1], [-1]])).any()
    assert len({tuple(cohort) for cohort in rounds}) > 12


def test_poisson_draws_each_client_on_its_own() -> None:
    """2,000 rounds of 12 clients; every mean within six deviations of one half, and pairs uncorrelated."""
    joined = np.zeros((2_000, 12))
    for number, row in enumerate(joined):
        row[drawn(number, "poisson", size=6)] = 1.0
    assert np.abs(joined.mean(axis=0) - 0.5).max() < 6 * 0.5 / np.sqrt(2_000)
    correlation = np.corrcoef(joined.T) - np.eye(12)
    assert np.abs(correlation).max() < 6 / np.sqrt(2_000)
    assert len({int(row.sum()) for row in joined}) > 5
    spent = EVERYONE.copy()
    spent[3] = False
    assert not any(3 in drawn(number, "poisson", size=6, eligible=spent) for number in range(20))


@pytest.mark.parametrize(
    ("rule", "cap", "expected"),
    [
        ("equal", None, [0.2] * 3),
        ("declared", None, [1 / 13, 2 / 13, 10 / 13]),
        ("declared", 20, [0.2, 0.4, 0.4]),
    ],
)
def test_weights_are_equal_parts_of_a_public_number_or_follow_declared_sizes(rule, cap, expected) -> None:
    """Of five that are expected, three joined: the equal weights of a secret draw do not depend on who did."""
    found = aggregation_weights(np.array([10, 20, 100]), rule=rule, cap=cap, divisor=5)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("sampling", "participants"), [("shuffled", 12), ("poisson", 4)])
def test_fedavg_equals_an_average_by_hand(given, sampling, participants):
    """One step on the full batch of every client; a secret draw divides by four, however many there were."""
    training = {"participants": participants, "sampling": sampling, "epochs": 1, "batch_size": 100}
    config = small_config(rounds=1, training={**training, "learning_rate": 0.5}, methods=[{"name": "fedavg"}])
    result = niss.run(config, **given)
    members = np.arange(12)
    if sampling == "poisson":
        stream = SimStream(config.seed).child("participants")
        members = choose_participants(0, sampling=sampling, size=4, eligible=EVERYONE, stream=stream)
        assert result.rounds[0].participants == members.size != 4
    expected = torch.zeros(3, 5)
    for client in members:
        inputs, labels = map(torch.from_numpy, given["clients"][client])
        weight, bias = torch.zeros(3, 5, requires_grad=True), torch.zeros(3, requires_grad=True)
        scores = torch.nn.functional.linear(inputs, weight, bias)
        torch.nn.functional.cross_entropy(scores, labels).backward()
        expected -= 0.5 * weight.grad / participants
    assert torch.allclose(result.state_dict["weight"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("sampling", "separation", "most"),
    [
        ("shuffled", None, 3),
        ("cyclic", None, 3),
        ("uniform", None, 9),
        ("uniform", 3, 3),
        ("poisson", None, 9),
    ],
)
def test_how_often_a_client_can_take_part(sampling: str, separation: int | None, most: int) -> None:
    config = small_config(
        rounds=9,
        training={**TRAINING, "sampling": sampling, "separation": separation},
        methods=[{"name": "fedavg"}],
    )
    assert config.participations == most
