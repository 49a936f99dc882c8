"""A simulation gives the same result on the cohort engine as on the plain loop, in step as alone."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

import niss
from niss.learning import ImageSamples, build_model
from niss.randomness import SimStream
from niss.simulation import training as training_module
from niss.simulation.method_run import RoundEvent
from support.federation import small_config

METHODS = ("fedavg", "dp-fedavg", "central-dp", "niss")
SIZES = {"even": [8] * 12, "uneven": [5, 9, 1, 8, 12, 3, 4, 10, 7, 2, 6, 11]}


def federation(model: str, sizes: list[int]) -> dict[str, object]:
    """Images of 8 x 8 in float64, dealt out in the sizes given, and a model for them."""
    drawn = np.random.default_rng(5)
    count = sum(sizes) + 20
    images = torch.from_numpy(drawn.standard_normal((count, 1, 8, 8)))
    labels = torch.from_numpy(drawn.integers(0, 3, count))
    ends = np.cumsum([0, *sizes])
    clients = [(images[start:end], labels[start:end]) for start, end in itertools.pairwise(ends)]
    hidden = (6, 5) if model == "mlp" else None
    module = build_model(
        model,
        samples=ImageSamples((1, 8, 8)),
        classes=3,
        stream=SimStream(1),
        hidden=hidden,
    ).double()
    return {"model": module, "clients": clients, "test": (images[-20:], labels[-20:])}


def weights_of(result: niss.RunResult) -> np.ndarray:
    return np.concatenate([tensor.reshape(-1).numpy() for tensor in result.state_dict.values()])


def with_engine(engine: str, **changes: object) -> niss.Config:
    training = {"participants": 6, "epochs": 2, "batch_size": 4, "learning_rate": 0.1, "engine": engine}
    return small_config(training=training | changes.pop("training", {}), **changes)


@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_every_method_ends_with_the_weights_of_the_plain_loop(model: str, sizes: str) -> None:
    given = federation(model, SIZES[sizes])
    methods = [{"name": name} | ({"neighbours": 3} if name == "niss" else {}) for name in METHODS]
    fast = niss.compare(with_engine("cohort", methods=methods, rounds=2), **given)
    plain = niss.compare(with_engine("plain", methods=methods, rounds=2), **given)
    for one, other in zip(fast.results, plain.results, strict=True):
        np.testing.assert_allclose(weights_of(one), weights_of(other), rtol=1e-10, atol=1e-12)


def test_a_method_ends_the_same_alone_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given = federation("mlp", SIZES["uneven"])
    given["model"] = given["model"].float()  # type: ignore[attr-defined]
    given["clients"] = [(images.float(), labels) for images, labels in given["clients"]]  # type: ignore[attr-defined]
    given["test"] = (given["test"][0].float(), given["test"][1])  # type: ignore[index]
    methods = [{"name": "fedavg"}, {"name": "niss", "neighbours": 3}, {"name": "dp-fedavg"}]
    together = niss.compare(with_engine("cohort", methods=methods), **given)
    for method, result in zip(methods, together.results, strict=True):
        alone = niss.run(with_engine("cohort", methods=[method]), **given)
        np.testing.assert_array_equal(weights_of(alone), weights_of(result))
        assert (alone.summary, alone.rounds) == (result.summary, result.rounds)
    # With room for the updates of one method only, they take turns, and nothing changes.
    monkeypatch.setattr(training_module, "TOGETHER_BYTES", 1)
    in_turns = niss.compare(with_engine("cohort", methods=methods), **given)
    assert in_turns.summary == together.summary


def test_the_manifest_names_engine_and_precision(tmp_path) -> None:
    given = federation("mlp", SIZES["even"])
    niss.run(with_engine("cohort", training={"device": "cpu"}), out=tmp_path / "fast", **given)
    niss.run(with_engine("plain"), out=tmp_path / "plain", **given)
    fast, plain = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("fast", "plain"))
    assert fast["precision"] == plain["precision"] == "float64"
    assert "MLP groups" in fast["engine"]
    assert "plain loop" in plain["engine"]
    assert "it was asked for" in plain["engine"]


def test_progress_within_a_round_counts_the_clients_of_all_methods() -> None:
    seen: list[niss.simulation.TrainingEvent] = []

    class Watching:
        def __call__(self, event: RoundEvent) -> None:
            pass

        def training(self, event: niss.simulation.TrainingEvent) -> None:
            seen.append(event)

    methods = [{"name": "fedavg"}, {"name": "dp-fedavg"}]
    given = federation("mlp", SIZES["even"])
    niss.compare(with_engine("cohort", methods=methods, rounds=2), progress=Watching(), **given)
    ends = [event for event in seen if event.done == event.clients]
    assert [(event.round, event.clients) for event in ends] == [(1, 12), (2, 12)]
    assert seen[0].labels == ("fedavg", "dp-fedavg")


def test_a_device_that_is_not_there_is_refused_before_any_work(tmp_path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is available")
    given = federation("mlp", SIZES["even"])
    with pytest.raises(niss.errors.ConfigError, match="CUDA"):
        niss.run(with_engine("cohort", training={"device": "cuda"}), out=tmp_path / "never", **given)
    assert not (tmp_path / "never").exists()
