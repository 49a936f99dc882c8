"""Replies that are not what they say: whatever a node sends is that node's failure, never the run's."""

from __future__ import annotations

import json
import math

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from flower.grid import (
    NODES,
    ODD,
    PLAN,
    FakeGrid,
    global_model,
    make_app,
    perhaps_without_a_round,
    start,
    survivors,
    with_body,
)
from fuzz.fuzz_flower import NASTY_HEADERS, NASTY_NUMBERS, feed, make_session, npy
from niss.errors import RemoteProtocolError
from niss.flower import NissMod, NissStrategy
from niss.flower.transport import read_reply, to_content
from niss.protocol.keys import SIGNATURE_BYTES
from niss.session.ports import Reply
from session.scene import signed_proposal

ESCAPES = "\x1b]0;owned\x07\x1b[2K\rniss: 6 of 6 uploads summed\n\u202e"


def with_data(data: bytes):
    def change(reply: Message) -> None:
        array = Array(dtype="uint8", shape=(1,), stype="numpy.ndarray", data=data)
        reply.content["niss-upload"] = ArrayRecord({"body": array})

    return change


@pytest.mark.parametrize("stage", ["enrol", "round"])
@pytest.mark.parametrize("header", NASTY_HEADERS, ids=range(len(NASTY_HEADERS)))
def test_a_header_that_numpy_would_choke_on_costs_one_upload(stage: str, header: bytes) -> None:
    grid = FakeGrid(NODES)
    grid.on_reply(stage, with_data(npy(header, b"\0" * 4)))
    assert survivors(start(grid)) == [NODES - 1, NODES - 1]


@pytest.mark.parametrize("stage", ["enrol", "round"])
@pytest.mark.parametrize("step", [*NASTY_NUMBERS[4:], -1, 0.5, "1", b"1", True])
def test_a_step_out_of_range_is_that_nodes_failure(stage: str, step) -> None:
    grid = FakeGrid(NODES)
    grid.on_reply(stage, lambda reply: reply.content.update({"niss": ConfigRecord({"step": step})}))
    assert min(survivors(start(grid))) >= NODES - 1


def test_only_the_bytes_that_a_client_packs_are_a_body() -> None:
    content = to_content(Reply(b"some bytes", 1))
    reply = Message(content, dst_node_id=1, message_type="train")
    assert read_reply(reply).body == b"some bytes"
    array = content.array_records["niss-upload"]["body"]
    good = array.data
    for bad in (good + b"x", good[:-1], good.replace(b"|u1", b"<u8"), good.replace(b"NUMPY\x01", b"NUMPY\x02"),
                good.replace(b"False", b"True "), good.replace(b"(10,)", b"(9,) ")):  # fmt: skip
        assert bad != good
        array.data = bad
        with pytest.raises(RemoteProtocolError, match="body of the reply"):
            read_reply(reply)


@pytest.mark.parametrize(
    "values",
    [(math.inf, -math.inf), (1e308, 1e308), (10**400, 1), (math.nan, 1), ([1.0], 2.0)],
    ids=["infinities", "overflow", "huge", "nan", "list"],
)
def test_metrics_that_have_no_mean_do_not_end_the_run(values) -> None:
    grid = FakeGrid(NODES, make_app(mods=[NissMod(clear_metrics=("loss",))]))
    others = iter([values[0]] + [values[1]] * 100)
    grid.on_reply(
        "round",
        lambda reply: reply.content.update(metrics=MetricRecord({"loss": next(others)})),
        node=None,
    )
    assert survivors(start(grid)) == [NODES, NODES]


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"num-examples": [1, 2]},
        {"num-examples": 1, "more": 2.0},
        {"num-examples": -NODES + 1, "node": 1.0},
    ],
    ids=["empty", "list", "more", "weights that sum to nothing"],
)
def test_metrics_of_evaluate_do_not_end_the_run(metrics) -> None:
    grid = FakeGrid(NODES)

    def change(reply: Message) -> Message:
        if grid.stage_of(reply) == "":
            mine = metrics if reply.metadata.src_node_id == ODD else {"num-examples": 1, "node": 1.0}
            content = RecordDict({"metrics": MetricRecord(mine)})
            return Message(content, reply_to=_sent(grid, reply))
        return reply

    grid.mangle = change
    assert survivors(start(grid, inner=FedAvg())) == [NODES, NODES]


def _sent(grid: FakeGrid, reply: Message) -> Message:
    return next(one for one in grid.sent if one.metadata.message_id == reply.metadata.reply_to_message_id)


@pytest.mark.parametrize("stage", ["enrol", "round", ""])
def test_escape_codes_of_a_client_are_not_printed(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid(NODES)

    def change(reply: Message) -> Message:
        if reply.metadata.src_node_id == ODD and grid.stage_of(reply) == stage:
            return Message(Error(901, ESCAPES + "y" * 5000), reply_to=_sent(grid, reply))
        return reply

    grid.mangle = change
    strategy = start(grid, inner=FedAvg())
    said = [record.getMessage() for record in caplog.records]
    assert any("]0;owned" in text for text in said)
    assert not any("\x1b" in text or "\x07" in text or "\r" in text or "y" * 600 in text for text in said)
    shown = [
        *strategy.session.members.left_out.values(),
        *(why for one in strategy.rounds for why in one.lost.values()),
    ]
    assert all(text.isprintable() for text in shown)


def test_neither_are_those_of_a_server(caplog: pytest.LogCaptureFixture) -> None:
    """Nor are its longest words: what a proposal says ends in the log of each node that declines it."""
    grid, strategy = FakeGrid(NODES), NissStrategy(FedAvg(fraction_evaluate=0.0), plan=PLAN)
    identity = strategy._kept.identity

    def change(body: bytes) -> bytes:
        text = json.loads(body[SIGNATURE_BYTES:]) | {"tracker": "y" * 5000}
        text["plan"]["graph"] = ESCAPES[:30]
        return signed_proposal(identity, text)

    grid.on_request("enrol", with_body(change), node=None)
    with perhaps_without_a_round():
        strategy.start(grid, global_model(), num_rounds=1, timeout=1)
    said = [record.getMessage() for record in caplog.records if "declined" in record.getMessage()]
    assert any("]0;owned" in text for text in said)
    assert not any("\x1b" in text or "\x07" in text or "\r" in text or "y" * 600 in text for text in said)


def test_the_fuzzer_notices_a_crash_and_another_body(monkeypatch: pytest.MonkeyPatch) -> None:
    session, bodies = make_session()
    sent = Message(RecordDict(), dst_node_id=77, message_type="train")
    sent.metadata.__dict__["_message_id"] = "1"
    reply = Message(to_content(Reply(bodies[0], 1)), reply_to=sent)
    assert feed(session, sent, reply) == "taken"
    other = {77: Reply(b"other", 1)}
    reply = Message(to_content(Reply(bodies[0], 1)), reply_to=sent)
    monkeypatch.setattr("fuzz.fuzz_flower.sort_replies", lambda *_: other)
    assert feed(session, sent, reply) == "another body"
    monkeypatch.setattr("fuzz.fuzz_flower.sort_replies", lambda *_: [][0])
    assert feed(session, sent, reply) == "raised IndexError"
