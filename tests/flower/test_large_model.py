"""A model of a hundred million parameters goes through a round, in memory that is some models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PARAMETERS, NODES = 100_000_000, 3
MODEL = 4 * PARAMETERS
# The replies, which this grid hands over together, and what the server or the client that answers last takes beside.
MODELS = NODES + 6
ROUND = """
import json, resource, sys, warnings

warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import flower.conftest
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flower.grid import FakeGrid
from niss.accounting import Plan
from niss.flower import NissStrategy, niss_mod

size, nodes = int(sys.argv[2]), int(sys.argv[3])
app = ClientApp(mods=[niss_mod])

@app.train()
def train(message, _context):
    weights = message.content["arrays"]["weights"].numpy() + np.float32(0.9e-4)
    content = {"arrays": ArrayRecord({"weights": Array(weights)}), "metrics": MetricRecord()}
    return Message(RecordDict(content), reply_to=message)

class LeanGrid(FakeGrid):
    # Messages are handed over as they are: on a federation they are on other machines.
    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            content = RecordDict(dict(message.content.items()))
            arrived = Message(content, dst_node_id=message.metadata.dst_node_id, message_type="train")
            arrived.metadata.__dict__["_message_id"] = str(number)
            replies.append(self._deliver(arrived))
        return replies

    def _deliver(self, message):
        node = message.metadata.dst_node_id
        return self.app(message, self.contexts[node])

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

plan = Plan(clip=1.0, epsilon=8.0, participations=1, neighbours=2.0)
strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan)
before = peak()
model = ArrayRecord({"weights": Array(np.zeros(size, dtype=np.float32))})
result = strategy.start(LeanGrid(nodes, app), model, num_rounds=1, timeout=1)
moved = result.arrays["weights"].numpy()
one = strategy.rounds[0]
print(json.dumps({"survivors": one.survivors, "deviation": one.noise.variance ** 0.5, "bytes": peak() - before,
                  "mean": float(moved.mean(dtype=np.float64)), "variance": float(moved.var(dtype=np.float64))}))
"""


def available() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def played(size: int) -> dict[str, float]:
    command = [sys.executable, "-c", ROUND, str(Path(__file__).parents[1]), str(size), str(NODES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check(found: dict[str, float], size: int) -> None:
    assert found["survivors"] == NODES
    # Eight deviations of a mean and of a variance of so many.
    assert abs(found["mean"] - 0.9e-4) < 8.0 * found["deviation"] / size**0.5 + 2e-6
    assert abs(found["variance"] / found["deviation"] ** 2 - 1.0) < 8.0 * (2.0 / size) ** 0.5 + 1e-4


def test_the_check_itself_on_a_small_model() -> None:
    check(played(100_000), 100_000)


@pytest.mark.slow
def test_a_hundred_million_parameters() -> None:
    if available() < 1.2 * MODELS * MODEL:
        pytest.skip(f"needs {1.2 * MODELS * MODEL / 1e9:.0f} GB of free memory")
    found = played(PARAMETERS)
    check(found, PARAMETERS)
    assert found["bytes"] < MODELS * MODEL, f"{found['bytes'] / MODEL:.1f} models"
