"""A client, and a mod before NISS that plays the relay, the disk or the machine that fails."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fault_app import step
from niss.flower import niss_mod
from niss.protocol import keys
from niss.protocol.messages import decode, encode


def fault_mod(message: Message, context: Context, call_next: Any) -> Message:
    """`fault` names what goes wrong, `fault-round` when; `fault-folder` is where tests look for signs."""
    now = 0
    if "niss" in message.content and message.content["niss"]["stage"] == "round":
        now = int(message.content["config"]["server-round"])
        folder = context.node_config.get("fault-folder")
        if folder:
            mine = context.node_config["partition-id"]
            (Path(str(folder)) / f"round-{now}-node-{mine}").touch()
    due = now and now == context.node_config.get("fault-round")
    fault = context.node_config.get("fault")
    if fault == "degenerate":
        # One-time keys with which everyone agrees on zero, correctly signed.
        with patch.object(keys, "x25519_public", lambda _private: bytes(32)):
            return call_next(message, context)
    if fault == "stale":
        return _with_stale_context(message, context, call_next, now, bool(due))
    if not due:
        return call_next(message, context)
    if fault in ("silent", "killed"):
        time.sleep(600.0)
    if fault == "swapped":
        record = message.content["niss"]
        opened = decode(record["body"])
        first, second = opened.participants[:2]
        people = (replace(first, prekey=second.prekey), second, *opened.participants[2:])
        record["body"] = encode(replace(opened, participants=people))
    reply = call_next(message, context)
    if fault == "corrupt":
        body = reply.content["niss-upload"]["body"].numpy().copy()
        body[60] ^= 1
        reply.content["niss-upload"] = ArrayRecord({"body": Array(body)})
    if fault == "malformed":
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }\n" % 2**80
        data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        array = Array(dtype="uint8", shape=(1,), stype="numpy.ndarray", data=data)
        reply.content["niss-upload"] = ArrayRecord({"body": array})
    return reply


def _with_stale_context(message: Message, context: Context, call_next: Any, now: int, due: bool) -> Message:
    """Keep the Context as it was before the round before, and bring it back when it is due."""
    kept = "kept-by-the-fault"
    if due:
        context.state["niss"] = ConfigRecord(dict(context.state[kept]))
    elif now:
        context.state[kept] = ConfigRecord(dict(context.state["niss"]))
    return call_next(message, context)


app = ClientApp(mods=[fault_mod, niss_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add this node's step of the round."""
    now = int(message.content["config"]["server-round"])
    if context.node_config.get("fault") == "raises" and now == context.node_config.get("fault-round"):
        raise IndexError("index 4312 is out of bounds")
    if context.node_config.get("fault") == "late":
        time.sleep(600.0)
    if context.node_config.get("fault") == "dying" and now == context.node_config.get("fault-round"):
        (Path(str(context.node_config["fault-folder"])) / f"dying-in-round-{now}").touch()
        time.sleep(600.0)
    weights = message.content["arrays"]["weights"].numpy()
    moved = weights + step(int(context.node_config["partition-id"]), now)
    content = RecordDict(
        {
            "arrays": ArrayRecord({"weights": Array(np.asarray(moved))}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:  # noqa: ARG001
    """What must not leave."""
    metrics = MetricRecord({"num-examples": 1, "evaluated-in-the-clear": 4312.0})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
