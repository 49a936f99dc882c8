"""Every client of a round at once on a CUDA device: the stacked step in a CUDA graph, data resident there.

`CudaCohort` gives what `train_client` gives, client by client, and differs only in rounding. Float32 is
float32: `tf32=False` keeps TF32 out of every product (the Triton kernels then compute each float32 product
as three TF32 products, whose error is that of float32). Which engine runs is said in `engine`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from niss.errors import ConfigError
from niss.learning.checks import require_logits, require_samples
from niss.learning.cohort_cuda_program import GraphedSteps, build_steps, choose_engine
from niss.learning.cohort_cuda_table import BatchTable, TrainingJob
from niss.learning.cohort_engines import is_plain_mlp, numbers_by_start
from niss.learning.evaluate import Evaluation
from niss.learning.flat import FlatLayout
from niss.learning.local import LocalTraining, train_client
from niss.learning.per_sample import clipped_gradient_step
from niss.learning.scratch import in_mode
from niss.learning.steps_ghost import clipped_mlp_steps

Progress = Callable[[int], None]
"""Told how many jobs are newly done."""

_KEPT_PROGRAMS = 3
_EVALUATION_ROWS = 5000


class CudaCohort:
    """Trains many clients at once on one CUDA device; a context manager that gives the memory back."""

    def __init__(
        self,
        module: nn.Module,
        layout: FlatLayout,
        inputs: Tensor,
        labels: Tensor,
        *,
        device: str = "cuda",
        tf32: bool = False,
    ) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "no CUDA device is available",
                field="device",
                hint="use device = 'cpu', or install torch for CUDA",
            )
        self._highest_label = require_samples(inputs, labels)
        self._device, self._tf32, self._layout = torch.device(device), tf32, layout
        self._module = copy.deepcopy(module).to(self._device)
        self._inputs = inputs.to(self._device).contiguous()
        self._labels = labels.to(self._device)
        self._plain_mlp = is_plain_mlp(self._module, layout, self._inputs, self._labels)
        self._programs: dict[object, GraphedSteps] = {}
        self._test: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._highest_test_label = 0
        with self._precision():
            self._engine = choose_engine(self._module, layout, self._inputs[:3], self._highest_label)

    @property
    def engine(self) -> str:
        """Device, formulation and precision in one line, for the manifest."""
        digits = str(self._layout.dtype).removeprefix("torch.")
        if digits == "float32":
            if self._tf32:
                digits = "TF32"
            elif self._engine.triton:
                digits = "float32 (products as 3xTF32)"
        return f"cuda: {torch.cuda.get_device_name(self._device)}, {self._engine.line}, {digits}"

    @property
    def together_bytes(self) -> int:
        """Updates for which the device has room beside what making them takes, other processes allowed for."""
        return int(torch.cuda.get_device_properties(self._device).total_memory) // 48

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory of the captured programs and of the test set back; a later call works again."""
        self._programs.clear()
        self._test = None
        torch.cuda.empty_cache()

    def train(
        self,
        jobs: Sequence[TrainingJob],
        settings: LocalTraining,
        *,
        out: NDArray[Any] | None = None,
        progress: Progress | None = None,
    ) -> NDArray[Any]:
        """Row i is what `train_client` returns for job i, up to the rounding of other summation orders.

        Modules that draw inside (Dropout) draw from the device's generator, seeded by the same stream:
        other masks than on the CPU.
        """
        result = self._rows(len(jobs), out)
        for first, updates in self._chunks(jobs, settings):
            last = first + len(updates)
            torch.from_numpy(result[first:last]).copy_(updates)
            if progress is not None:
                progress(len(updates))
        return result

    def train_on_device(
        self, jobs: Sequence[TrainingJob], settings: LocalTraining, *, progress: Progress | None = None
    ) -> Tensor:
        """As `train`, but the updates [jobs, h] stay on the device and nothing waits for them."""
        parts = []
        for _, updates in self._chunks(jobs, settings):
            parts.append(updates)
            if progress is not None:
                progress(len(updates))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def clipped_steps(
        self,
        jobs: Sequence[TrainingJob],
        *,
        clip: float,
        learning_rate: float,
        out: NDArray[Any] | None = None,
        progress: Progress | None = None,
    ) -> NDArray[Any]:
        """Row i is what `clipped_gradient_step` returns for job i (without a stream)."""
        result = self._rows(len(jobs), out)
        updates = self.clipped_steps_on_device(
            jobs, clip=clip, learning_rate=learning_rate, progress=progress
        )
        torch.from_numpy(result).copy_(updates)
        return result

    def clipped_steps_on_device(
        self,
        jobs: Sequence[TrainingJob],
        *,
        clip: float,
        learning_rate: float,
        progress: Progress | None = None,
    ) -> Tensor:
        """As `clipped_steps`, but the updates [jobs, h] stay on the device.

        The clients of an MLP that start from the same weights are one computation; any other module goes client
        by client.
        """
        updates = torch.empty((len(jobs), self._layout.size), dtype=self._layout.dtype, device=self._device)
        with self._precision():
            for numbers in self._clipped_together(jobs):
                some = [jobs[number] for number in numbers]
                updates[numbers] = self._clipped(some, clip, learning_rate)
                if progress is not None:
                    progress(len(some))
        return updates

    def _clipped_together(self, jobs: Sequence[TrainingJob]) -> list[list[int]]:
        """The numbers of jobs to be done at once."""
        if not self._plain_mlp:
            return [[number] for number in range(len(jobs))]
        return numbers_by_start(jobs)

    def _clipped(self, jobs: Sequence[TrainingJob], clip: float, learning_rate: float) -> Tensor:
        start = jobs[0].start.detach().to(self._device)
        if self._plain_mlp:
            return clipped_mlp_steps(
                self._layout, self._inputs.flatten(1), self._labels, start,
                [job.samples.to(self._device) for job in jobs], clip=clip, learning_rate=learning_rate,
            )  # fmt: skip
        images, labels = self._own_samples(jobs[0])
        return clipped_gradient_step(
            self._module, self._layout, start, images, labels, clip=clip, learning_rate=learning_rate
        )[None]

    @torch.no_grad()
    def evaluate(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Evaluation:
        """As `niss.learning.evaluate` of the module with these weights (on the CPU or the device).

        The test set is kept on the device as long as the same tensors come again.
        """
        images, targets = self._resident(inputs, labels)
        entries = self._layout.split(weights.detach().to(self._device))
        scores = torch.zeros(2, dtype=torch.float64, device=self._device)
        with self._precision(), in_mode(self._module, training=False):
            for some_images, some_labels in zip(
                torch.split(images, _EVALUATION_ROWS), torch.split(targets, _EVALUATION_ROWS), strict=True
            ):
                logits = require_logits(
                    functional_call(self._module, entries, (some_images,)),
                    rows=some_labels.shape[0],
                    highest_label=self._highest_test_label,
                ).double()
                hits = (logits.argmax(dim=1) == some_labels) & ~logits.isnan().any(dim=1)
                scores[0] += hits.sum()
                scores[1] += functional.cross_entropy(logits, some_labels, reduction="sum")
        right, loss = scores.tolist()
        examples = targets.shape[0]
        return Evaluation(accuracy=int(right) / examples, loss=loss / examples, examples=examples)

    def _resident(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self._test is None or self._test[0] is not inputs or self._test[1] is not labels:
            self._highest_test_label = require_samples(inputs, labels)
            self._test = (inputs, labels, inputs.to(self._device), labels.to(self._device))
        return self._test[2], self._test[3]

    def _rows(self, jobs: int, out: NDArray[Any] | None) -> NDArray[Any]:
        kind = np.dtype(str(self._layout.dtype).removeprefix("torch."))
        if out is None:
            return np.empty((jobs, self._layout.size), dtype=kind)
        if out.shape != (jobs, self._layout.size) or out.dtype != kind:
            raise ConfigError(
                f"must be {kind} of shape {(jobs, self._layout.size)}, not {out.dtype} of {out.shape}",
                field="out",
            )
        return out

    def _own_samples(self, job: TrainingJob) -> tuple[Tensor, Tensor]:
        rows = job.samples.to(self._device)
        return self._inputs[rows], self._labels[rows]

    def _chunks(self, jobs: Sequence[TrainingJob], settings: LocalTraining) -> Iterator[tuple[int, Tensor]]:
        """The updates of consecutive jobs, as many at once as the device holds."""
        for job in jobs:
            self._layout.split(job.start)
            if job.start.dtype != self._layout.dtype:
                raise ConfigError(f"is {job.start.dtype}, the model is {self._layout.dtype}", field="start")
            if job.samples.numel() == 0:
                raise ConfigError(
                    "a client has no samples",
                    field="jobs",
                    hint="leave clients without data out before training",
                )
        if not self._engine.stacked:
            for number, job in enumerate(jobs):
                yield number, self._train_alone(job, settings)[None]
            return
        first, room = 0, self._room(settings)
        while first < len(jobs):
            left = len(jobs) - first
            size = -(-left // -(-left // room))
            try:
                with self._precision():
                    updates = self._train_stacked(jobs[first : first + size], settings)
            except torch.cuda.OutOfMemoryError:
                self._programs.clear()
                torch.cuda.empty_cache()
                if size == 1:
                    raise
                room = size // 2
                continue
            yield first, updates
            first += size

    def _room(self, settings: LocalTraining) -> int:
        """How many clients to try at once: weights, velocities, result and its making within half of what is free."""
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        held = sum(program.bytes_held for program in self._programs.values())
        vectors = 5 if settings.momentum else 4
        return max(1, (free + held) // 2 // (vectors * self._layout.size * self._layout.dtype.itemsize))

    def _train_stacked(self, jobs: Sequence[TrainingJob], settings: LocalTraining) -> Tensor:
        table = BatchTable(jobs, settings)
        program = self._program(table, len(jobs), settings)
        starts = _stacked_starts(jobs, self._device)
        program.run(table, starts)
        return program.weights().sub_(starts)

    def _program(self, table: BatchTable, clients: int, settings: LocalTraining) -> GraphedSteps:
        rule = (settings.learning_rate, settings.momentum, settings.weight_decay)
        key = (clients, table.width, rule)
        program = self._programs.pop(key, None)
        if program is None or program.capacity < table.steps:
            program = None
            while len(self._programs) >= _KEPT_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            program = build_steps(
                self._engine, self._module, self._layout, self._inputs, self._labels,
                clients=clients, table=table, settings=settings, tf32=self._tf32,
            )  # fmt: skip
        self._programs[key] = program  # the last one used is the last one dropped
        return program

    def _train_alone(self, job: TrainingJob, settings: LocalTraining) -> Tensor:
        images, labels = self._own_samples(job)
        with self._precision():
            return train_client(
                self._module,
                self._layout,
                job.start.to(self._device),
                images,
                labels,
                settings,
                stream=job.stream,
            )

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """TF32 in torch's own products and convolutions only if asked for; restored afterwards."""
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = products.allow_tf32, convolutions.allow_tf32
        products.allow_tf32 = convolutions.allow_tf32 = self._tf32
        try:
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32 = before


def _stacked_starts(jobs: Sequence[TrainingJob], device: torch.device) -> Tensor:
    """[1, h] where all jobs start from the same tensor, else [jobs, h]; each distinct start travels once."""
    different = {id(job.start): job.start for job in jobs}
    if len(different) == 1:
        return jobs[0].start.detach().to(device)[None]
    places = {key: place for place, key in enumerate(different)}
    unique = torch.stack([start.detach().to(device) for start in different.values()])
    return unique[torch.tensor([places[id(job.start)] for job in jobs], device=device)]
