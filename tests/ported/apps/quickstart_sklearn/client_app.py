"""A client with a part of the irises, and scikit-learn's logistic regression."""

import warnings

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from quickstart_sklearn.task import get_params, load_data, make_model, set_params
from sklearn.metrics import log_loss

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = set_params(make_model(), message.content["arrays"].to_numpy_ndarrays())
    inputs, labels, _, _ = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # One local epoch does not converge.
        model.fit(inputs, labels)
    loss = log_loss(labels, model.predict_proba(inputs), labels=model.classes_)
    metrics = MetricRecord({"num-examples": len(labels), "train_logloss": loss})
    content = RecordDict({"arrays": ArrayRecord(get_params(model)), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = set_params(make_model(), message.content["arrays"].to_numpy_ndarrays())
    _, _, inputs, labels = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": model.score(inputs, labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
