"""A mod that writes what the app measured, and how long it took, into a file of each node."""

import json
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod


def get_log_mod(folder: str) -> Mod:
    def log_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        server_round = message.content["config"]["server-round"]
        began = time.perf_counter()
        reply = call_next(message, context)
        if reply.has_content():
            entry = {"round": server_round, "kind": message.metadata.message_type}
            entry |= dict(reply.content["metrics"])
            entry["seconds"] = time.perf_counter() - began
            Path(folder).mkdir(exist_ok=True)
            with (Path(folder) / f"{context.node_id}.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")
        return reply

    return log_mod
