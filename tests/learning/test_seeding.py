from __future__ import annotations

import pytest
import torch

from niss.learning import seeded_torch
from niss.randomness import SimStream


def test_draws_depend_on_the_stream_alone() -> None:
    stream = SimStream(1)
    with seeded_torch(stream):
        first = torch.rand(3)
    torch.rand(5)
    with seeded_torch(stream):
        again = torch.rand(3)
    with seeded_torch(stream.child("other")):
        other = torch.rand(3)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_global_generator_is_restored() -> None:
    before = torch.random.get_rng_state()
    with seeded_torch(SimStream(1)):
        torch.rand(3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_global_generator_is_restored_after_an_error() -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(KeyError), seeded_torch(SimStream(1)):
        raise KeyError("inside")
    assert torch.equal(before, torch.random.get_rng_state())


def test_blocks_nest() -> None:
    with seeded_torch(SimStream(1)):
        plain = torch.rand(4)
    with seeded_torch(SimStream(1)):
        head = torch.rand(2)
        with seeded_torch(SimStream(2)):
            torch.rand(7)
        tail = torch.rand(2)
    assert torch.equal(plain, torch.cat([head, tail]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_generators_are_seeded_and_restored() -> None:
    torch.zeros(1, device="cuda")
    before = torch.cuda.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded_torch(SimStream(1)):
            draws.append(torch.rand(3, device="cuda"))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(before, torch.cuda.get_rng_state())
