"""Who has which examples: one array for all clients, with the same views as a list of arrays would give."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.errors import ConfigError
from niss.simulation import inputs as inputs_module
from niss.simulation.inputs import own_clients
from niss.simulation.training import Clients

sizes = st.lists(st.integers(1, 5), min_size=2, max_size=30)


@settings(deadline=None, max_examples=60)
@given(sizes=sizes, seed=st.integers(0, 1000))
def test_rows_are_those_of_each_client(sizes: list[int], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(sum(sizes))
    rows = np.split(order, np.cumsum(sizes)[:-1])
    clients = Clients(sizes, None, torch.from_numpy(order))
    assert len(clients) == len(sizes)
    assert clients.sizes.tolist() == sizes
    for client, wanted in enumerate(rows):
        assert clients.samples(client).dtype == torch.int64
        assert clients.samples(client).tolist() == wanted.tolist()


@settings(deadline=None, max_examples=60)
@given(sizes=sizes, together=st.integers(1, 8), mixed=st.booleans())
def test_datasets_end_to_end_are_what_cat_makes_of_them(sizes: list[int], together: int, mixed: bool) -> None:
    draw = np.random.default_rng(sum(sizes))
    kinds = [np.float64 if mixed and number % 3 == 2 else np.float32 for number in range(len(sizes))]
    pairs = [
        (draw.standard_normal((size, 2)).astype(kind), draw.integers(0, 3, size))
        for size, kind in zip(sizes, kinds, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs_module, "_TENSORS_OF_A_PART", together)
        clients = own_clients(pairs)
    assert clients.sizes.tolist() == sizes
    inputs, labels = clients.hand_over()
    wanted = torch.cat([torch.from_numpy(one) for one, _ in pairs])
    assert inputs.dtype == wanted.dtype
    assert torch.equal(inputs, wanted)
    for client, (its_inputs, its_labels) in enumerate(pairs):
        rows = clients.samples(client)
        assert np.array_equal(inputs[rows].numpy(), its_inputs)
        assert np.array_equal(labels[rows].numpy(), its_labels)


class Many(Sequence[Any]):
    """A hundred thousand datasets, each made when it is asked for."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, place: Any) -> Any:
        if place >= len(self):
            raise IndexError
        return np.zeros((1, 2), dtype=np.float32), np.zeros(1, dtype=np.int64)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))


def test_a_client_takes_no_more_memory_than_its_numbers() -> None:
    """Python's part alone: torch keeps its numbers out of sight."""
    tracemalloc.start()
    try:
        clients = own_clients(Many())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(clients) == 100_000
    assert held < 100_000 * 40  # Two arrays of eight bytes, and what is left of the list they came from.


def test_inputs_of_different_shapes_are_refused() -> None:
    pairs = [(np.zeros((1, 2)), np.zeros(1, int)), (np.zeros((1, 3)), np.zeros(1, int))]
    with pytest.raises(ConfigError, match="different shapes"):
        own_clients(pairs)
