"""How a group of clients is trained in one process: the fastest way that equals the reference.

The rule, in this order:

- `Mlp` as built: groups of clients in batched products, backward by hand (`steps_mlp`);
- `Cnn` as built: client by client, channels-last, backward by hand (`steps_cnn`);
- small modules of products only, which `torch.func` can stack: groups by vmap (`steps_vmap`);
- anything else: the reference loop, client by client, and the reason why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from niss.learning.cohort_cuda_table import TrainingJob
from niss.learning.flat import FlatLayout
from niss.learning.local import LocalTraining, train_client
from niss.learning.models import Cnn, Mlp
from niss.learning.per_sample import clipped_gradient_step
from niss.learning.steps_cnn import train_cnn
from niss.learning.steps_ghost import clipped_mlp_step
from niss.learning.steps_mlp import train_mlps
from niss.learning.steps_vmap import train_stacked, why_not
from niss.randomness import SimStream

GROUP_BYTES = 6 * 2**20
"""Weights of one group: what stays in the cache of a core. Half or twice as much costs a few percent."""
MOST_CLIENTS = 16
WORTH_STACKING = 8
"""vmap has a price of its own: 8 clients gain about 1.3x on the plain loop and 16 about 2x, 2 lose half."""


@dataclass(frozen=True)
class Job:
    """One client's turn: the weights it starts from, the rows of its samples, its stream."""

    start: Tensor
    samples: Tensor
    stream: SimStream


def numbers_by_start(jobs: Sequence[TrainingJob]) -> list[list[int]]:
    """The numbers of the jobs that start from the same tensor together, in the order of their first."""
    found: dict[int, list[int]] = {}
    for number, job in enumerate(jobs):
        found.setdefault(id(job.start), []).append(number)
    return list(found.values())


class Engine(Protocol):
    """Trains groups of at most `largest_group` clients, given in falling order of size, into `out`."""

    @property
    def name(self) -> str: ...
    @property
    def largest_group(self) -> int: ...
    def train(self, jobs: Sequence[Job], settings: LocalTraining, out: Tensor) -> None: ...
    def clipped_steps(self, jobs: Sequence[Job], clip: float, learning_rate: float, out: Tensor) -> None: ...


def choose_engine(module: nn.Module, layout: FlatLayout, inputs: Tensor, labels: Tensor) -> Engine:
    """The rule above; `inputs` and `labels` are the data of all clients."""
    common = (module, layout, inputs, labels)
    if is_plain_mlp(module, layout, inputs, labels):
        return MlpEngine(*common)
    if _is_plain_cnn(module, layout, inputs, labels):
        return CnnEngine(*common)
    stacked = VmapEngine(*common)
    if stacked.largest_group < MOST_CLIENTS:
        return PlainEngine(*common, reason="the module is too large to gain from stacking on a CPU")
    reason = why_not(module, layout, inputs, labels)
    return stacked if reason is None else PlainEngine(*common, reason=reason)


@dataclass(frozen=True)
class PlainEngine:
    """The reference, one client at a time."""

    module: nn.Module
    layout: FlatLayout
    inputs: Tensor
    labels: Tensor
    reason: str = ""

    @property
    def name(self) -> str:
        return f"plain loop, one client at a time, because {self.reason}"

    @property
    def largest_group(self) -> int:
        return 1

    def train(self, jobs: Sequence[Job], settings: LocalTraining, out: Tensor) -> None:
        for row, job in zip(out, jobs, strict=True):
            images, labels = self.inputs[job.samples], self.labels[job.samples]
            row.copy_(
                train_client(self.module, self.layout, job.start, images, labels, settings, stream=job.stream)
            )

    def clipped_steps(self, jobs: Sequence[Job], clip: float, learning_rate: float, out: Tensor) -> None:
        for row, job in zip(out, jobs, strict=True):
            images, labels = self.inputs[job.samples], self.labels[job.samples]
            row.copy_(
                clipped_gradient_step(
                    self.module,
                    self.layout,
                    job.start,
                    images,
                    labels,
                    clip=clip,
                    learning_rate=learning_rate,
                )
            )


class _Grouped(PlainEngine):
    @property
    def largest_group(self) -> int:
        weights = self.layout.size * self.inputs.new_empty(0, dtype=self.layout.dtype).element_size()
        return min(MOST_CLIENTS, max(1, GROUP_BYTES // weights))


class MlpEngine(_Grouped):
    @property
    def name(self) -> str:
        return f"MLP groups of up to {self.largest_group}"

    def train(self, jobs: Sequence[Job], settings: LocalTraining, out: Tensor) -> None:
        train_mlps(self.layout, self.inputs.flatten(1), self.labels, *_columns(jobs), settings, out=out)

    def clipped_steps(self, jobs: Sequence[Job], clip: float, learning_rate: float, out: Tensor) -> None:
        images = self.inputs.flatten(1)
        for row, job in zip(out, jobs, strict=True):
            clipped_mlp_step(
                self.layout, images, self.labels, job.start.detach(), job.samples,
                clip=clip, learning_rate=learning_rate, out=row,
            )  # fmt: skip


class CnnEngine(PlainEngine):
    @property
    def name(self) -> str:
        return "CNN client by client, channels-last"

    def train(self, jobs: Sequence[Job], settings: LocalTraining, out: Tensor) -> None:
        for row, job in zip(out, jobs, strict=True):
            train_cnn(
                self.layout, self.inputs, self.labels, job.start.detach(), job.samples, job.stream, settings,
                out=row,
            )  # fmt: skip


class VmapEngine(_Grouped):
    @property
    def name(self) -> str:
        return f"vmap groups of {WORTH_STACKING} to {self.largest_group}, smaller ones in a plain loop"

    def train(self, jobs: Sequence[Job], settings: LocalTraining, out: Tensor) -> None:
        if len(jobs) < WORTH_STACKING:
            super().train(jobs, settings, out)
            return
        train_stacked(self.module, self.layout, self.inputs, self.labels, *_columns(jobs), settings, out=out)


def _columns(jobs: Sequence[Job]) -> tuple[list[Tensor], list[Tensor], list[SimStream]]:
    return [job.start.detach() for job in jobs], [job.samples for job in jobs], [job.stream for job in jobs]


def is_plain_mlp(module: nn.Module, layout: FlatLayout, inputs: Tensor, labels: Tensor) -> bool:
    """Whether nothing was changed after building it, and the data fit: what fails here fails there too."""
    if type(module) is not Mlp or not _untouched(module, layout) or not _fit(inputs, layout):
        return False
    layers = list(module.layers)
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    pattern = [nn.Flatten, *[nn.Linear, nn.ReLU] * (len(linear) - 1), nn.Linear]
    return (
        [type(layer) for layer in layers] == pattern
        and layout.shapes == tuple(shape for layer in linear for shape in _shapes(layer))
        and inputs[0].numel() == linear[0].in_features
        and int(labels.max()) < linear[-1].out_features
    )


def _is_plain_cnn(module: nn.Module, layout: FlatLayout, inputs: Tensor, labels: Tensor) -> bool:
    if type(module) is not Cnn or not _untouched(module, layout) or not _fit(inputs, layout):
        return False
    if inputs.ndim != 4:
        return False
    classes = layout.shapes[-1][0]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        same = Cnn((inputs.shape[1], inputs.shape[2], inputs.shape[3]), classes)
    return (
        str(module) == str(same)
        and layout.shapes == tuple(tuple(part.shape) for part in same.parameters())
        and int(labels.max()) < classes
    )


def _fit(inputs: Tensor, layout: FlatLayout) -> bool:
    return inputs.dtype == layout.dtype and bool(inputs.numel())


def _shapes(layer: nn.Linear) -> list[tuple[int, ...]]:
    return [tuple(part.shape) for part in layer.parameters()]


def _untouched(module: nn.Module, layout: FlatLayout) -> bool:
    """No hooks, nothing frozen, nothing beside weights and biases."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        not any(getattr(part, name) for part in module.modules() for name in hooks)
        and next(module.buffers(), None) is None
        and all(layout.trainable)
    )
