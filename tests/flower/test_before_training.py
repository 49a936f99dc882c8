"""The mod asks before it trains, and says nothing but NISS: what a server could learn from the app itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto

from flower.grid import FIRST, NODES, ODD, FakeGrid, Killed, body_of, global_model, holds, make_app, start
from niss.errors import ConfigError
from niss.flower import NissMod, niss_mod
from niss.protocol.messages import Refusal, RoundOpen, Upload, decode, encode

PRIVATE_WORD = "index 4312 is out of bounds"


class Training:
    """An app that notes when it trains, and then does what it is told."""

    def __init__(self, act: Callable[[Message], Message], mod: NissMod = niss_mod) -> None:
        self.calls: list[Message] = []
        self.app = ClientApp(mods=[mod])

        @self.app.train()
        def train(message: Message, context: Context) -> Message:  # noqa: ARG001
            self.calls.append(message)
            return act(message)


def unchanged(message: Message) -> Message:
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


def with_values(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], Message]:
    def act(message: Message) -> Message:
        moved = {
            name: Array(change(array.numpy().copy())) for name, array in message.content["arrays"].items()
        }
        metrics = MetricRecord({"loss": 4312.0})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    return act


def raises(_message: Message) -> Message:
    raise IndexError(PRIVATE_WORD)


def nan_in_one_row(values: np.ndarray) -> np.ndarray:
    values[0] = np.nan
    return values


FAILURES = {
    "an exception": raises,
    "an error as reply": lambda message: Message(Error(0, PRIVATE_WORD), reply_to=message),
    "no arrays": lambda message: Message(RecordDict(), reply_to=message),
    "no message": lambda _message: None,
    "NaN": with_values(nan_in_one_row),
    "another shape": with_values(lambda values: values[:1]),
    "another type": with_values(lambda values: np.full(values.shape, "word")),
}


class TestOrder:
    def test_mods_after_niss_see_the_bare_update_and_those_before_it_do_not(self):
        seen: dict[str, RecordDict] = {}

        def watching(name: str):
            def mod(message, context, call_next):
                reply = call_next(message, context)
                seen[name] = reply.content
                return reply

            return mod

        grid = FakeGrid(NODES)
        grid.apps[ODD] = make_app([watching("before"), niss_mod, watching("after")])
        start(grid, rounds=1)
        assert list(seen["after"]) == ["arrays", "metrics"]
        assert "arrays" not in seen["before"]
        assert isinstance(decode(seen["before"]["niss-upload"]["body"].numpy().tobytes()), Upload)

    @pytest.mark.parametrize("forge", ["unsigned", "another run", "answered before", "not joined"])
    def test_a_message_that_is_not_a_round_of_this_client_trains_nothing(self, forge):
        grid, training = FakeGrid(NODES), Training(unchanged)
        grid.apps[ODD] = training.app
        letters = grid.kept("round")
        start(grid, rounds=1)
        (message,) = letters
        assert len(training.calls) == 1
        opened = decode(message.content["niss"]["body"])
        assert isinstance(opened, RoundOpen)
        if forge == "unsigned":
            later = replace(opened, terms=replace(opened.terms, round=7), signature=bytes(64))
            message.content["niss"]["body"] = encode(later)
        elif forge == "another run":
            message.content["niss"]["run"] = bytes(16)
        context = grid.contexts[ODD]
        if forge == "not joined":
            context = FakeGrid(1).contexts[FIRST]
        reply = training.app(message, context)
        assert isinstance(decode(body_of(reply)), Refusal)
        assert len(training.calls) == 1, "the app trained on weights of the server's choice, uncharged"

    def test_a_model_of_another_size_than_the_round_is_refused_uncharged_and_untrained(self, tmp_path):
        grid, training = FakeGrid(NODES).keep_state(tmp_path), Training(unchanged)
        grid.apps[ODD] = training.app
        grid.on_request("round", lambda message: message.content.update(arrays=ArrayRecord([np.zeros(3)])))
        strategy = start(grid, rounds=1)
        assert str(ODD) in strategy.rounds[0].lost
        assert training.calls == []
        assert not (grid.home() / "ledger.jsonl").exists()

    def test_the_round_is_remembered_and_charged_when_training_begins(self, tmp_path):
        grid, seen = FakeGrid(NODES).keep_state(tmp_path), []

        def look(message: Message) -> Message:
            seen.append(grid.ledger().participations("self"))
            return unchanged(message)

        grid.apps[ODD] = Training(look).app
        start(grid, rounds=2)
        assert seen == [1, 2]

    def test_a_crash_while_training_costs_the_round_and_never_answers_it(self, tmp_path):
        grid = FakeGrid(NODES).keep_state(tmp_path)
        letters = grid.kept("round")

        def die(_message: Message) -> Message:
            raise Killed

        dying, killed = Training(die), []
        plain = grid.app

        def once(message: Message, context: Context) -> Message:
            if message.content["niss"]["stage"] != "round":
                return plain(message, context)
            with pytest.raises(Killed):
                dying.app(message, context)
            killed.append(1)
            return Message(Error(3, "Node unavailable"), reply_to=message)

        grid.apps[ODD] = once  # type: ignore[assignment]
        strategy = start(grid, rounds=1)
        assert killed == [1]
        assert strategy.rounds[0].survivors == NODES - 1
        assert grid.ledger().participations("self") == 1
        again = grid.app(letters[0], grid.contexts[ODD])
        assert "was answered before" in decode(body_of(again)).reason


class TestFailuresOfTheApp:
    @pytest.mark.parametrize("deadline", [None, 60.0], ids=["at once", "in a thread"])
    @pytest.mark.parametrize("failure", FAILURES)
    def test_a_failure_looks_like_any_other_upload_and_is_charged(self, failure, deadline, tmp_path):
        grid = FakeGrid(NODES).keep_state(tmp_path)
        training = Training(FAILURES[failure], NissMod(clear_metrics=("loss",)))
        grid.apps[ODD] = training.app
        strategy = start(grid, rounds=1, deadline=deadline)
        assert len(training.calls) == 1
        assert strategy.rounds[0].lost == {}
        assert strategy.rounds[0].survivors == NODES
        (reply,) = [one for one in grid.received if one.metadata.src_node_id == ODD and holds(one, Upload)]
        assert set(reply.content) == {"niss", "niss-upload"}
        assert b"4312" not in recorddict_to_proto(reply.content).SerializeToString()
        assert grid.ledger().participations("self") == 1

    def test_a_refusal_names_no_file_of_the_node(self, tmp_path):
        grid = FakeGrid(NODES).keep_state(tmp_path)
        start(grid, rounds=1)
        (grid.home() / "notes").unlink()
        letters = grid.kept("round")
        start(grid, rounds=1)
        assert letters == []
        shown = [str(one.error.reason) for one in grid.received if one.has_error()]
        assert shown
        assert str(tmp_path) not in "".join(shown)

    def test_a_defect_of_ours_leaves_without_its_text(self, monkeypatch):
        def fail(*_arguments: object) -> None:
            raise KeyError(PRIVATE_WORD)

        monkeypatch.setattr("niss.flower.mod.open_store", fail)
        grid = FakeGrid(NODES)
        start(grid, rounds=1)
        assert all("4312" not in one.error.reason for one in grid.received)


class TestDefaultDeny:
    """Evaluation at chosen weights gives the gradient by differences: f(w + h) - f(w - h)."""

    TYPES = ("evaluate", "evaluate.mine", "query", "query.model", "train.mine")
    LEGACY = ("get_parameters", "get_properties", "reconnect")

    @pytest.mark.parametrize("kind", TYPES + LEGACY)
    def test_nothing_but_a_niss_round_reaches_the_app(self, kind):
        reached: list[str] = []
        reply = self._send(niss_mod, kind, reached)
        assert reached == []
        assert reply.has_error()
        assert reply.error.reason == "niss: this client answers NISS rounds only"

    def test_what_is_opened_by_name_passes_and_nothing_else(self):
        mod, reached = NissMod(allow=("evaluate",)), []
        assert not self._send(mod, "evaluate", reached).has_error()
        assert not self._send(mod, "evaluate.mine", reached).has_error()
        assert self._send(mod, "query", reached).has_error()
        assert self._send(mod, "train", reached).has_error()
        assert reached == ["evaluate", "evaluate.mine"]

    @pytest.mark.parametrize("kind", ["train", "get_parameters", "evaluation", ""])
    def test_what_cannot_be_opened_is_said_at_once(self, kind):
        with pytest.raises(ConfigError, match="allow"):
            NissMod(allow=(kind,))

    @staticmethod
    def _send(mod: NissMod, kind: str, reached: list[str]) -> Message:
        message = Message(RecordDict({"arrays": global_model()}), dst_node_id=ODD, message_type="train")
        message.metadata.__dict__["_message_id"] = "1"
        message.metadata.__dict__["_message_type"] = kind

        def app(message: Message, _context: Context) -> Message:
            reached.append(kind)
            return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=message)

        return mod(message, FakeGrid(1).contexts[FIRST], app)
