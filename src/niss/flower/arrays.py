"""A model's arrays as one vector, and back.

Only arrays of floating-point numbers take part. Integers (the step counters of some layers) are not part of an update,
since a single counter would use up the whole clip; they stay as the server sent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray

from niss.errors import ConfigError, LocalProtocolError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """The global model of a round as it was sent: arrays by name, in the order of the message."""

    arrays: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, record: ArrayRecord) -> Self:
        """The model in a record; raises `ConfigError` if nothing in it is a floating-point number."""
        model = cls({name: array.numpy() for name, array in record.items()})
        if not model.size:
            raise ConfigError("the model has no floating-point numbers to train", field="arrays")
        return model

    @property
    def size(self) -> int:
        """The length of an update: how many floating-point numbers there are."""
        return sum(array.size for _, array in self._floating)

    @property
    def _floating(self) -> list[tuple[str, NDArray[Any]]]:
        return [item for item in self.arrays.items() if np.issubdtype(item[1].dtype, np.floating)]

    def update_to(self, trained: ArrayRecord) -> FloatArray:
        """Trained weights minus these, as one vector of float64.

        Raises `LocalProtocolError` where names or shapes are not those that were sent. Infinities and NaN of a
        training that diverged are passed on; what to do about them is the caller's business.
        """
        if list(trained) != list(self.arrays):
            raise LocalProtocolError(
                "the names of the trained arrays are not those of the arrays the server sent",
                hint="return the arrays of the message under the same names and in the same order",
            )
        parts = []
        for name, before in self._floating:
            after = trained[name].numpy()
            if after.shape != before.shape:
                raise LocalProtocolError(f"array {name!r} has shape {after.shape} instead of {before.shape}")
            with np.errstate(invalid="ignore", over="ignore"):
                parts.append((after.astype(np.float64) - before.astype(np.float64)).ravel())
        return np.concatenate(parts)

    def moved_by(self, update: FloatArray) -> ArrayRecord:
        """These weights plus an update of length `size`, in the dtypes they were sent in."""
        if update.shape != (self.size,):
            raise LocalProtocolError(f"expected an update of {self.size} numbers, got shape {update.shape}")
        moved, start = dict(self.arrays), 0
        for name, before in self._floating:
            part = update[start : start + before.size].reshape(before.shape)
            moved[name] = np.asarray(before.astype(np.float64) + part).astype(before.dtype)
            start += before.size
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in moved.items()})


def shared_model(messages: Sequence[Message]) -> tuple[Model, str]:
    """The one model that all participants start from, and the name of its record in the messages.

    A sum of updates to different models means nothing: a strategy that sends such is refused with `ConfigError`.
    """
    records = [message.content.array_records for message in messages]
    if any(len(record) != 1 for record in records):
        raise ConfigError("a training message must have exactly one record of arrays", field="strategy")
    key, first = next(iter(records[0].items()))
    for record in records[1:]:
        other = next(iter(record.values()))
        if other is not first and other != first:
            raise ConfigError(
                "sends different arrays to different nodes",
                field="strategy",
                hint="NISS sums updates of one model; use a strategy that sends everyone the same",
            )
    return Model.of(first), key
