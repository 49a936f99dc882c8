"""The server's side on Flower: any strategy that averages, around a sum that NISS protects.

    strategy = NissStrategy(FedAvg(...), plan=plan)

The wrapped strategy still samples nodes, configures training and evaluation, and aggregates. It is handed one result a
round: the global weights plus the mean of the clipped updates, with the weight of one example. Updates weigh the same;
how many examples a client has stays with it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from niss.accounting import Plan, Statement
from niss.accounting.assess import Assessor
from niss.errors import ConfigError, PrivacyError, ProtocolError
from niss.flower.account import Account, RoundReport
from niss.flower.arrays import shared_model
from niss.flower.coordinator import Coordinator, Relay
from niss.flower.letters import METRICS, RECORD, Answer, Letter
from niss.flower.metrics import mean_metrics
from niss.flower.post import Mail, ask, sort_replies
from niss.flower.proposal import plan_values
from niss.flower.server_keys import server_identity
from niss.flower.session import Session
from niss.flower.summing import require_summing
from niss.protocol.beacon import LINKS_PER_ROUND
from niss.protocol.coalition_file import load_coalition
from niss.protocol.messages import MODES
from niss.protocol.server import Outcome

LOG = logging.getLogger("flwr")
_ROUNDS_UNLESS_TOLD = 1000
_MOST_FAILED_ENROLMENTS = 2
# Graphs that may be drawn for a round until one keeps the promise with the noise that was set; counted in delta.
_ATTEMPTS = 3


class NissStrategy(Strategy):
    """Wraps a strategy that averages.

    strategy       the wrapped one; those that do more than average are refused
    plan           what the clients are promised
    mode           what happens when clients drop out: `tolerate` leaves their noise in the sum, `repair` takes it out
                   at the cost of two more messages a round
    participants   fewest participants of a round; a smaller round is skipped
    tracker        address of a tracker, with the certificate of its authority in `tracker_ca`; without one the server
                   relays keys and holds the beacon itself
    key            key file of the server's identity, which nodes can pin; without one it is new in each run
    coalition      file with the identities that may take part
    report         file to write the statement and what happened in each round to, as JSON
    stage_timeout  seconds to wait for answers that need no training
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
    ) -> None:
        require_summing(strategy)
        plan_values(plan)
        if mode not in MODES:
            raise ConfigError(f"unknown value {mode!r}", field="mode", hint="use one of: " + ", ".join(MODES))
        if plan.attempts > LINKS_PER_ROUND:
            raise ConfigError(f"a round has {LINKS_PER_ROUND} attempts at most", field="plan.attempts")
        self.inner, self._mode = strategy, mode
        self._identity = server_identity(key)
        self._coordinator: Coordinator = Relay()
        if tracker is not None:
            from niss.flower.tracked import Tracked

            self._coordinator = Tracked(tracker, self._identity, ca=tracker_ca)
        plan = replace(plan, attempts=max(plan.attempts, _ATTEMPTS))
        # A server that holds the beacon can place colluders after it knows the graph: then all may be neighbours.
        self.plan = plan if self._coordinator.independent else replace(plan, graph="complete")
        self._participants = max(2, plan.colluders + 2) if participants is None else participants
        self._coalition = None if coalition is None else load_coalition(Path(coalition))
        self._report = None if report is None else Path(report)
        if self._report is not None and not self._report.parent.is_dir():
            raise ConfigError(f"there is no folder {self._report.parent}", field="report")
        self._stage_timeout = stage_timeout
        self._assess = Assessor(relation=plan.relation, failure=self.plan.corruption.failure)
        self._rounds = _ROUNDS_UNLESS_TOLD
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
        """Run as the wrapped strategy would, then say what was promised."""
        self._rounds = num_rounds
        self._begun = None
        result = Result()
        try:
            result = super().start(
                grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            )
        finally:
            self._conclude(result)
        return result

    @property
    def statement(self) -> Statement:
        """What the run has promised so far."""
        return self.account.statement(self.session, independent=self._coordinator.independent)

    @property
    def rounds(self) -> list[RoundReport]:
        """What happened, round by round."""
        return self.account.rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Enrol whoever is new, open the round, and give each participant what it needs to hide its update."""
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
            letters = self.session.open(number, nodes, self._model.size)
        except (ProtocolError, PrivacyError) as error:
            # Too few, unlucky graphs, or a tracker that is away: the next round may do better.
            spent = len(seatable) - len(nodes)
            why = error.message + (f"; {spent} have spent what the plan allows" if spent else "")
            LOG.warning("niss: round %d is skipped: %s", server_round, why)
            self.account.rounds.append(RoundReport.skip(number, why))
            return []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in letters:
                # The wrapped strategy may have given all messages the same content.
                content = RecordDict(dict(message.content.items()))
                content[RECORD] = letters[node].to_record()
                message.content = content
                self._sent.append(message)
        return list(self._sent)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the uploads, repair what was lost if so agreed, and hand the mean to the wrapped strategy."""
        if not self._sent:
            return self.inner.aggregate_train(server_round, [])
        replies = list(replies)
        mail = sort_replies(self._sent, replies)
        self.session.take_uploads(mail)
        if self._mode == "repair":
            self.session.take_repairs(self._ask(self.session.claim()))
            self.session.take_repairs(self._ask(self.session.requests()))
        current, outcome = self.session.finish()
        mu = self._assess(current.agreed, self.plan.colluders)
        report = self.account.enter(current, outcome, self.session.members, mu)
        self._log(report)
        failed = [reply for reply in replies if reply.has_error()]
        if not outcome.survivors:
            return self.inner.aggregate_train(server_round, failed)
        shown = [mail.answers[current.nodes[seat]] for seat in outcome.survivors]
        arrays, metrics = self.inner.aggregate_train(
            server_round, [self._as_one_reply(outcome, len(current.nodes), shown), *failed]
        )
        counted = MetricRecord({"niss-survivors": report.survivors, "niss-lost": len(report.lost)})
        counted.update({} if metrics is None else metrics)
        return arrays, counted

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the wrapped strategy does."""
        messages = list(self.inner.configure_evaluate(server_round, arrays, config, grid))
        self.account.evaluations += len(messages)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the wrapped strategy does."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the settings of both."""
        plan = self.plan
        LOG.info("\t├──> NISS around %s:", type(self.inner).__name__)
        LOG.info("\t│\t├── target: epsilon %s, delta %g, %s", plan.epsilon, plan.delta, plan.relation)
        LOG.info(
            "\t│\t├── over %d rounds, clip %g, %d colluders", plan.participations, plan.clip, plan.colluders
        )
        LOG.info("\t│\t├── dropouts: %s", self._mode)
        LOG.info("\t│\t└── keys and beacon: %s", self._coordinator.address or "this server")
        self.inner.summary()

    @property
    def session(self) -> Session:
        """The protocol's run; each `start` begins a new one."""
        if self._begun is None:
            self._begun = Session(
                self.plan,
                mode=self._mode,
                identity=self._identity,
                coordinator=self._coordinator,
                rounds=self._rounds,
                participants=self._participants,
                coalition=self._coalition,
                assess=self._assess,
            )
            self.account = Account(self.plan)
            self._failed_enrolments.clear()
            self._sent.clear()
        return self._begun

    def _enrol(self, nodes: list[int], grid: Grid) -> None:
        """At first everyone who is there, afterwards those of the round who are new or have no key left."""
        asked = dict.fromkeys(nodes)
        if not self.session.members:
            asked |= dict.fromkeys(grid.get_node_ids())
        mail = self._ask(self.session.wanting(asked))
        for node, answer in mail.answers.items():
            self.session.admit(node, answer)
        for node, why in mail.failures.items():
            LOG.warning("niss: node %d did not join: %s", node, why)
            self._failed_enrolments[node] = self._failed_enrolments.get(node, 0) + 1
            if self._failed_enrolments[node] >= _MOST_FAILED_ENROLMENTS:
                self.session.leave_out(node, f"did not join: {why}")

    def _ask(self, letters: dict[int, Letter]) -> Mail:
        return ask(self._grid, letters, message_type=self._type, timeout=self._stage_timeout)

    def _as_one_reply(self, outcome: Outcome, size: int, answers: list[Answer]) -> Message:
        """The survivors' mean as the reply of one client; the sum was taken with weights 1 / participants."""
        mean = outcome.total * (size / len(outcome.survivors))
        metrics = mean_metrics([one.metrics for one in answers])
        self.account.clear_metrics |= set(metrics)
        metrics[getattr(self.inner, "weighted_by_key", "num-examples")] = 1
        content = RecordDict({self._array_key: self._model.moved_by(mean), METRICS: metrics})
        return Message(content, reply_to=self._sent[0])

    def _log(self, report: RoundReport) -> None:
        LOG.info(
            "niss: %d of %d uploads summed, noise deviation %.3g a coordinate",
            report.survivors,
            report.participants,
            report.deviation,
        )
        for node, why in report.lost.items():
            LOG.info("niss: \t> node %s: %s", node, why)

    def _conclude(self, result: Result) -> None:
        if self._begun is None:
            return  # It failed before it began.
        made = self.statement
        LOG.info("niss: %s", made.words)
        for caveat in made.caveats:
            LOG.info("niss: \t- %s", caveat)
        if self._report is not None:
            whole: dict[str, Any] = self.account.to_json(
                self.session, independent=self._coordinator.independent
            )
            whole["metrics"] = {
                "train": _plain(result.train_metrics_clientapp),
                "evaluate": _plain(result.evaluate_metrics_clientapp),
                "server": _plain(result.evaluate_metrics_serverapp),
            }
            self._report.write_text(json.dumps(whole, indent=2) + "\n")


def _plain(metrics: dict[int, MetricRecord]) -> dict[str, dict[str, Any]]:
    return {str(number): dict(record) for number, record in metrics.items()}
