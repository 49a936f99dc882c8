"""An app that fails, hangs or raises: its node uploads a blank, and says so to its owner alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flower.grid import (
    FIRST,
    NODES,
    ODD,
    PRIVATE,
    WITHOUT_NOISE,
    FakeGrid,
    arrays,
    body_of,
    global_model,
    holds,
    make_app,
    values,
)
from flower.test_before_training import Training, raises, unchanged
from flower.test_silos import app_of
from niss.errors import ConfigError
from niss.flower import NissMod, NissStrategy, niss_mod
from niss.flower.mod import _LateError, _within
from niss.protocol.messages import Upload
from niss.records import LogisticRegression, Records, clipped_rows, clipped_sum
from niss.session.limits import Limits

SECONDS = 1.0
"""As short as nodes allow; whoever is late in these tests never finishes, the others need milliseconds."""


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Set when the test is over, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


def start(grid: FakeGrid, rounds: int = 1, plan=WITHOUT_NOISE, **options):
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan, **options)
    result = strategy.start(grid, global_model(), num_rounds=rounds, timeout=1)
    return strategy, result


def hanging(never: threading.Event, mod: NissMod = niss_mod) -> ClientApp:
    """Its state is as it likes, before and after."""
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        context.state["begun"] = ConfigRecord({"n": 1})
        never.wait(60)
        context.state["late"] = ConfigRecord({"n": 1})
        return unchanged(message)

    return app


class TestDeadline:
    def test_one_that_hangs_uploads_a_blank_which_cancels_and_is_charged(self, never, tmp_path, caplog):
        grid = FakeGrid(NODES).keep_state(tmp_path)
        grid.apps[ODD] = hanging(never)
        strategy, result = start(grid, deadline=SECONDS)
        (record,) = strategy.rounds
        assert (record.survivors, record.lost, record.exact) == (NODES, {}, True)
        assert record.blanks == pytest.approx(1.0, abs=0.01)
        assert result.train_metrics_clientapp[1]["niss-blank"] == pytest.approx(1 / NODES, abs=0.01)
        assert grid.ledger().participations("self") == 1
        uploads = [one for one in grid.received if holds(one, Upload)]
        assert len(uploads) == NODES
        assert len({len(body_of(one)) for one in uploads}) == 1
        assert all(set(one.content) == {"niss", "niss-upload"} for one in uploads)
        assert "the app was not done within 1 seconds" in caplog.text
        # The others' updates, over all who took part.
        plain, moved = FakeGrid(NODES), []
        for node in plain.contexts:
            if node != ODD:
                alone = make_app(mods=[])
                message = Message(
                    RecordDict({"arrays": global_model(), "config": ConfigRecord({"server-round": 1})}),
                    dst_node_id=node,
                    message_type="train",
                )
                message.metadata.__dict__["_message_id"] = "1"
                moved.append(values(alone(message, plain.contexts[node]).content["arrays"]))
        wanted = (sum(moved) + values(global_model())) / NODES
        np.testing.assert_allclose(values(result.arrays), wanted, atol=1e-4)

    def test_what_a_late_app_did_to_its_context_is_dropped_and_of_others_kept(self, never):
        grid = FakeGrid(NODES)
        grid.apps[ODD] = hanging(never)

        def noted(message: Message, context: Context) -> Message:
            context.state["noted"] = ConfigRecord({"n": 1})
            return unchanged(message)

        app = ClientApp(mods=[niss_mod])
        app.train()(noted)
        grid.apps[FIRST] = app
        start(grid, deadline=SECONDS)
        assert set(grid.contexts[ODD].state) == {"niss"}
        assert set(grid.contexts[FIRST].state) == {"niss", "noted"}

    def test_everyone_in_time_is_as_without_a_deadline(self):
        timed, result = start(FakeGrid(NODES), rounds=2, deadline=60.0)
        plain, other = start(FakeGrid(NODES), rounds=2, count_blanks=True)
        np.testing.assert_allclose(values(result.arrays), values(other.arrays), atol=1e-4)
        for one in (timed, plain):
            assert [record.blanks for record in one.rounds] == pytest.approx([0.0, 0.0], abs=0.01)

    def test_silos_send_an_empty_batch(self, never, monkeypatch, caplog):
        examples = np.ones((4, 2)), np.array([0, 1, 0, 1])
        silos = [Records(LogisticRegression(2), examples) for _ in range(3)]

        def slow(records, *arguments):
            if records is silos[0]:
                never.wait(60)
            yield from clipped_rows(records, *arguments)

        monkeypatch.setattr("niss.session.node.clipped_rows", slow)
        plan = replace(WITHOUT_NOISE, unit="record", batch=1.0, records=12, graph="complete")
        grid = FakeGrid(3, app_of(lambda context: silos[context.node_id - FIRST]))
        strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan, deadline=SECONDS, participants=3)
        model = arrays({"w": np.zeros((2, 2)), "b": np.zeros(2)})
        result = strategy.start(grid, model, num_rounds=1, timeout=1)
        assert strategy.rounds[0].survivors == 3
        assert strategy.rounds[0].blanks is None, "a count of silos' blanks would have no bound by a record"
        total = clipped_sum(silos[0], silos[0].weights, np.arange(4), plan.clip)
        np.testing.assert_allclose(values(result.arrays), -2 * total / 12, atol=1e-4)
        assert "an empty batch was sent" in caplog.text

    @pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf")])
    def test_one_that_no_clock_can_keep_is_refused(self, deadline):
        with pytest.raises(ConfigError, match="deadline"):
            NissStrategy(FedAvg(), plan=PRIVATE, deadline=deadline)


class TestCount:
    def test_that_every_app_fails_is_known_to_the_server_and_to_each_node(self, caplog):
        """Ten of ten uploads are summed; the count inside the noise says what they were."""
        grid = FakeGrid(40, Training(raises).app)
        strategy, _ = start(grid, rounds=3, plan=PRIVATE, count_blanks=True)
        assert [one.survivors for one in strategy.rounds] == [40] * 3
        assert "40 of 40 uploads summed" in caplog.text
        assert "most apps fail or are late" in caplog.text
        assert "number 3 of this node in the run" in caplog.text
        assert "IndexError" in caplog.text
        assert "4312" not in caplog.text
        part, noise = strategy.session.books.blanks
        assert abs(part - 1.0) < 6 * noise < 0.5  # 6 deviations: false-alarm rate 2e-9
        assert any("were blanks" in caveat for caveat in strategy.statement.caveats)

    def test_where_none_fails_nobody_is_alarmed(self, caplog):
        strategy, _ = start(FakeGrid(NODES), count_blanks=True)
        assert "about 0.0 of 6 uploads were blanks" in caplog.text
        assert not [one for one in caplog.records if one.levelno > logging.INFO and "blanks" in one.message]
        assert strategy.rounds[0].blanks == pytest.approx(0.0, abs=0.01)

    def test_it_is_not_there_unless_it_is_asked_for(self):
        strategy, _ = start(FakeGrid(NODES))
        assert strategy.rounds[0].blanks is None
        assert not strategy.session.proposal.metrics.ranges


class TestRaising:
    @pytest.mark.parametrize("way", ["node", "code"])
    def test_a_node_in_development_raises_after_the_charge(self, way, tmp_path, caplog):
        grid = FakeGrid(NODES).keep_state(tmp_path)
        failing = Training(raises, NissMod(Limits(raises=way == "code", uncalibrated=True)))
        if way == "node":
            grid.contexts[ODD].node_config["niss-raises"] = True
        message, reached = _round_for(grid, failing), []
        with pytest.raises(IndexError, match="4312"):
            reached.append(failing.app(message, grid.contexts[ODD]))
        assert reached == []
        assert grid.ledger().participations("self") == 1
        assert "charged already" in caplog.text

    @pytest.mark.parametrize("name", ["niss-raises", "raises", "niss_raises"])
    def test_no_server_can_switch_it_on(self, name, tmp_path):
        """It writes run_config and every message; an exception of its choice would be an oracle."""
        grid = FakeGrid(NODES).keep_state(tmp_path)
        grid.contexts[ODD].run_config[name] = True
        failing = Training(raises)
        message = _round_for(grid, failing)
        message.content["config"][name] = True
        message.content[name] = ConfigRecord({name: True})
        reply = failing.app(message, grid.contexts[ODD])
        assert holds(reply, Upload)
        assert len(failing.calls) == 1


def _round_for(grid: FakeGrid, training: Training) -> Message:
    """What the odd node would have been sent; it joined and has not answered."""
    letters = grid.kept("round")
    keep, held = grid.tamper, []

    def hold(message: Message) -> Message | None:
        keep(message)
        if letters and message is not None and message.metadata.dst_node_id == ODD and letters[-1:] != held:
            held[:] = letters[-1:]
            return None
        return message

    grid.tamper = hold
    start(grid)
    assert training.calls == []
    return letters[0]


class TestWithin:
    def test_it_hands_on_what_is_made_and_raised_and_stops_at_the_deadline(self, never):
        assert list(_within(60.0, iter([1, 2, 3]))) == list(_within(None, iter([1, 2, 3]))) == [1, 2, 3]

        def failing() -> Iterator[int]:
            yield 1
            raise KeyboardInterrupt

        for seconds in (None, 60.0):
            found = _within(seconds, failing())
            assert next(found) == 1
            with pytest.raises(KeyboardInterrupt):
                next(found)

        def stopping() -> Iterator[int]:
            yield 1
            never.wait(60)
            yield 2

        found = _within(0.2, stopping())
        assert next(found) == 1
        with pytest.raises(_LateError):
            next(found)

    def test_a_late_thread_ends_once_it_has_something_to_hand_over(self, never):
        made: list[int] = []

        def slow() -> Iterator[int]:
            for number in range(100):
                never.wait(60)
                made.append(number)
                yield number

        with pytest.raises(_LateError):
            next(_within(0.05, slow()))
        before = threading.active_count()
        never.set()
        for thread in threading.enumerate():
            if thread.daemon and thread is not threading.current_thread():
                thread.join(5)
        assert len(made) <= 2
        assert threading.active_count() < before
