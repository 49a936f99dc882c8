"""Letters to nodes and their answers, whatever became of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from niss.errors import RemoteProtocolError
from niss.flower.letters import RECORD, Answer, Letter, read_answer

SILENT = "no answer in time"


@dataclass
class Mail:
    """By node: what was answered, and why there is no answer from the others."""

    answers: dict[int, Answer] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


def ask(grid: Grid, letters: Mapping[int, Letter], *, message_type: str, timeout: float | None) -> Mail:
    """Send each node its letter and wait for the answers."""
    if not letters:
        return Mail()
    messages = [
        Message(RecordDict({RECORD: letter.to_record()}), dst_node_id=node, message_type=message_type)
        for node, letter in letters.items()
    ]
    return sort_replies(messages, grid.send_and_receive(messages, timeout=timeout))


def sort_replies(sent: Sequence[Message], replies: Iterable[Message]) -> Mail:
    """Replies by node. A lost node is reported in the server's name, so the message replied to says whose it is."""
    node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    mail = Mail()
    for reply in replies:
        node = node_of.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
        if node not in node_of.values() or node in mail.answers:
            continue
        if reply.has_error():
            mail.failures[node] = reply.error.reason or f"error {reply.error.code}"
            continue
        try:
            mail.answers[node] = read_answer(reply)
        except RemoteProtocolError as error:
            mail.failures[node] = error.message
    for node in node_of.values():
        if node not in mail.answers:
            mail.failures.setdefault(node, SILENT)
    return mail
