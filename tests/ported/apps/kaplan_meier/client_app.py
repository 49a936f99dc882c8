"""A hospital, which answers a question with all times and events that it has."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from kaplan_meier.task import load_partition

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    times, events = load_partition(int(context.node_config["partition-id"]))
    data = ArrayRecord({"T": Array(times), "E": Array(events)})
    metrics = MetricRecord({"num-examples": len(times)})
    return Message(RecordDict({"survival-data": data, "metrics": metrics}), reply_to=message)
