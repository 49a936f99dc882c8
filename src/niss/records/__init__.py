"""The clipped sum over a secret batch of records: what a silo that hides single records uploads.

    records = Records(model, (inputs, labels))
    batch = draw_batch(len(records), 0.05, SecretStream.fresh())
    total = clipped_sum(records, records.weights, batch, clip=0.1)

`draw_batch` flips a coin for each record, `clipped_sum` adds their gradients, each clipped (`clipped_sums` those of
several silos), `clipped_rows` hands them out one by one, and `reference_sum` is the definition that all are tested
against. A `Records` holds any torch module, or a regression by closed form, without torch.

    sum over the batch of  g_i min(1, C / ||g_i||_2),     g_i the gradient of the loss of record i alone,

its norm taken over all trained parameters together. The sum is over the batch and divided by nothing that depends on
it, so adding or removing one record moves it by at most C: the sensitivity of DP-SGD (Abadi et al. 2016).

**Time.** When a silo's upload comes must not say what is in its batch. On a node every round is the same work: as many
chunks of one shape as the largest batch needs that is at all plausible (`largest_batch`), filled up with records that
count for nothing. What makes model or loss raise an exception is found once, before the first round
(`niss.records.modules`), and a record that does is filler for good.

**Guarantee.** Each record is differentiated alone: model and loss never see two records together, so what one
contributes is a function of that record and the weights. A record whose loss or gradient is not finite, or for which
model or loss raise an exception, contributes zero, and the others what they always do: neither is told to anyone.
Up to floating point: chunks are added in float64, but within a chunk a float32 model sums in float32, and the last
digits of a gradient may depend on the record's place among the others. Nodes round record by record instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from niss.checks import require_real, require_whole
from niss.errors import ConfigError
from niss.records.batches import FloatArray, IntArray, draw_batch, largest_batch
from niss.records.closed_form import ClosedForm, LinearRegression, LogisticRegression, Regression, clipped

__all__ = [
    "LinearRegression",
    "LogisticRegression",
    "Records",
    "clipped_rows",
    "clipped_sum",
    "clipped_sums",
    "draw_batch",
    "reference_sum",
]


LEAST_CLIP = 1e-12
"""Squares of float32 numbers below 1e-22 are lost from norms; a million of them are still far shorter than this."""


class RecordEngine(Protocol):
    """What computes clipped gradients of one kind of model."""

    weights: FloatArray
    chunk: int

    def zeros(self, count: int) -> Any:
        """So many sums of nothing, [count, parameters], float64: an array, or a tensor where the module is."""

    def sums(self, weights: FloatArray, rows: IntArray, counts: Sequence[int], clip: float) -> Any:
        """The clipped sums over the first `counts[0]` of `rows`, the next `counts[1]` and so on, like `zeros`.

        What is left of the rows fills the chunk up and counts for nothing. They may be overwritten by the next.
        """

    def each(self, weights: FloatArray, rows: IntArray, clip: float) -> FloatArray:
        """The clipped gradients of these rows, a row each."""

    def alone(self, weights: FloatArray, row: int) -> FloatArray:
        """The gradient of one record, not clipped, in float64 and by the plainest way; nan where there is none."""


@dataclass(frozen=True, eq=False)
class Records:
    """A silo's records and what is learned from them.

    model     any `torch.nn.Module`, or `LinearRegression` or `LogisticRegression`, which need no torch. Parameters that
              require a gradient are trained; frozen ones and buffers stay as they are and are no part of the vectors
    examples  (inputs, labels): arrays or tensors whose first axis is the record
    loss      of a batch of one record: `loss(model(inputs), labels)` with inputs [1, ...] and labels [1, ...] returns
              one number. Cross-entropy by default, averaged over the positions of a sequence; a regression has its own
    chunk     records that are differentiated together, a number that must not depend on the batch; by default planned
              from the model. Batches are filled up to whole chunks: small ones want small chunks
    name      of the dataset, in ledgers
    most      a bound on how many records there may be, which is public: the time that a round takes follows from it. By
              default their number, rounded up by an eighth at most

    The model runs in the mode that it is in. Refused are layers that mix records, remember them or draw: BatchNorm in
    train() mode, Dropout in train() mode.
    """

    model: Any
    examples: tuple[Any, Any]
    loss: Any = None
    chunk: int | None = None
    name: str = "records"
    most: int | None = None

    def __post_init__(self) -> None:
        if self.most is not None:
            require_whole(self.most, field="most", at_least=len(self))
        if self.chunk is not None:
            require_whole(self.chunk, field="chunk", at_least=1)
        if not isinstance(self.examples, tuple) or len(self.examples) != 2:
            raise ConfigError("must be a pair (inputs, labels)", field="examples")
        lengths = [len(part) for part in self.examples]
        if lengths[0] != lengths[1]:
            raise ConfigError(f"{lengths[0]} inputs for {lengths[1]} labels", field="examples")
        _ = self.engine  # what cannot be used is refused before the first round

    def __len__(self) -> int:
        return len(self.examples[1])

    def __repr__(self) -> str:
        return f"Records({type(self.model).__name__}, name={self.name!r})"

    @property
    def weights(self) -> FloatArray:
        """The trained parameters as the model has them, as one vector: those of a module in the order of its state."""
        return self.engine.weights.copy()

    @cached_property
    def engine(self) -> RecordEngine:
        """What computes the gradients."""
        if isinstance(self.model, Regression):
            return ClosedForm(self.model, *self.examples, self.loss, self.chunk)
        # By name, and only here: whoever holds a regression needs no torch, and rooms without torch may import this.
        modules = import_module("niss.records.modules")
        made: RecordEngine = modules.ModuleEngine(self.model, *self.examples, self.loss, self.chunk)
        return made

    def largest(self, probability: float) -> int:
        """The largest batch that time is planned for, where each record is in it with this probability."""
        step = 2 ** max(len(self).bit_length() - 4, 0)
        return largest_batch(self.most or -(-len(self) // step) * step, probability)

    def shared_chunks(self, batches: Sequence[IntArray]) -> Iterator[tuple[IntArray, int, list[int]]]:
        """All batches, one after the other, in chunks: its rows, the first batch that has some of them, and how many
        that one and each of those after it have.
        """
        owners, done = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches]), 0
        for some, real in self.chunks(np.concatenate(batches)) if len(self) else ():
            own = owners[done : done + real]
            first = int(own[0]) if real else 0
            yield some, first, np.bincount(own - first, minlength=1).tolist()
            done += real

    def chunks(self, rows: IntArray, most: int = 1) -> Iterator[tuple[IntArray, int]]:
        """The batch in pieces of one size, each with how many of it are real.

        They are filled up with records that count for nothing, to as many pieces as `most` records need: the time that
        they take depends on the number of pieces alone.
        """
        chunk = self.engine.chunk
        whole = -(-max(len(rows), most) // chunk) * chunk
        # Other records, not one again and again: what is in a cache is faster.
        filled = np.concatenate([rows, np.arange(whole - len(rows)) % len(self)])
        for start in range(0, whole, chunk):
            yield filled[start : start + chunk], min(max(len(rows) - start, 0), chunk)


def clipped_sum(problem: Records, weights: FloatArray, rows: IntArray, clip: float) -> FloatArray:
    """The sum over `rows` of the gradients at `weights`, each clipped to an L2 norm of `clip`; float64.

    problem  model, loss and records
    weights  where the gradients are taken, as long as `problem.weights`
    rows     numbers of records, each at most once, as `draw_batch` gives them; none is a batch too
    clip     C, the bound on what one record adds

    >>> from niss.records import LinearRegression
    >>> records = Records(LinearRegression(1), (np.array([[3.0], [0.0]]), np.array([0.0, 0.5])))
    >>> clipped_sum(records, np.array([1.0, 1.0]), np.array([0, 1]), 1.0).round(3).tolist()
    [0.949, 0.816]
    """
    (total,) = clipped_sums(problem, weights, [rows], clip)
    return np.asarray(total if isinstance(total, np.ndarray) else total.cpu().numpy())


def clipped_sums(problem: Records, weights: FloatArray, batches: Sequence[IntArray], clip: float) -> Any:
    """`clipped_sum` of each of these batches, at least one, [batches, parameters]; in chunks that may hold several.

    For whoever has the records of several silos. Of a module they are a tensor and stay where it is.
    """
    vector, parts = weights, []
    for batch in batches:
        vector, numbers = _checked(problem, weights, batch, clip)
        parts.append(numbers)
    totals = problem.engine.zeros(len(parts))
    for some, first, counts in problem.shared_chunks(parts):
        totals[first : first + len(counts)] += problem.engine.sums(vector, some, counts, clip)
    return totals


def clipped_rows(
    problem: Records, weights: FloatArray, rows: IntArray, clip: float, most: int = 1
) -> Iterator[tuple[FloatArray, int]]:
    """The clipped gradients themselves, chunk by chunk, in the order of `rows`: [chunk, parameters], with how many of
    the chunk count.

    For rounding record by record: whole numbers add without error, so that the sum of rounded gradients moves by
    exactly what one of them is.

    most  so many records' work is done, however few there are
    """
    weights, rows = _checked(problem, weights, rows, clip)
    if len(problem):
        for some, real in problem.chunks(rows, most):
            yield problem.engine.each(weights, some, clip), real


def reference_sum(problem: Records, weights: FloatArray, rows: IntArray, clip: float) -> FloatArray:
    """What `clipped_sum` returns, to be read as its definition: float64, one record after the other."""
    weights, rows = _checked(problem, weights, rows, clip)
    total = np.zeros_like(weights)
    for row in rows:
        total += clipped(problem.engine.alone(weights, int(row)), clip)
    return total


def _checked(
    problem: Records, weights: FloatArray, rows: IntArray, clip: float
) -> tuple[FloatArray, IntArray]:
    require_real(clip, field="clip", zero_allowed=False)
    if clip < LEAST_CLIP:
        raise ConfigError(f"must be at least {LEAST_CLIP:g}, not {clip:g}", field="clip")
    vector, numbers = np.asarray(weights, dtype=np.float64), np.asarray(rows)
    if vector.shape != problem.engine.weights.shape:
        raise ConfigError(
            f"must have shape {problem.engine.weights.shape}, not {vector.shape}",
            field="weights",
            hint="problem.weights is such a vector: the trained parameters alone",
        )
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ConfigError("must be a list of record numbers", field="rows")
    numbers = numbers.astype(np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= len(problem)):
        raise ConfigError(f"there are {len(problem)} records, from 0", field="rows")
    if np.unique(numbers).size != numbers.size:
        raise ConfigError(
            "a record is in it twice: it would count for more than clip", field="rows", hint="use draw_batch"
        )
    return vector, numbers
