"""Metrics inside the upload: within the clip whatever the app reports, exact without noise, as noisy as they say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from flower.grid import (
    FIRST,
    SHAPES,
    FakeGrid,
    arrays,
    global_model,
    make_app,
    perhaps_without_a_round,
    step_of,
)
from flower.test_drop_in import PRIVATE, WITHOUT_NOISE, values
from flower.test_trust import body_of, with_folders
from niss.accounting import LedgerFile, Plan, make_terms
from niss.errors import ConfigError, RemoteProtocolError
from niss.flower import NissMod, NissStrategy
from niss.mechanism import l2_norm
from niss.mechanism.grid import Grid
from niss.mechanism.rounding import round_randomly
from niss.protocol.keys import SIGNATURE_BYTES
from niss.protocol.messages import Refusal, Upload
from niss.protocol.wire import decode
from niss.randomness import SecretStream
from niss.session.metrics import NoisyMetrics
from niss.session.proposal import read_proposal
from niss.session.server import Session

NODES = 6
ODD = FIRST + 2
SIZE = sum(math.prod(shape) for shape in SHAPES.values())
RANGES = {"accuracy": (0.0, 1.0), "loss": (0.0, 8.0)}
REPAIRED = replace(WITHOUT_NOISE, dropped=1, revealed=2)
MIDDLE = [None, "word", math.nan, [0.9], True, b"1", object()]


def reported(node: int, server_round: int) -> dict[str, float]:
    """What the app of a node reports, the same whoever asks."""
    rng = np.random.default_rng([node % 1000, server_round, 7])
    return {"accuracy": float(rng.uniform()), "loss": float(rng.uniform(0.0, 8.0))}


def reporting_app(
    mod: NissMod | None = None, report: Callable[[int, int], dict[str, float]] = reported
) -> ClientApp:
    """`make_app` with other metrics."""
    app = ClientApp(mods=[NissMod(metrics=RANGES) if mod is None else mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        now = int(message.content["config"]["server-round"])
        step = step_of(context.node_id, now)
        moved = {name: array.numpy() + step[name] for name, array in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 10, **report(context.node_id, now)})
        return Message(RecordDict({"arrays": arrays(moved), "metrics": metrics}), reply_to=message)

    return app


def start(grid: FakeGrid, rounds: int = 3, **options) -> tuple[NissStrategy, Result]:
    strategy = NissStrategy(
        FedAvg(fraction_evaluate=0.0), **{"plan": WITHOUT_NOISE, "metrics": RANGES, **options}
    )
    result = Result()
    with perhaps_without_a_round():
        result = strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)
    return strategy, result


def uploads(grid: FakeGrid) -> list[Upload]:
    bodies = [body_of(reply) for reply in grid.received if not reply.has_error()]
    messages = [decode(body) for body in bodies if not body.startswith(b"niss enrolment")]
    return [message for message in messages if isinstance(message, Upload)]


class TestTheVector:
    @given(
        update=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
        given_values=st.lists(
            st.floats() | st.integers() | st.sampled_from([*MIDDLE, 10**400, -(10**400)]),
            min_size=1,
            max_size=5,
        ),
        # Half of the least positive number is 0: a range as narrow as that is refused.
        ends=st.tuples(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300)).filter(
            lambda one: (one[1] - one[0]) / 2.0 > 0.0
        ),
        part=st.floats(0.01, 0.9),
        clip=st.floats(1e-6, 1e6),
        bits=st.integers(1, 30),
        participants=st.integers(2, 500),
    )
    def test_its_norm_is_never_above_the_clip(
        self, update, given_values, ends, part, clip, bits, participants
    ) -> None:
        named = {f"metric {number}": value for number, value in enumerate(given_values)}
        metrics = NoisyMetrics.of(dict.fromkeys(named, ends), part)
        terms = replace(_terms(), clip=clip, grid_bits=bits)
        joined = metrics.joined(np.array(update), named, terms, participants)
        assert joined.shape == (len(update) + len(named),)
        assert l2_norm(joined) <= clip
        tail = joined[len(update) :]
        assert l2_norm(tail) <= part * clip * (1.0 + 1e-12)
        alone = metrics.joined(np.zeros(len(update)), named, terms, participants)[len(update) :]
        np.testing.assert_allclose(tail, alone, rtol=1e-12)
        assert l2_norm(joined[: len(update)]) <= math.sqrt(1.0 - part**2) * clip * (1.0 + 1e-12)

    @pytest.mark.parametrize(
        ("value", "position"),
        [(0, -1.0), (1, 1.0), (0.75, 0.5), (-3.0, -1.0), (math.inf, 1.0), (10**400, 1.0)]
        + [(value, 0.0) for value in MIDDLE],
    )
    def test_where_a_number_lies_in_its_range(self, value, position) -> None:
        metrics = NoisyMetrics.of({"accuracy": (0, 1)}, part=0.5)
        joined = metrics.joined(np.zeros(3), {"accuracy": value}, _terms(), 4)
        assert joined.tolist() == [0.0, 0.0, 0.0, position]  # 0.5 of a clip of 2.

    def test_a_missing_metric_lies_in_the_middle(self) -> None:
        metrics = NoisyMetrics.of(RANGES)
        assert metrics.joined(np.zeros(3), {}, _terms(), 4).tolist() == [0.0] * 5

    def test_nothing_is_changed_where_there_are_no_metrics(self) -> None:
        update = np.array([3.0, 4.0])
        assert NoisyMetrics.of().joined(update, {"loss": 1.0}, _terms(), 4) is update

    def test_rounding_to_the_grid_shortens_updates_and_not_metrics(self) -> None:
        """Of a model with as many coordinates an update as long as the clip is shortened by 7 %."""
        size, participants = 250_000, 30
        plan = Plan(clip=1.0, epsilon=8.0, participations=20, neighbours=10, kappa=2.0)
        terms = make_terms(plan, participants=participants, coordinates=size + 2, run=bytes(16), number=0)
        update = np.random.default_rng(1).normal(size=size)
        metrics = NoisyMetrics.of(RANGES)
        joined = metrics.joined(update, {"accuracy": 1.0, "loss": 0.0}, terms, participants)
        wanted = np.array([0.2, -0.2]) / math.sqrt(2.0)
        np.testing.assert_allclose(joined[-2:], wanted, rtol=1e-12)
        grid = Grid(terms.grid_bits)
        steps = round_randomly(grid, joined / participants, 1.0 / participants, SecretStream(bytes(32)))
        np.testing.assert_allclose(steps[-2:], grid.in_steps(wanted / participants), rtol=0, atol=1.0)
        uneven = np.append(update * math.sqrt(0.96) / l2_norm(update), wanted)
        alike = round_randomly(grid, uneven / participants, 1.0 / participants, SecretStream(bytes(32)))
        assert abs(alike[-1]) < 0.97 * abs(steps[-1]), "else the update need not be shortened in advance"

    @pytest.mark.parametrize(
        "ranges",
        [
            {"": (0, 1)},
            {"a\nb": (0, 1)},
            {"x" * 65: (0, 1)},
            {"niss-lost": (0, 1)},
            {"loss": (0, 1), "loss_noise_sd": (0, 1)},
            {"loss": (1, 1)},
            {"loss": (1, 0)},
            {"loss": (0, math.inf)},
            {"loss": (-1.7e308, 1.7e308)},
            {"loss": (0, 5e-324)},
            {"loss": (0, math.nan)},
            {"loss": (0, 1, 2)},
            {"loss": 1},
            {"loss": (0, 10**400)},
        ],
    )
    def test_names_and_ranges_that_cannot_be(self, ranges) -> None:
        for use in (
            lambda: NissMod(metrics=ranges),
            lambda: NissStrategy(FedAvg(), plan=PRIVATE, metrics=ranges),
        ):
            with pytest.raises(ConfigError, match="metrics"):
                use()

    def test_settings_that_contradict_each_other(self) -> None:
        with pytest.raises(ConfigError, match="clear_metrics"):
            NissMod(metrics=RANGES, clear_metrics=("loss",))
        with pytest.raises(ConfigError, match="the weight of a result"):
            NissStrategy(FedAvg(weighted_by_key="loss"), plan=PRIVATE, metrics=RANGES)
        for part in (0.0, 1.0, -0.1, math.nan):
            with pytest.raises(ConfigError, match="metric_part"):
                NissStrategy(FedAvg(), plan=PRIVATE, metrics=RANGES, metric_part=part)


class TestRuns:
    @pytest.mark.parametrize("mode", ["tolerate", "repair"])
    def test_without_noise_the_means_are_exact_and_the_model_is_as_without_metrics(self, mode) -> None:
        plan = WITHOUT_NOISE if mode == "tolerate" else REPAIRED
        strategy, result = start(FakeGrid(NODES, reporting_app()), mode=mode, plan=plan)
        for number in (1, 2, 3):
            seen = result.train_metrics_clientapp[number]
            for name in RANGES:
                mean = np.mean([reported(FIRST + node, number)[name] for node in range(NODES)])
                assert seen[name] == pytest.approx(mean, abs=1e-4)
                assert seen[f"{name}_noise_sd"] == 0.0
            assert set(seen) == {
                "accuracy",
                "accuracy_noise_sd",
                "loss",
                "loss_noise_sd",
                "niss-survivors",
                "niss-lost",
            }
        plain = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan, mode=mode)
        alone = plain.start(FakeGrid(NODES), global_model(), num_rounds=3, timeout=1)
        np.testing.assert_allclose(values(result.arrays), values(alone.arrays), rtol=0, atol=1e-5)
        assert any(
            "inside the noisy sum, protected as the updates are: accuracy, loss" in one
            for one in strategy.statement.caveats
        )
        assert not any("in the clear" in one for one in strategy.statement.caveats)

    @pytest.mark.parametrize("mode", ["tolerate", "repair"])
    def test_who_is_lost_is_not_in_the_mean(self, mode) -> None:
        """Where the lost client's shares stay in the sum, they are in the noise that is reported."""
        grid = FakeGrid(NODES, reporting_app())
        grid.mangle = lambda reply: None if _is_upload(reply) and reply.metadata.src_node_id == ODD else reply
        plan = WITHOUT_NOISE if mode == "tolerate" else REPAIRED
        strategy, result = start(grid, rounds=1, mode=mode, plan=plan)
        assert strategy.rounds[0].survivors == NODES - 1
        seen = result.train_metrics_clientapp[1]
        mean = np.mean([reported(node, 1)["accuracy"] for node in grid.contexts if node != ODD])
        if mode == "repair":
            assert seen["accuracy"] == pytest.approx(mean, abs=1e-4)
            assert seen["accuracy_noise_sd"] == 0.0
        else:
            # Nine deviations.
            assert seen["accuracy"] == pytest.approx(mean, abs=9 * seen["accuracy_noise_sd"])
            assert seen["accuracy_noise_sd"] > 0.0

    @pytest.mark.parametrize("lost", [False, True])
    def test_the_noise_is_as_large_as_reported(self, lost) -> None:
        """Forty metrics in three rounds, chi-squared; false alarms: two in 10^9."""
        many = {f"m{number:02}": (-1.0, 3.0) for number in range(40)}
        grid = FakeGrid(NODES, reporting_app(NissMod(metrics=many), lambda *_: dict.fromkeys(many, 2.0)))
        if lost:
            grid.mangle = lambda reply: (
                None if _is_upload(reply) and reply.metadata.src_node_id == ODD else reply
            )
        strategy, result = start(grid, plan=replace(PRIVATE, neighbours=5.0), metrics=many, metric_part=0.5)
        assert [one.survivors for one in strategy.rounds] == [NODES - lost] * 3
        squares = [
            ((record[name] - 2.0) / record[f"{name}_noise_sd"]) ** 2
            for record in result.train_metrics_clientapp.values()
            for name in many
        ]
        low, high = chi2.ppf([1e-9, 1.0 - 1e-9], len(squares))
        assert len(squares) == 120
        assert low < sum(squares) < high
        scale = 0.5 * strategy.plan.clip / math.sqrt(len(many))
        for one, record in zip(strategy.rounds, result.train_metrics_clientapp.values(), strict=True):
            assert record["m00_noise_sd"] == pytest.approx(2.0 * one.noise.variance**0.5 / scale)

    def test_an_app_that_fails_counts_with_the_middle_of_the_range(self) -> None:
        grid = FakeGrid(NODES, reporting_app())

        def fails(_message: Message, _context: Context) -> Message:
            raise IndexError("4312")

        odd = ClientApp(mods=[NissMod(metrics=RANGES)])
        odd.train()(fails)
        grid.apps[ODD] = odd
        strategy, result = start(grid, rounds=1)
        assert strategy.rounds[0].survivors == NODES
        others = [reported(node, 1)["loss"] for node in grid.contexts if node != ODD]
        assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(
            (sum(others) + 4.0) / NODES, abs=1e-3
        )

    def test_a_round_costs_what_it_costs_without_metrics(self, tmp_path: Path) -> None:
        spent = []
        for folder, metrics in (("with", RANGES), ("without", None)):
            grid = FakeGrid(NODES, reporting_app())
            with_folders(grid, tmp_path / folder)
            start(grid, rounds=2, plan=replace(PRIVATE, neighbours=5.0), metrics=metrics)
            spent.append(LedgerFile.read(tmp_path / folder / str(ODD) / "ledger.jsonl").spent("self"))
        assert spent[0] == pytest.approx(spent[1], rel=1e-9)
        assert spent[0] > 0.0


class TestAgreement:
    def test_nothing_but_the_upload_leaves(self) -> None:
        grid = FakeGrid(NODES, reporting_app())
        start(grid, rounds=1)
        assert len(grid.received) == 2 * NODES
        for reply in grid.received:
            assert set(reply.content) == {"niss", "niss-upload"}
            assert set(reply.content["niss"]) == {"step"}
            assert set(reply.content["niss-upload"]) == {"body"}
        assert {len(one.vector) for one in uploads(grid)} == {4 * (SIZE + 2)}

    @pytest.mark.parametrize(
        "agreed",
        [
            None,
            {"accuracy": (0, 1)},
            {"accuracy": (0, 1), "loss": (0, 9)},
            {"accuracy": (0, 1), "Loss": (0, 8)},
        ],
        ids=["to nothing", "to one", "to another range", "to another name"],
    )
    def test_a_client_that_has_not_agreed_does_not_join_and_the_others_go_on(self, agreed) -> None:
        grid = FakeGrid(NODES, reporting_app())
        grid.apps[ODD] = reporting_app(NissMod(metrics=agreed))
        strategy, _ = start(grid, rounds=2)
        assert [one.survivors for one in strategy.rounds] == [NODES - 1] * 2
        assert "which this client has not agreed to send" in strategy.session.members.left_out[ODD]
        from_odd = [reply for reply in grid.received if reply.metadata.src_node_id == ODD]
        assert from_odd
        assert all(isinstance(decode(body_of(reply)), Refusal) for reply in from_odd)

    def test_the_agreement_is_asked_for_in_every_round(self) -> None:
        """The app of a node can change between two rounds."""
        grid = FakeGrid(NODES, reporting_app())

        def change(message: Message) -> Message:
            if message.content["niss"]["stage"] == "round":
                grid.apps[ODD] = reporting_app(NissMod())
            return message

        grid.tamper = change
        strategy, _ = start(grid, rounds=1)
        assert "has not agreed to send" in strategy.rounds[0].lost[str(ODD)]

    def test_what_a_client_agrees_to_is_sent_only_where_the_run_wants_it(self) -> None:
        grid = FakeGrid(NODES, reporting_app())
        _, result = start(grid, rounds=1, metrics={"loss": RANGES["loss"]})
        assert {len(one.vector) for one in uploads(grid)} == {4 * (SIZE + 1)}
        assert "accuracy" not in result.train_metrics_clientapp[1]
        grid = FakeGrid(NODES, reporting_app())
        _, result = start(grid, rounds=1, metrics=None)
        assert {len(one.vector) for one in uploads(grid)} == {4 * SIZE}
        assert set(result.train_metrics_clientapp[1]) == {"niss-survivors", "niss-lost"}

    @pytest.mark.parametrize("metrics", [None, RANGES])
    def test_a_round_with_more_coordinates_than_were_agreed_is_refused(self, metrics, monkeypatch) -> None:
        begin = Session.begin

        def begin_with_more(session: Session, number: int, nodes, *, coordinates: int, **rest) -> None:
            begin(session, number, nodes, coordinates=coordinates + 1, **rest)

        monkeypatch.setattr(Session, "begin", begin_with_more)
        grid = FakeGrid(NODES, reporting_app())
        strategy, _ = start(grid, rounds=1, metrics=metrics)
        assert uploads(grid) == []
        assert all("another number of coordinates" in why for why in strategy.rounds[0].lost.values())
        assert len(strategy.rounds[0].lost) == NODES

    def test_metrics_sent_in_the_clear_do_not_replace_those_in_the_sum(self) -> None:
        grid = FakeGrid(NODES, reporting_app())

        def add(reply: Message) -> Message:
            if _is_upload(reply):
                reply.content["metrics"] = MetricRecord({"accuracy": 9.0, "accuracy_noise_sd": 9.0})
            return reply

        grid.mangle = add
        _, result = start(grid, rounds=1)
        assert result.train_metrics_clientapp[1]["accuracy"] < 1.1
        assert result.train_metrics_clientapp[1]["accuracy_noise_sd"] == 0.0

    def test_the_proposal_says_which_metrics(self) -> None:
        for metrics in (RANGES, None):
            strategy = NissStrategy(FedAvg(), plan=PRIVATE, metrics=metrics, metric_part=0.3)
            proposal = strategy.session.proposal
            data = proposal.signed(strategy._identity)
            assert read_proposal(data).metrics.names == tuple(metrics or ())
        assert read_proposal(
            replace(proposal, metrics=NoisyMetrics.of(RANGES, 0.3)).signed(strategy._identity)
        )

    @pytest.mark.parametrize(
        "metrics",
        [
            1,
            [],
            {"ranges": {"a": [0, 1]}, "part": 0.2, "more": 1},
            {"ranges": {"a": [0, 1]}, "part": 0.0},
            {"ranges": {"a": [0, 1]}, "part": 1.0},
            {"ranges": {"a": [0, 1]}, "part": "0.2"},
            {"ranges": {"a": [0, 1]}, "part": math.nan},
            {"ranges": {"a": [1, 0]}, "part": 0.2},
            {"ranges": {"a": [0, math.nan]}, "part": 0.2},
            {"ranges": {"a\x1b[31m": [0, 1]}, "part": 0.2},
            {"ranges": ["a"], "part": 0.2},
        ],
    )
    def test_a_proposal_with_metrics_that_cannot_be_is_refused(self, metrics) -> None:
        strategy = NissStrategy(FedAvg(), plan=PRIVATE)
        text = json.loads(strategy.session.proposal.signed(strategy._identity)[SIGNATURE_BYTES:])
        text["metrics"] = metrics
        data = json.dumps(text).encode()
        with pytest.raises(RemoteProtocolError, match="cannot be read"):
            read_proposal(strategy._identity.sign("flower proposal", data) + data)


def test_the_plain_app_of_the_other_tests_still_sends_no_metrics() -> None:
    grid = FakeGrid(NODES, make_app())
    strategy, _ = start(grid, rounds=1)
    assert strategy.rounds[0].skipped
    assert len(strategy.session.members.left_out) == NODES


def _terms():
    return make_terms(
        replace(WITHOUT_NOISE, clip=2.0), participants=4, coordinates=5, run=bytes(16), number=0
    )


def _is_upload(reply: Message) -> bool:
    if reply.has_error():
        return False
    body = body_of(reply)
    return not body.startswith(b"niss enrolment") and isinstance(decode(body), Upload)
