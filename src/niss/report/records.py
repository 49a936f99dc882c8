"""What a report is made of, as read from a folder and before anything is formatted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOT_PRIVATE = "fedavg"
TRUSTS_THE_SERVER = "central-dp"


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """One line of metrics.jsonl; accuracy is None in rounds without an evaluation.

    `protocol` holds what was public of a round of the real protocol, in hex: beacon, participants, terms, graph.
    """

    round: int
    accuracy: float | None
    loss: float | None
    aggregate_variance: float | None
    aggregate_variance_predicted: float | None
    tau2: float | None
    dropped: int | None = None
    protocol: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method of a comparison, or the one method of a single run."""

    label: str
    method: str
    kappa: float | None
    tau2: float | None
    accuracy: float | None
    aggregate_variance: float | None
    aggregate_variance_predicted: float | None
    epsilon_joint: float | None
    epsilon_marginal: float | None
    adversary: str | None
    guarantee: str | None
    finished: bool
    curve: tuple[RoundMetrics, ...]
    manifest: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def is_private(self) -> bool:
        """Whether the method sets out to protect anyone, with or without a guarantee."""
        return self.method != NOT_PRIVATE

    @property
    def trusts_the_server(self) -> bool:
        return self.method == TRUSTS_THE_SERVER

    @property
    def rounds_done(self) -> int:
        return max((point.round for point in self.curve), default=0)

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """The rounds with an evaluation, each with its accuracy."""
        return [(point.round, point.accuracy) for point in self.curve if point.accuracy is not None]


@dataclass(frozen=True, slots=True)
class ReportInput:
    """All a report says, read from one folder."""

    folder: Path
    name: str
    title: str
    created: str | None
    niss_version: str | None
    rounds: int | None
    clients: int | None
    participants: int | None
    model_parameters: int | None
    delta: float | None
    target_epsilon: float | None
    unit: str | None
    relation: str | None
    dataset: str | None
    split: str | None
    methods: tuple[MethodResult, ...]
    is_comparison: bool
    finished: bool
    notes: tuple[str, ...] = ()
