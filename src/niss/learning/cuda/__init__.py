"""Every client of a round at once on a CUDA device: the stacked step in a CUDA graph, data resident there.

It gives what `train_client` gives, client by client, and differs only in rounding. Float32 is float32: `tf32=False`
keeps TF32 out of every product (the Triton kernels then split each factor of a float32 product into two parts of 11
bits, TF32 or float16, and multiply three pairs of them: the error is that of float32).

The engine chooses the formulation and holds what is resident on the device; `program` has the table of batches, the
step in plain torch and the graph; `mlp` and `cnn` launch the Triton kernels of `kernels` and `conv_kernels`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from niss.learning.cohort import (
    BatchTable,
    Cohort,
    Job,
    Problem,
    TakeUpdates,
    numbers_by_start,
    why_not_stacked,
)
from niss.learning.cuda.program import (
    UNROLLED,
    DeviceTable,
    GraphedSteps,
    PlainSteps,
    StackedForward,
    Steps,
    stacked_mlp,
    stacked_module,
    tf32_products,
    train_once,
)
from niss.learning.local import Evaluation, LocalTraining, in_mode, require_logits, require_samples, score
from niss.learning.models import Cnn, Mlp

if TYPE_CHECKING:  # they need Triton
    from niss.learning.cuda.cnn import CnnSteps
    from niss.learning.cuda.mlp import MlpSteps

# What the kernels take: they hold a batch in one tile. Larger ones are no longer bound by weight traffic.
LARGEST_BATCH = 64
_MOST_PROGRAMS = 3
# Clients from which a recurrent layer step by step is faster than torch's own, one after another: one or two clients of
# a GRU lose, four gain 1.6 times.
_WORTH_UNROLLING = 3
# What a step may keep of a client's batch: 0.4 GiB gain 3 times and 0.5 GiB 2 times, at 1.4 GiB one client fills the
# device and stacking loses.
_LARGEST_STEP = 768 * 2**20
# Of the trial of stacked clients: TF32 stays far below it.
_TOLERANCE = 2e-2
# Samples of a batch of evaluation: for any module, for the convolutions, whose outputs are held, and for an `Mlp`.
_ROWS, _CONVOLVED, _FLAT = 5000, 2500, 50_000


@dataclass(frozen=True)
class Formulation:
    """How the step of a module is computed: `forward` for all clients stacked, or None for one after another.

    With `triton`, batches of at most `LARGEST_BATCH` go through the fused kernels instead. Fewer clients than
    `at_least` are trained one after another. `line` says it in words.
    """

    line: str
    forward: StackedForward | None
    triton: bool = False
    at_least: int = 1


def choose_formulation(problem: Problem) -> Formulation:
    """Fused kernels for the package's models, else plain stacked torch, else one client after another.

    The kernels are for float32, for models and images that fit into their tiles, and need Triton; whatever is
    missing is said in the line. Raises `ConfigError` where the module's logits do not fit the labels.
    """
    module, some = problem.module, problem.labels[:3]
    with torch.no_grad(), in_mode(module, training=False):
        logits = module(problem.inputs[:3])
        require_logits(logits, shape=some.shape, highest_label=int(problem.labels.max()))
    if problem.built is not None:
        name = problem.built.__name__.upper()
        forward = stacked_mlp(module) if isinstance(module, Mlp) else stacked_module(module)
        plain = "batched products"
        if problem.layout.dtype != torch.float32:
            return Formulation(f"{name} as {plain} in a CUDA graph", forward)
        if find_spec("triton") is None:
            return Formulation(f"{name} as {plain} in a CUDA graph (Triton is not installed)", forward)
        if _kernel_steps(problem) is None:
            return Formulation(f"{name} as {plain} in a CUDA graph (not one for the kernels)", forward)
        line = f"{name} in fused Triton kernels in a CUDA graph (batches above {LARGEST_BATCH}: {plain})"
        return Formulation(line, forward, triton=True)
    forward = stacked_module(module)
    reason = why_not_stacked(problem, partial(train_once, problem, forward), tolerance=_TOLERANCE)
    if reason is None:
        recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
        at_least = _WORTH_UNROLLING if recurrent else 1
        fewer = f"fewer than {at_least} clients, " if recurrent else ""
        line = (
            f"{type(module).__name__} vmapped in a CUDA graph ({fewer}batches that keep over "
            f"{_LARGEST_STEP >> 20} MiB a client: one after another)"
        )
        return Formulation(line, forward, at_least=at_least)
    return Formulation(f"{type(module).__name__} one client after another ({reason})", None)


def _kernel_steps(problem: Problem) -> type[MlpSteps] | type[CnnSteps] | None:
    """The steps of this model in Triton kernels; None where their tiles do not hold it."""
    from niss.learning.cuda.cnn import CnnSteps
    from niss.learning.cuda.mlp import MlpSteps

    steps: type[MlpSteps] | type[CnnSteps] = MlpSteps if problem.built is Mlp else CnnSteps
    return steps if steps.fit(problem) else None


class CudaEngine(Cohort):
    """Trains many clients at once on one CUDA device, where the data of all clients lie.

    Captured programs are kept for the next round as long as it has as many clients and the same rule of SGD:
    capturing takes longer than a round. At most `_MOST_PROGRAMS` are kept, the ones used last.
    """

    def __init__(self, problem: Problem, *, device: str = "cuda", tf32: bool = False) -> None:
        """Copies the problem to `device` ("cuda", "cuda:1"); `tf32` allows TF32 in all products."""
        self.device, self._tf32 = torch.device(device), tf32
        self._problem = Problem(
            copy.deepcopy(problem.module).to(self.device),
            problem.layout,
            problem.inputs.to(self.device).contiguous(),
            problem.labels.to(self.device),
        )
        self._programs: dict[object, GraphedSteps] = {}
        self._measured: dict[int, int] = {}
        self._evaluation: _DeviceEvaluation | None = None
        self._kernel_precision = "tf32" if tf32 else "tf32x3"
        # Making updates takes several times their memory, and other processes may be on the device.
        self.room_for_updates = int(torch.cuda.get_device_properties(self.device).total_memory) // 48
        with tf32_products(self._tf32):
            self._formulation = choose_formulation(self._problem)

    @property
    def engine(self) -> str:
        digits = str(self._problem.layout.dtype).removeprefix("torch.")
        if digits == "float32":
            if self._tf32:
                digits = "TF32"
            elif self._formulation.triton:
                digits = "float32 (products in three parts)"
        return f"cuda: {torch.cuda.get_device_name(self.device)}, {self._formulation.line}, {digits}"

    def close(self) -> None:
        self._programs.clear()
        self._evaluation = None
        torch.cuda.empty_cache()

    def evaluate(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Evaluation:
        if self._evaluation is None or not self._evaluation.is_of(inputs, labels):
            precision = self._kernel_precision if self._formulation.triton else None
            self._evaluation = _DeviceEvaluation(self._problem, inputs, labels, precision=precision)
        with tf32_products(self._tf32):
            return self._evaluation(weights)

    def perform(self, work: LocalTraining, jobs: Sequence[Job], take: TakeUpdates) -> None:
        """As `Cohort.perform`; the updates may still be on their way when `take` gets them.

        Stacked training takes as many clients at once as the device holds. Anything else goes client by client.
        """
        if self._worth_stacking(work, jobs):
            for together in self._stackable(jobs):
                self._train_in_chunks(work, jobs, together, take)
        else:
            with tf32_products(self._tf32):
                for number, job in enumerate(jobs):
                    take(range(number, number + 1), self._problem.update_of(job, work)[None])

    def _worth_stacking(self, settings: LocalTraining, jobs: Sequence[Job]) -> bool:
        """Whether the clients can be stacked, are enough, and do not fill the device one by one."""
        formulation = self._formulation
        if formulation.forward is None or len(jobs) < formulation.at_least:
            return False
        return (
            self._problem.built is not None or self._kept(settings, _width(settings, jobs)) <= _LARGEST_STEP
        )

    def _stackable(self, jobs: Sequence[Job]) -> list[Sequence[int]]:
        """The numbers of jobs that may be loaded together: what is not trained is there once for all of them."""
        layout = self._problem.layout
        if all(layout.trainable):
            return [range(len(jobs))]
        frozen = ~layout.trainable_mask()
        groups: list[tuple[Tensor, list[int]]] = []
        for numbers in numbers_by_start(jobs):
            start = jobs[numbers[0]].start
            common = start.detach()[frozen.to(start.device)].cpu()
            own = next((group for known, group in groups if torch.equal(known, common)), None)
            if own is None:
                groups.append((common, list(numbers)))
            else:
                own.extend(numbers)
        return [range(len(jobs))] if len(groups) == 1 else [numbers for _, numbers in groups]

    def _train_in_chunks(
        self, settings: LocalTraining, jobs: Sequence[Job], numbers: Sequence[int], take: TakeUpdates
    ) -> None:
        """The jobs of these numbers, as many at once as the device holds; half as many after it ran out of memory.

        Chunks are of like size, so that one captured program serves them all, or two.
        """
        width = _width(settings, [jobs[number] for number in numbers])
        known = _program_key(len(numbers), width, settings) in self._programs
        first, room = 0, len(numbers) if known else self._room(settings, width)
        while first < len(numbers):
            left = len(numbers) - first
            size = -(-left // -(-left // room))
            try:
                with tf32_products(self._tf32):
                    some = numbers[first : first + size]
                    updates = self._train_stacked([jobs[number] for number in some], settings)
            except torch.cuda.OutOfMemoryError:
                self._programs.clear()
                torch.cuda.empty_cache()
                if size == 1:
                    raise
                room = size // 2
                continue
            take(some, updates)
            first += size

    def _room(self, settings: LocalTraining, width: int) -> int:
        """How many clients to try at once: what they take, and the making of the result, in half of what is free.

        What captured programs hold counts as free: they make way for the next one.
        """
        needed = self._bytes_of_a_client(settings, width)
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        held = sum(program.bytes_held for program in self._programs.values())
        return int(max(1, (free + held) // 2 // needed))

    def _bytes_of_a_client(self, settings: LocalTraining, width: int) -> int:
        """Weights, velocity, gradient, step, what the backward pass keeps of a batch, and two rows of the result."""
        layout = self._problem.layout
        row, trained = (
            count * layout.dtype.itemsize for count in (layout.size, int(layout.trainable_mask().sum()))
        )
        if self._formulation.triton and width <= LARGEST_BATCH:
            return (5 if settings.momentum else 4) * row  # the kernels keep little of a batch
        return (5 if settings.momentum else 4) * trained + 2 * row + self._kept(settings, width)

    def _kept(self, settings: LocalTraining, width: int) -> int:
        """Bytes that a step of one client takes beyond its weights, velocity, gradient and new weights.

        It is measured once, on two clients. More than the device has where these do not fit.
        """
        if width not in self._measured:
            assert self._formulation.forward is not None
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            resident = DeviceTable(1, 2, width, self.device)
            steps = PlainSteps(
                self._formulation.forward, self._problem, resident, replace(settings, momentum=0.0)
            )
            try:
                with tf32_products(self._tf32):
                    steps.load(self._problem.layout.flatten(self._problem.module))
                    steps.enqueue(0)
                peak = torch.cuda.max_memory_allocated(self.device) - before
            except torch.cuda.OutOfMemoryError:
                peak = 2 * int(torch.cuda.get_device_properties(self.device).total_memory)
            vectors = (
                4 * int(self._problem.layout.trainable_mask().sum()) * self._problem.layout.dtype.itemsize
            )
            self._measured[width] = max(0, peak // 2 - vectors)
        return self._measured[width]

    def _train_stacked(self, jobs: Sequence[Job], settings: LocalTraining) -> Tensor:
        """The updates of these jobs as one computation, [jobs, h]; the device may still be at work on them."""
        table = BatchTable(jobs, settings)
        program = self._program(table, len(jobs), settings)
        starts = _stacked_starts(jobs, self.device)
        program.run(table, starts)
        return program.read().sub_(starts)

    def _program(self, table: BatchTable, clients: int, settings: LocalTraining) -> GraphedSteps:
        """The captured steps for so many clients and batches of the table's width, made where there are none."""
        key = _program_key(clients, table.width, settings)
        program = self._programs.pop(key, None)
        if program is None or program.capacity < table.steps:
            program = None
            while len(self._programs) >= _MOST_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            program = self._capture(table, clients, settings)
        self._programs[key] = program  # the last one used is the last one dropped
        return program

    def _capture(self, table: BatchTable, clients: int, settings: LocalTraining) -> GraphedSteps:
        """The steps for so many clients in a graph, with room for more steps than `table` has: the next round's
        clients may have more samples."""
        before = torch.cuda.memory_allocated(self.device)
        room = max(256, 1 << (table.steps - 1).bit_length()) + UNROLLED + 1
        problem, formulation = self._problem, self._formulation
        kernels = _kernel_steps(problem) if formulation.triton and table.width <= LARGEST_BATCH else None
        tables: list[DeviceTable] = []
        for count in _dealt(clients, kernels.lanes if kernels else 1):
            first = tables[-1].clients.stop if tables else 0
            tables.append(DeviceTable(room, count, table.width, self.device, first=first))
        steps: Sequence[Steps]
        if kernels is not None:
            steps = kernels.abreast(problem, tables, settings, precision=self._kernel_precision)
        else:
            assert formulation.forward is not None
            steps = [PlainSteps(formulation.forward, problem, tables[0], settings)]
        for some in steps:
            some.load(problem.layout.flatten(problem.module))
        held = torch.cuda.memory_allocated(self.device) - before
        return GraphedSteps(steps, UNROLLED if formulation.triton else 2, held)


def _width(settings: LocalTraining, jobs: Sequence[Job]) -> int:
    """Samples of the largest batch."""
    return min(settings.batch_size, max((len(job.samples) for job in jobs), default=1))


def _program_key(clients: int, width: int, settings: LocalTraining) -> tuple[object, ...]:
    """What a captured program is good for."""
    return clients, width, settings.learning_rate, settings.momentum, settings.weight_decay


def _dealt(clients: int, lanes: int) -> list[int]:
    """How many clients each lane gets: as many as the others or one more, and at least one."""
    lanes = min(clients, lanes)
    return [clients // lanes + (lane < clients % lanes) for lane in range(lanes)]


def _stacked_starts(jobs: Sequence[Job], device: torch.device) -> Tensor:
    """[1, h] where all jobs start from the same tensor, else [jobs, h]; each distinct start travels once."""
    different = {id(job.start): job.start for job in jobs}
    if len(different) == 1:
        return jobs[0].start.detach().to(device)[None]
    places = {key: place for place, key in enumerate(different)}
    unique = torch.stack([start.detach().to(device) for start in different.values()])
    return unique[torch.tensor([places[id(job.start)] for job in jobs], device=device)]


class _DeviceEvaluation:
    """Scores the weights of a problem's module on `inputs` and `labels`, which are copied to its device.

    precision  of the kernels for the convolutions of a `Cnn` as built; None where torch computes everything

    For the package's models it is a CUDA graph from the second time on: launching its many small kernels one by one
    takes longer than they do. The convolutions of a `Cnn` go through the kernels of the training. torch's own switches
    decide whether it may use TF32: those at the time of the first two calls.
    """

    def __init__(self, problem: Problem, inputs: Tensor, labels: Tensor, *, precision: str | None) -> None:
        self._highest_label = require_samples(inputs, labels)
        self._problem, self._given = problem, (inputs, labels)
        device = problem.inputs.device
        self._inputs, self._labels = inputs.to(device), labels.to(device)
        self._module: nn.Module = problem.module
        self._rows = _FLAT if problem.built is Mlp else _ROWS
        like_training = inputs.shape[1:] == problem.inputs.shape[1:]
        if precision is not None and isinstance(problem.module, Cnn) and like_training:
            self._convolve(problem.module, precision)
        self._weights = torch.empty(problem.layout.size, dtype=problem.layout.dtype, device=device)
        self._scores = torch.zeros(2, dtype=torch.float64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def _convolve(self, module: Cnn, precision: str) -> None:
        from niss.learning.cuda.cnn import CnnForward, of_like_brightness

        if of_like_brightness(self._inputs):
            self._module = CnnForward(module, self._inputs[:_CONVOLVED], precision=precision)
            self._rows = _CONVOLVED

    def is_of(self, inputs: Tensor, labels: Tensor) -> bool:
        """Whether these very tensors were given."""
        return self._given[0] is inputs and self._given[1] is labels

    def __call__(self, weights: Tensor) -> Evaluation:
        self._weights.copy_(weights.detach())
        self._calls += 1
        if self._calls == 2 and self._problem.built is not None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._score()
        if self._graph is None:
            self._score()
        else:
            self._graph.replay()
        return Evaluation.of(self._scores, self._labels)

    def _score(self) -> None:
        self._problem.layout.load(self._problem.module, self._weights)
        self._scores.copy_(
            score(
                self._module, self._inputs, self._labels,
                batch_size=self._rows, highest_label=self._highest_label,
            )
        )  # fmt: skip
