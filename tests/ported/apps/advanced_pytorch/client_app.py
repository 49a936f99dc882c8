"""A client of `quickstart_pytorch` that keeps the last layer of the model to itself, in its state."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from quickstart_pytorch.client_app import evaluate
from quickstart_pytorch.task import Net, load_data
from quickstart_pytorch.task import train as train_fn

app = ClientApp()
app.evaluate()(evaluate)
HEAD = "classification-head"


@app.train()
def train(message: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    if HEAD in context.state:
        model.fc2.load_state_dict(context.state[HEAD].to_torch_state_dict())
    data, _ = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss = train_fn(model, data, int(context.run_config["local-epochs"]), message.content["config"]["lr"])
    context.state[HEAD] = ArrayRecord(model.fc2.state_dict())
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[1])})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
