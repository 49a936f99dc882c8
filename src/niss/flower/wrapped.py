"""The wrapped strategy: what of it NISS can serve, tried and said before anyone is asked anything.

It samples, configures and aggregates. It must need no more than the mean of the updates, and make do with the metrics
that clients let out: its own code that says otherwise is tried on made-up replies. It may have a `start` of its own (to
write checkpoints, say) that goes through its hooks; while that runs, the hooks are those of
`NissStrategy`, and so every round is one of NISS.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from niss.errors import ConfigError
from niss.flower.transport import (
    METRICS,
    METRICS_FUNCTION,
    FloatArray,
    GuardedMetrics,
    Model,
    failed_metrics,
    fewest_nodes,
    shared_model,
)

LOG = logging.getLogger("flwr")
_NO_EVALUATION = (
    "this strategy asks nodes to evaluate, which they refuse: at weights of the server's choice it gives updates away. "
    "For an accuracy: evaluate_fn on public data at the server; `metrics=` of NissStrategy and NissMod, inside the "
    "uploads; or NissMod(allow=('evaluate',)), unprotected. fraction_evaluate=0 asks nobody"
)


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
    for beginning, reason in _NOT_AVERAGING.items():
        if any(origin.startswith(beginning) for origin in origins):
            raise ConfigError(
                f"{name} cannot be used: {reason}",
                field="strategy",
                hint="use one that averages, such as FedAvg, FedProx, FedAvgM, FedAdam, FedYogi or FedAdagrad",
            )
    for kind in type(strategy).__mro__:
        if kind is Strategy or (start := vars(kind).get("start")) is None:
            continue
        names = _names_in(getattr(inspect.unwrap(start), "__code__", None))
        if {"configure_train", "aggregate_train"} <= names:
            break
        if "start" not in names:
            raise ConfigError(
                f"{name} has a start() of its own that does not go through configure_train and aggregate_train, and so "
                "would train without NISS",
                field="strategy",
                hint="have it call self.configure_train and self.aggregate_train, or super().start(...)",
            )


def _names_in(code: Any) -> set[str]:
    """The names of attributes and globals that a function uses, and those inside it."""
    if code is None:
        return set()
    return {*code.co_names}.union(*(_names_in(one) for one in code.co_consts if hasattr(one, "co_names")))


_HOOKS = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


def own_hooks(strategy: Strategy) -> Strategy:
    """The hooks of a strategy as it came, and nothing else of it, whatever takes their place later."""
    return cast("Strategy", SimpleNamespace(**{name: getattr(strategy, name) for name in _HOOKS}))


def has_own_start(strategy: Strategy) -> bool:
    """Whether it runs the rounds itself, to write checkpoints, say, or to log elsewhere."""
    return type(strategy).start is not Strategy.start


def start_own(strategy: Strategy, by: Strategy, grid: Grid, given: Mapping[str, Any]) -> Result | None:
    """Have it run the rounds, with as many of Flower's arguments as it takes; None where it has no start of its own.

    While it runs, its hooks are those of `by`, and so every round is one of NISS.
    """
    if not has_own_start(strategy):
        return None
    by.summary()
    before = {name: vars(strategy)[name] for name in _HOOKS if name in vars(strategy)}
    vars(strategy).update({name: getattr(by, name) for name in _HOOKS})
    takes = inspect.signature(strategy.start).parameters.values()
    every = any(one.kind is one.VAR_KEYWORD for one in takes)
    names = {one.name for one in takes}
    try:
        result = strategy.start(
            grid, **{name: value for name, value in given.items() if every or name in names}
        )
    finally:
        for name in _HOOKS:
            del vars(strategy)[name]
        vars(strategy).update(before)
    return result if isinstance(result, Result) else Result()


class _MadeUpNodes:
    """Enough nodes for any strategy that only draws some."""

    def __init__(self, count: int) -> None:
        self._nodes = list(range(1, count + 1))

    def get_node_ids(self) -> list[int]:
        return self._nodes


def try_strategy(
    strategy: Strategy, arrays: ArrayRecord, config: ConfigRecord | None, metrics: Mapping[str, float]
) -> None:
    """Have its own code, if it has any, make something of what it is given under NISS, before anyone is asked.

    metrics  of the one result, by name
    """
    record = MetricRecord(dict(metrics))
    _try_metrics(strategy, record)
    _try_aggregation(strategy, arrays, config, record)


def _try_aggregation(
    strategy: Strategy, arrays: ArrayRecord, config: ConfigRecord | None, metrics: MetricRecord
) -> None:
    """Refuse (`ConfigError`), before anyone is asked, an `aggregate_train` of an app's own that NISS cannot serve.

    Copies of the strategy are given made-up replies to round 0: one the reply that it gets under NISS, the mean with
    the metrics of these names; one three updates with the same mean, of which it must make the same.
    """
    if type(strategy).aggregate_train.__module__.startswith("flwr."):
        return
    name, model = type(strategy).__name__, Model.of(arrays)
    step = 0.01 * np.random.default_rng(0).normal(size=model.size)
    nodes = cast(Grid, _MadeUpNodes(max(fewest_nodes(strategy), 3)))
    try:
        one, other = copy.deepcopy(strategy), copy.deepcopy(strategy)
        asked = [
            list(each.configure_train(0, arrays, copy.deepcopy(config) or ConfigRecord(), nodes))
            for each in (one, other)
        ]
        key = shared_model(asked[0])[1]
    except Exception as error:
        LOG.warning(
            "niss: aggregate_train of %s could not be tried before the first round (%s). It is given one result, the "
            "mean of the updates; what it makes of single updates is not done",
            *(name, type(error).__name__),
        )
        return

    def made_of(each: Strategy, messages: list[Message], updates: list[FloatArray]) -> NDArray[Any]:
        replies = [
            Message(RecordDict({key: model.moved_by(update), METRICS: metrics}), reply_to=message)
            for message, update in zip(messages, updates, strict=False)
        ]
        made, _ = each.aggregate_train(0, replies)
        return np.zeros(model.size) if made is None else model.update_to(made).array()

    try:
        alone = made_of(one, asked[0], [step])
    except Exception as error:
        if isinstance(error, AttributeError) and has_own_start(strategy):
            return  # What its start prepares is not there yet.
        raise ConfigError(
            f"aggregate_train of {name} fails on what it is given under NISS ({type(error).__name__}: {error}): one "
            f"result a round, the mean of the updates, with the metrics {', '.join(sorted(metrics))}",
            field="strategy",
            hint="leave out of it what needs single clients; metrics inside the uploads are named in "
            "NissStrategy(metrics=...)",
        ) from None
    nothing = np.zeros(model.size)
    try:
        together = made_of(other, asked[1], [3.0 * step, nothing, nothing])
    except Exception:
        return  # It takes one result, and is given one.
    if not np.allclose(together, alone, rtol=0.0, atol=1e-2 * float(np.abs(alone).max()) + 1e-9):
        raise ConfigError(
            f"aggregate_train of {name} makes something else of three updates than of their mean: {_EACH}, so it would "
            "be given the mean alone",
            field="strategy",
            hint="have it average, or leave the aggregation to FedAvg",
        )


def weight_of(strategy: Strategy) -> str:
    """The name of the metric that a strategy weights results by."""
    return str(getattr(strategy, "weighted_by_key", "num-examples"))


def warn_of_strategy(strategy: Strategy, participants: int, *, carries: bool) -> None:
    """Warn of a strategy that has nodes evaluate, that begins with too few, or under which carried noise stays."""
    if getattr(strategy, "fraction_evaluate", 0.0):
        LOG.warning("niss: %s", _NO_EVALUATION)
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


def _try_metrics(strategy: Strategy, metrics: MetricRecord) -> None:
    """Warn, before the first round, of a function that fails on such metrics."""
    guarded = getattr(strategy, METRICS_FUNCTION, None)
    if not isinstance(guarded, GuardedMetrics):
        return
    records = [RecordDict({"arrays": ArrayRecord(), METRICS: metrics})]
    try:
        guarded.function(records, weight_of(strategy))
    except Exception as error:
        LOG.warning(
            "niss: %s, unless the clients send more in the clear (NissMod(clear_metrics=...)); hidden ones are "
            "named in NissStrategy(metrics=...)",
            failed_metrics(error, records),
        )
