"""The LoRA example: the base stays frozen, adapters alone are exchanged, and it learns: by itself, and as an app."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from examples.test_flower_app import needs_ray, simulated

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora_app"


@pytest.fixture(scope="module")
def task():
    sys.path.insert(0, str(EXAMPLE))
    try:
        from lora_app import task as module
    finally:
        sys.path.remove(str(EXAMPLE))
    return module


@pytest.mark.slow
def test_adapters_learn_and_the_base_stays_as_it_was(task):
    model = task.make_model()
    part = task.trained_part(model)
    assert {name.rpartition(".")[2] for name in part} == {"down", "up", "weight", "bias"}
    assert all(".layer." not in name for name in part), "no weight of the base is exchanged"
    whole = sum(one.numel() for one in task.make_model(adapters=False).parameters())
    exchanged = sum(one.numel() for one in part.values())
    assert exchanged == 644
    assert whole > 30 * exchanged
    before = {name: one.clone() for name, one in model.state_dict().items()}
    assert task.accuracy(model) < 0.35
    task.train(model, task.client_data(0, 600), epochs=3, rate=0.3, batch=10, seed=1)
    assert task.accuracy(model) > 0.9
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]) == (name not in part), name


@pytest.mark.slow
def test_what_is_sent_is_put_back(task):
    model, other = task.make_model(), task.make_model()
    task.train(model, task.client_data(1, 100), epochs=1, rate=0.3, batch=10, seed=1)
    task.load_trained_part(other, task.trained_part(model))
    text, _ = task.messages(20, torch.Generator().manual_seed(5))
    assert torch.equal(model(text), other(text))
    with pytest.raises(ValueError, match="expected"):
        task.load_trained_part(other, {"desk.weight": model.desk.weight})


@needs_ray
@pytest.mark.slow
def test_two_rounds_in_simulation(tmp_path):
    report = simulated(tmp_path, EXAMPLE, {"rounds": 2})
    assert [one["survivors"] for one in report["rounds"]] == [6, 6]
    assert report["statement"]["epsilon_joint"] <= 8.0
    # Four bytes a number, and some for keys and signatures: nothing of the base's 20,000 numbers.
    assert all(one["bytes_uploaded"] < 6 * 4 * 1_000 for one in report["rounds"])
    assert set(report["metrics"]["server"]) == {"0", "1", "2"}
