"""A model's arrays as one vector, and back.

Only arrays of floating-point numbers take part. Whole numbers (the step counters of some layers) are no part of an
update: one of them would use up the clip alone. They stay what the server sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray

from niss.errors import ConfigError, LocalProtocolError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """The global model of a round, as it was sent."""

    arrays: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, record: ArrayRecord) -> Self:
        """The arrays of a record; one without any floating-point number is refused."""
        model = cls({name: array.numpy() for name, array in record.items()})
        if not model.size:
            raise ConfigError("the model has no floating-point numbers to train", field="arrays")
        return model

    @property
    def size(self) -> int:
        """How many numbers take part."""
        return sum(self.arrays[name].size for name in self._taking_part)

    @property
    def _taking_part(self) -> list[str]:
        return [name for name, array in self.arrays.items() if np.issubdtype(array.dtype, np.floating)]

    def update_to(self, trained: ArrayRecord) -> FloatArray:
        """Trained weights minus these, as one vector."""
        if list(trained) != list(self.arrays):
            raise LocalProtocolError(
                "the trained arrays are named otherwise than the ones the server sent",
                hint="return the arrays of the message under the same names and in the same order",
            )
        parts = []
        for name in self._taking_part:
            before, after = self.arrays[name], trained[name].numpy()
            if after.shape != before.shape:
                raise LocalProtocolError(f"array {name!r} has shape {after.shape} instead of {before.shape}")
            # A diverged training may hold infinities; what to do about them is the caller's business.
            with np.errstate(invalid="ignore", over="ignore"):
                parts.append((after.astype(np.float64) - before.astype(np.float64)).ravel())
        return np.concatenate(parts)

    def moved_by(self, update: FloatArray) -> ArrayRecord:
        """These weights plus an update, in the dtypes they were sent in."""
        if update.shape != (self.size,):
            raise LocalProtocolError(f"an update of shape {update.shape} for {self.size} numbers")
        moved, start = dict(self.arrays), 0
        for name in self._taking_part:
            before = self.arrays[name]
            part = update[start : start + before.size].reshape(before.shape)
            moved[name] = np.asarray(before.astype(np.float64) + part).astype(before.dtype)
            start += before.size
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in moved.items()})


def shared_model(messages: list[Message]) -> tuple[Model, str]:
    """The one model that all participants start from; a sum of updates to different ones means nothing."""
    records = [message.content.array_records for message in messages]
    if any(len(record) != 1 for record in records):
        raise ConfigError("a training message must carry one record of arrays", field="strategy")
    key, first = next(iter(records[0].items()))
    for record in records[1:]:
        other = next(iter(record.values()))
        if other is not first and other != first:
            raise ConfigError(
                "sends different arrays to different nodes",
                field="strategy",
                hint="NISS sums updates of one model",
            )
    return Model.of(first), key
