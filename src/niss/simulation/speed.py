"""How fast this machine simulates: the engine beside the plain loop, and what noise costs, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.learning import (
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    Samples,
    TokenSamples,
    build_model,
)
from niss.learning.models import accepts
from niss.mechanism import add_shares
from niss.randomness import SecretStream, SimStream
from niss.randomness.secret import demand

# The made-up data, and how many classes it has; a model is timed on the first that it takes.
_WORKLOADS: tuple[tuple[Samples, int], ...] = (
    (ImageSamples((1, 28, 28)), 10),
    (TokenSamples(length=80, vocabulary=80), 80),
)


@dataclass(frozen=True)
class Round:
    """The work that is timed: a round of the paper, unless told otherwise.

    model       name of the network, as in `build_model`
    clients     clients that train in the round
    samples     examples of each client, made up
    epochs      local epochs of each client
    batch_size  examples in a step

    Raises `ConfigError` for a number below 1.
    """

    model: str = "mlp"
    clients: int = 30
    samples: int = 600
    epochs: int = 5
    batch_size: int = 10

    def __post_init__(self) -> None:
        for name in ("clients", "samples", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", field=name)

    @property
    def steps(self) -> int:
        """SGD steps of one client."""
        return self.epochs * -(-self.samples // self.batch_size)


@dataclass(frozen=True)
class Speed:
    """What was measured: medians over the repeats.

    round               the work
    engine              how the clients were trained, in one line
    parameters          of the model
    seconds             of a round on the engine
    plain_seconds       of the same round in the plain loop, scaled up from the few clients that were timed
    plain_clients       how many that were
    share_nanoseconds   to draw and add one coordinate of a simulated share
    secret_nanoseconds  to draw and add one coordinate of the protocol's noise, on the grid, from a secret key
    """

    round: Round
    engine: str
    parameters: int
    seconds: float
    plain_seconds: float
    plain_clients: int
    share_nanoseconds: float
    secret_nanoseconds: float

    @property
    def ratio_to_plain(self) -> float:
        """How many times as fast as the plain loop the engine is."""
        return self.plain_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio_to_plain": self.ratio_to_plain}


def measure(
    work: Round,
    *,
    device: str = "cpu",
    tf32: bool = False,
    repeats: int = 3,
    plain_clients: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> Speed:
    """Time rounds of the engine and, in between, the plain loop on a few of the same clients.

    work           the round
    device         `cpu` or `cuda`
    tf32           faster and coarser products on a GPU
    repeats        how often everything is timed; one round more warms up
    plain_clients  clients in the plain loop, which is slow
    progress       told in a few words what is done next
    """
    if repeats < 1:
        raise ConfigError(f"must be at least 1, not {repeats}", field="repeats")
    stream = SimStream(1)
    samples, classes = next((one for one in _WORKLOADS if accepts(work.model, one[0])), _WORKLOADS[0])
    module = build_model(work.model, samples=samples, classes=classes, stream=stream.child("model"))
    layout = FlatLayout.of(module)
    drawn = stream.child("data").generator()
    inputs, labels = _made_up(samples, classes, work.clients * work.samples, drawn)
    start = layout.flatten(module)
    jobs = [
        Job(start, torch.arange(work.samples) + client * work.samples, stream.child("client", client))
        for client in range(work.clients)
    ]
    settings = LocalTraining(epochs=work.epochs, batch_size=work.batch_size, learning_rate=0.01)
    few = jobs[: min(plain_clients, work.clients)]
    timed: dict[str, list[float]] = {"engine": [], "plain": []}
    with (
        Cohort(module, layout, inputs, labels, device=device, tf32=tf32) as cohort,
        Cohort(module, layout, inputs, labels, plain=True) as plain,
    ):
        progress("warming up")
        cohort.start()
        cohort.train(jobs, settings)
        for repeat in range(repeats):
            progress(f"repeat {repeat + 1} of {repeats}: engine")
            timed["engine"].append(_seconds(lambda: cohort.train(jobs, settings)))
            progress(f"repeat {repeat + 1} of {repeats}: plain loop, {len(few)} of {work.clients} clients")
            timed["plain"].append(_seconds(lambda: plain.train(few, settings)) * work.clients / len(few))
        engine = cohort.engine
    progress("noise")
    return Speed(
        round=work,
        engine=engine,
        parameters=layout.size,
        seconds=statistics.median(timed["engine"]),
        plain_seconds=statistics.median(timed["plain"]),
        plain_clients=len(few),
        share_nanoseconds=_share_nanoseconds(layout.size, repeats),
        secret_nanoseconds=_secret_nanoseconds(layout.size, repeats),
    )


def _made_up(
    samples: Samples, classes: int, count: int, drawn: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of `count` samples, without any connection."""
    inputs: npt.NDArray[np.float32] | npt.NDArray[np.int64]
    shape: tuple[int, ...] = (count,)
    if isinstance(samples, ImageSamples):
        inputs = drawn.standard_normal((count, *samples.shape), dtype=np.float32)
    else:
        shape = (count, samples.length)
        inputs = drawn.integers(0, samples.vocabulary, shape)
    return torch.from_numpy(inputs), torch.from_numpy(drawn.integers(0, classes, shape))


def _share_nanoseconds(coordinates: int, repeats: int) -> float:
    """Per edge and coordinate, on a small graph without distortion."""
    graph = ShareGraph.regular(10, degree=3, beacon=b"speed")
    uploads = np.zeros((10, coordinates), dtype=np.float32)

    def once() -> None:
        add_shares(uploads, graph, unit_variance=1e-6, tau2=0.0, distortion="additive", stream=SimStream(1))

    return _median(once, repeats) / (graph.senders.size * coordinates) * 1e9


def _secret_nanoseconds(coordinates: int, repeats: int) -> float:
    """Per coordinate, with a deviation of 1000 grid steps; by the compiled loop where there is one."""
    demand.worth = 0  # as in a process that has drawn enough to load it
    vector = np.zeros(coordinates, dtype=np.uint64)
    return _median(lambda: SecretStream.fresh().add_gaussian(vector, 1000.0), repeats) / coordinates * 1e9


def _median(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of at least three calls, after one that warms up."""
    work()
    seconds: Sequence[float] = [_seconds(work) for _ in range(max(3, repeats))]
    return statistics.median(seconds)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
