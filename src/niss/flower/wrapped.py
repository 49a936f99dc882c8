"""The wrapped strategy: what is asked of it, and what it gets to see.

It samples, configures and aggregates. It must need no more than the mean of the updates, leave `start` to
`NissStrategy`, and make do with the metrics that clients let out. Where it does not, that is said before any client
has spent anything. What is said of rounds in the log is here too.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from niss.accounting import outlook
from niss.errors import ConfigError, ProtocolError
from niss.flower.transport import METRICS, records_of
from niss.redaction import printable
from niss.runs import RoundRecord
from niss.session.server import Session

LOG = logging.getLogger("flwr")

_EACH = "it looks at the update of each client, and under NISS the server learns their sum alone"
_OWN_NOISE = "it clips or adds noise of its own, and its claim would not be the one that NISS accounts for"
# What the names of Flower's strategies start with that need more than the mean of the updates, and why they do.
_NOT_AVERAGING = {
    "FedMedian": f"a median is not a sum: {_EACH}",
    "FedTrimmedAvg": f"a trimmed mean is not a sum: {_EACH}",
    "Krum": f"it chooses among the updates: {_EACH}",
    "MultiKrum": f"it chooses among the updates: {_EACH}",
    "Bulyan": f"it chooses among the updates: {_EACH}",
    "QFedAvg": f"it weights each update by its norm and its loss: {_EACH}",
    "FedXgb": "it collects trees, which cannot be summed",
    "DifferentialPrivacy": _OWN_NOISE,
}
_METRICS_FUNCTION = "train_metrics_aggr_fn"

MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]


def require_wrappable(strategy: Strategy) -> None:
    """Refuse, with `ConfigError`, a strategy that needs more than the mean, or whose `start` would not be called."""
    name = type(strategy).__name__
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"{name} is not a strategy of flwr.serverapp.strategy",
            field="strategy",
            hint="the older strategies of flwr.server cannot be wrapped; use those of the Message API",
        )
    origins = [kind.__name__ for kind in type(strategy).__mro__ if kind.__module__.startswith("flwr.")]
    for start, reason in _NOT_AVERAGING.items():
        if any(origin.startswith(start) for origin in origins):
            raise ConfigError(
                f"{name} cannot be used: {reason}",
                field="strategy",
                hint="use one that averages, such as FedAvg, FedProx, FedAvgM, FedAdam, FedYogi or FedAdagrad",
            )
    if type(strategy).start is not Strategy.start:
        raise ConfigError(
            f"{name} has a start() of its own, which would never be called: NissStrategy runs the rounds",
            field="strategy",
            hint="put it into a subclass of NissStrategy, or do what it does in evaluate_fn or aggregate_train",
        )


def weight_of(strategy: Strategy) -> str:
    """The name of the metric that a strategy weights results by."""
    return str(getattr(strategy, "weighted_by_key", "num-examples"))


def guard_metrics(strategy: Strategy) -> None:
    """From here on a function of the strategy that fails on the metrics of a round costs the metrics, not the round.

    By the time it is called the clients have paid for the round.
    """
    function: MetricsFunction | None = getattr(strategy, _METRICS_FUNCTION, None)
    if function is None or isinstance(function, _Guarded):
        return
    setattr(strategy, _METRICS_FUNCTION, _Guarded(function))


class _Guarded:
    """A function that aggregates metrics; where it fails there are none, and the log says why."""

    def __init__(self, function: MetricsFunction) -> None:
        self.function = function

    def __call__(self, records: list[RecordDict], weighted_by: str) -> MetricRecord:
        try:
            return self.function(records, weighted_by)
        except Exception as error:
            LOG.warning("niss: %s", _failed(error, records))
            return MetricRecord()


def try_metrics(strategy: Strategy, names: Iterable[str]) -> None:
    """Warn, before the first round, of a function that fails on metrics with these names and the strategy's weight."""
    guarded = getattr(strategy, _METRICS_FUNCTION, None)
    if not isinstance(guarded, _Guarded):
        return
    metrics: dict[str, Any] = {**dict.fromkeys(names, 0.5), weight_of(strategy): 1}
    records = [RecordDict({"arrays": ArrayRecord(), METRICS: MetricRecord(metrics)})]
    try:
        guarded.function(records, weight_of(strategy))
    except Exception as error:
        LOG.warning(
            "niss: %s, unless the clients send more in the clear (NissMod(clear_metrics=...)); hidden ones are "
            "named in NissStrategy(metrics=...)",
            _failed(error, records),
        )


def _failed(error: Exception, records: list[RecordDict]) -> str:
    names = sorted(records_of(records[0], MetricRecord).get(METRICS, {}))
    return (
        f"{_METRICS_FUNCTION} fails ({type(error).__name__}: {error}), so there are no metrics of `train`: it is given "
        + ", ".join(names)
    )


def fewest_nodes(strategy: Strategy) -> int:
    """How many connected nodes a strategy waits for before it samples, as far as it says."""
    return max(int(getattr(strategy, name, 0)) for name in ("min_available_nodes", "min_train_nodes"))


def warn_of_strategy(strategy: Strategy, participants: int, *, carries: bool) -> None:
    """Warn of a strategy that begins with too few nodes, or under which noise that is carried over does not cancel."""
    if carries and hasattr(strategy, "v_t"):
        LOG.warning(
            "niss: %s divides by what it has seen of earlier rounds, so that noise that a round carries to the next "
            "does not cancel; FedAvg, FedProx and FedAvgM keep it in proportion",
            type(strategy).__name__,
        )
    if not carries and fewest_nodes(strategy) < participants:
        LOG.warning(
            "niss: a round needs %d participants, but the wrapped strategy begins with fewer nodes, and rounds are "
            "skipped until there are enough. To wait for them: min_available_nodes=%d, min_train_nodes=%d",
            *(participants, participants, participants),
        )


class WillingNodes:
    """A grid as the wrapped strategy sees it: without the nodes that could not take part if they were drawn.

    A strategy that drew them would have a smaller round than it wanted, with the noise of a smaller round.

    grid     the one that it stands for, and that does everything else
    willing  of these nodes, those that can take part
    fewest   how many the strategy waits for
    """

    def __init__(self, grid: Grid, willing: Callable[[list[int]], list[int]], fewest: int) -> None:
        self._grid, self._willing, self._fewest = grid, willing, fewest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> list[int]:
        """The nodes that can take part.

        Raises `ProtocolError` where they are too few for the strategy though enough are connected: it would wait for
        ever.
        """
        connected = list(self._grid.get_node_ids())
        willing = self._willing(connected)
        if len(willing) < self._fewest <= len(connected):
            raise ProtocolError(
                f"{len(willing)} of {len(connected)} nodes could take part, the strategy waits for {self._fewest}; "
                "the others have spent what the plan allows, or were left out"
            )
        return willing


def mean_metrics(records: Sequence[Mapping[str, object]]) -> MetricRecord:
    """The mean, with equal weights, of each number that every client sent; everything else is left out."""
    means: dict[str, int | float | list[int] | list[float]] = {}
    for name in records[0] if records else ():
        values = [record.get(name) for record in records]
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            # Opposite infinities, or numbers beyond a float: such a metric has no mean.
            with suppress(OverflowError, ValueError):
                means[name] = math.fsum(numbers) / len(numbers)
    return MetricRecord(means)


def most_common(reasons: Iterable[str]) -> str:
    """The reason that was given most often."""
    counted = Counter(reasons).most_common(1)
    return counted[0][0] if counted else "no reason is known"


def shown(reply: Message) -> Message:
    """A reply that is an error, with a reason that Flower can print."""
    reply.error = Error(reply.error.code, printable(reply.error.reason or ""))
    return reply


def alike(replies: Iterable[Message]) -> list[Message]:
    """The errors, and the replies whose metrics have the names and kinds that most replies have."""
    errors, made = [], []
    for reply in replies:
        if reply.has_error():
            errors.append(shown(reply))
        else:
            made.append((reply, _layout(reply)))
    if not made:
        return errors
    usual, _ = Counter(layout for _, layout in made).most_common(1)[0]
    return [reply for reply, layout in made if layout == usual] + errors


def _layout(reply: Message) -> tuple[object, ...]:
    """Of each entry of the metrics: its record, its name, whether it is a list and how long."""
    records = sorted(records_of(reply.content, MetricRecord).items())
    return tuple(
        (key, name, len(value) if isinstance(value, list) else -1)
        for key, record in records
        for name, value in sorted(record.items())
    )


def say_outlook(session: Session, parameters: int, rounds: int) -> None:
    """Before the first round that anyone pays for: can this model learn anything under this noise?"""
    if (opened := session.round) is None:
        return
    terms = opened.agreed.terms
    variance = len(opened.nodes) * terms.residual_variance
    judged = outlook(parameters=parameters, rounds=rounds, clip=terms.clip, variance=variance)
    LOG.log(logging.INFO if judged.verdict == "good" else logging.WARNING, "niss: %s", judged.words)


def why_no_round(rounds: Sequence[RoundRecord]) -> tuple[str, str]:
    """Why the model of a run is the one that it began with, and what to do about it."""
    why, hint = "the strategy asked no node to train", "see `fraction_train`"
    if rounds:
        last = rounds[-1]
        lost = f"every upload was lost ({most_common(last.lost.values())})"
        why = last.skipped or lost
        hint = "the log says why of each node; `participants` is how many a round needs"
    return why, hint


def log_record(record: RoundRecord) -> None:
    """One line for the round, and one for each upload that is not in the sum and each problem of the repair."""
    LOG.info(
        "niss: %d of %d uploads summed, noise deviation %.3g per coordinate",
        record.survivors,
        record.participants,
        math.sqrt(record.noise.variance),
    )
    for node, why in record.lost.items():
        LOG.info("niss: \t> node %s: %s", node, why)
    for problem in record.problems:
        LOG.warning("niss: \t> %s", problem)
