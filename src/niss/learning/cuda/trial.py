"""Whether clients of a module can share a computation: it is tried on two of them, against the reference."""

from __future__ import annotations

import torch

from niss.learning.cohort import BatchTable, Job, Problem
from niss.learning.cuda.program import DeviceTable, GraphedSteps, Lane, PlainSteps, StackedForward
from niss.learning.local import LocalTraining, batch_statistics_layers, in_mode
from niss.randomness import SimStream

# What a difference in rounding stays far below, in TF32 too, and a wrong gradient does not.
_TOLERANCE = 2e-2


def why_not_stacked(problem: Problem, forward: StackedForward) -> str | None:
    """Why clients of this module cannot share a computation in a CUDA graph, or None.

    Two clients with weights of their own take a step as in training, one of them on a batch that is filled up,
    which is exact only where the samples of a batch do not meet. What the forward pass changes (running statistics)
    would change for finished clients too.
    """
    module = problem.module
    if layers := batch_statistics_layers(module):
        return f"{layers[0]} mixes the samples of a batch"
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with in_mode(module, training=True):
            return _compare(problem, forward)
    except Exception as error:  # whatever a user's forward raises when it is stacked or captured
        return _in_words(error)
    finally:
        with torch.no_grad():
            for name, now in module.named_buffers():
                now.copy_(buffers[name])


def _compare(problem: Problem, forward: StackedForward) -> str | None:
    module, layout, device = problem.module, problem.layout, problem.labels.device
    last = len(problem.labels) - 1
    start = layout.flatten(module)
    trained = layout.trainable_mask().to(device)
    other = torch.where(trained, 0.9 * start, start)
    jobs = [
        Job(start, torch.tensor([last, 0, last // 2]), SimStream(1)),
        Job(other, torch.tensor([0, last]), SimStream(2)),
    ]
    settings = LocalTraining(epochs=1, batch_size=3, learning_rate=1.0)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    table = BatchTable(jobs, settings)
    resident = DeviceTable(table.steps + 2, len(jobs), table.width, device)
    steps = PlainSteps(forward, problem, resident, settings)
    starts = torch.stack([start, other])
    if device.type == "cuda":
        steps.load(starts)
        GraphedSteps([Lane(steps, resident)], 1, 0).run(table, starts)
    else:
        for ready in table.fill():
            resident.write(table, 0, ready)
        steps.load(starts)
        steps.enqueue(0)
    found = steps.read() - starts
    changed = any(not torch.equal(buffers[name], now) for name, now in module.named_buffers())
    if changed or bool(found[:, ~trained].any()):
        return "its forward pass changes its buffers"
    for row, job in zip(found, jobs, strict=True):
        expected = problem.update_of(job, settings)
        allowed = _TOLERANCE * expected.norm() + 1e-5 * start.norm()
        if bool(expected.isfinite().all()) and not bool((row - expected).norm() <= allowed):
            return "stacked, it trains differently: the samples of a batch may influence each other"
    return None


def _in_words(error: Exception) -> str:
    words = str(error).strip().splitlines() or [type(error).__name__]
    if "randomness" in words[0]:
        return "it draws random numbers"
    return f"vmap: {words[0][:120]}"
