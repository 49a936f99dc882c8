"""The server's side on Flower: any strategy that averages, around a sum that NISS protects.

    strategy = NissStrategy(FedAvg(...), plan=plan)

The wrapped strategy still samples nodes, configures training and evaluation, and aggregates. It is handed one result a
round: the global weights plus the mean of the clipped updates, with the weight of one example. Updates weigh the same,
unless `weight_cap` is given; how many examples a client has stays with it.

Each client is sent one message a round, as without NISS, and one more a run, in which it hands over its signed keys. In
mode `repair` members of a round's committee are sent a second one, and with `carry` a third after the next round. What
a client must trust, and can pin, is in `niss.flower.limits`.

A round: Flower calls `configure_train`, which enrols whoever is new and opens the round; sends the messages; and calls
`aggregate_train` with the replies, which sums the uploads, repairs what was lost, charges the account and hands the
mean to the wrapped strategy.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from niss.accounting import Assessor, Plan, Promise, Statement, outlook
from niss.errors import ConfigError, PrivacyError, ProtocolError
from niss.files import SHARED, write_atomically
from niss.flower.account import Account, Pending, RoundReport
from niss.flower.adaptive import adaptive_clip, with_own
from niss.flower.coordinator import Coordinator, Relay, Tracked
from niss.flower.metrics import PART, NoisyMetrics
from niss.flower.proposal import check_mode, plan_values, read_proposal
from niss.flower.run_config import plan_of, strategy_options
from niss.flower.run_plan import carrying, check_settings, for_nodes, for_rounds, prepared
from niss.flower.saving import MetricsByRound, RunFolder, RunRecorder, saved_or_new
from niss.flower.session import Round, Session
from niss.flower.transport import (
    METRICS,
    RECORD,
    USE_THE_MOD,
    Model,
    Replies,
    Request,
    send_requests,
    shared_model,
    sort_replies,
)
from niss.flower.wrapped import (
    GridOfWilling,
    alike,
    fewest_nodes,
    guard_metrics,
    mean_metrics,
    most_common,
    require_wrappable,
    shown,
    try_metrics,
    warn_of_strategy,
    weight_of,
)
from niss.protocol import Outcome, SecretBytes, load_coalition, load_identity

LOG = logging.getLogger("flwr")
_DEFAULT_ROUNDS = 1000
_MOST_FAILED_ENROLMENTS = 2

_OWN_BEACON = (
    "this server, so colluders count as placed after the graph was drawn; a tracker would save noise"
)


class NissStrategy(Strategy):
    """Wraps a strategy that averages; use it in its place.

    strategy       the wrapped one; those that need more than the mean of the updates are refused
    plan           what the clients are promised
    mode           what happens when clients drop out: `tolerate` leaves their noise in the sum, `repair` takes it out
                   at the cost of two more messages a round
    carry          carry noise from each round to the next, which takes it out again: for rounds with a part of the
                   nodes, less stays in the model. They take turns, `plan.separation` rounds apart, in rounds of one
                   size: `plan.participants`, or as many as there are nodes for when the run begins. Who takes part is
                   fixed a round ahead, and not by the wrapped strategy; who does not come leaves noise, or is repaired
    participants   fewest participants of a round; a smaller round is skipped. With `carry`, all there are
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
    quantile       of the updates' norms that the clip follows, from `first_clip` on and never above the plan's, by one
                   more such metric (`niss.flower.adaptive`); None: the clip stays
    weight_cap     weigh updates by the metric that the strategy weighs by, up to this many (`niss.flower.metrics`)

    After `start`, `statement` says what was promised and `rounds` what happened. Raises `ConfigError` for settings that
    cannot be carried out.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        plan: Plan,
        mode: str = "tolerate",
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
        resume: str | Path | None = None,
    ) -> None:
        require_wrappable(strategy)
        plan = carrying(plan) if carry else plan
        plan_values(plan)  # Refuses a plan that the protocol cannot carry out.
        check_mode(plan, mode)
        self._adaptive = adaptive_clip(plan, quantile, first_clip)
        inside = with_own(plan, metrics, self._adaptive, weight_of(strategy), weight_cap)
        self._metrics = NoisyMetrics.of(inside, metric_part)
        check_settings(weight_of(strategy), self._metrics, tracker=tracker, key=key)
        guard_metrics(strategy)
        self.inner, self._mode = strategy, mode
        self._folder = None if resume is None else RunFolder(Path(resume))
        self._own_key = key is not None
        self._identity = saved_or_new(self._folder) if key is None else load_identity(Path(key).expanduser())
        self._coordinator: Coordinator = (
            Relay() if tracker is None else Tracked(tracker, self._identity, ca=tracker_ca)
        )
        self._given, self._size = prepared(plan, independent=self._coordinator.independent), participants
        self._plan_for(
            plan.planned_rounds + plan.closing
            if plan.kind.carries
            else min(_DEFAULT_ROUNDS, plan.chain_rounds or _DEFAULT_ROUNDS)
        )
        self._nodes = self._coordinates = 0
        self._participants = max(2, plan.colluders + 2) if participants is None else participants
        self._coalition = None if coalition is None else load_coalition(Path(coalition))
        self._report = None if report is None else Path(report)
        if self._report is not None and not self._report.parent.is_dir():
            raise ConfigError(f"the folder {self._report.parent} does not exist", field="report")
        self._stage_timeout = stage_timeout
        self._sent: list[Message] = []
        self._failed_enrolments: dict[int, int] = {}
        self._begun: Session | None = None
        self.save: Callable[[], None] = lambda: None
        self.account = Account(self.plan)

    @classmethod
    def from_run_config(cls, context: Context, strategy: Strategy, **options: Any) -> Self:
        """Around a strategy, with plan, mode, tracker, key and the rest from `[tool.flwr.app.config]`.

        The names are those of `niss.flower.run_config`; `options` are arguments as above, and go before them.
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
        self._nodes, self._coordinates = len(list(grid.get_node_ids())), Model.of(initial_arrays).size
        self._warn()
        recorder = RunRecorder(self, self._folder, num_rounds)
        try:
            result = recorder.run(grid, initial_arrays, timeout, train_config, evaluate_config, evaluate_fn)
        finally:
            self._conclude(recorder.metrics)
        self._require_a_round()
        return result

    def _warn(self) -> None:
        """Say what will go wrong, while nobody has been asked anything."""
        try_metrics(self.inner, self._metrics.means(np.zeros(len(self._metrics)), 1.0, 1.0))
        warn_of_strategy(self.inner, self._participants, carries=self.plan.kind.carries)

    def _say_outlook(self) -> None:
        """Before the first round that anyone pays for: can this model learn anything under this noise?"""
        opened = self.session.round
        if opened is None or any(one.participants for one in self.rounds):
            return
        terms = opened.agreed.terms
        judged = outlook(
            parameters=self._model.size,
            rounds=self._rounds,
            clip=terms.clip,
            variance=len(opened.nodes) * terms.residual_variance,
        )
        LOG.log(logging.INFO if judged.verdict == "good" else logging.WARNING, "niss: %s", judged.words)

    def _require_a_round(self) -> None:
        """Raise `ProtocolError` for a run whose model is the one that it began with."""
        if self._rounds == 0 or any(one.survivors for one in self.rounds):
            return
        why, hint = "the strategy asked no node to train", "see `fraction_train`"
        if self.rounds:
            last = self.rounds[-1]
            lost = f"every upload was lost ({most_common(last.lost.values())})"
            why = last.skipped or lost
            hint = "the log says why of each node; `participants` is how many a round needs"
        if self._begun is not None and not self._begun.members:
            why += f"; no node joined ({most_common(self._begun.left_out.values())})"
            hint = USE_THE_MOD
        raise ProtocolError(f"no round took place: {why}", hint=hint)

    def _plan_for(self, rounds: int) -> None:
        """Fix how many rounds the beacon chain is for, and so how many graphs a client has to reckon with."""
        self._rounds, self.plan = rounds, for_rounds(self._given, rounds)
        self._assess = Assessor(
            relation=self.plan.relation, failure=self.plan.failure, promise=Promise.of(self.plan)
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
        number, carries = server_round - 1, self.plan.kind.carries
        try:
            willing = grid if carries else GridOfWilling(grid, self._willing, fewest_nodes(self.inner))
            messages = list(self.inner.configure_train(server_round, arrays, config, willing))
        except ProtocolError as error:
            return self._skip(number, error.message)
        if not messages:
            return []
        self._grid, self._type = grid, messages[0].metadata.message_type
        self._model, self._array_key = shared_model(messages)
        drawn = [message.metadata.dst_node_id for message in messages]
        if carries:
            # Who takes part is not for the wrapped strategy to draw; it says what they are sent.
            drawn = list(grid.get_node_ids())
            self._nodes, self._coordinates = len(drawn), self._model.size
        self._enrol(drawn, grid)
        seatable = self.session.seatable(drawn)
        nodes = self.account.with_room(seatable, self.session.members)
        try:
            if carries:
                requests = self.session.open_next(number, nodes, set(drawn), self.save)
            else:
                requests = self.session.open(number, nodes, self._model.size)
        except (ProtocolError, PrivacyError) as error:
            # Too few, unlucky graphs, or a tracker that is away: the next round may do better.
            spent = len(seatable) - len(nodes)
            why = getattr(error, "detail", error.message) + (
                f"; {spent} have spent what the plan allows" if spent else ""
            )
            return self._skip(number, f"{why}; {error.hint}" if carries and error.hint else why)
        self._say_outlook()
        made = {message.metadata.dst_node_id: message for message in messages}
        for node, request in requests.items():
            # The wrapped strategy may have given all messages the same content.
            content = RecordDict(dict(made.get(node, messages[0]).content.items()))
            content[RECORD] = request.to_record()
            if node in made:
                made[node].content = content
            else:
                made[node] = Message(content, dst_node_id=node, message_type=self._type)
            self._sent.append(made[node])
        return list(self._sent)

    def _willing(self, nodes: list[int]) -> list[int]:
        """Those of these nodes that could take part if they were drawn; new ones count."""
        if self._begun is None:
            return nodes
        members = self._begun.members
        known = [node for node in nodes if node in members]
        spent = set(known) - set(self.account.with_room(known, members))
        return [node for node in self._begun.not_left_out(nodes) if node not in spent]

    def _skip(self, number: int, why: str) -> list[Message]:
        """Note that a round did not take place; no message is sent."""
        LOG.warning("niss: round %d is skipped: %s", number + 1, why)
        self.account.rounds.append(RoundReport.skip(number, why))
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the uploads, repair what was lost if so agreed, and hand the mean to the wrapped strategy.

        Returns what the wrapped strategy makes of it; its metrics get `niss-survivors` and `niss-lost`. Those that
        travelled inside the uploads reach it as the metrics of that one result, each with its noise.
        """
        if self._begun is None or self._begun.round is None:
            return self.inner.aggregate_train(server_round, [])
        replies = list(replies)
        uploads = sort_replies(self._sent, replies)
        self.session.take_uploads(uploads)
        if self._mode == "repair":
            self.session.repair(self._send)
        current, outcome = self.session.finish()
        report = self.account.enter(current, outcome, self.session.members, self._mu_of(current))
        report.log()
        results = [shown(reply) for reply in replies if reply.has_error()]
        if not outcome.survivors:
            return self.inner.aggregate_train(server_round, results)
        results.insert(0, self._mean_as_reply(current, outcome, uploads))
        arrays, metrics = self.inner.aggregate_train(server_round, results)
        if arrays is not None:
            arrays = self._model.restored(arrays)
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
            return self.inner.aggregate_evaluate(server_round, alike(replies))
        except Exception as error:
            LOG.warning("niss: no metrics of `evaluate` in round %d: %s", server_round, type(error).__name__)
            return None

    def summary(self) -> None:
        """Log the settings of both strategies, as Flower does before the first round."""
        plan = self.plan
        LOG.info("\t├──> NISS around %s:", type(self.inner).__name__)
        LOG.info("\t│\t├── target: epsilon %s, delta %g, %s", plan.epsilon, plan.delta, plan.relation)
        LOG.info("\t│\t├── %d rounds, clip %g, %d colluders", plan.participations, plan.clip, plan.colluders)
        LOG.info("\t│\t├── dropouts: %s", self._mode)
        if plan.kind.carries:
            LOG.info(
                "\t│\t├── noise carried over %d rounds, nodes in turn, every %d",
                plan.planned_rounds,
                plan.separation,
            )
        if self._metrics:
            LOG.info("\t│\t├── metrics in the noisy sum: %s", ", ".join(self._metrics.names))
        LOG.info("\t│\t└── keys and beacon: %s", self._coordinator.address or _OWN_BEACON)
        self.inner.summary()

    @property
    def session(self) -> Session:
        """The protocol's run: begun when it is first needed, and anew by each `start`."""
        return self._begin() if self._begun is None else self._begun

    @property
    def has_begun(self) -> bool:
        """Whether there is a session yet; to ask for it begins it."""
        return self._begun is not None

    def _begin(self, saved: dict[str, Any] | None = None) -> Session:
        if self.plan.kind.carries:
            before = None if saved is None else read_proposal(bytes.fromhex(saved["proposal"])).participants
            self.plan = for_nodes(self.plan, before or self._size, self._nodes)
            self._participants = self.plan.participants or 0
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
            adaptive=self._adaptive,
            coordinates=self._coordinates + len(self._metrics),
            saved=saved,
        )
        self.account = Account(self.plan, schedule=self._begun.proposal.schedule)
        self._failed_enrolments.clear()
        self._sent.clear()
        return self._begun

    def restore(self, session: dict[str, Any], account: dict[str, Any]) -> None:
        """Go on with a run that was saved, in place of a new one."""
        begun = self._begin(session)
        self.account = Account.restored(self.plan, account, begun.proposal.schedule)

    @property
    def secret_to_save(self) -> SecretBytes | None:
        """The secret of the server's identity, where no key file has it."""
        return None if self._own_key else self._identity.secret_bytes()

    @property
    def pending(self) -> Pending | None:
        """What the round under way costs its participants, should nothing more be heard of it."""
        if self._begun is None or (current := self._begun.round) is None:
            return None
        return self.account.pending(current, self._begun.members, self._mu_of(current))

    def _mu_of(self, current: Round) -> float | None:
        """What a round costs each of its participants; None where that depends on the rounds before."""
        return None if self.plan.kind.carries else self._assess(current.agreed, self.plan.colluders)

    def _enrol(self, nodes: list[int], grid: Grid) -> None:
        """At first everyone who is there, afterwards those of the round who are new or have no key left."""
        everyone = dict.fromkeys(nodes)
        if not self.session.gathered:
            everyone |= dict.fromkeys(grid.get_node_ids())
        replies = self._send(self.session.enrolment_requests(everyone))
        for node, reply in replies.received.items():
            self.session.admit(node, reply)
        for node, why in replies.failures.items():
            LOG.warning("niss: node %d did not join: %s. %s", node, why, USE_THE_MOD)
            self._failed_enrolments[node] = self._failed_enrolments.get(node, 0) + 1
            if self._failed_enrolments[node] >= _MOST_FAILED_ENROLMENTS:
                self.session.leave_out(node, f"did not join: {why}")

    def _send(self, requests: dict[int, Request]) -> Replies:
        """Exchange messages outside of Flower's own round, through the grid that the round was configured with."""
        return send_requests(self._grid, requests, message_type=self._type, timeout=self._stage_timeout)

    def _mean_as_reply(self, current: Round, outcome: Outcome, uploads: Replies) -> Message:
        """The survivors' mean as the reply of one client; the sum was taken with weights 1 / participants.

        Where noise is carried over it stays the sum: every round has to enter the model with the same factor.
        """
        mean = outcome.total * self.account.scale(len(current.nodes), len(outcome.survivors))
        survivors = [uploads.received[current.nodes[seat]] for seat in outcome.survivors]
        metrics = mean_metrics([reply.metrics for reply in survivors])
        self.account.clear_metrics |= set(metrics)
        size, clip, weight = self._model.size, current.agreed.terms.clip, len(current.nodes) / len(survivors)
        metrics.update(
            self._metrics.means(outcome.total[size:] * weight, clip, self.account.noise_of_round() * weight)
        )
        metrics[weight_of(self.inner)] = 1
        mean[:size] /= self.account.weigh(self._metrics.mean_weight(mean[size:], clip))
        content = RecordDict({self._array_key: self._model.moved_by(mean[:size]), METRICS: metrics})
        return Message(content, reply_to=self._sent[0])

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
