"""Which formulation of the stacked step a module gets, and that step captured in a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn

from niss.learning.checks import require_logits
from niss.learning.cohort_cuda_plain import (
    PlainSteps,
    StackedForward,
    stacked_mlp,
    stacked_module,
)
from niss.learning.cohort_cuda_table import BatchTable, DeviceTable
from niss.learning.flat import FlatLayout
from niss.learning.local import LocalTraining
from niss.learning.models import Cnn, Mlp
from niss.learning.scratch import batch_statistics_layers, in_mode

LARGEST_BATCH = 64
"""What the kernels take: they hold a batch in one tile. Larger ones are no longer bound by weight traffic."""

UNROLLED = 10
"""Steps in one graph: launching a graph costs about as much as a small kernel."""


class Steps(Protocol):
    """A formulation of the step: `PlainSteps` says what the methods mean."""

    def load(self, starts: Tensor) -> None: ...
    def enqueue(self, offset: int) -> None: ...
    def finish(self) -> None: ...
    def read(self) -> Tensor: ...


@dataclass(frozen=True)
class Engine:
    """The choice for a module: stacked or not, with Triton or not, and the line that says so."""

    line: str
    forward: StackedForward | None
    triton: bool = False

    @property
    def stacked(self) -> bool:
        return self.forward is not None


def choose_engine(module: nn.Module, layout: FlatLayout, some_inputs: Tensor, highest_label: int) -> Engine:
    """Fused kernels for the package's models, else plain stacked torch, else one client after another."""
    with torch.no_grad(), in_mode(module, training=False):
        require_logits(module(some_inputs), rows=some_inputs.shape[0], highest_label=highest_label)
    if type(module) in (Mlp, Cnn) and _as_built(module, layout):
        name = type(module).__name__.upper()
        forward = stacked_mlp(module) if isinstance(module, Mlp) else stacked_module(module)
        plain = "batched products" if isinstance(module, Mlp) else "grouped convolutions"
        if layout.dtype != torch.float32:
            return Engine(f"{name} as {plain} in a CUDA graph", forward)
        if find_spec("triton") is None:
            return Engine(f"{name} as {plain} in a CUDA graph (Triton is not installed)", forward)
        if not _kernels_fit(module, some_inputs, batch=1):
            return Engine(f"{name} as {plain} in a CUDA graph (too large for the kernels)", forward)
        line = f"{name} in fused Triton kernels in a CUDA graph (batches above {LARGEST_BATCH}: {plain})"
        return Engine(line, forward, triton=True)
    reason = _why_not_stacked(module, layout, some_inputs)
    if reason is None:
        return Engine(f"{type(module).__name__} vmapped in a CUDA graph", stacked_module(module))
    return Engine(f"{type(module).__name__} one client after another ({reason})", None)


def _as_built(module: nn.Module, layout: FlatLayout) -> bool:
    """Whether nothing was frozen, hooked or replaced since `build_model`."""
    hooked = any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )
    plain = {nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU, nn.Conv2d, nn.MaxPool2d, Mlp, Cnn}
    return all(layout.trainable) and not hooked and all(type(part) in plain for part in module.modules())


def _kernels_fit(module: nn.Module, some_inputs: Tensor, *, batch: int) -> bool:
    from niss.learning.cohort_cuda_cnn import CnnSteps
    from niss.learning.cohort_cuda_mlp import MlpSteps

    return (
        batch <= LARGEST_BATCH
        and some_inputs.dtype == torch.float32
        and (MlpSteps.fits(module) or CnnSteps.fits(module, tuple(some_inputs.shape[1:])))
    )


def _why_not_stacked(module: nn.Module, layout: FlatLayout, some_inputs: Tensor) -> str | None:
    """Why clients of this module cannot share a computation, or None.

    Short batches are filled up, which is exact only where the samples of a batch do not meet; and what
    the forward pass changes (running statistics) would change for finished clients too.
    """
    if layers := batch_statistics_layers(module):
        return f"{layers[0]} mixes the samples of a batch"
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    vector = layout.flatten(module)
    try:
        with in_mode(module, training=True), torch.no_grad():
            entries = {name: value[None] for name, value in layout.split(vector).items()}
            stacked = stacked_module(module)(entries, some_inputs[None])[0]
            alone = torch.cat([module(sample[None]) for sample in some_inputs])
        changed = any(not torch.equal(buffers[name], now) for name, now in module.named_buffers())
        if changed or not torch.equal(vector, layout.flatten(module)):
            return "its forward pass changes its buffers"
        if not torch.allclose(stacked, alone, rtol=1e-3, atol=1e-5, equal_nan=True):
            return "the samples of a batch influence each other"
    except RuntimeError as problem:
        return f"vmap: {str(problem).strip().splitlines()[0][:120]}"
    finally:
        with torch.no_grad():
            for name, now in module.named_buffers():
                now.copy_(buffers[name])
    return None


class GraphedSteps:
    """Steps captured once and replayed: `UNROLLED` of them a launch, counted on the device."""

    def __init__(self, steps: Steps, table: DeviceTable, unrolled: int, bytes_held: int) -> None:
        self._steps, self._table, self._unrolled = steps, table, unrolled
        self.bytes_held = bytes_held
        side = torch.cuda.Stream(table.sizes.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(table.sizes.device))
        with torch.cuda.stream(side):
            # Every size is 0: nobody moves while kernels are compiled and handles are made.
            steps.enqueue(0)
            steps.finish()
        torch.cuda.current_stream(table.sizes.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for offset in range(unrolled):
                steps.enqueue(offset)
            table.counter.add_(unrolled)

    @property
    def capacity(self) -> int:
        """How many steps the table has room for."""
        return self._table.capacity - self._unrolled - 1

    def run(self, table: BatchTable, starts: Tensor) -> None:
        """All steps of `table` from `starts`; the device trains one epoch while the next is drawn."""
        self._table.restart()
        self._steps.load(starts)
        written = launched = 0
        for ready in table.fill():
            self._table.write(table, written, ready)
            written = ready
            # A launch must find all its steps; the last one may run over into empty steps.
            until = ready if ready == table.steps else ready - self._unrolled + 1
            while launched < until:
                self._graph.replay()
                launched += self._unrolled
        self._steps.finish()

    def weights(self) -> Tensor:
        """The trained weights [clients, h], a new tensor."""
        weights = self._steps.read()
        return weights.clone() if isinstance(self._steps, PlainSteps) else weights


def build_steps(
    engine: Engine,
    module: nn.Module,
    layout: FlatLayout,
    inputs: Tensor,
    labels: Tensor,
    *,
    clients: int,
    table: BatchTable,
    settings: LocalTraining,
    tf32: bool,
) -> GraphedSteps:
    """The captured step of `engine` for so many clients and batches of the table's width."""
    before = torch.cuda.memory_allocated(inputs.device)
    room = max(256, 1 << (table.steps - 1).bit_length()) + UNROLLED + 1
    resident = DeviceTable(room, clients, table.width, inputs.device)
    steps: Steps
    if engine.triton and _kernels_fit(module, inputs, batch=table.width):
        from niss.learning.cohort_cuda_cnn import CnnSteps
        from niss.learning.cohort_cuda_mlp import MlpSteps

        precision = "tf32" if tf32 else "tf32x3"
        if isinstance(module, Mlp):
            steps = MlpSteps(module, layout, inputs, labels, resident, settings, precision=precision)
        else:
            assert isinstance(module, Cnn)
            steps = CnnSteps(layout, inputs, labels, resident, settings, precision=precision)
    else:
        assert engine.forward is not None
        steps = PlainSteps(engine.forward, layout, inputs, labels, resident, settings)
    steps.load(layout.flatten(module))
    unrolled = UNROLLED if engine.triton else 2
    held = torch.cuda.memory_allocated(inputs.device) - before
    return GraphedSteps(steps, resident, unrolled, held)
