"""The server: asks every node, and estimates from all that they answer. There is no strategy."""

import time

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from kaplan_meier.task import survival

app = ServerApp()
MONTHS = np.arange(0.0, 60.0, 6.0)


@app.main()
def main(grid: Grid, context: Context) -> None:
    while len(list(grid.get_node_ids())) < int(context.run_config["min-num-clients"]):
        time.sleep(1.0)
    messages = [
        Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
        for node in grid.get_node_ids()
    ]
    replies = [
        reply.content["survival-data"]
        for reply in grid.send_and_receive(messages, timeout=60.0)
        if not reply.has_error()
    ]
    times, events = (np.concatenate([reply[name].numpy() for reply in replies]) for name in "TE")
    np.save("survival", survival(times, events, MONTHS))
