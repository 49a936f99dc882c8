"""Silos that hide single records: what they upload, which batches they draw, and how the methods compare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import niss
from niss.accounting import LedgerFile
from niss.randomness import SimStream
from niss.records import Records, draw_batch, reference_sum
from niss.simulation import Config, make_config, with_overrides
from niss.simulation.uploads import Played
from support.federation import assert_resumes

METHODS = ("fedavg", "central-dp", "niss", "dp-fedavg", "alone")


def silo_config(method: str = "fedavg", **changes: object) -> Config:
    """Twelve silos of 6 to 8 records each (83 in all), three rounds, half of the records in a batch."""
    values: dict[str, object] = {
        "seed": 5,
        "rounds": 3,
        "data": {"silos": 12},
        "training": {"server_rate": 0.5},
        "privacy": {"unit": "record", "batch": 0.5, "clip": 0.8, "epsilon": 4.0},
        "methods": [{"name": method}],
    }
    return make_config({**values, **changes})


def batch_of(silo: int, size: int, round: int, share: float = 0.5) -> np.ndarray:
    stream = SimStream(5).child("round", round).child("client", silo).child("batch")
    return draw_batch(size, share, stream)


class Shifted(nn.Module):
    """A buffer and a frozen layer before the one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((5,), 0.5))
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.first.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(inputs + self.shift)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_round_moves_what_is_trained_by_the_clipped_sum_over_the_planned_batch(given, workers):
    """By the reference: a loop over the records of all silos, in float64."""
    config, module = with_overrides(silo_config(), {"rounds": 2, "training.workers": workers}), Shifted()
    total = sum(len(labels) for _, labels in given["clients"])
    problems = [Records(module, pair) for pair in given["clients"]]
    weights = problems[0].weights
    for round in range(2):
        sums = [
            reference_sum(problem, weights, batch_of(silo, len(problem), round), 0.8)
            for silo, problem in enumerate(problems)
        ]
        weights = weights - 0.5 * np.sum(sums, axis=0) / (0.5 * total)
    found = niss.run(config, **{**given, "model": module}).state_dict
    trained = [found["last.weight"].flatten(), found["last.bias"]]
    assert np.concatenate(trained) == pytest.approx(weights, abs=1e-6)
    for name in ("shift", "first.weight", "first.bias"):
        assert torch.equal(found[name], module.state_dict()[name])


@pytest.mark.parametrize(
    "dealt", [{"split": "shards"}, {"split": "dirichlet", "alpha": 0.1}, {"split": "iid", "size_ratio": 20.0}]
)
def test_how_records_are_dealt_out_makes_no_difference_to_the_sum(dealt):
    """With every record in every batch; in float32 the order of summation is left."""
    plain = silo_config(
        data={"silos": 5}, model={"name": "logistic"}, privacy={"unit": "record", "batch": 1.0, "clip": 0.1}
    )
    usual = niss.run(plain)
    other = niss.run(with_overrides(plain, {f"data.{key}": value for key, value in dealt.items()}))
    for name, tensor in usual.state_dict.items():
        torch.testing.assert_close(other.state_dict[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_sums_what_the_processor_does():
    config = silo_config(
        methods=[{"name": "fedavg"}], data={"silos": 5}, model={"name": "cnn", "activation": "tanh"}
    )
    usual, other = (
        niss.run(with_overrides(config, {"training.device": device})) for device in ("cpu", "cuda")
    )
    for name, tensor in usual.state_dict.items():
        torch.testing.assert_close(other.state_dict[name].cpu(), tensor, rtol=1e-4, atol=1e-5)


def test_every_round_and_silo_draws_a_batch_of_its_own_and_every_method_the_same(given, monkeypatch):
    drawn: dict[int, list[tuple[int, ...]]] = {}
    train = niss.simulation.training.SiloSums.train

    def watch(self, jobs, work, progress):
        drawn.setdefault(len(drawn), [tuple(job.samples.tolist()) for job in jobs])
        return train(self, jobs, work, progress)

    monkeypatch.setattr(niss.simulation.training.SiloSums, "train", watch)
    niss.compare(silo_config(methods=[{"name": "fedavg"}, {"name": "niss"}]), **given)
    assert len(drawn) == 3
    for batches in drawn.values():
        assert batches[:12] == batches[12:]
    assert len({batches[0] for batches in drawn.values()}) == 3
    owners = np.repeat(np.arange(12), [len(labels) for _, labels in given["clients"]])
    assert all(set(owners[list(batch)]) <= {silo} for silo, batch in enumerate(drawn[0][:12]))
    assert len({len(batch) for batch in drawn[0]}) > 1


def test_an_empty_batch_is_an_upload_like_any_other(given):
    config = silo_config("niss", privacy={"unit": "record", "batch": 0.01, "clip": 0.8, "epsilon": 4.0})
    result = niss.run(config, **given)
    assert all(line.participants == line.survivors == 12 for line in result.rounds)
    assert not any(batch_of(silo, 6, 0, 0.01).size for silo in range(6))


def test_shared_noise_is_a_curators_and_a_silo_alone_needs_all_of_it(given):
    """In variances: alone (N / n)^2 times a curator's, each silo for itself as often as there are silos."""
    comparison = niss.compare(silo_config(methods=[{"name": name} for name in METHODS]), **given)
    noise = {result.label: result.summary["aggregate_variance_predicted"] for result in comparison}
    sizes = [len(labels) for _, labels in given["clients"]]
    assert noise["fedavg"] == 0.0
    assert noise["dp-fedavg"] == pytest.approx(12 * noise["central-dp"])
    assert noise["alone"] == pytest.approx((sum(sizes) / max(sizes)) ** 2 * noise["central-dp"])
    assert 1.0 < noise["niss"] / noise["central-dp"] < 1.1
    assert [line.participants for line in comparison["alone"].rounds] == [1, 1, 1]


def test_a_method_ends_with_the_same_bits_alone_and_beside_others():
    """In the first round too, where all of them start from one point."""
    config = silo_config(
        rounds=2,
        data={"silos": 3},
        model={"hidden": [16]},
        training={"device": "cpu", "workers": 2},
        privacy={"unit": "record", "batch": 0.05, "clip": 0.5, "epsilon": 2.0},
        methods=[{"name": name} for name in ("fedavg", "niss", "dp-fedavg")],
    )
    for beside in niss.compare(config):
        alone = niss.run(replace(config, methods=(beside.settings,))).state_dict
        for name, tensor in beside.state_dict.items():
            assert torch.equal(alone[name], tensor), beside.label


@pytest.mark.parametrize("method", ["niss", "alone"])
def test_a_run_that_was_killed_goes_on_with_the_same_batches(tmp_path, given, monkeypatch, method):
    from niss.simulation.method_run import CheckpointFolder

    death = (CheckpointFolder, "append_round", lambda _folder, record, _seconds: record.round == 2)
    assert_resumes(tmp_path, silo_config(method), given, monkeypatch, *death)


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_the_real_protocol_charges_every_node_a_slot_a_round_and_leaves_the_noise_it_says(
    tmp_path, monkeypatch, late
):
    """Measured against the bare sums of the batches that the nodes drew: within 6 deviations of a sample variance."""
    exchanges = []

    class Watched(Played):
        def __init__(self, setup):
            super().__init__(setup)
            exchanges.append(self)

    monkeypatch.setattr(niss.simulation.federation, "Played", Watched)
    config = silo_config(
        exchange="protocol",
        rounds=2,
        data={"silos": 3},
        model={"name": "logistic"},
        training={"device": "cpu", "late": late},
        privacy={"unit": "record", "batch": 0.05, "clip": 0.5, "epsilon": 2.0},
        methods=[{"name": "niss"}],
    )
    result = niss.run(config, out=tmp_path)
    for line in result.rounds:
        off = line.aggregate_variance / line.aggregate_variance_predicted - 1.0
        assert abs(off) < 6 * np.sqrt(2 / 7850)
    assert result.epsilon == pytest.approx(2.0, abs=1e-3)
    assert any("batches too large to be sent" in caveat for caveat in result.statement.caveats)
    ledger = LedgerFile.read(tmp_path / "ledger.jsonl")
    for node in range(3):
        own = exchanges[0].parties.store(node).charged
        assert own.spent(0) == ledger.spent(str(node))
        assert own.spent(0).size == 2


def test_report_and_summary_speak_of_records(given, tmp_path):
    from niss.report import read_report_input, summary_rows, write_report
    from niss.report.summary import settings_of

    result = niss.run(silo_config("niss"), **given, out=tmp_path)
    assert "hiding one record (added or removed)" in result.statement.words
    settings = settings_of(read_report_input(tmp_path))
    assert settings["Share of the records in a batch"] == "0.5"
    assert "Local epochs" not in settings
    assert "one single record" in write_report(tmp_path).read_text(encoding="utf-8")
    header, (row,) = summary_rows(read_report_input(tmp_path))
    assert (header[3], float(row[3])) == ("ε against the server", pytest.approx(4.0, abs=0.05))
    assert row[4] == "all silos not to help the server"
    assert "if all became known, epsilon would be" in result.statement.words
