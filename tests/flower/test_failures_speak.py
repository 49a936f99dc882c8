"""What a user gets wrong is said in words, and before any client has spent anything."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

from flower.grid import PRIVATE, FakeGrid, global_model, make_app
from niss.accounting import Plan
from niss.accounting.assumed import fewest_participants
from niss.accounting.terms import plan_noise
from niss.errors import ConfigError, ProtocolError
from niss.flower import NissMod, NissStrategy
from niss.flower.given import flower_plan, in_better_mode, lasting
from niss.flower.transport import what_to_do


def charges(grid: FakeGrid) -> list[int]:
    """How often each node was charged."""
    return [
        context.state["niss"]["charges"] if "niss" in context.state else 0
        for context in grid.contexts.values()
    ]


def start(strategy: NissStrategy, grid: FakeGrid, rounds: int = 2):
    return strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)


def inner(**options) -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, **options)


def test_a_run_without_any_round_raises_and_still_leaves_its_report(tmp_path):
    report = tmp_path / "report.json"
    strategy = NissStrategy(inner(), plan=PRIVATE, participants=10, report=report)
    with pytest.raises(
        ProtocolError, match=r"no round took place.*6 nodes could take part, at least 10"
    ) as e:
        start(strategy, FakeGrid())
    assert "participants" in e.value.hint
    why = "6 nodes could take part, at least 10 are needed"
    skipped = [one["skipped"] for one in json.loads(report.read_text())["rounds"]]
    assert len(skipped) == 2
    assert all(one.startswith(why) and "collusion and dropouts of the plan" in one for one in skipped)
    assert any("Rounds that were skipped: 2;" in caveat for caveat in strategy.statement.caveats)


def test_a_run_in_which_every_upload_is_lost_raises():
    grid = FakeGrid()
    grid.tamper = lambda message: None if message.content["niss"]["stage"] == "round" else message
    with pytest.raises(ProtocolError, match=r"no round took place.*no answer in time"):
        start(NissStrategy(inner(), plan=PRIVATE), grid)


def test_a_forgotten_mod_is_named_before_anything_is_spent(caplog):
    grid = FakeGrid(app=make_app(mods=[]))
    with pytest.raises(ProtocolError, match="no round") as e:
        start(NissStrategy(inner(), plan=PRIVATE), grid)
    assert "mods=[niss_mod]" in e.value.hint
    assert any("mods=[niss_mod]" in record.getMessage() for record in caplog.records)
    assert charges(grid) == [0] * 6


def test_the_log_begins_with_the_strategy_that_was_started_and_the_one_inside(caplog):
    start(NissStrategy(inner(), plan=PRIVATE), FakeGrid(), rounds=1)
    assert [one for one in caplog.messages if "Starting" in one] == ["Starting NissStrategy strategy:"]
    assert caplog.text.count("NISS around FedAvg:") == 1


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("the reply was made without NISS", "mods=[niss_mod]"),
        ("KeyError: 'arrays'", "mods=[niss_mod]"),
        ("no answer in time", "Is it running"),
        ("Node unavailable", "Is it running"),
        ("did not join: Error: Message Unavailable", "Is it running"),
        ("niss: this node cannot answer; its own log says why", "It has NISS and refuses"),
        ("declined: this client's own limits or its ledger do not allow it", "It has NISS and refuses"),
    ],
)
def test_what_to_do_about_a_node_follows_from_its_reason(reason, hint):
    assert hint in what_to_do(reason)


def test_nodes_whose_budgets_are_spent_are_not_asked_for_the_mod(tmp_path, caplog):
    grid = FakeGrid(4).keep_state(tmp_path)
    start(NissStrategy(inner(), plan=PRIVATE), grid, rounds=3)
    caplog.clear()
    with pytest.raises(ProtocolError, match="declined: this client's own limits") as e:
        start(NissStrategy(inner(), plan=PRIVATE), grid)
    assert "its own log says why" in e.value.hint
    assert "mods=" not in caplog.text


class TestAFunctionForMetrics:
    @staticmethod
    def of_loss(records, weighted_by):
        assert weighted_by == "num-examples"
        return MetricRecord({"mean-loss": sum(one["metrics"]["loss"] for one in records) / len(records)})

    def test_one_that_fails_is_named_before_the_first_round_and_costs_no_round(self, caplog):
        grid = FakeGrid()
        strategy = NissStrategy(inner(train_metrics_aggr_fn=self.of_loss), plan=PRIVATE)

        def warned(_message):
            assert "train_metrics_aggr_fn fails (KeyError: 'loss')" in caplog.text

        grid.on_request("enrol", warned)
        result = start(strategy, grid)
        assert [one.survivors for one in strategy.rounds] == [6, 6]
        assert result.train_metrics_clientapp[2] == {"niss-survivors": 6, "niss-lost": 0}

    def test_one_that_gets_what_it_needs_is_used(self):
        grid = FakeGrid(app=make_app([NissMod(clear_metrics=("loss",))]))
        strategy = NissStrategy(inner(train_metrics_aggr_fn=self.of_loss), plan=PRIVATE)
        assert start(strategy, grid).train_metrics_clientapp[1]["mean-loss"] == 0.5


def test_a_tracker_without_a_key_is_refused():
    with pytest.raises(ConfigError, match=r"^key: ") as e:
        NissStrategy(inner(), plan=PRIVATE, tracker="https://tracker.example")
    assert "niss keys new" in e.value.hint


def test_a_strategy_that_would_start_with_too_few_nodes_is_warned_of(caplog):
    strategy = NissStrategy(inner(), plan=PRIVATE, participants=5)
    start(strategy, FakeGrid(), rounds=1)
    assert "min_available_nodes=5" in caplog.text
    caplog.clear()
    patient = NissStrategy(inner(min_available_nodes=5, min_train_nodes=5), plan=PRIVATE, participants=5)
    start(patient, FakeGrid(), rounds=1)
    assert "min_available_nodes" not in caplog.text


class TestParticipations:
    def test_follow_the_rounds_where_the_plan_does_not_say(self):
        """At 1 they paid for the first of three rounds, and the run ended there as if that were all."""
        strategy = NissStrategy(inner(), plan=replace(PRIVATE, participations="planned"))
        start(strategy, FakeGrid(), rounds=3)
        assert [one.survivors for one in strategy.rounds] == [6, 6, 6]
        assert strategy.plan.participations == 3

    def test_and_the_sampling(self):
        strategy = NissStrategy(inner(fraction_train=0.5), plan=replace(PRIVATE, participations="planned"))
        start(strategy, FakeGrid(8), rounds=6)
        assert [one.participants for one in strategy.rounds] == [4] * 6
        rarely = lasting(Plan(), FedAvg(fraction_train=0.1), 100, 1000)
        assert 20 < rarely.participations < 40

    def test_that_cannot_last_are_refused_before_anyone_is_asked(self):
        grid = FakeGrid()
        with pytest.raises(ConfigError, match=r"participations: .* in 2 rounds, but 3 rounds with 100%") as e:
            start(NissStrategy(inner(), plan=replace(PRIVATE, participations=2)), grid, rounds=3)
        assert "3 are enough" in e.value.hint
        assert not grid.sent

    def test_that_may_not_last_are_warned_of(self, caplog):
        start(NissStrategy(inner(fraction_train=0.5), plan=PRIVATE), FakeGrid(8), rounds=6)
        assert "participations=6 are enough" in caplog.text


class TestSpentClients:
    HALF = replace(PRIVATE, participations=2)

    def test_are_not_sampled_again(self):
        """Half of twelve nodes four times: drawn blindly, some would nearly always be asked a third time."""
        strategy = NissStrategy(inner(fraction_train=0.5), plan=self.HALF)
        start(strategy, grid := FakeGrid(12), rounds=4)
        asked = [m.metadata.dst_node_id for m in grid.sent if m.content["niss"]["stage"] == "round"]
        assert max(asked.count(node) for node in asked) == 2
        assert not any(one.lost for one in strategy.rounds)

    def test_do_not_make_the_strategy_wait_for_ever(self):
        """With everyone spent it would wait for six nodes that never come."""
        everyone = inner(fraction_train=0.5, min_train_nodes=6, min_available_nodes=6)
        strategy = NissStrategy(everyone, plan=self.HALF)
        start(strategy, FakeGrid(), rounds=4)
        assert [one.survivors for one in strategy.rounds] == [6, 6, 0]
        assert "0 of 6 nodes could take part" in strategy.rounds[2].skipped
        assert strategy.statement.epsilon_joint <= PRIVATE.epsilon

    def test_end_the_run_with_the_model_it_has_come_to(self, tmp_path, caplog):
        """An earlier run has spent half of everyone's budget; nobody is asked for a round it would decline."""
        plan, grid = replace(PRIVATE, participations=4), FakeGrid(4).keep_state(tmp_path)
        start(NissStrategy(inner(), plan=plan), grid, rounds=2)
        asked = len(grid.sent)
        strategy = NissStrategy(inner(), plan=plan)
        result = start(strategy, grid, rounds=4)
        assert [one.survivors for one in strategy.rounds] == [4, 4, 0]
        assert not strategy.session.members.left_out
        assert len(grid.sent) == asked + 4 + 2 * 4
        assert (
            "4 of 4 nodes can pay for a part of the run only, some for no more than 2 rounds" in caplog.text
        )
        assert caplog.text.count("the run ends here") == 1
        before = global_model()
        assert all((result.arrays[name].numpy() != before[name].numpy()).any() for name in before)


HOPELESS = "next to nothing is learned; `niss plan` shows what helps"


class TestOutlook:
    def test_a_hopeless_plan_is_said_to_be_hopeless_before_anyone_is_charged(self, caplog):
        plan = replace(PRIVATE, epsilon=0.1)
        grid = FakeGrid()

        def warned(_message):
            assert HOPELESS in caplog.text

        grid.on_request("round", warned)
        start(NissStrategy(inner(), plan=plan), grid)
        assert caplog.text.count(HOPELESS) == 1 + 6, "once in the server's log, and in that of each node"

    @pytest.mark.parametrize("resume", [False, True])
    def test_stops_the_run_where_that_is_wanted_and_nobody_pays(self, tmp_path, resume):
        grid, report = FakeGrid().keep_state(tmp_path / "nodes"), tmp_path / "report.json"
        kept = {"resume": tmp_path / "run"} if resume else {}
        plan = replace(PRIVATE, epsilon=0.1)
        strategy = NissStrategy(inner(), plan=plan, on_hopeless="stop", report=report, **kept)
        with pytest.raises(ConfigError, match="on_hopeless: nothing can be learned") as e:
            start(strategy, grid)
        assert "next to nothing is learned" in e.value.hint
        assert not (grid.home() / "ledger.jsonl").exists()
        assert json.loads(report.read_text())["rounds"][0]["skipped"].startswith("the plan is hopeless")
        assert not strategy.session.books.charges
        if resume:
            # Who goes on all the same is not charged for the round that nobody was asked for.
            again = NissStrategy(inner(), plan=plan, **kept)
            start(again, grid)
            assert [one.survivors for one in again.rounds] == [0, 6]
            assert len(again.session.books.charges) == 1

    def test_one_that_can_work_is_not_warned_of(self, caplog):
        plan = replace(PRIVATE, epsilon=10.0, neighbours=5)
        start(NissStrategy(inner(), plan=plan), FakeGrid(12))
        assert "little is lost" in caplog.text
        assert HOPELESS not in caplog.text

    def test_a_client_finds_the_norm_of_its_update_in_its_own_log_alone(self, caplog):
        grid = FakeGrid()
        start(NissStrategy(inner(), plan=PRIVATE), grid, rounds=1)
        assert caplog.text.count("the update has norm 0.") == 6
        assert all(set(reply.content) == {"niss", "niss-upload"} for reply in grid.received)


class TestMode:
    """Where the plan does not say what becomes of the noise of the lost, what leaves less of it."""

    PLAN = flower_plan(epsilon=8.0, clip=0.5)

    def noise_with_a_node_lost(self, plan: Plan, nodes: int = 12) -> tuple[str, float]:
        grid, strategy = FakeGrid(nodes), NissStrategy(inner(), plan=plan)
        grid.lose_uploads()
        start(strategy, grid, rounds=1)
        assert strategy.rounds[0].survivors == nodes - 1
        return strategy.plan.mode, strategy.rounds[0].noise.variance ** 0.5

    def test_is_to_repair_where_that_leaves_less_noise(self):
        mode, repaired = self.noise_with_a_node_lost(self.PLAN)
        assert mode == "repair"
        left = {"tolerate": self.noise_with_a_node_lost(flower_plan(epsilon=8.0, clip=0.5, mode="tolerate"))}
        assert left["tolerate"][0] == "tolerate"
        assert repaired < 0.6 * left["tolerate"][1]

    def test_that_is_asked_for_stays(self):
        for mode in ("tolerate", "repair"):
            asked = replace(self.PLAN, mode=mode)
            assert in_better_mode(asked, inner(), 12).mode == "repair", "who is asked would repair"
            assert in_better_mode(replace(asked, graph="complete"), inner(), 200).mode == "repair"
            strategy = NissStrategy(inner(), plan=asked)
            start(strategy, FakeGrid(12), rounds=1)
            assert strategy.plan.mode == mode

    def test_is_settled_in_what_nodes_are_proposed(self):
        strategy = NissStrategy(inner(), plan=self.PLAN)
        assert (self.PLAN.mode, strategy.session.proposal.plan.mode) == ("planned", "tolerate")

    def test_is_still_chosen_for_a_plan_that_was_changed_elsewhere(self):
        mode, _ = self.noise_with_a_node_lost(replace(Plan(clip=0.5, epsilon=3.0, kappa=4.0), epsilon=8.0))
        assert mode == "repair"

    @pytest.mark.parametrize(
        ("plan", "nodes"),
        [
            (PLAN, 2),  # Nobody is left to repair anything,
            (PLAN, fewest_participants(replace(PLAN, mode="repair"))),  # or would be in the next round.
            (replace(PLAN, graph="complete"), 201),  # Everyone would have to repair.
            (Plan(tau2=0.0, clip=5.0), 12),
            (flower_plan(epsilon=8.0, clip=0.5, carry=3), 12),
        ],
    )
    def test_is_tolerant_where_nothing_speaks_for_repair(self, plan, nodes):
        assert in_better_mode(plan, inner(), nodes).settled_mode == "tolerate"

    def test_goes_by_the_nodes_that_are_drawn_and_stays_for_a_run(self, tmp_path):
        grid = FakeGrid(12).keep_state(tmp_path / "nodes")
        options = {"plan": self.PLAN, "resume": tmp_path / "run"}
        with grid.killing(2):
            start(NissStrategy(inner(), **options), grid, rounds=3)
        grid.dead |= set(list(grid.contexts)[3:])
        again = NissStrategy(inner(), **options)
        start(again, grid, rounds=3)
        assert again.plan.mode == again.session.proposal.plan.mode == "repair"


class TestAPlanOfFlowersSize:
    def test_is_the_plan_with_what_it_does_not_ask_for_derived(self):
        plan = flower_plan(epsilon=8.0, clip=2.0, colluders=0.2, dropout=0.1, mode="repair")
        assert plan == Plan(
            epsilon=8.0, clip=2.0, collusion=0.2, dropout=0.1, mode="repair", kappa=4.0, neighbours=200
        )
        few = replace(plan, neighbours=10)
        assert plan_noise(plan, 100).residual < 0.1 * plan_noise(few, 100).residual, "all of ten may be lost"
        carried = flower_plan(epsilon=8.0, clip=2.0, carry=5)
        assert (carried.kind.carries, carried.separation) == (True, 5)
        silos = flower_plan(epsilon=2.0, clip=1.0, records=6000)
        assert (silos.unit, silos.batch, silos.records, silos.settled_mode) == (
            "record",
            0.05,
            6000,
            "repair",
        )

    @pytest.mark.parametrize(
        ("given", "nodes", "taking_part"),
        [({}, 4, 4), ({"carry": 3}, 12, 4), ({"carry": 3, "mode": "repair"}, 12, 4)],
    )
    def test_runs_as_it_is(self, given, nodes, taking_part):
        strategy = NissStrategy(inner(), plan=flower_plan(epsilon=8.0, clip=0.5, **given))
        start(strategy, FakeGrid(nodes), rounds=3)
        assert [one.survivors for one in strategy.rounds] == [taking_part] * 3
        assert strategy.statement.epsilon_joint <= 8.0

    @pytest.mark.parametrize(
        ("field", "value"),
        [("epsilon", -1.0), ("clip", 0.0), ("collusion", 1.5), ("mode", "hope"), ("records", 0)],
    )
    def test_refuses_what_no_plan_can_be(self, field, value):
        given = {"epsilon": 8.0, "clip": 2.0, {"collusion": "colluders"}.get(field, field): value}
        with pytest.raises(ConfigError, match=field):
            flower_plan(**given)

    def test_says_before_the_first_round_what_was_derived(self, caplog):
        grid, seen = FakeGrid(12), []
        grid.on_request("enrol", lambda _message: seen.append(caplog.text))
        start(NissStrategy(inner(), plan=flower_plan(epsilon=8.0, clip=0.5, colluders=0.2)), grid)
        for line in (
            "target: epsilon 8.0, delta 1e-5",
            "2 rounds of a client, clip 0.5, 20 % collude",
            "noise shares: with 200 others, or all there are; kappa 4",
            "dropouts: repair, 5% expected",
            "keys and beacon: this server",
        ):
            assert line in seen[0]


class TestLosses:
    """More lost uploads than the plan allows for are said when they happen, with what would help."""

    def losing_an_upload(self) -> FakeGrid:
        grid = FakeGrid()
        grid.lose_uploads()
        return grid

    def test_beyond_the_plan_are_warned_of(self, caplog):
        grid = self.losing_an_upload()
        start(NissStrategy(inner(), plan=PRIVATE), grid, rounds=1)
        assert "lost 1 of 6 uploads, and the plan (tolerate, dropout 0) allows for 0" in caplog.text
        assert "noise of the lost stays in the sum" in caplog.text

    def test_are_said_with_how_long_they_were_waited_for_and_what_bounds_that(self, caplog):
        waits, grid = [], self.losing_an_upload()
        send = grid.send_and_receive

        def noted(messages, *, timeout=None):
            waits.append(timeout)
            return send(messages, timeout=timeout)

        grid.send_and_receive = noted
        strategy = NissStrategy(inner(), plan=PRIVATE, deadline=5.0, stage_timeout=2.0)
        strategy.start(grid, global_model(), num_rounds=1, timeout=3600)
        assert max(waits) == 7.0
        assert "uploads of a round are waited for at most 7 seconds" in caplog.text
        assert re.search(r"niss: waited \d+ seconds for uploads; with a `deadline`", caplog.text)

    def test_within_the_plan_are_not(self, caplog):
        grid = self.losing_an_upload()
        start(NissStrategy(inner(), plan=replace(PRIVATE, mode="repair", neighbours=5.0)), grid, rounds=1)
        assert "allows for" not in caplog.text


class TestEvaluation:
    def test_that_nodes_refuse_is_said_once_before_anyone_is_asked_with_ways_out(self, caplog):
        grid, strategy = FakeGrid(), NissStrategy(FedAvg(), plan=PRIVATE)

        def warned(_message):
            assert "asks nodes to evaluate, which they refuse" in caplog.text

        grid.on_request("enrol", warned, node=None)
        result = start(strategy, grid)
        assert [one.survivors for one in strategy.rounds] == [6, 6]
        assert not result.evaluate_metrics_clientapp
        assert caplog.text.count("asks nodes to evaluate") == 1
        assert all(way in caplog.text for way in ("evaluate_fn", "`metrics=`", "allow=('evaluate',)"))
        assert "travel in the clear" not in " ".join(strategy.statement.caveats)

    def test_that_nobody_is_asked_for_is_not_spoken_of(self, caplog):
        start(NissStrategy(inner(), plan=PRIVATE), FakeGrid(), rounds=1)
        assert "evaluate" not in "".join(
            one.getMessage() for one in caplog.records if "niss:" in one.getMessage()
        )
