"""The cohort on the processor: which formulation trains a group of clients, and which process does it.

`formulations` has the reference loop and what is known of an `Mlp` and a `Cnn`, `VmapGroups` below stacks a user's own
module, [clients, ...], and vmaps the gradient of one client's loss: worth it for modules of small products, where the
price of a call exceeds that of its arithmetic. `pool` is the worker processes, seen from both sides. Every process uses
one torch thread: threads inside an operation collapse as soon as anything else runs on the machine, processes do not.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.flop_counter import FlopCounterMode

from niss.learning.cohort import Cohort, Job, Problem, TakeUpdates, numbers_by_start, why_not_stacked
from niss.learning.cpu.formulations import (
    MOST_CLIENTS,
    ChannelsLastLoop,
    CnnLoop,
    GroupLoop,
    MlpGroups,
    PlainLoop,
    group_batches,
)
from niss.learning.cpu.pool import CannotLoad, Group, Pool
from niss.learning.local import (
    Evaluation,
    FlatLayout,
    LocalTraining,
    evaluate,
    in_mode,
    require_logits,
    sample_losses,
    sgd_step,
    torch_threads,
    velocity_like,
)
from niss.learning.models import Cnn, Mlp, ResNet
from niss.learning.stackable import as_function

# Layers of few and small products, where one call for many clients saves time. Convolutions are faster one client at
# a time, and so is torch's LSTM, which has a kernel of its own (stacked: 0.4 to 1.2 times its speed); Dropout and
# BatchNorm draw or keep something that stacked clients would share.
_WORTHWHILE = (
    nn.Linear, nn.Bilinear, nn.Flatten, nn.Unflatten, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.Softplus,
    nn.GroupNorm, nn.Embedding, nn.GRU, nn.RNN, nn.modules.linear.NonDynamicallyQuantizableLinear,
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.ReLU6,
)  # fmt: skip

# vmap has a price of its own: at a step 8 clients gain 1.2 to 2.2 times on the plain loop, 4 hardly, 2 lose a fifth.
WORTH_STACKING = 6
# Where a call of torch has more arithmetic than this, or keeps more, its price matters no longer, and what is stacked
# leaves the cache. Measured: GRU and LSTM gain up to 0.34 million, and lose with 16 clients above; factorisation gains
# 1.45 times with batches of 20 and loses a tenth with 64.
MOST_OPERATIONS = 350_000
MOST_KEPT_BYTES = 128 * 2**10
# Tensors that a forward pass keeps, from which on it is long: then the slopes of all clients are taken at once by plain
# autograd, whose calls cost less (GRU 1.9 times as fast as the loop, by torch.func 1.2). In a short pass torch.func has
# the better layouts (factorisation in batches of 10: 1.7, by plain autograd 1.2).
LONG = 200

# Of the trial of stacked clients: float32 stays far below it.
_TOLERANCE = 1e-3

_Parameters = dict[str, Tensor]
_Gradients = Callable[[_Parameters, _Parameters, Tensor, Tensor, Tensor], _Parameters]


# Seconds of training after which worker processes are started, which takes about as long on a core each; this process
# does not wait for them. At worst their start doubles what was spent so far.
WORTH_WORKERS = 2.0
# Seconds of a round from which on it is shared with workers that are there: on a busy machine they may answer late.
WORTH_SHARING = 0.01
# What remains of a measured time with each round after it, so that the slower way is tried again now and then.
REMEMBERED = 0.98


@dataclass
class Pace:
    """What a sample takes, by the latest measurements; and how many seconds were measured in all."""

    total: float = 0.0
    seconds: float = 0.0
    samples: float = 0.0

    def __float__(self) -> float:
        """Seconds for a sample; without end while that is unknown."""
        return self.seconds / self.samples if self.samples else math.inf

    @contextmanager
    def measure(self, samples: int) -> Iterator[None]:
        """Inside, so many samples are trained; it counts as much as everything before it."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.total += seconds
        self.seconds = self.seconds / 2 + seconds
        self.samples = self.samples / 2 + samples


def choose_formulation(problem: Problem) -> PlainLoop:
    """The fastest way to train a group in one process that equals the reference; see `Cohort.of`.

    Where it is the plain loop, its name says why. Convolutions are never stacked: on a CPU that is slower than one
    client at a time.
    """
    if problem.built is Mlp:
        return MlpGroups(problem)
    if problem.built is Cnn:
        return CnnLoop(problem)
    if type(problem.module) in (Cnn, ResNet) and not any(
        isinstance(part, _DropoutNd) for part in problem.module.modules()
    ):
        return ChannelsLastLoop(problem)  # Masks of Dropout would be drawn in another order.
    stacked = VmapGroups(problem)
    if stacked.largest_group < MOST_CLIENTS:
        return PlainLoop(problem, "the module is too large to gain from stacking on a CPU")
    reason = why_not(problem)
    return stacked if reason is None else PlainLoop(problem, reason)


class CpuEngine(Cohort):
    """Trains groups of clients in this process and, once there is enough to do, in worker processes beside it.

    Where work is done is decided by clocks:
    - after `WORTH_WORKERS` seconds of training here workers are started, and this process trains meanwhile;
    - when they have loaded, what takes more than `WORTH_SHARING` is shared as long as that is the faster way.

    How it is done depends on the jobs alone (`make_groups`), and so do the results, to the last bit.
    """

    device = torch.device("cpu")

    def __init__(self, formulation: PlainLoop, *, workers: int, reason: str = "") -> None:
        """Train groups by `formulation`, in up to `workers` processes; `reason` says why there is only one."""
        self._formulation = formulation
        self._workers, self._reason = workers, reason
        self._pool: Pool | None = None
        self._alone, self._together = Pace(), Pace()
        self._have_shared = False

    @property
    def _problem(self) -> Problem:  # type: ignore[override]
        return self._formulation.problem

    @property
    def engine(self) -> str:
        where = f"{self._workers} processes" if self._workers > 1 else "one process"
        because = f", because {self._reason}" if self._reason else ""
        dtype = str(self._problem.layout.dtype).removeprefix("torch.")
        return f"cpu: {where}{because}; {self._formulation.name}; {dtype}"

    def perform(self, work: LocalTraining, jobs: Sequence[Job], take: TakeUpdates) -> None:
        """As `Cohort.perform`, group by group; the same bits from this process and from workers."""
        form = self._formulation
        groups = make_groups(jobs, form.largest_group, self._workers, partial(form.gains, work))
        passes = work.epochs if isinstance(work, LocalTraining) else 1
        left = passes * sum(len(job.samples) for job in jobs)
        for pace in (self._alone, self._together):
            pace.seconds *= REMEMBERED
        try:
            while groups:
                if self._workers > 1 and self._alone.total > WORTH_WORKERS:
                    self._start_pool()
                if len(groups) > 1 and self._gains_by_workers(left):
                    assert self._pool is not None
                    # The first time says nothing of the workers' pace, as they load parts of torch.
                    with self._together.measure(left) if self._have_shared else nullcontext():
                        self._pool.run(work, groups, take, self._train)
                    self._have_shared = True
                else:
                    group = groups.popleft()
                    samples = passes * sum(len(job.samples) for job in group[1])
                    with self._alone.measure(samples):
                        self._train(work, group, take)
                    left -= samples
        except BaseException:
            # Workers in the middle of something (Ctrl-C, a death among them) are of no further use.
            self.close()
            raise

    def evaluate(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Evaluation:
        problem = self._problem
        problem.layout.load(problem.module, weights)
        return evaluate(problem.module, inputs, labels)

    def start(self) -> None:
        if self._workers > 1:
            self._start_pool()
            self._has_workers(timeout=None)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @cached_property
    def _updates(self) -> Tensor:
        """Room for a group, used again and again: fresh memory costs more than filling it."""
        layout = self._problem.layout
        return torch.empty(self._formulation.largest_group, layout.size, dtype=layout.dtype)

    def _train(self, work: LocalTraining, group: Group, take: TakeUpdates) -> None:
        """One group, in this process."""
        numbers, jobs = group
        updates = self._updates[: len(numbers)]
        with torch_threads(1):  # as in workers: the last bits of sums depend on it
            self._formulation.perform(work, jobs, updates)
        take(numbers, updates)

    def _gains_by_workers(self, samples: int) -> bool:
        """Whether to share so many samples: with workers that are there, and faster by a tenth; both ways are tried."""
        alone, together = float(self._alone), float(self._together)
        faster = not self._together.samples or together < 0.9 * alone < math.inf
        return faster and samples * alone > WORTH_SHARING and self._has_workers()

    def _has_workers(self, timeout: float | None = 0.0) -> bool:
        """Whether all workers have loaded; without them for good where they cannot load the module."""
        try:
            return self._pool is not None and self._pool.is_ready(timeout)
        except CannotLoad as problem:
            self.close()
            self._workers, self._reason = 1, f"workers cannot load the module ({problem})"
            return False

    def _start_pool(self) -> None:
        if self._pool is None:
            self._pool, self._have_shared = Pool(self._formulation, self._workers - 1), False
            # One copy of the data is enough: the shared one serves this process too.
            self._formulation = replace(self._formulation, problem=self._pool.problem)


def make_groups(
    jobs: Sequence[Job], largest: int, workers: int, gains: Callable[[Sequence[Job]], bool]
) -> deque[Group]:
    """Clients of one start and of like size together, largest first; as many groups for each worker, where possible.

    The last bits of a batched product depend on who is in it: a group never mixes starts, so that what the
    clients of one method get does not depend on the methods trained beside them. Clients that do not gain from being
    together (`gains`, of some in falling order of their samples) are groups of one.
    """
    groups = [
        group
        for numbers in numbers_by_start(jobs)
        for group in _split(numbers, jobs, largest, workers, gains)
    ]
    groups.sort(key=lambda group: -len(group[1][0].samples))
    return deque(groups)


def _split(
    numbers: list[int],
    jobs: Sequence[Job],
    largest: int,
    workers: int,
    gains: Callable[[Sequence[Job]], bool],
) -> Iterator[Group]:
    """`numbers` in falling order of samples, in a multiple of `workers` pieces of at most `largest`."""
    order = sorted(numbers, key=lambda number: -len(jobs[number].samples))
    mine = [jobs[number] for number in order]
    largest = min(largest, len(order))
    # Those who are too large for any company would keep the others in their group from gaining.
    first = 0
    while first < len(order) and (largest == 1 or not gains(mine[first : first + largest])):
        yield (order[first],), mine[first : first + 1]
        first += 1
    rest = len(order) - first
    count = -(-rest // largest)
    count = min(rest, -(-count // workers) * workers)
    for piece in range(count):
        # As even as can be, the larger ones first.
        end = first + rest // count + (piece < rest % count)
        step = end - first if gains(mine[first:end]) else 1
        for begin in range(first, end, step):
            yield tuple(order[begin : begin + step]), mine[begin : begin + step]
        first = end


def why_not(problem: Problem) -> str | None:
    """None where stacking clients gains and equals the plain loop; otherwise one reason, in words."""
    for part in problem.module.modules():
        if not list(part.children()) and type(part) not in _WORTHWHILE:
            return f"{type(part).__name__} gains nothing from stacking on a CPU, or cannot be stacked"
    trial = VmapGroups(replace(problem, module=copy.deepcopy(problem.module)))

    def train(jobs: Sequence[Job], settings: LocalTraining) -> Tensor:
        updates = torch.empty((len(jobs), problem.layout.size), dtype=problem.layout.dtype)
        trial.perform(settings, jobs, updates)
        return updates

    return why_not_stacked(trial.problem, train, tolerance=_TOLERANCE)


class VmapGroups(GroupLoop):
    """Local training of a group as one computation; the jobs of a group share their start."""

    @property
    def name(self) -> str:
        return f"vmap groups of {WORTH_STACKING} to {self.largest_group} where that gains, else a plain loop"

    def gains(self, work: LocalTraining, jobs: Sequence[Job]) -> bool:
        """For local training: at least `WORTH_STACKING` clients at the average step, and calls with little to do."""
        steps = [-(-len(job.samples) // work.batch_size) for job in jobs]
        if sum(steps) < WORTH_STACKING * steps[0]:
            return False
        width = min(work.batch_size, len(jobs[0].samples))
        if width not in self._passes:
            self._passes[width] = _forward_pass(self.problem, width)
        calls, kept, operations = self._passes[width]
        return operations <= MOST_OPERATIONS * calls and kept <= MOST_KEPT_BYTES * calls

    @cached_property
    def _passes(self) -> dict[int, tuple[int, int, int]]:
        return {}

    @cached_property
    def _gradients(self) -> _Gradients:
        return _stacked_gradients(self.problem)

    def perform(self, work: LocalTraining, jobs: Sequence[Job], out: Tensor) -> None:
        if len(jobs) == 1:
            super().perform(work, jobs, out)
            return
        module, layout = self.problem.module, self.problem.layout
        inputs, labels = self.problem.inputs, self.problem.labels
        schedule = group_batches(jobs, work, layout.dtype)
        everyone, common = _stack(layout, [job.start for job in jobs])
        velocities = {name: velocity_like(part, work) for name, part in everyone.items()}
        # Without seed or restored buffers: `why_not` let in no layer that draws or remembers anything.
        with in_mode(module, training=True):
            for number, working in enumerate(schedule.working):
                rows = schedule.rows[number, :working]
                weights = {name: part[:working] for name, part in everyone.items()}
                share = schedule.weights[number, :working, :, 0]
                slopes = self._gradients(weights, common, inputs[rows], labels[rows], share)
                with torch.no_grad():
                    for name, slope in slopes.items():
                        velocity = velocities[name]
                        sgd_step(weights[name], None if velocity is None else velocity[:working], slope, work)
        with torch.no_grad():
            for client, job in enumerate(jobs):
                out[client] = job.start
                for name, part in layout.split(out[client]).items():
                    if name in everyone:
                        part.copy_(everyone[name][client])
                out[client].sub_(job.start)


def _forward_pass(problem: Problem, width: int) -> tuple[int, int, int]:
    """Of a forward pass of `width` samples: how many tensors it keeps for the way back, their bytes without those of
    parameters, and the operations of its products."""
    own = {part.untyped_storage().data_ptr() for part in problem.module.parameters()}
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(0 if tensor.untyped_storage().data_ptr() in own else tensor.nbytes)
        return tensor

    rows = torch.arange(width) % len(problem.labels)
    with (
        in_mode(problem.module, training=True),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        FlopCounterMode(display=False) as products,
    ):
        problem.module(problem.inputs[rows])
    return len(kept), sum(kept), products.get_total_flops()


def _stack(layout: FlatLayout, starts: Sequence[Tensor]) -> tuple[_Parameters, _Parameters]:
    """Every trained parameter of all clients, [clients, ...] by name; and what is not trained, once for them all."""
    parts = [layout.split(start.detach()) for start in starts]
    trained = [name for name, flag in zip(layout.names, layout.trainable, strict=True) if flag]
    everyone = {name: torch.stack([own[name] for own in parts]) for name in trained}
    return everyone, {name: part for name, part in parts[0].items() if name not in everyone}


def _stacked_gradients(problem: Problem) -> _Gradients:
    """Gradients of each client's loss, sum_i share_i * cross-entropy_i over its batch, with all clients stacked."""
    forward, highest_label = as_function(problem.module), int(problem.labels.max())

    def batch_loss(
        weights: _Parameters, common: _Parameters, images: Tensor, labels: Tensor, share: Tensor
    ) -> Tensor:
        logits = require_logits(
            forward(weights | common, images), shape=labels.shape, highest_label=highest_label
        )
        return (sample_losses(logits, labels) * share).sum()

    places = (0, None, 0, 0, 0)
    if _forward_pass(problem, 1)[0] < LONG:
        return vmap(grad(batch_loss), in_dims=places)
    losses = vmap(batch_loss, in_dims=places)

    def gradients(weights: _Parameters, *rest: Any) -> _Parameters:
        # No client's loss depends on another's weights: the slopes of the sum are those of each.
        leaves = [part.detach().requires_grad_() for part in weights.values()]
        with torch.enable_grad():
            total = losses(dict(zip(weights, leaves, strict=True)), *rest).sum()
        slopes = torch.autograd.grad(total, leaves, materialize_grads=True)
        return dict(zip(weights, slopes, strict=True))

    return gradients
