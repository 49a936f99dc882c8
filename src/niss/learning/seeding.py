"""Reproducible draws for code that can only use torch's default generator (Dropout, default init)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from niss.randomness import SimStream


@contextmanager
def seeded_torch(stream: SimStream) -> Iterator[None]:
    """Inside, torch's default generators start at `stream`; afterwards they are as they were before.

    The CPU generator is always covered, the CUDA generators once CUDA is initialised (a module that
    lives on a GPU has done that). CUDA is never initialised here: a run on the CPU should not pay for
    it, nor lose the ability to fork.
    """
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = list(range(torch.cuda.device_count())) if initialized else []
    with torch.random.fork_rng(devices=gpus):
        seed = stream.torch_seed()
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed_all(seed)
        yield
