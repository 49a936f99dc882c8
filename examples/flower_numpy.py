"""Flower: 60 clients, a model in plain numpy, and the two lines that hide what each of them learned.

python examples/flower_numpy.py     about a minute; the picture is flower_numpy.png
"""

import matplotlib.pyplot as plt
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from sklearn.datasets import load_digits

import niss
from niss.flower import NissStrategy, niss_mod

CLIENTS, EACH, ROUNDS = 60, 25, 5
pixels, digits = load_digits(return_X_y=True)
order = np.random.default_rng(1).permutation(len(digits))
pixels, digits = pixels[order] / 16.0, digits[order]
client_app, server_app = ClientApp(mods=[niss_mod]), ServerApp()  # The first line: what trains is hidden.
accuracies = {}


@client_app.train()
def train(message, context):
    """Softmax regression by gradient descent, on what this client has."""
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    start = EACH * int(context.node_config["partition-id"])
    inputs, labels = pixels[start : start + EACH], digits[start : start + EACH]
    for _ in range(10):
        scores = np.exp(inputs @ weights)
        wrong = scores / scores.sum(axis=1, keepdims=True) - np.eye(10)[labels]
        weights = weights - 0.5 * inputs.T @ wrong / EACH
    metrics = MetricRecord({"num-examples": EACH})
    return Message(RecordDict({"arrays": ArrayRecord([weights]), "metrics": metrics}), reply_to=message)


def evaluate(server_round, arrays):
    """On digits of nobody's."""
    (weights,) = arrays.to_numpy_ndarrays()
    guessed = (pixels[CLIENTS * EACH :] @ weights).argmax(axis=1)
    accuracies[server_round] = float((guessed == digits[CLIENTS * EACH :]).mean())
    return MetricRecord({"accuracy": accuracies[server_round]})


@server_app.main()
def main(grid, _context):
    plan = niss.Plan(clip=1.0, epsilon=8.0, participations=ROUNDS)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan)  # The second: around any that averages.
    first = ArrayRecord([np.zeros((64, 10))])
    strategy.start(grid=grid, initial_arrays=first, num_rounds=ROUNDS, evaluate_fn=evaluate)
    print(strategy.statement.words)
    plt.figure(figsize=(7, 3.4), layout="constrained")
    plt.bar(list(accuracies), [100 * each for each in accuracies.values()])
    plt.title(f"{CLIENTS} Flower clients, epsilon 8 for each of them", loc="left")
    plt.gca().set(xlabel="round", ylabel="digits read rightly, %", ylim=(0, 100))
    plt.savefig("flower_numpy.png", dpi=150)
    print(f"{accuracies[ROUNDS]:.1%} of the digits after {ROUNDS} rounds")


run_simulation(server_app, client_app, CLIENTS)
