"""The stacked step of many clients: its batches on the device, its form in plain torch, its capture in a CUDA graph.

All clients are one computation: weights [clients, ...], inputs [clients, batch, ...]. A `Steps` says how one step
is enqueued (`PlainSteps` here, the Triton kernels in `mlp` and `cnn`); `GraphedSteps` captures some of them once
and replays them, while the processor already draws the batches of the next epoch. The clients may be dealt to several
lanes, which do not wait for each other: while one waits for memory, another computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from niss.learning.cohort import BatchTable, Job, Problem
from niss.learning.local import FlatLayout, LocalTraining, sample_losses
from niss.learning.models import Mlp
from niss.learning.stackable import as_function

# Steps in one graph: launching a graph costs about as much as a small kernel.
UNROLLED = 10

# Entries by name, trained ones [clients, ...], and inputs [clients, batch, ...] to logits [clients, batch, classes],
# or [clients, batch, positions, classes].
StackedForward = Callable[[dict[str, Tensor], Tensor], Tensor]


class DeviceTable:
    """The table as a captured graph reads it: fixed addresses, room for `capacity` steps, a step counter.

    Steps that were never written have size 0: nobody moves in them. `first` is the number of its first client in
    the tables that are written to it.
    """

    def __init__(
        self, capacity: int, clients: int, width: int, device: torch.device, *, first: int = 0
    ) -> None:
        self.capacity = capacity
        self.clients = slice(first, first + clients)
        self.rows = torch.zeros((capacity, clients, width), dtype=torch.int32, device=device)
        self.sizes = torch.zeros((capacity, clients), dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        # Copies from pinned memory wait their turn on the device, while the processor goes on.
        pinned = device.type == "cuda"
        self._staged = [
            torch.zeros(tensor.shape, dtype=torch.int32, pin_memory=pinned)
            for tensor in (self.rows, self.sizes)
        ]
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        """Back to the first step, with no step written."""
        if self._copied is not None:
            self._copied.synchronize()
        self.counter.zero_()
        self.sizes.zero_()

    def write(self, table: BatchTable, first: int, last: int) -> None:
        """Steps `first` to `last` (without it) of `table`, which are complete there."""
        for source, staged, target in zip(
            (table.rows, table.sizes), self._staged, (self.rows, self.sizes), strict=True
        ):
            staged[first:last].copy_(torch.from_numpy(source[first:last, self.clients]))
            target[first:last].copy_(staged[first:last], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.rows.device))


class Steps(Protocol):
    """A formulation of the SGD steps of many clients, fit for capture in a CUDA graph: tensors keep their addresses.

    table  their batches
    """

    table: DeviceTable

    def load(self, starts: Tensor) -> None:
        """Begin at `starts`, [clients, h] or one vector for all."""

    def enqueue(self, offset: int) -> None:
        """One step of every client, at `counter + offset`; clients whose batch is empty do not move."""

    def finish(self) -> None:
        """What is left over after the last step; nothing, unless a formulation says otherwise."""
        return

    def read(self) -> Tensor:
        """The weights now, [clients, h], a new tensor."""


class PlainSteps(Steps):
    """The steps in plain torch: for float64, for machines without Triton, and for modules of the user's.

    The sum of the clients' losses is differentiated, which gives each client its own gradient; one that diverges
    does not reach the others. What is not trained is there once, for all clients: those that are loaded together
    must agree in it.
    """

    def __init__(
        self, forward: StackedForward, problem: Problem, table: DeviceTable, settings: LocalTraining
    ) -> None:
        inputs = problem.inputs
        self._layout, self._settings = problem.layout, settings
        self._forward, self._inputs, self._labels, self.table = forward, inputs, problem.labels, table
        self._trained = trained_pieces(problem.layout)
        clients, size = table.sizes.shape[1], sum(last - first for first, last in self._trained.values())
        # Weights and velocities of the trained entries, one after another; of all others, those of `_common`.
        self._weights = torch.empty((clients, size), dtype=problem.layout.dtype, device=inputs.device)
        self._velocity = torch.zeros_like(self._weights) if settings.momentum else None
        self._common = torch.zeros(problem.layout.size, dtype=problem.layout.dtype, device=inputs.device)
        self._entries = problem.layout.split(self._common)
        shapes = dict(zip(problem.layout.names, problem.layout.shapes, strict=True))
        pieces = torch.split(self._weights, [last - first for first, last in self._trained.values()], dim=1)
        for name, piece in zip(self._trained, pieces, strict=True):
            self._entries[name] = piece.view(clients, *shapes[name])
        self._places = torch.arange(table.rows.shape[2], device=inputs.device)

    def load(self, starts: Tensor) -> None:
        starts = starts.view(-1, starts.shape[-1])
        self._common.copy_(starts[0])
        self._weights.copy_(
            torch.cat([starts[:, first:last] for first, last in self._trained.values()], dim=1)
        )
        if self._velocity is not None:
            self._velocity.zero_()

    def read(self) -> Tensor:
        if self._weights.shape[1] == self._layout.size:
            return self._weights.clone()
        everything = self._common.expand(len(self._weights), -1).clone()
        for name, (first, last) in self._trained.items():
            everything[:, first:last] = self._entries[name].flatten(1)
        return everything

    def enqueue(self, offset: int) -> None:
        step = self.table.counter + offset
        rows = self.table.rows.index_select(0, step)[0].long()
        sizes = self.table.sizes.index_select(0, step)[0]
        counts = self._places < sizes[:, None]
        entries = {name: entry.detach() for name, entry in self._entries.items()}
        leaves = [entries[name].requires_grad_() for name in self._trained]
        with torch.enable_grad():
            logits = self._forward(entries, self._inputs[rows])
            losses = sample_losses(logits.flatten(0, 1), self._labels[rows].flatten(0, 1)).view_as(counts)
            scale = losses.new_ones(()) / sizes.clamp(min=1)
            loss = (torch.where(counts, losses, 0.0) * scale[:, None]).sum()
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        with torch.no_grad():
            self._move(leaves, gradients, (sizes > 0)[:, None])

    def _move(self, leaves: list[Tensor], gradients: Sequence[Tensor | None], active: Tensor) -> None:
        """One step of SGD of the clients that are `active`, by selection: no shape depends on who that is, as a
        graph needs it, and a non-finite value of one client stays with it. What the loss does not reach stays."""
        weights, settings = self._weights, self._settings
        direction = torch.cat(
            [
                (torch.zeros_like(leaf) if gradient is None else gradient).flatten(1)
                for leaf, gradient in zip(leaves, gradients, strict=True)
            ],
            dim=1,
        )
        if any(gradient is None for gradient in gradients):
            reached = [
                leaf.new_full((1, leaf[0].numel()), gradient is not None, dtype=torch.bool)
                for leaf, gradient in zip(leaves, gradients, strict=True)
            ]
            active = active & torch.cat(reached, dim=1)
        if settings.weight_decay:
            direction.add_(weights, alpha=settings.weight_decay)
        if self._velocity is not None:
            direction.add_(self._velocity, alpha=settings.momentum)
            self._velocity.copy_(torch.where(active, direction, self._velocity))
        weights.copy_(torch.where(active, weights.sub(direction, alpha=settings.learning_rate), weights))


def trained_pieces(layout: FlatLayout) -> dict[str, tuple[int, int]]:
    """The trained entries by name: where each begins and ends in the vector."""
    pieces, first = {}, 0
    for name, size, trained in zip(layout.names, layout.sizes, layout.trainable, strict=True):
        if trained:
            pieces[name] = (first, first + size)
        first += size
    return pieces


def stacked_mlp(module: Mlp) -> StackedForward:
    """`Mlp` as batched matrix products: one call a layer, where vmap would make several."""
    # In the order of the forward pass.
    layers = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]

    def forward(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        values = inputs.flatten(2)
        for depth, name in enumerate(layers):
            weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
            values = torch.baddbmm(bias.unsqueeze(1), values, weight.transpose(1, 2))
            if depth + 1 < len(layers):
                values = values.relu()
        return values

    return forward


def stacked_module(module: nn.Module, *, products: bool = True) -> StackedForward:
    """Any module whose forward pass can be vmapped over its trained entries; the others are there once.

    `products` as in `stackable_operations`; without it convolutions become grouped ones.
    """
    layout = FlatLayout.of(module)
    trained = trained_pieces(layout)
    return vmap(
        as_function(module, products=products),
        in_dims=({name: 0 if name in trained else None for name in layout.names}, 0),
    )


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Inside, torch's own products and convolutions are in TF32, or never; restored afterwards.

    torch's switches are global, so every computation that leaves the kernels runs inside.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = allowed
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


class GraphedSteps:
    """Steps captured once and replayed, `unrolled` of them a launch, counted on the device.

    lanes       the steps of all clients in order; each lane has a stream of its own
    bytes_held  the device memory that the steps take as long as this lives

    A launch that runs over the last step of a table finds steps of size 0, in which nobody moves.
    """

    def __init__(self, lanes: Sequence[Steps], unrolled: int, bytes_held: int) -> None:
        self._lanes, self._unrolled = lanes, unrolled
        self.bytes_held = bytes_held
        device = lanes[0].table.sizes.device
        streams = [torch.cuda.Stream(device) for _ in lanes]  # type: ignore[no-untyped-call]
        self._beside(streams, self._try_out)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._beside(streams, self._take_steps)

    def _beside(self, streams: Sequence[torch.cuda.Stream], work: Callable[[Steps], None]) -> None:
        """Every lane's `work` on its stream, after what is enqueued now and before what comes next."""
        current = torch.cuda.current_stream(streams[0].device)
        for stream, lane in zip(streams, self._lanes, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work(lane)
        for stream in streams:
            current.wait_stream(stream)

    def _try_out(self, lane: Steps) -> None:
        """Every size is 0: nobody moves while kernels are compiled and handles are made."""
        lane.enqueue(0)
        lane.finish()

    def _take_steps(self, lane: Steps) -> None:
        for offset in range(self._unrolled):
            lane.enqueue(offset)
        lane.table.counter.add_(self._unrolled)

    @property
    def capacity(self) -> int:
        """How many steps the tables have room for."""
        return self._lanes[0].table.capacity - self._unrolled - 1

    def run(self, table: BatchTable, starts: Tensor) -> None:
        """All steps of `table` from `starts`, [clients, h] or [1, h]; the device trains one epoch while the next is
        drawn."""
        for lane in self._lanes:
            lane.table.restart()
            lane.load(starts if len(starts) == 1 else starts[lane.table.clients])
        written = launched = 0
        for ready in table.fill():
            for lane in self._lanes:
                lane.table.write(table, written, ready)
            written = ready
            # A launch must find all its steps; the last one may run over into empty steps.
            until = ready if ready == table.steps else ready - self._unrolled + 1
            while launched < until:
                self._graph.replay()
                launched += self._unrolled
        for lane in self._lanes:
            lane.finish()

    def read(self) -> Tensor:
        """The trained weights, [clients, h], a new tensor."""
        weights = [lane.read() for lane in self._lanes]
        return weights[0] if len(weights) == 1 else torch.cat(weights)


def train_once(
    problem: Problem, forward: StackedForward, jobs: Sequence[Job], settings: LocalTraining
) -> Tensor:
    """The updates of these jobs in plain torch, [jobs, h], captured for this once; on a processor step by step."""
    device = problem.labels.device
    table = BatchTable(jobs, settings)
    resident = DeviceTable(table.steps + 2, len(jobs), table.width, device)
    steps = PlainSteps(forward, problem, resident, settings)
    starts = torch.stack([job.start for job in jobs])
    steps.load(starts)
    if device.type == "cuda":
        GraphedSteps([steps], 1, 0).run(table, starts)
    else:
        for _ in table.fill():
            pass
        resident.write(table, 0, table.steps)
        with torch.no_grad():
            for offset in range(table.steps):
                steps.enqueue(offset)
    return steps.read() - starts
