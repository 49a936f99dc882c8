"""Linear and logistic regression with numpy alone: the clipped sum by closed form.

The gradient of record i is the outer product of delta_i, the slope of its loss in the model's outputs, and (x_i, 1), so
its norm needs no gradient and the clipped sum is one product of matrices:

    ||g_i|| = ||delta_i|| sqrt(||x_i||^2 + 1),     sum_i f_i g_i = (f * delta)^T (x, 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from niss.checks import require_whole
from niss.errors import ConfigError
from niss.records.batches import FloatArray, IntArray


@dataclass(frozen=True)
class Regression(ABC):
    """outputs = W x + b; the vector is W, row by row, then b, as in `torch.nn.Linear`."""

    features: int
    outputs: int = 1

    def __post_init__(self) -> None:
        require_whole(self.features, field="features", at_least=1)
        require_whole(self.outputs, field="outputs", at_least=1)

    @abstractmethod
    def slopes(self, outputs: FloatArray, labels: Any) -> FloatArray:
        """delta: of each record's loss in its outputs, [records, outputs]."""

    @abstractmethod
    def labels(self, given: Any) -> Any:
        """Labels as `slopes` takes them; refuses others."""


@dataclass(frozen=True)
class LinearRegression(Regression):
    """The loss of a record is ||W x + b - y||^2 / 2; y has `outputs` numbers, or is a number where there is one."""

    def slopes(self, outputs: FloatArray, labels: Any) -> FloatArray:
        """W x + b - y."""
        return np.asarray(outputs - labels)

    def labels(self, given: Any) -> Any:
        """[records, outputs], float64."""
        labels = np.asarray(given, dtype=np.float64)
        labels = labels[:, None] if labels.ndim == 1 else labels
        if labels.ndim != 2 or labels.shape[1] != self.outputs:
            raise ConfigError(f"must be {self.outputs} numbers a record, not {labels.shape}", field="labels")
        return labels


@dataclass(frozen=True)
class LogisticRegression(Regression):
    """The loss of a record is the cross-entropy of softmax(W x + b); `outputs` is the number of classes, at least 2."""

    outputs: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(self.outputs, field="outputs", at_least=2)

    def slopes(self, outputs: FloatArray, labels: Any) -> FloatArray:
        """softmax(W x + b) minus 1 at the label."""
        slopes: FloatArray = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        slopes /= slopes.sum(axis=1, keepdims=True)
        slopes[np.arange(len(labels)), labels] -= 1.0
        return slopes

    def labels(self, given: Any) -> Any:
        """[records] of class numbers."""
        labels = np.asarray(given)
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ConfigError(
                f"must be whole numbers, one a record, not {labels.dtype} of {labels.shape}", field="labels"
            )
        if labels.size and (labels.min() < 0 or labels.max() >= self.outputs):
            raise ConfigError(f"class numbers are 0 to {self.outputs - 1}", field="labels")
        return labels


class ClosedForm:
    """The gradients of a regression over these records."""

    def __init__(self, model: Regression, inputs: Any, labels: Any, loss: Any, chunk: int | None) -> None:
        if loss is not None:
            raise ConfigError("a regression has its own", field="loss", hint="leave it out")
        self._model, self._inputs = model, np.asarray(inputs)
        if self._inputs.ndim != 2 or self._inputs.shape[1] != model.features:
            raise ConfigError(
                f"must be [records, {model.features}], not {self._inputs.shape}", field="inputs"
            )
        self._labels = model.labels(labels)
        self.chunk = chunk or 1024
        self.weights = np.zeros(model.outputs * (model.features + 1))

    def zeros(self, count: int) -> FloatArray:
        """See `RecordEngine`."""
        return np.zeros((count, len(self.weights)))

    def sums(self, weights: FloatArray, rows: IntArray, counts: Sequence[int], clip: float) -> FloatArray:
        """See `RecordEngine`."""
        slopes, inputs = self._clipped(weights, rows, sum(counts), clip)
        return np.stack(
            [
                np.concatenate([(slopes[some].T @ inputs[some]).reshape(-1), slopes[some].sum(0)])
                for some in segments(counts, len(rows))
            ]
        )

    def each(self, weights: FloatArray, rows: IntArray, clip: float) -> FloatArray:
        """See `RecordEngine`."""
        slopes, inputs = self._clipped(weights, rows, len(rows), clip)
        products = slopes[:, :, None] * inputs[:, None, :]
        return np.concatenate([products.reshape(len(rows), -1), slopes], axis=1)

    def alone(self, weights: FloatArray, row: int) -> FloatArray:
        """See `RecordEngine`."""
        with np.errstate(all="ignore"):
            slopes, inputs = self._flow(weights, np.array([row]))
            return np.concatenate([np.outer(slopes, inputs).reshape(-1), slopes[0]])

    def _flow(self, weights: FloatArray, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        cut = self._model.outputs * self._model.features
        matrix, bias = weights[:cut].reshape(self._model.outputs, -1), weights[cut:]
        inputs = self._inputs[rows].astype(np.float64)
        return self._model.slopes(inputs @ matrix.T + bias, self._labels[rows]), inputs

    def _clipped(
        self, weights: FloatArray, rows: IntArray, real: int, clip: float
    ) -> tuple[FloatArray, FloatArray]:
        """delta times min(1, C / norm), and the inputs; zero in rows that count for nothing."""
        with np.errstate(all="ignore"):
            slopes, inputs = self._flow(weights, rows)
            norms = np.linalg.norm(slopes, axis=1) * np.hypot(np.linalg.norm(inputs, axis=1), 1.0)
            used = np.isfinite(norms) & (np.arange(len(rows)) < real)
            factors = np.where(norms > clip, clip / norms, 1.0)
        # Not a factor of zero: 0 * inf and 0 * nan are nan.
        return (
            np.where(used[:, None], slopes * factors[:, None], 0.0),
            np.where(used[:, None], inputs, 0.0),
        )


def segments(counts: Sequence[int], length: int) -> list[slice]:
    """Of a chunk of that length, the rows of each owner; the last has those that fill it up, too, which are zero."""
    ends = np.cumsum(counts).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], [*ends[:-1], length], strict=False)]


def clipped(gradient: FloatArray, clip: float) -> FloatArray:
    """g min(1, C / ||g||); zero where the norm is not finite."""
    with np.errstate(over="ignore"):
        norm = np.linalg.norm(gradient)
    if not np.isfinite(norm):
        return np.zeros_like(gradient)
    return gradient if norm <= clip else gradient * (clip / norm)
