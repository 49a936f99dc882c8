"""The evaluation of one model on a test set that stays on the device.

For the package's models it is a CUDA graph from the second time on: launching its many small kernels one by one takes
longer than they do. The convolutions of a `Cnn` go through the kernels of the training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from niss.learning.cohort import Problem
from niss.learning.local import Evaluation, require_samples, score
from niss.learning.models import Cnn, Mlp

# Samples of a batch: for any module, for the convolutions, whose outputs are held, and for an `Mlp`.
_ROWS, _CONVOLVED, _FLAT = 5000, 2500, 50_000


class DeviceEvaluation:
    """Scores the weights of a problem's module on `inputs` and `labels`, which are copied to its device.

    precision  of the kernels for the convolutions of a `Cnn` as built; None where torch computes everything

    Its own switches decide whether torch may use TF32: those at the time of the first two calls.
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
