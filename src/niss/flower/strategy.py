"""The server's side on Flower: any strategy that averages, around a sum that NISS protects.

    strategy = NissStrategy(FedAvg(...), plan=plan)

The wrapped strategy still samples nodes, configures training and evaluation, and aggregates. It is handed one result a
round: the global weights plus the mean of the clipped updates, with the weight of one example. Updates weigh the same;
how many examples a client has stays with it.

Each client is sent one message a round, as without NISS, and one more a run, in which it hands over its signed keys; in
mode `repair` there are two more a round. What a client must trust, and can pin, is in `niss.flower.limits`.

A round: Flower calls `configure_train`, which enrols whoever is new and opens the round; sends the messages; and calls
`aggregate_train` with the replies, which sums the uploads, repairs what was lost, charges the account and hands the
mean to the wrapped strategy.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from niss.accounting import Assessor, Plan, Promise, Statement
from niss.errors import ConfigError, PrivacyError, ProtocolError
from niss.files import SHARED, write_atomically
from niss.flower.account import Account, Pending, RoundReport
from niss.flower.coordinator import Coordinator, Relay, Tracked
from niss.flower.limits import MOST_ROUNDS
from niss.flower.metrics import PART, NoisyMetrics
from niss.flower.proposal import plan_values
from niss.flower.saving import MetricsByRound, RunFolder, RunRecorder
from niss.flower.session import Round, Session
from niss.flower.transport import (
    METRICS,
    RECORD,
    Replies,
    Request,
    records_of,
    send_requests,
    shared_model,
    sort_replies,
)
from niss.protocol import (
    LINKS_PER_ROUND,
    MODES,
    Identity,
    Outcome,
    SecretBytes,
    load_coalition,
    load_identity,
)
from niss.redaction import printable

LOG = logging.getLogger("flwr")
_DEFAULT_ROUNDS = 1000
_MOST_FAILED_ENROLMENTS = 2
# Graphs that may be drawn for a round until one keeps the promise with the noise that was set; counted in delta.
_ATTEMPTS = 3
# A plan pays for so many chains as long as the run's, so that clients can join that many runs under one delta.
_CHAINS = 4

_OWN_BEACON = (
    "this server, so colluders count as placed after the graph was drawn; a tracker would save noise"
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


class NissStrategy(Strategy):
    """Wraps a strategy that averages; use it in its place.

    strategy       the wrapped one; those that need more than the mean of the updates are refused
    plan           what the clients are promised
    mode           what happens when clients drop out: `tolerate` leaves their noise in the sum, `repair` takes it out
                   at the cost of two more messages a round
    participants   fewest participants of a round; a smaller round is skipped
    tracker        address of a tracker, with the certificate of its authority in `tracker_ca`; without one the server
                   relays keys and holds the beacon itself, and colluders count as placed after the graph was drawn:
                   with few neighbours that takes far more noise
    key            key file of the server's identity, which nodes can pin; without one it is new in each run
    coalition      file with the identities that may take part
    report         file to write the statement and what happened in each round to, as JSON; after every round
    resume         folder to save the run in after every round, and to go on from if a run is saved there already
                   (`niss.flower.saving`); private, as secrets of the server are in it
    stage_timeout  seconds to wait for answers that need no training
    metrics        by name the ranges (least, greatest) of metrics of `train` that travel inside the uploads, hidden and
                   charged with them; a node that has not agreed to them in its `NissMod` does not join
    metric_part    how much of the clip all of them together may take up

    After `start`, `statement` says what was promised and `rounds` what happened. Raises `ConfigError` for settings that
    cannot be carried out.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        plan: Plan,
        mode: str = "tolerate",
        participants: int | None = None,
        tracker: str | None = None,
        tracker_ca: str | Path | None = None,
        key: str | Path | None = None,
        coalition: str | Path | None = None,
        report: str | Path | None = None,
        stage_timeout: float = 120.0,
        metrics: Mapping[str, tuple[float, float]] | None = None,
        metric_part: float = PART,
        resume: str | Path | None = None,
    ) -> None:
        _require_averaging(strategy)
        plan_values(plan)  # Refuses a plan that the protocol cannot carry out.
        if mode not in MODES:
            raise ConfigError(f"unknown value {mode!r}", field="mode", hint="use one of: " + ", ".join(MODES))
        if plan.attempts > LINKS_PER_ROUND:
            raise ConfigError(f"a round can have at most {LINKS_PER_ROUND} attempts", field="plan.attempts")
        self._metrics = NoisyMetrics.of(metrics, metric_part)
        if _weight_of(strategy) in self._metrics.names:
            raise ConfigError(
                f"{_weight_of(strategy)!r} is the weight of a result",
                field="metrics",
                hint="use another name",
            )
        self.inner, self._mode = strategy, mode
        self._folder = None if resume is None else RunFolder(Path(resume))
        self._own_key = key is not None
        self._identity = _saved_or_new(self._folder) if key is None else load_identity(Path(key).expanduser())
        self._coordinator: Coordinator = (
            Relay() if tracker is None else Tracked(tracker, self._identity, ca=tracker_ca)
        )
        plan = replace(plan, attempts=max(plan.attempts, _ATTEMPTS))
        # A server that holds the beacon can place colluders after it knows the graph: then all may be neighbours.
        self._given = plan if self._coordinator.independent else replace(plan, graph="complete")
        self._plan_for(min(_DEFAULT_ROUNDS, plan.rounds or _DEFAULT_ROUNDS))
        self._participants = max(2, plan.colluders + 2) if participants is None else participants
        self._coalition = None if coalition is None else load_coalition(Path(coalition))
        self._report = None if report is None else Path(report)
        if self._report is not None and not self._report.parent.is_dir():
            raise ConfigError(f"the folder {self._report.parent} does not exist", field="report")
        self._stage_timeout = stage_timeout
        self._sent: list[Message] = []
        self._failed_enrolments: dict[int, int] = {}
        self._begun: Session | None = None
        self.account = Account(self.plan)

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
        and even if the run fails. With a run saved in `resume`, only the rounds that are left take place.
        """
        self._plan_for(num_rounds)
        self._begun = None
        recorder = RunRecorder(self, self._folder, num_rounds)
        try:
            return recorder.run(grid, initial_arrays, timeout, train_config, evaluate_config, evaluate_fn)
        finally:
            self._conclude(recorder.metrics)

    def _plan_for(self, rounds: int) -> None:
        """Fix how many rounds the beacon chain is for, and so how many graphs a client has to reckon with."""
        planned = self._given.rounds or min(_CHAINS * rounds, MOST_ROUNDS)
        if not rounds <= planned <= MOST_ROUNDS:
            raise ConfigError(
                f"a run of {rounds} rounds needs a plan for {rounds} to {MOST_ROUNDS} rounds, not {planned}",
                field="plan.rounds",
                hint="leave it out, or split the run",
            )
        self._rounds, self.plan = rounds, replace(self._given, rounds=planned)
        self._assess = Assessor(
            relation=self.plan.relation, failure=self.plan.corruption.failure, promise=Promise.of(self.plan)
        )

    @property
    def statement(self) -> Statement:
        """What the run has promised so far, against whom, and what happened on the way."""
        return self.account.statement(self.session)

    @property
    def rounds(self) -> list[RoundReport]:
        """What happened, round by round."""
        return self.account.rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Enrol whoever is new, open the round, and give each participant what it needs to hide its update.

        Returns the wrapped strategy's messages to the participants, each with the record of NISS added; none where the
        round is skipped.
        """
        self._sent.clear()
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        if not messages:
            return []
        number = server_round - 1
        self._grid, self._type = grid, messages[0].metadata.message_type
        self._enrol([message.metadata.dst_node_id for message in messages], grid)
        self._model, self._array_key = shared_model(messages)
        seatable = self.session.seatable(message.metadata.dst_node_id for message in messages)
        nodes = self.account.with_room(seatable, self.session.members)
        try:
            requests = self.session.open(number, nodes, self._model.size)
        except (ProtocolError, PrivacyError) as error:
            # Too few, unlucky graphs, or a tracker that is away: the next round may do better.
            spent = len(seatable) - len(nodes)
            why = getattr(error, "detail", error.message) + (
                f"; {spent} have spent what the plan allows" if spent else ""
            )
            LOG.warning("niss: round %d is skipped: %s", server_round, why)
            self.account.rounds.append(RoundReport.skip(number, why))
            return []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in requests:
                # The wrapped strategy may have given all messages the same content.
                content = RecordDict(dict(message.content.items()))
                content[RECORD] = requests[node].to_record()
                message.content = content
                self._sent.append(message)
        return list(self._sent)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the uploads, repair what was lost if so agreed, and hand the mean to the wrapped strategy.

        Returns what the wrapped strategy makes of it; its metrics get `niss-survivors` and `niss-lost`. Those that
        travelled inside the uploads reach it as the metrics of that one result, each with its noise.
        """
        if not self._sent:
            return self.inner.aggregate_train(server_round, [])
        replies = list(replies)
        uploads = sort_replies(self._sent, replies)
        self.session.take_uploads(uploads)
        if self._mode == "repair":
            self.session.take_repairs(self._send(self.session.claim_requests()))
            self.session.take_repairs(self._send(self.session.reveal_requests()))
        current, outcome = self.session.finish()
        mu = self._assess(current.agreed, self.plan.colluders)
        report = self.account.enter(current, outcome, self.session.members, mu)
        self._log(report)
        results = [_shown(reply) for reply in replies if reply.has_error()]
        if not outcome.survivors:
            return self.inner.aggregate_train(server_round, results)
        results.insert(0, self._mean_as_reply(current, outcome, uploads, report.deviation))
        arrays, metrics = self.inner.aggregate_train(server_round, results)
        counts = MetricRecord({"niss-survivors": report.survivors, "niss-lost": len(report.lost)})
        counts.update({} if metrics is None else metrics)
        return arrays, counts

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy does; that metrics will travel unprotected is noted for the statement."""
        messages = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        self.account.evaluations += len(messages)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy does, with the replies that are made like most of them.

        Where it fails on their values, the round has no metrics: what a node sends does not end the run.
        """
        try:
            return self.inner.aggregate_evaluate(server_round, _alike(replies))
        except Exception as error:
            LOG.warning("niss: no metrics of `evaluate` in round %d: %s", server_round, type(error).__name__)
            return None

    def summary(self) -> None:
        """Log the settings of both strategies, as Flower does before the first round."""
        plan = self.plan
        LOG.info("\t├──> NISS around %s:", type(self.inner).__name__)
        LOG.info("\t│\t├── target: epsilon %s, delta %g, %s", plan.epsilon, plan.delta, plan.relation)
        LOG.info(
            "\t│\t├── over %d rounds, clip %g, %d colluders", plan.participations, plan.clip, plan.colluders
        )
        LOG.info("\t│\t├── dropouts: %s", self._mode)
        if self._metrics:
            LOG.info("\t│\t├── metrics in the noisy sum: %s", ", ".join(self._metrics.names))
        LOG.info("\t│\t└── keys and beacon: %s", self._coordinator.address or _OWN_BEACON)
        self.inner.summary()

    @property
    def session(self) -> Session:
        """The protocol's run: begun when it is first needed, and anew by each `start`."""
        return self._begin() if self._begun is None else self._begun

    def _begin(self, saved: dict[str, Any] | None = None) -> Session:
        self._begun = Session(
            self.plan,
            mode=self._mode,
            identity=self._identity,
            coordinator=self._coordinator,
            rounds=self._rounds,
            participants=self._participants,
            coalition=self._coalition,
            assess=self._assess,
            metrics=self._metrics,
            saved=saved,
        )
        self.account = Account(self.plan)
        self._failed_enrolments.clear()
        self._sent.clear()
        return self._begun

    def restore(self, session: dict[str, Any], account: dict[str, Any]) -> None:
        """Go on with a run that was saved, in place of a new one."""
        self._begin(session)
        self.account = Account.restored(self.plan, account)

    @property
    def secret_to_save(self) -> SecretBytes | None:
        """The secret of the server's identity, where no key file has it."""
        return None if self._own_key else self._identity.secret_bytes()

    @property
    def pending(self) -> Pending | None:
        """What the round under way costs its participants, should nothing more be heard of it."""
        current = self.session.round
        if current is None:
            return None
        mu = self._assess(current.agreed, self.plan.colluders)
        return self.account.pending(current, self.session.members, mu)

    def _enrol(self, nodes: list[int], grid: Grid) -> None:
        """At first everyone who is there, afterwards those of the round who are new or have no key left."""
        everyone = dict.fromkeys(nodes)
        if not self.session.gathered:
            everyone |= dict.fromkeys(grid.get_node_ids())
        replies = self._send(self.session.enrolment_requests(everyone))
        for node, reply in replies.received.items():
            self.session.admit(node, reply)
        for node, why in replies.failures.items():
            LOG.warning("niss: node %d did not join: %s", node, why)
            self._failed_enrolments[node] = self._failed_enrolments.get(node, 0) + 1
            if self._failed_enrolments[node] >= _MOST_FAILED_ENROLMENTS:
                self.session.leave_out(node, f"did not join: {why}")

    def _send(self, requests: dict[int, Request]) -> Replies:
        """Exchange messages outside of Flower's own round, through the grid that the round was configured with."""
        return send_requests(self._grid, requests, message_type=self._type, timeout=self._stage_timeout)

    def _mean_as_reply(self, current: Round, outcome: Outcome, uploads: Replies, deviation: float) -> Message:
        """The survivors' mean as the reply of one client; the sum was taken with weights 1 / participants."""
        mean = outcome.total * (len(current.nodes) / len(outcome.survivors))
        survivors = [uploads.received[current.nodes[seat]] for seat in outcome.survivors]
        metrics = _mean_metrics([reply.metrics for reply in survivors])
        self.account.clear_metrics |= set(metrics)
        size, clip = self._model.size, current.agreed.terms.clip
        metrics.update(self._metrics.means(mean[size:], clip, deviation))
        metrics[_weight_of(self.inner)] = 1
        content = RecordDict({self._array_key: self._model.moved_by(mean[:size]), METRICS: metrics})
        return Message(content, reply_to=self._sent[0])

    def _log(self, report: RoundReport) -> None:
        """One line for the round, and one for each upload that is not in the sum and each problem of the repair."""
        LOG.info(
            "niss: %d of %d uploads summed, noise deviation %.3g per coordinate",
            report.survivors,
            report.participants,
            report.deviation,
        )
        for node, why in report.lost.items():
            LOG.info("niss: \t> node %s: %s", node, why)
        for problem in report.problems:
            LOG.warning("niss: \t> %s", problem)

    def _conclude(self, metrics: MetricsByRound) -> None:
        """Log the statement and write the report, unless the run failed before it began."""
        if self._begun is None:
            return
        statement = self.statement
        LOG.info("niss: %s", statement.words)
        for caveat in statement.caveats:
            LOG.info("niss: \t- %s", caveat)
        self.write_report(metrics)

    def write_report(self, metrics: MetricsByRound) -> None:
        """Replace the report, if there is to be one; `metrics` are all those of the run so far."""
        if self._report is None or self._begun is None:
            return
        report = self.account.to_json(self.session)
        report["metrics"] = {
            name: {str(number): dict(record) for number, record in records.items()}
            for name, records in metrics.items()
        }
        write_atomically(self._report, (json.dumps(report, indent=2) + "\n").encode(), mode=SHARED)


def _saved_or_new(folder: RunFolder | None) -> Identity:
    secret = None if folder is None else folder.identity()
    return Identity.generate(os.urandom) if secret is None else Identity(secret)


def _require_averaging(strategy: Strategy) -> None:
    """Refuse a strategy of Flower's, or one derived from it, that needs more than the mean."""
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"{type(strategy).__name__} is not a strategy of flwr.serverapp.strategy",
            field="strategy",
            hint="the older strategies of flwr.server cannot be wrapped; use those of the Message API",
        )
    origins = [kind.__name__ for kind in type(strategy).__mro__ if kind.__module__.startswith("flwr.")]
    for start, reason in _NOT_AVERAGING.items():
        if any(origin.startswith(start) for origin in origins):
            raise ConfigError(
                f"{type(strategy).__name__} cannot be used: {reason}",
                field="strategy",
                hint="use one that averages, such as FedAvg, FedProx, FedAvgM, FedAdam, FedYogi or FedAdagrad",
            )


def _weight_of(strategy: Strategy) -> str:
    """The name of the metric that a strategy weights results by."""
    return str(getattr(strategy, "weighted_by_key", "num-examples"))


def _mean_metrics(records: list[MetricRecord | None]) -> MetricRecord:
    """The mean, with equal weights, of each number that every client sent; everything else is left out."""
    sent = [record for record in records if record is not None]
    means: dict[str, int | float | list[int] | list[float]] = {}
    for name in sent[0] if len(sent) == len(records) else ():
        values = [record.get(name) for record in sent]
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            # Opposite infinities, or numbers beyond a float: such a metric has no mean.
            with suppress(OverflowError, ValueError):
                means[name] = math.fsum(numbers) / len(numbers)
    return MetricRecord(means)


def _shown(reply: Message) -> Message:
    """A reply that is an error, with a reason that Flower can print."""
    reply.error = Error(reply.error.code, printable(reply.error.reason or ""))
    return reply


def _alike(replies: Iterable[Message]) -> list[Message]:
    """The errors, and the replies whose metrics have the names and kinds that most replies have."""
    errors, made = [], []
    for reply in replies:
        if reply.has_error():
            errors.append(_shown(reply))
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
