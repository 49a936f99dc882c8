"""The server's side on Flower: any strategy that averages, around a sum that NISS protects.

    strategy = NissStrategy(FedAvg(...), plan=plan)

The wrapped strategy (`niss.flower.wrapped`) is handed one result a round: the global weights plus the mean of the
clipped updates, with the weight of one example. Updates weigh the same, unless `weight_cap` is given. What a client
must trust, and can pin, is in `niss.session.limits`.

A round: Flower calls `configure_train`, which enrols whoever is new and opens the round; sends the messages; and calls
`aggregate_train` with the replies, which sums the uploads, repairs what was lost, charges the account and hands the
mean to the wrapped strategy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, PrivacySpent
from flwr.serverapp.strategy import Result, Strategy

from niss.accounting import Plan, Statement
from niss.accounting.assumed import fewest_participants
from niss.errors import ConfigError, ProtocolError
from niss.flower.given import (
    carrying,
    check_settings,
    for_nodes,
    for_rounds,
    foresee,
    in_better_mode,
    in_short,
    lasting,
    no_round,
    plan_of,
    prepared,
    strategy_options,
)
from niss.flower.state import KeptRun, MetricsByRound
from niss.flower.transport import (
    METRICS,
    RECORD,
    Model,
    OneByOne,
    WillingNodes,
    alike,
    guard_metrics,
    mean_metrics,
    say_round,
    send_requests,
    shared_model,
    shown,
    sort_replies,
    to_record,
    what_to_do,
)
from niss.flower.wrapped import (
    own_hooks,
    require_wrappable,
    start_own,
    try_strategy,
    warn_of_strategy,
    weight_of,
)
from niss.protocol.keyfile import load_coalition
from niss.runs import RoundRecord
from niss.session.books import RunState
from niss.session.metrics import PART, NoisyMetrics, adaptive_clip, with_own
from niss.session.ports import Coordinator, CoordinatorAway, Relay, Reply, Request, Stage
from niss.session.proposal import Setup, read_proposal, require_deadline, require_proposable
from niss.session.server import Session, drive
from niss.tracker.coordinator import Tracked, patiently

LOG = logging.getLogger("flwr")
_DEFAULT_ROUNDS = 1000
ACCOUNTING = "niss-gaussian-joint-view"
Value = TypeVar("Value")


def _noting_errors(replies: Iterable[Message], errors: list[Message]) -> Iterator[Message]:
    """The replies, none of which is kept but those that are errors."""
    for reply in replies:
        if reply.has_error():
            errors.append(shown(reply))
        yield reply


class _SpentError(Exception):
    """Ends Flower's loop over the rounds: none can be opened any more."""


class NissStrategy(Strategy):
    """Wraps a strategy that averages; use it in its place.

    strategy       the wrapped one; those that need more than the mean of the updates are refused
    plan           what the clients are promised (`flower_plan` makes one), and what happens when clients drop out: mode
                   `tolerate` leaves their noise in the sum, `repair` takes it out at the cost of two more messages a
                   round; where the plan does not say, what leaves less noise in rounds of the size they have
    carry          carry noise from each round to the next, which takes it out again. Nodes take turns,
                   `plan.separation` rounds apart, in rounds of one size, fixed a round ahead and not by the strategy
    participants   fewest participants of a round; a smaller round is skipped. With `carry`, all there are
    tracker        address of a tracker, with the certificate of its authority in `tracker_ca`; without one the server
                   relays keys and holds the beacon itself, and colluders count as placed after the graph was drawn
    key            key file of the server's identity, which nodes can pin; without one it is new in each run
    coalition      file with the identities that may take part
    report         file to write the statement and what happened in each round to, as JSON; after every round
    resume         folder to save the run in after every round, and to go on from if a run is saved there already
                   (`niss.flower.state`); private, as secrets of the server are in it
    stage_timeout  seconds to wait for answers that need no training; on top of a `deadline`, also for uploads
    patience       seconds to wait for a tracker that is away, before the run pauses (`PausedError`)
    on_hopeless    whether a plan under which nothing can be learned is warned of, or stops the run before anyone pays
    metrics        by name the ranges (least, greatest) of metrics of `train` that travel inside the uploads, hidden and
                   charged with them; a node that has not agreed to them in its `NissMod` does not join
    metric_part    how much of the clip all of them together may take up
    quantile       of the updates' norms that the clip follows, from `first_clip` on and never above the plan's, by one
                   more such metric (`niss.session.metrics`); None: the clip stays
    deadline       seconds to train in a round: who needs longer, like who fails, uploads a blank. With it blanks are
                   counted, by one more such metric, unless single records are hidden; `count_blanks` without it too
    weight_cap     weigh updates by the metric that the strategy weighs by, up to this many (`niss.session.metrics`)

    After `start`, `statement` says what was promised and `rounds` what happened. Raises `ConfigError` for settings that
    cannot be carried out.
    """

    plan: Plan

    def __init__(
        self,
        strategy: Strategy,
        *,
        plan: Plan,
        carry: bool = False,
        participants: int | None = None,
        tracker: str | None = None,
        tracker_ca: str | Path | None = None,
        key: str | Path | None = None,
        coalition: str | Path | None = None,
        report: str | Path | None = None,
        stage_timeout: float = 120.0,
        metrics: Mapping[str, tuple[float, float]] | None = None,
        metric_part: float = PART,
        quantile: float | None = None,
        first_clip: float | None = None,
        weight_cap: float | None = None,
        deadline: float | None = None,
        count_blanks: bool = False,
        resume: str | Path | None = None,
        patience: float = 600.0,
        on_hopeless: Literal["warn", "stop"] = "warn",
    ) -> None:
        require_wrappable(strategy)
        if on_hopeless not in ("warn", "stop"):
            raise ConfigError(f"must be 'warn' or 'stop', not {on_hopeless!r}", field="on_hopeless")
        plan = carrying(plan) if carry else plan
        require_proposable(plan)
        require_deadline(deadline)
        self._adaptive = adaptive_clip(plan, quantile, first_clip)
        self._weight = weight_of(strategy)
        counted, self._deadline = count_blanks or deadline is not None, deadline
        inside = with_own(plan, metrics, self._adaptive, self._weight, weight_cap, counted)
        self._metrics = NoisyMetrics(inside, metric_part)
        check_settings(self._weight, self._metrics, tracker=tracker, key=key)
        guard_metrics(strategy)
        self.inner, self._own = strategy, own_hooks(strategy)
        self._kept = KeptRun(strategy, resume=resume, report=report, key=key)
        self._coordinator: Coordinator = (
            Relay() if tracker is None else Tracked(tracker, self._kept.identity, ca=tracker_ca)
        )
        self._given, self._size = prepared(plan, independent=bool(self._coordinator.address)), participants
        usual = min(_DEFAULT_ROUNDS, plan.chain_rounds or _DEFAULT_ROUNDS)
        self._plan_for(plan.planned_rounds + plan.closing if plan.kind.carries else usual)
        self._nodes = self._coordinates = 0
        if not plan.kind.carries or participants is not None:
            # Refused now where they are too few, and not when they train.
            self._given.assumed(self._participants)
        self._coalition = None if coalition is None else load_coalition(Path(coalition))
        self._stage_timeout, self._patience, self._on_hopeless = stage_timeout, patience, on_hopeless
        self._sent: list[Message] = []
        self._asked_at = 0.0
        self._begun: Session | None = None

    @classmethod
    def from_run_config(cls, context: Context, strategy: Strategy, **options: Any) -> Self:
        """Around a strategy, with plan, tracker, key and the rest from `[tool.flwr.app.config]`.

        The names are those of `niss.flower.given`; `options` are arguments as above, and go before them.
        """
        if "plan" not in options:
            options["plan"] = plan_of(context.run_config)
        return cls(strategy, **strategy_options(context.run_config) | options)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run as the wrapped strategy would, then log what was promised and write the report.

        The arguments are those of `flwr.serverapp.strategy.Strategy.start`. The report is written after every round,
        and even if the run fails. With a run saved in `resume`, only the rounds that are left take place. Raises
        `ProtocolError` if no update of any client came to be summed.
        """
        self._plan_for(num_rounds)
        self._begun = None
        self._kept.begin(num_rounds)
        self._nodes, self._coordinates = len(list(grid.get_node_ids())), Model.of(initial_arrays).size
        # What will go wrong is said, or refused, while nobody has been asked anything.
        self.plan = lasting(self.plan, self.inner, num_rounds, self._nodes)
        if self._given.mode == "planned":
            self.plan = in_better_mode(self.plan, self.inner, self._nodes)
        metrics = {**self._metrics.means(np.zeros(len(self._metrics.ranges)), 1.0, 1.0), self._weight: 1}
        try_strategy(self.inner, initial_arrays, train_config, metrics)
        warn_of_strategy(self.inner, self._participants, carries=self.plan.kind.carries)
        if self._deadline is not None:
            # Who has not answered by then is gone: Flower itself waits for about a minute.
            timeout = min(timeout, self._deadline + self._stage_timeout)
        LOG.info("niss: the uploads of a round are waited for at most %g seconds", timeout)
        given: dict[str, Any] = {
            "train_config": train_config,
            "evaluate_config": evaluate_config,
            "timeout": timeout,
        }
        try:
            with self._kept.locked():
                given["initial_arrays"] = arrays = self._resumed(initial_arrays)
                given["evaluate_fn"] = self._kept.evaluation(evaluate_fn, lambda: self._begun)
                given["num_rounds"] = num_rounds - self._kept.before
                result = start_own(self.inner, self, grid, given)
                result = result or super().start(cast(Grid, OneByOne(grid)), **given)
        except _SpentError:
            LOG.warning("niss: the run ends here, as too few of its nodes can pay for another round")
            result = Result(arrays=self._weights)
        finally:
            self._conclude()
        if not result.arrays and self._kept.before:
            result.arrays = arrays
        result.train_metrics_clientapp = self._kept.metrics["train"]
        result.evaluate_metrics_clientapp = self._kept.metrics["evaluate"]
        result.evaluate_metrics_serverapp = self._kept.metrics["server"]
        if num_rounds and not any(record.survivors for record in self.rounds):
            raise no_round(self._begun)
        return result

    def _resumed(self, arrays: ArrayRecord) -> ArrayRecord:
        """The model that a saved run has come to, which then goes on; these weights where there is none."""
        if (found := self._kept.load()) is None:
            return arrays
        saved, model = found
        self._begin(saved).save()
        return model

    def _plan_for(self, rounds: int) -> None:
        """Fix how many rounds the beacon chain is for, and so how many graphs a client has to reckon with."""
        self._rounds, self.plan = rounds, for_rounds(self._given, rounds)

    @property
    def statement(self) -> Statement:
        """What the run has promised so far, against whom, and what happened on the way."""
        return self.session.books.statement

    def privacy_spent(self) -> PrivacySpent | None:
        """What has been spent so far, in the shape of Flower's own accountants; None: the plan promises nothing.

        epsilon and delta are those of `statement`, which says more; releases are the rounds that were charged.
        """
        if self._begun is None or not self._begun.books.charges:
            return PrivacySpent(0.0, self.plan.delta, 0, ACCOUNTING) if self.plan.calibrated else None
        statement = self.statement
        if statement.epsilon_joint is None:
            return None
        charged = len(self._begun.books.charges)
        return PrivacySpent(statement.epsilon_joint, statement.delta, charged, ACCOUNTING)

    @property
    def metrics(self) -> MetricsByRound:
        """Of `train`, of `evaluate` and of the `server`, by round, so far."""
        return self._kept.metrics

    @property
    def rounds(self) -> list[RoundRecord]:
        """What happened, round by round."""
        return [] if self._begun is None else self._begun.books.rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Enrol whoever is new, open the round, and give each participant what it needs to hide its update.

        Returns the wrapped strategy's messages to the participants, each with the record of NISS added; none where the
        round is skipped.
        """
        self._sent.clear()
        self._weights = arrays
        number, carries = self._kept.before + server_round, self.plan.kind.carries
        willing = grid if carries else cast(Grid, WillingNodes(grid, self._willing, self.inner))
        try:
            messages = list(self._own.configure_train(number, arrays, config, willing))
        except ProtocolError as error:
            self.session.skip(number - 1, error.message)
            return self._skipped(grid)
        if not messages:
            return []
        self._grid, self._type = grid, messages[0].metadata.message_type
        self._model, self._array_key = shared_model(messages)
        connected = list(grid.get_node_ids())
        # With `carry`, who takes part is not for the wrapped strategy to draw; it says what they are sent.
        drawn = connected if carries else [message.metadata.dst_node_id for message in messages]
        self._nodes, self._coordinates = len(connected), self._model.size
        session = self.session
        self._kept.begin_with(arrays, session)
        self._open(number, drawn, connected)
        if session.stage is Stage.DONE:
            return self._skipped(grid)
        if not any(record.participants for record in self.rounds):
            foresee(session, number, self._model.size, self._rounds, stop=self._on_hopeless == "stop")
        made = {message.metadata.dst_node_id: message for message in messages}
        for node, request in session.requests().items():
            # The wrapped strategy may have given all messages the same content.
            content = RecordDict(dict(made.get(node, messages[0]).content.items()))
            content[RECORD] = to_record(request)
            if node in made:
                made[node].content = content
            else:
                made[node] = Message(content, dst_node_id=node, message_type=self._type)
            self._sent.append(made[node])
        self._asked_at = time.monotonic()
        return list(self._sent)

    def _open(self, number: int, drawn: list[int], connected: list[int]) -> None:
        """Enrol and open the round, once the tracker is there."""
        session = self.session

        def opened() -> None:
            session.begin(number - 1, drawn, connected=connected, coordinates=self._model.size)
            drive(session, self._deliver, until=Stage.ROUND)
            if isinstance(session.refused, CoordinatorAway):
                raise session.refused

        self._patiently(f"round {number}", opened)

    def _patiently(self, what: str, begin: Callable[[], Value]) -> Value:
        """What `begin` gives, once the tracker is there; where it stays away the run pauses (`PausedError`)."""
        try:
            return patiently(what, begin, self._patience, say=partial(LOG.warning, "niss: %s"))
        except CoordinatorAway as error:
            raise self._kept.pause(error.message) from None

    def _willing(self, nodes: list[int]) -> list[int]:
        return nodes if self._begun is None else self._begun.willing(nodes)

    def _skipped(self, grid: Grid) -> list[Message]:
        """Say that a round does not take place; no message is sent. Where none can any more, the run ends."""
        LOG.warning("niss: round %d is skipped: %s", self.rounds[-1].round, self.rounds[-1].skipped)
        if self.session.over(list(grid.get_node_ids())):
            raise _SpentError
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the uploads, repair what was lost if so agreed, and hand the mean to the wrapped strategy.

        Returns what the wrapped strategy makes of it; its metrics get `niss-survivors` and `niss-lost`. Those that
        travelled inside the uploads reach it as the metrics of that one result, each with its noise.
        """
        number = self._kept.before + server_round
        arrays, metrics = self._aggregated(number, replies)
        self._kept.model(number, self._weights if arrays is None else arrays)
        self._kept.keep("train", number, metrics, self._begun)
        return arrays, metrics

    def _aggregated(
        self, number: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        session = self._begun
        if session is None or session.stage is not Stage.ROUND:
            return self._own.aggregate_train(number, [])
        clear: dict[int, Mapping[str, object]] = {}
        results: list[Message] = []

        def heard(node: int, reply: Reply) -> None:
            clear[node] = reply.clear
            session.hear(node, reply)

        session.take(sort_replies(self._sent, _noting_errors(replies, results), heard))
        waited = time.monotonic() - self._asked_at
        drive(session, self._deliver)
        total, record = session.finish()
        say_round(record, self.plan, session.books.blanks, waited)
        if total is None:
            return self._own.aggregate_train(number, results)
        mean, hidden = session.mean(total)
        metrics = mean_metrics([values for node, values in clear.items() if str(node) not in record.lost])
        session.state.clear_metrics |= set(metrics)
        metrics.update(hidden)
        metrics[self._weight] = 1
        content = RecordDict({self._array_key: self._model.moved_by(mean), METRICS: metrics})
        del total, mean
        results.insert(0, Message(content, reply_to=self._sent[0]))
        arrays, made = self._own.aggregate_train(number, results)
        if arrays is not None:
            arrays = self._model.restored(arrays)
        counts = MetricRecord({"niss-survivors": record.survivors, "niss-lost": len(record.lost)})
        counts.update({} if made is None else made)
        return arrays, counts

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy does."""
        return self._own.configure_evaluate(self._kept.before + server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy does, with the replies that are made like most of them; noted for the statement.

        Where it fails on their values, the round has no metrics: what a node sends does not end the run.
        """
        number, replies = self._kept.before + server_round, list(replies)
        answered = sum(not reply.has_error() for reply in replies)
        if self._begun is not None:
            self._begun.state.evaluations += answered
        try:
            metrics = self._own.aggregate_evaluate(number, alike(replies))
        except Exception as error:
            LOG.warning("niss: no metrics of `evaluate` in round %d: %s", number, type(error).__name__)
            return None
        if metrics is not None:
            self._kept.keep("evaluate", number, metrics, self._begun)
        return metrics

    def summary(self) -> None:
        """Log the settings of both strategies, as Flower does before the first round."""
        LOG.info("\t├──> NISS around %s:", type(self.inner).__name__)
        for line in in_short(self.plan, self._metrics.ranges, self._coordinator.address):
            LOG.info("\t│\t├── %s", line)
        self.inner.summary()

    @property
    def session(self) -> Session:
        """The protocol's run: begun when it is first needed, and anew by each `start`."""
        return self._begin() if self._begun is None else self._begun

    @property
    def _participants(self) -> int:
        """The fewest of a round; of one that carries noise, all."""
        return self._size or self.plan.participants or fewest_participants(self.plan)

    def _begin(self, saved: RunState | None = None) -> Session:
        before = None if saved is None else read_proposal(saved.proposal)
        # What followed the nodes that were there when the run began.
        if before is not None and self._given.participations == "planned":
            self.plan = replace(self.plan, participations=before.plan.participations)
        if before is not None and self._given.mode == "planned":
            self.plan = replace(self.plan, mode=before.plan.mode)
        if self.plan.kind.carries:
            self.plan = for_nodes(self.plan, before.participants if before else self._size, self._nodes)
        setup = Setup(
            plan=self.plan,
            rounds=self._rounds,
            participants=self._participants,
            coalition=self._coalition,
            metrics=self._metrics,
            adaptive=self._adaptive,
            coordinates=self._coordinates,
            deadline=self._deadline,
        )
        begin = partial(Session, setup, identity=self._kept.identity, coordinator=self._coordinator)
        self._begun = self._patiently("the run", partial(begin, save=self._kept.save, saved=saved))
        self._sent.clear()
        return self._begun

    def _deliver(self, requests: Mapping[int, Request]) -> dict[int, Reply | str]:
        """Exchange messages outside of Flower's own round, through the grid that the round was configured with."""
        replies = send_requests(self._grid, requests, message_type=self._type, timeout=self._stage_timeout)
        for node, reply in replies.items():
            if isinstance(reply, str) and requests[node].stage is Stage.ENROL:
                LOG.warning("niss: node %d did not join: %s. %s", node, reply, what_to_do(reply))
        return replies

    def _conclude(self) -> None:
        """Log the statement and write the report, unless the run failed before it began."""
        if self._begun is None:
            return
        statement = self.statement
        LOG.info("niss: %s", statement.words)
        for caveat in statement.caveats:
            LOG.info("niss: \t- %s", caveat)
        self._kept.write_report(self._begun)
