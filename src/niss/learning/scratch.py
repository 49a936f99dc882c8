"""Leaving a borrowed module as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from niss.learning.flat import FlatLayout


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the module is in train() or eval() mode; afterwards every submodule has its own mode back."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, flag in before:
            part.training = flag


@contextmanager
def kept_buffers(module: nn.Module, layout: FlatLayout) -> Iterator[None]:
    """Afterwards every buffer outside the vector (integer, bool, non-persistent) is as it was before.

    Without this, what one client did would reach the next one through the shared scratch module.
    """
    listed = set(layout.names)
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in listed}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, saved in before.items():
                module.get_buffer(name).copy_(saved)


def batch_statistics_layers(module: nn.Module) -> list[str]:
    """The names of torch's layers that mix the samples of a batch or keep running statistics of them."""
    return [
        name or type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) or (isinstance(part, _InstanceNorm) and part.track_running_stats)
    ]
