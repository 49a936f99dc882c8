"""The data of the clients, as tensors: dealt out from a named dataset, or given by the user."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.data import Dataset, partition
from niss.errors import ConfigError
from niss.learning import to_tensor
from niss.randomness import SimStream
from niss.simulation.config import DataConfig

Examples = tuple[Tensor, Tensor]


class Clients:
    """`samples(k)` are the rows of the data that client k has; `sizes` are their numbers."""

    def __init__(self, inputs: Tensor, labels: Tensor, owned: Sequence[NDArray[np.int64]]) -> None:
        self._data: Examples | None = (inputs, labels)
        self._owned = [torch.from_numpy(np.ascontiguousarray(indices)) for indices in owned]
        self.sizes: NDArray[np.int64] = np.array([len(indices) for indices in owned], dtype=np.int64)

    @classmethod
    def deal(cls, dataset: Dataset, data: DataConfig, stream: SimStream) -> Clients:
        """Deal a dataset's training examples out to the clients."""
        inputs = to_tensor(dataset.train_images, dataset.mean, dataset.std)
        return cls(inputs, torch.from_numpy(dataset.train_labels), _dealt(dataset, data, stream))

    @classmethod
    def deal_again(cls, dataset: Dataset, data: DataConfig, stream: SimStream) -> Clients:
        """The same examples dealt out another way; those who were dealt them first hand them over."""
        again = cls(torch.empty(0), torch.empty(0), _dealt(dataset, data, stream))
        again._data = None
        return again

    @classmethod
    def given(cls, datasets: Sequence[tuple[Any, Any]]) -> Clients:
        """Take the user's own data: one (inputs, labels) pair of arrays or tensors per client."""
        if len(datasets) < 2:
            raise ConfigError(
                f"{len(datasets)} datasets given", field="clients", hint="a federation has at least two"
            )
        pairs = [examples(pair, f"clients[{number}]") for number, pair in enumerate(datasets)]
        shapes = {tuple(inputs.shape[1:]) for inputs, _ in pairs}
        if len(shapes) > 1:
            raise ConfigError(f"inputs of different shapes: {sorted(shapes)}", field="clients")
        ends = np.cumsum([0] + [len(labels) for _, labels in pairs])
        owned = [np.arange(start, end) for start, end in itertools.pairwise(ends)]
        return cls(
            torch.cat([inputs for inputs, _ in pairs]), torch.cat([labels for _, labels in pairs]), owned
        )

    def __len__(self) -> int:
        return len(self._owned)

    def hand_over(self) -> Examples:
        """The inputs and labels of all clients, once: whoever trains on them need not share the memory."""
        if self._data is None:
            raise ValueError("the data of these clients were handed over before")
        data, self._data = self._data, None
        return data

    def samples(self, client: int) -> Tensor:
        """The rows of this client's examples, in its own order."""
        return self._owned[client]


def _dealt(dataset: Dataset, data: DataConfig, stream: SimStream) -> list[NDArray[np.int64]]:
    return partition(
        dataset.train_labels,
        clients=data.clients,
        split=data.split,
        stream=stream,
        samples_per_client=data.samples_per_client,
        shards_per_client=data.shards_per_client,
        alpha=data.alpha,
    )


def examples(pair: tuple[Any, Any], field: str) -> Examples:
    """A pair of tensors from a pair of arrays or tensors, checked."""
    try:
        inputs, labels = (torch.as_tensor(part) for part in pair)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"is no pair of arrays: {error}", field=field, hint="give (inputs, labels)"
        ) from None
    if labels.ndim != 1 or len(inputs) != len(labels) or not len(labels):
        raise ConfigError(
            f"{tuple(inputs.shape)} inputs and {tuple(labels.shape)} labels do not belong together",
            field=field,
            hint="labels are a vector of class numbers, one per input, at least one",
        )
    if labels.is_floating_point():
        raise ConfigError(
            f"labels are {labels.dtype}", field=field, hint="give whole class numbers, such as int64"
        )
    return inputs, labels.to(torch.int64)
