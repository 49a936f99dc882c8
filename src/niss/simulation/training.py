"""The engine that trains the clients of all methods of a round as one cohort."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from niss.learning import ClippedStep, Cohort, Evaluation, Job, LocalTraining, choose_device
from niss.simulation.config import Config
from niss.simulation.materials import Materials
from niss.simulation.uploads import Uploads, make_uploads

Done = Callable[[int], None]
"""Called now and then while clients train, with the number of clients that were finished since the last call."""

TOGETHER_BYTES = 512 * 2**20
"""Methods are trained together as long as their updates fit into this much memory of the processor."""


class Trainer(AbstractContextManager["Trainer"]):
    """Trains clients on the engine that `config` chooses; owns the worker processes, or the place on the device.

    The training examples are handed over to it by `materials.clients`. How clients train may change from call to
    call (`train(config=...)`); model, data and engine stay.
    """

    def __init__(self, config: Config, materials: Materials) -> None:
        training = config.training
        self._row_bytes = materials.start.nbytes
        self._cohort = Cohort(
            copy.deepcopy(materials.module),
            materials.layout,
            *materials.clients.hand_over(),
            device=choose_device(training.device, field="training.device"),
            workers=training.workers,
            tf32=training.tf32,
            plain=training.engine == "plain",
        )

    @property
    def engine(self) -> str:
        """How the clients are trained, in one line."""
        return self._cohort.engine

    def train(
        self, requests: Sequence[Sequence[Job]], config: Config, done: Done | None = None
    ) -> list[Uploads]:
        """The updates of each request, a row for each of its jobs, all trained as one cohort as `config` says.

        The rows stay where they were made: in the memory of the processor or of the device.
        """
        jobs = [job for request in requests for job in request]
        rows = self._cohort.train_in_place(jobs, local_work(config), progress=done)
        return [make_uploads(part) for part in torch.split(rows, [len(request) for request in requests])]

    def together(self, config: Config) -> int:
        """How many methods to train at once: at least one, and as many as have room for their updates."""
        room = self._cohort.room_for_updates or TOGETHER_BYTES
        return max(1, room // (self._row_bytes * config.training.participants))

    def evaluate(self, weights: Tensor, inputs: Tensor, labels: Tensor) -> Evaluation:
        """Accuracy and loss of the model with these weights."""
        return self._cohort.evaluate(weights, inputs, labels)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cohort.close()


def local_work(config: Config) -> LocalTraining | ClippedStep:
    """What a client does in a round: local epochs, or one step with this clip and rate (unit record).

    Methods whose local work is the same, on the same cohort, are trained together.
    """
    training, privacy = config.training, config.privacy
    if privacy.unit == "record":
        return ClippedStep(privacy.clip, training.learning_rate)
    return LocalTraining(
        epochs=training.epochs,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
