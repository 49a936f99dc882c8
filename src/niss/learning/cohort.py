"""All clients of a round trained as one cohort: equal to one after another, close to what the machine can do.

    with Cohort.of(module, FlatLayout.of(module), inputs, labels, device="auto") as cohort:
        rows = cohort.train([Job(start, samples, stream), ...], LocalTraining())

Row i is what the reference (`train_client`) gives for client i alone, up to floating-point rounding, on every device
and with any number of workers. `Cohort.of` decides what computes it; `Cohort.engine` says what that was, and why
where a faster way had to be left.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning.local import (
    Evaluation,
    FlatLayout,
    LocalTraining,
    batch_statistics_layers,
    in_mode,
    require_samples,
    train_client,
)
from niss.learning.models import Cnn, Mlp
from niss.randomness import SimStream

DEVICES = ("auto", "cpu", "cuda", "cuda:all")
# Called with the number of clients newly done.
Progress = Callable[[int], None]
# Called with the numbers of some jobs and their updates, one row each, to be copied before it returns.
TakeUpdates = Callable[[Sequence[int], Tensor], None]


@dataclass(frozen=True)
class Job:
    """One client's turn: the weights it starts from, the row numbers of its samples, its stream.

    start    a vector of the model's layout, on the CPU or the engine's device
    samples  int64 row numbers into the cohort's inputs, on the CPU, at least one
    stream   the client's own, for this round: order of its batches, draws inside the module

    Clients that start from the same weights should share the tensor: it then travels once, and they may be
    computed together.
    """

    start: Tensor
    samples: Tensor
    stream: SimStream


@dataclass(frozen=True)
class Problem:
    """What is learned: a module (scratch space), the layout of its vector, and the samples of all clients.

    Module and samples are on one device; an engine makes its own problem where that is not the CPU.
    """

    module: nn.Module
    layout: FlatLayout
    inputs: Tensor
    labels: Tensor

    @cached_property
    def built(self) -> type[Mlp] | type[Cnn] | None:
        """`Mlp` or `Cnn` where the module is what `build_model` makes and the data fit it, else None.

        Then forward and backward are known, and an engine may compute them by its own code: no layer was replaced
        or subclassed, nothing is hooked or frozen, there are no buffers, and every label has its class.
        """
        module, layout, inputs, labels = self.module, self.layout, self.inputs, self.labels
        linear = [part for part in module.modules() if type(part) is nn.Linear]
        if not linear or not inputs.numel() or inputs.dtype != layout.dtype or labels.ndim != 1:
            return None
        classes = linear[-1].out_features
        built: Mlp | Cnn
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            if type(module) is Mlp:
                built = Mlp(inputs[0].numel(), tuple(layer.out_features for layer in linear[:-1]), classes)
            elif type(module) is Cnn and inputs.ndim == 4:
                built = Cnn((inputs.shape[1], inputs.shape[2], inputs.shape[3]), classes)
            else:
                return None
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        same = (
            [type(part) for part in module.modules()] == [type(part) for part in built.modules()]
            and str(module) == str(built)
            and layout.shapes == tuple(tuple(part.shape) for part in built.parameters())
            and not any(getattr(part, name) for part in module.modules() for name in hooks)
            and next(module.buffers(), None) is None
            and all(layout.trainable)
            and int(labels.max()) < classes
        )
        return type(built) if same else None

    def update_of(self, job: Job, work: LocalTraining) -> Tensor:
        """The update of one client by the reference, on the device where the samples are."""
        device = self.labels.device
        rows = job.samples.to(device)
        common = (self.module, self.layout, job.start.to(device), self.inputs[rows], self.labels[rows])
        return train_client(*common, work, stream=job.stream)


class Cohort(ABC):
    """Trains many clients of one module; a context manager that ends its workers or frees its device."""

    device: torch.device
    # Bytes of updates the device has room for; None where they lie in the memory of the processor.
    room_for_updates: int | None = None
    _problem: Problem

    @staticmethod
    def of(
        module: nn.Module,
        layout: FlatLayout,
        inputs: Tensor,
        labels: Tensor,
        *,
        device: str = "cpu",
        workers: int | None = None,
        tf32: bool = False,
        plain: bool = False,
    ) -> Cohort:
        """The fastest one that equals the reference.

        module, layout  what is trained; the module is scratch space
        inputs, labels  the samples of all clients; a job names its rows of them
        device          "cpu", "cuda" (or "cuda:1" and so on), or "auto": the GPU where there is one
        workers         processes on the CPU, this one among them; None: one for each core
        tf32            whether a GPU may compute its products in TF32
        plain           train with the reference loop, in this process, whatever the module and the device

        - cpu: `Mlp` as built in groups of clients, `Cnn` as built client by client, both with a backward pass by
          hand; small modules without convolutions in groups by vmap, where the clients are many and their batches
          small; anything else in the reference loop. On all cores, or `workers` of them, where that is faster, unless
          the module cannot be sent to other processes;
        - cuda: `Mlp` and `Cnn` as built in fused Triton kernels, in plain torch without Triton or in float64; other
          modules by vmap where two clients on trial equal the reference, and a step of one does not fill the device;
          else the reference loop.
        """
        require_samples(inputs, labels)
        problem = Problem(module, layout, inputs.detach().contiguous(), labels)
        if plain or choose_device(device.partition(":")[0]) == "cpu":
            from niss.learning.cpu import CpuEngine, choose_formulation
            from niss.learning.cpu.formulations import PlainLoop

            if plain:
                return CpuEngine(PlainLoop(problem, "it was asked for"), workers=1)
            count = available_cores() if workers is None else workers
            reason = _why_one_process(problem.module) if count > 1 else ""
            return CpuEngine(choose_formulation(problem), workers=1 if reason else count, reason=reason)
        from niss.learning.cuda import CudaEngine

        return CudaEngine(problem, device="cuda" if device == "auto" else device, tf32=tf32)

    @property
    @abstractmethod
    def engine(self) -> str:
        """Device, formulation and precision in one line, for the manifest; and why not a faster one."""

    @abstractmethod
    def perform(self, work: LocalTraining, jobs: Sequence[Job], take: TakeUpdates) -> None:
        """Do `work` for every job; `take` gets each group's updates, on this device, as they are ready.

        Groups come in any order and of any size; jobs that follow each other may come with a `range` of numbers.
        """

    @abstractmethod
    def evaluate(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Evaluation:
        """`niss.learning.evaluate` of the module with these weights, on this device."""

    def start(self) -> None:  # noqa: B027
        """Start worker processes now and wait until they have loaded, instead of when they are worth it."""

    @abstractmethod
    def close(self) -> None:
        """End worker processes, free device memory; a later call works again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train(self, jobs: Sequence[Job], work: LocalTraining, *, progress: Progress | None = None) -> Tensor:
        """The updates of all jobs, [len(jobs), layout.size], row i that of job i; on a device nothing waits for them.

        A row is what `train_client` returns. On a GPU, modules that draw inside (Dropout) draw other masks than on the
        CPU, from the same stream.
        """
        layout = self._problem.layout
        rows = torch.empty((len(jobs), layout.size), dtype=layout.dtype, device=self.device)

        def take(numbers: Sequence[int], updates: Tensor) -> None:
            if isinstance(numbers, range):
                rows[numbers.start : numbers.stop] = updates
            else:
                rows.index_copy_(0, torch.tensor(numbers, device=self.device), updates)
            if progress is not None:
                progress(len(numbers))

        self.perform(work, jobs, take)
        return rows


def choose_device(wanted: str, *, field: str = "device") -> str:
    """`cpu` or `cuda`; `auto` is the GPU where there is one. `field` is what a refusal names.

    `cuda:all` is `cuda` here: whoever starts a process for each GPU says which of them is its own. Raises `ConfigError`
    for any other name, and for a GPU where torch finds none: never a silent fallback.
    """
    if wanted not in DEVICES:
        raise ConfigError(f"unknown device {wanted!r}", field=field, hint="use one of: " + ", ".join(DEVICES))
    available = torch.cuda.is_available()
    if wanted.startswith("cuda") and not available:
        raise ConfigError(
            "torch finds no CUDA GPU here",
            field=field,
            hint="use auto or cpu, or install a torch with CUDA on a machine with a GPU",
        )
    return "cuda" if available and wanted != "cpu" else "cpu"


def visible_gpus() -> list[str]:
    """The GPUs that torch sees, as `CUDA_VISIBLE_DEVICES` names them: a process given one of them sees it alone."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (given.split(",") if given else list(map(str, range(count))))[:count]


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _why_one_process(module: nn.Module) -> str:
    """Why the module cannot be sent to other processes; empty where it can.

    Workers rebuild it by import and pickle; a class of the main script has no module they could import.
    """
    if os.name == "nt":
        return "workers need a POSIX system"
    for part in module.modules():
        if type(part).__module__ == "__main__":
            return f"{type(part).__name__} is defined in the main script, which workers cannot import"
    try:
        torch.save(module, io.BytesIO())
    except Exception as problem:  # a user's module can refuse in any way
        return f"the module cannot be pickled ({type(problem).__name__})"
    return ""


def numbers_by_start(jobs: Sequence[Job]) -> list[list[int]]:
    """The numbers of the jobs that start from the same tensor together, in the order of their first.

    In a comparison each method has its own weights: these are the clients of one method.
    """
    groups: dict[int, list[int]] = {}
    for number, job in enumerate(jobs):
        groups.setdefault(id(job.start), []).append(number)
    return list(groups.values())


def why_not_stacked(
    problem: Problem, train: Callable[[Sequence[Job], LocalTraining], Tensor], *, tolerance: float
) -> str | None:
    """Why clients of this module cannot share a computation, or None.

    problem    its module is tried, and has other weights afterwards
    train      the updates of jobs as one computation, to be tried
    tolerance  what a difference in rounding stays far below, and a wrong gradient does not

    Two clients with weights of their own take a step as in training, one of them on a batch that is filled up,
    which is exact only where the samples of a batch do not meet; the reference does the same. What the loss does not
    reach stays as it is. What the forward pass changes (running statistics) would change for finished clients too.
    """
    module, layout = problem.module, problem.layout
    if layers := batch_statistics_layers(module):
        return f"{layers[0]} mixes the samples of a batch"
    last, start = len(problem.labels) - 1, layout.flatten(module)
    trained = layout.trainable_mask().to(start.device)
    other = torch.where(trained, 0.9 * start, start)
    jobs = [
        Job(start, torch.tensor([last, 0, last // 2]), SimStream(1)),
        Job(other, torch.tensor([0, last]), SimStream(2)),
    ]
    settings = LocalTraining(epochs=1, batch_size=3, learning_rate=1.0, weight_decay=0.1)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with in_mode(module, training=True):
            found = train(jobs, settings)
        changed = any(not torch.equal(buffers[name], now) for name, now in module.named_buffers())
        for row, job in zip(found, jobs, strict=True):
            expected = problem.update_of(job, settings)
            if changed or bool(expected[~trained].any()):
                return "its forward pass changes its buffers"
            little = 1e-5 * start.norm()
            same = (row - expected).norm() <= tolerance * expected.norm() + little
            if bool(expected.isfinite().all()) and not bool(same & (row[expected == 0.0].norm() <= little)):
                return "stacked, it trains differently: the samples of a batch may influence each other"
    except Exception as error:  # whatever a user's forward raises when it is stacked or captured
        words = str(error).strip().splitlines() or [type(error).__name__]
        return "it draws random numbers" if "randomness" in words[0] else f"vmap: {words[0][:120]}"
    finally:
        with torch.no_grad():
            for name, now in module.named_buffers():
                now.copy_(buffers[name])
    return None


class BatchTable:
    """Row numbers and true sizes of every batch of every client, in the order of `batch_order`.

    `rows[s, k]` are the data rows of client k's batch of step s and `sizes[s, k]` how many of them count.
    A short batch is filled up with its own first row, so that filling it cannot bring in a value the
    batch does not have; a finished client has size 0 and its first sample's row. The same client trained from
    several starts, as in a comparison, has its batches drawn once.
    """

    def __init__(self, jobs: Sequence[Job], settings: LocalTraining) -> None:
        self._jobs = jobs
        self._settings = settings
        self._samples = [job.samples.numpy() for job in jobs]
        seen: dict[tuple[SimStream, int], int] = {}
        self._drawn_for = np.array(
            [seen.setdefault((job.stream, job.samples.data_ptr()), k) for k, job in enumerate(jobs)]
        )
        self._repeats = np.flatnonzero(self._drawn_for != np.arange(len(jobs)))
        counts = np.array([len(samples) for samples in self._samples])
        self.width = int(min(settings.batch_size, counts.max()))
        self._per_epoch = -(-counts // self.width)
        self.steps = int(self._per_epoch.max()) * settings.epochs
        self.rows: NDArray[np.int32] = np.empty((self.steps, len(jobs), self.width), dtype=np.int32)
        self.sizes: NDArray[np.int32] = np.zeros((self.steps, len(jobs)), dtype=np.int32)

    def fill(self) -> Iterator[int]:
        """Draw the orders epoch after epoch; yields how many leading steps are complete so far.

        Clients with many batches an epoch are ahead of those with few: complete is what all of them have drawn.
        """
        for client, samples in enumerate(self._samples):
            self.rows[:, client] = samples[0]
        shortest = int(self._per_epoch.min())
        for epoch in range(self._settings.epochs):
            for client in np.unique(self._drawn_for).tolist():
                self._fill_epoch(client, self._jobs[client].stream, epoch)
            if self._repeats.size:
                first = self._drawn_for[self._repeats]
                self.rows[:, self._repeats] = self.rows[:, first]
                self.sizes[:, self._repeats] = self.sizes[:, first]
            yield self.steps if epoch + 1 == self._settings.epochs else shortest * (epoch + 1)

    def _fill_epoch(self, client: int, stream: SimStream, epoch: int) -> None:
        """One client's batches of one epoch: the whole ones, then what is left over, filled up."""
        samples, batches = self._samples[client], int(self._per_epoch[client])
        order = samples[stream.child("epoch", epoch).generator().permutation(len(samples))]
        first = epoch * batches
        whole, rest = divmod(len(samples), self.width)
        steps = slice(first, first + whole)
        self.rows[steps, client] = order[: whole * self.width].reshape(whole, self.width)
        self.sizes[steps, client] = self.width
        if rest:
            self.rows[first + whole, client, :rest] = order[-rest:]
            self.rows[first + whole, client, rest:] = order[-rest]
            self.sizes[first + whole, client] = rest
