"""Clients that the data itself has: settings that follow from the dataset, and who then holds which samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import niss
from niss.data import Dataset, partition_by_owner
from niss.data.catalog import CATALOG
from niss.errors import ConfigError
from niss.learning import TokenSamples
from niss.randomness import SimStream
from niss.settings import to_values
from niss.simulation import Config, make_config, with_overrides
from niss.simulation.inputs import gather_together, sample_spec, to_tensors

SIZES = (3, 1, 4, 2, 5, 2)
OWNERS = np.random.default_rng(4).permutation(np.repeat(np.arange(len(SIZES)), SIZES))


@pytest.fixture
def written() -> Dataset:
    """Seventeen pictures by six writers."""
    random = np.random.default_rng(3)
    return Dataset(
        "written",
        random.integers(0, 256, (17, 1, 4, 4), dtype=np.uint8),
        random.integers(0, 3, 17),
        random.integers(0, 256, (5, 1, 4, 4), dtype=np.uint8),
        random.integers(0, 3, 5),
        classes=3,
        mean=(0.5,),
        std=(0.5,),
        owners=OWNERS,
    )


def config_of(**data: Any) -> Config:
    training = {"participants": 2, "epochs": 1}
    return make_config({"data": data, "training": training, "rounds": 2, "methods": [{"name": "fedavg"}]})


def test_what_is_left_out_follows_from_the_dataset():
    for spec in CATALOG:
        data = make_config({"data": {"dataset": spec.name}})
        expected = ("iid", 1000) if spec.clients is None else ("natural", spec.clients)
        assert (data.split, data.clients) == expected
    chosen = make_config({"data": {"dataset": "shakespeare", "split": "natural"}})
    assert (chosen.split, chosen.clients) == ("natural", 627)
    fewer = make_config({"data": {"dataset": "shakespeare", "clients": 300}})
    assert (fewer.split, fewer.clients) == ("natural", 300)


def test_another_dataset_brings_its_own_clients_and_what_was_set_stays():
    plays = with_overrides(Config(), {"data.dataset": "shakespeare"})
    assert (plays.split, plays.clients) == ("natural", 627)
    digits = with_overrides(plays, {"data.dataset": "mnist-mini"})
    assert (digits.split, digits.clients) == ("iid", 1000)
    chosen = with_overrides(with_overrides(Config(), {"data.clients": 400}), {"data.dataset": "shakespeare"})
    assert (chosen.split, chosen.clients) == ("natural", 400)
    # A manifest says all of it.
    assert make_config(to_values(plays)) == plays


def test_participations_are_counted_from_the_clients_of_the_dataset():
    config = make_config(
        {"data": {"dataset": "shakespeare"}, "training": {"participants": 100}, "rounds": 12}
    )
    assert config.participations == 2  # six whole cohorts of 100 among 627


def test_every_client_holds_the_samples_it_owns(written):
    (materials,) = gather_together([config_of(split="natural", clients=6, dataset="mine")], written)
    assert materials.clients.sizes.tolist() == list(SIZES)
    for client in range(6):
        assert materials.clients.samples(client).tolist() == np.flatnonzero(np.equal(OWNERS, client)).tolist()


def test_fewer_clients_are_drawn_by_the_seed_and_keep_their_samples_whole(written):
    chosen = set()
    for seed in range(6):
        config = with_overrides(config_of(split="natural", clients=4, dataset="mine"), {"seed": seed})
        (materials,) = gather_together([config], written)
        owners = [np.unique(OWNERS[materials.clients.samples(client)]) for client in range(4)]
        assert all(len(one) == 1 for one in owners)
        numbers = [int(one[0]) for one in owners]
        assert numbers == sorted(set(numbers))
        assert materials.clients.sizes.tolist() == [SIZES[number] for number in numbers]
        chosen.add(tuple(numbers))
    assert len(chosen) > 1


def test_who_has_more_samples_than_allowed_keeps_some_drawn_by_the_seed(written):
    kept = set()
    for seed in range(6):
        config = with_overrides(
            config_of(split="natural", clients=6, dataset="mine", samples_per_client=2), {"seed": seed}
        )
        (materials,) = gather_together([config], written)
        assert materials.clients.sizes.tolist() == [min(size, 2) for size in SIZES]
        for client in range(6):
            rows = materials.clients.samples(client).numpy()
            assert (np.diff(rows) > 0).all()
            assert (OWNERS[rows] == client).all()
        kept.add(tuple(materials.clients.samples(int(np.argmax(SIZES))).tolist()))
    assert len(kept) > 1


def test_samples_of_nobody_and_too_few_clients_are_refused(written):
    with pytest.raises(ConfigError, match="belong to nobody"):
        gather_together(
            [config_of(split="natural", clients=6, dataset="mine")], replace(written, owners=None)
        )
    with pytest.raises(ConfigError, match="6 clients, not 7"):
        gather_together([config_of(split="natural", clients=7, dataset="mine")], written)
    text = np.zeros((4, 3), dtype=np.int64)
    texts = Dataset("x", text, text, text, text, classes=2, vocabulary=("a", "b"))
    with pytest.raises(ConfigError, match="no label of its own"):
        gather_together([config_of(split="iid", clients=2)], texts)
    with pytest.raises(ConfigError, match="at least 1"):
        partition_by_owner(OWNERS, clients=0, stream=SimStream(1))


def test_tokens_reach_the_model_as_they_are(written):
    pictures, _ = to_tensors(written)
    assert pictures[0].dtype == torch.float32
    inputs = np.arange(6).reshape(2, 3)
    labels = inputs % 2
    dataset = Dataset("x", inputs, labels, inputs[:1], labels[:1], classes=2, vocabulary=tuple("abcdef"))
    train, test = to_tensors(dataset)
    assert train[0].dtype == train[1].dtype == torch.int64
    assert train[0].tolist() == inputs.tolist()
    assert train[1].tolist() == labels.tolist()
    assert len(test[0]) == 1
    assert sample_spec(dataset) == TokenSamples(3, 6)


class NextLetter(torch.nn.Module):
    """Scores of the next token from this one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def test_a_run_on_clients_of_their_own_with_a_model_of_ones_own(monkeypatch):
    inputs = np.random.default_rng(8).integers(0, 5, (48, 3))
    labels = (inputs + 2) % 5
    owners, letters = np.repeat(np.arange(12), 4), tuple("abcde")
    texts = Dataset("texts", inputs, labels, inputs[::4], labels[::4], 5, vocabulary=letters, owners=owners)
    monkeypatch.setattr("niss.simulation.inputs.load_dataset", lambda *_, **__: texts)
    config = with_overrides(
        config_of(split="natural", clients=12, dataset="texts"),
        {"rounds": 30, "training.participants": 6, "training.learning_rate": 1.0, "training.engine": "plain"},
    )
    result = niss.run(config, model=NextLetter)
    assert result.accuracy > 0.6


def test_a_model_of_another_kind_is_refused_before_anything_is_downloaded(monkeypatch):
    def fetched(*_: Any, **__: Any) -> Dataset:
        raise AssertionError("read the data first")

    monkeypatch.setattr("niss.simulation.inputs.load_dataset", fetched)
    for dataset, name in (("shakespeare", "mlp"), ("cifar10", "gru")):
        config = with_overrides(config_of(dataset=dataset), {"model.name": name})
        with pytest.raises(ConfigError, match=r"takes .* and the data are"):
            niss.run(config)
    with pytest.raises(ConfigError, match="no such setting"):
        niss.run(with_overrides(config_of(dataset="cifar10"), {"model.heads": 3}))
