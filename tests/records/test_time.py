"""What a round costs in time says nothing of the batch: the same chunks, whatever is drawn and whatever the records do.

Work is counted, not timed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor, nn
from torch.nn import functional

from niss.mechanism.slots import OVERSIZE
from niss.records import Records, clipped_rows, clipped_sum, reference_sum
from niss.records.batches import largest_batch
from niss.records.modules import ModuleEngine
from records.conftest import each_of, make_records

CLIP, MOST = 0.4, 9
OTHERS = np.array([0, 1, 3, 4, 6, 7])
WITH = np.array([0, 1, 3, 4, 5, 6, 7])


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The chunks that were computed together, and the records that were differentiated alone."""
    done: list[tuple[str, int]] = []
    stacked, alone = ModuleEngine._stacked, ModuleEngine._differentiate

    def together(self: ModuleEngine, entries: Any, inputs: Tensor, labels: Tensor) -> Any:
        done.append(("chunk", len(inputs)))
        return stacked(self, entries, inputs, labels)

    def one(self: ModuleEngine, weights: Any, inputs: Tensor, labels: Tensor) -> Any:
        done.append(("alone", len(inputs)))
        return alone(self, weights, inputs, labels)

    monkeypatch.setattr(ModuleEngine, "_stacked", together)
    monkeypatch.setattr(ModuleEngine, "_differentiate", one)
    return done


def spoilt(kind: str, change: str, chunk: int = 4) -> Records:
    """With one record, the sixth, that fails."""
    records = make_records(kind)
    inputs, labels = records.examples
    if change == "overflows":
        inputs[5] *= 1e200
    elif change == "nan":
        inputs[5] *= np.nan
    elif change == "label":
        labels[5] = 40
    elif change == "token":
        inputs[5].reshape(-1)[-1] = 10**6
    return Records(records.model, (inputs, labels), records.loss, chunk=chunk)


CASES = [("mlp", "as it is"), ("mlp", "overflows"), ("mlp", "nan"), ("mlp", "label"), ("cnn", "label")]
CASES += [("tied", "as it is"), ("tied", "token"), ("tied", "label")]


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_every_round_is_the_same_work(kind: str, change: str, work: list[tuple[str, int]]) -> None:
    records = spoilt(kind, change)
    wild = np.full_like(records.weights, 1e30)
    rounds = []
    for weights in (records.weights, wild, np.zeros_like(wild), wild * np.nan):
        for rows in (np.arange(0), np.array([5]), OTHERS, WITH, np.arange(MOST)):
            work.clear()
            made = [(len(some), real) for some, real in clipped_rows(records, weights, rows, CLIP, MOST)]
            assert sum(real for _, real in made) == len(rows)
            rounds.append((work.copy(), [length for length, _ in made]))
    assert all(one == ([("chunk", 4)] * 3, [4] * 3) for one in rounds)


@pytest.mark.parametrize(("kind", "change"), [case for case in CASES if case[1] in ("label", "token")])
def test_a_record_that_raises_is_found_before_the_first_round_and_is_filler_for_good(
    kind: str, change: str, work: list[tuple[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    records, plain = spoilt(kind, change), spoilt(kind, "as it is")
    expected = reference_sum(plain, plain.weights, OTHERS, CLIP)
    work.clear()
    found = [
        clipped_sum(records, records.weights, WITH, CLIP),
        each_of(records, records.weights, WITH, CLIP).sum(axis=0),
    ]
    assert {how for how, _ in work} == {"chunk"}
    for one in (*found, reference_sum(records, records.weights, WITH, CLIP)):
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-10)
    assert not clipped_sum(records, records.weights, np.array([5]), CLIP).any()
    assert not caplog.records
    # What was given stays as it was.
    assert records.examples[0 if change == "token" else 1][5].reshape(-1)[-1] in (40, 10**6)


def test_every_different_number_is_tried_and_no_more() -> None:
    """A thousand records of ten classes are no more to try than ten; only the twelfth does not exist."""
    tried: list[int] = []

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        tried.append(1)
        return functional.cross_entropy(outputs, labels)

    generator = np.random.default_rng(3)
    labels = np.append(generator.integers(0, 10, 999), 11)
    records = Records(nn.Linear(3, 10), (generator.normal(size=(1000, 3)), labels), loss)
    # The usual probes, all kinds together, and each of them.
    assert len(tried) < 40
    sound = records.engine._sound
    assert sound.tolist() == [True] * 999 + [False]


def bce(outputs: Tensor, labels: Tensor) -> Tensor:
    """Raises on what is not between 0 and 1: nan, at weights that overflow on one record."""
    return functional.binary_cross_entropy(torch.sigmoid(outputs[:, 0]), labels)


def cholesky(outputs: Tensor, labels: Tensor) -> Tensor:
    made = torch.eye(2) + outputs[0, :2].outer(outputs[0, :2])
    return torch.linalg.cholesky(made).sum() + 0.0 * labels.sum()


@pytest.mark.parametrize("loss", [bce, cholesky])
def test_what_checks_its_values_is_taken_one_by_one_always(loss: Any, work: list[tuple[str, int]]) -> None:
    """A chunk of it would raise or not with the weights of a server's choice, on one record alone."""
    generator = np.random.default_rng(4)
    inputs, labels = generator.normal(size=(8, 3)).astype(np.float32), np.zeros(8, dtype=np.float32)
    records = Records(nn.Linear(3, 2), (inputs, labels), loss, chunk=4)
    for weights in (records.weights, np.full(8, np.nan)):
        work.clear()
        total = clipped_sum(records, weights, np.arange(6), CLIP)
        assert {how for how, _ in work} == {"alone"}
        assert bool(total.any()) == bool(np.isfinite(weights).all())


def test_a_chunk_that_raises_all_the_same_gives_the_same_sum_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = spoilt("mlp", "as it is")
    expected = clipped_sum(records, records.weights, OTHERS, CLIP)
    records.examples[1][5] = 40  # Changed after it was looked at.
    np.testing.assert_allclose(
        clipped_sum(records, records.weights, WITH, CLIP), expected, rtol=0, atol=1e-10
    )
    assert "may show in the time" in caplog.text


class TestLargestBatch:
    @pytest.mark.parametrize(
        ("most", "q"), [(1, 0.5), (60, 0.5), (60, 1.0), (500, 0.05), (6000, 0.05), (60_000, 0.05)]
    )
    def test_the_other_records_alone_reach_it_as_rarely_as_it_says(self, most: int, q: float) -> None:
        largest = largest_batch(most, q)
        assert binom.sf(largest - 1, most - 1, q) <= OVERSIZE
        assert largest == 1 or binom.sf(largest - 2, most - 1, q) > OVERSIZE

    def test_it_follows_from_a_public_number(self) -> None:
        """Not from how many records there are: one more or less would show in the time of every round."""

        def largest(count: int, most: int | None = None) -> int:
            examples = np.zeros((count, 2)), np.zeros(count, dtype=np.int64)
            return Records(nn.Linear(2, 2), examples, most=most).largest(0.05)

        assert len({largest(count, 1000) for count in (0, 1, 500, 999, 1000)}) == 1
        assert len({largest(count) for count in range(961, 1025)}) == 1
        assert largest(0) == 0
        assert largest(1024) < largest(1025) <= largest_batch(1024 * 9 // 8, 0.05)
        with pytest.raises(Exception, match="most"):
            largest(1001, 1000)
