"""How NISS travels in Flower's messages: one record beside, or instead of, what the app sends.

Everything is a message of type `train` with a stage, because a mod sees only the actions an app has registered.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from niss.errors import RemoteProtocolError

RECORD = "niss"
UPLOAD = "niss-upload"
METRICS = "metrics"

Value = TypeVar("Value")


class Stage(StrEnum):
    """What a letter is about: joining a run, a round, and the two stages of a repair."""

    ENROL = "enrol"
    ROUND = "round"
    CLAIM = "claim"
    REQUEST = "request"


@dataclass(frozen=True)
class Letter:
    """From the server to a client: `after` is the last of the client's steps that the server has seen."""

    stage: Stage
    body: bytes
    after: int = 0
    run: bytes = b""

    def to_record(self) -> ConfigRecord:
        return ConfigRecord(
            {"stage": self.stage.value, "body": self.body, "after": self.after, "run": self.run}
        )

    @property
    def digest(self) -> bytes:
        """What an answer to this letter refers to when it has no round to refer to."""
        return hashlib.sha256(b"niss.letter.v1" + self.stage.encode() + self.body).digest()


@dataclass(frozen=True)
class Answer:
    """From a client to the server: `step` counts what the client has answered in this run."""

    body: bytes
    step: int
    metrics: MetricRecord | None = None

    def to_content(self) -> RecordDict:
        # An array rather than plain bytes: Flower cuts large arrays into pieces, not large bytes.
        packed = Array(np.frombuffer(self.body, dtype=np.uint8))
        content = RecordDict(
            {RECORD: ConfigRecord({"step": self.step}), UPLOAD: ArrayRecord({"body": packed})}
        )
        if self.metrics is not None:
            content[METRICS] = self.metrics
        return content


def take_letter(content: RecordDict) -> Letter | None:
    """Take our record out of a message, so that the app does not see it; None where there is none."""
    if RECORD not in content.config_records:
        return None
    record = content.config_records[RECORD]
    del content[RECORD]
    try:
        stage = Stage(_field(record, "stage", str))
    except ValueError:
        raise RemoteProtocolError(
            "a letter of an unknown stage", hint="use the same niss everywhere"
        ) from None
    return Letter(
        stage, _field(record, "body", bytes), _field(record, "after", int), _field(record, "run", bytes)
    )


def read_answer(message: Message) -> Answer:
    """A client's answer; anything else in its place is its fault."""
    content = message.content
    if RECORD not in content.config_records or UPLOAD not in content.array_records:
        raise RemoteProtocolError(
            "an answer without NISS",
            hint="does the ClientApp have `mods=[niss_mod]`, and is it the first mod?",
        )
    try:
        body = content.array_records[UPLOAD]["body"].numpy()
    except (KeyError, ValueError, TypeError, EOFError) as error:
        raise RemoteProtocolError(f"an answer that cannot be read ({type(error).__name__})") from None
    if body.dtype != np.uint8 or body.ndim != 1:
        raise RemoteProtocolError("an answer that is no bytes")
    step = _field(content.config_records[RECORD], "step", int)
    return Answer(body.tobytes(), step, content.metric_records.get(METRICS))


def _field(record: ConfigRecord, name: str, kind: type[Value]) -> Value:
    value = record.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RemoteProtocolError(f"{name}: missing, or no {kind.__name__}")
    return value
