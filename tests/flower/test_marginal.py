"""One marginal mu: the ledgers of a Flower round and those of the simulator show the same number."""

from __future__ import annotations

import math

import pytest
from flwr.serverapp.strategy import FedAvg

from flower.grid import FakeGrid, global_model
from flower.test_trust import with_folders
from niss.accounting import LedgerFile, Plan
from niss.flower import NissStrategy

NODES, CLIP, EPSILON, KAPPA = 6, 0.5, 8.0, 2.0


def flower_ledgers(relation: str, folder) -> tuple[float, float]:
    """A client's own marginal mu after a round, from its ledger file, and the server's view of it."""
    grid = FakeGrid(NODES)
    with_folders(grid, folder)
    plan = Plan(
        relation=relation, clip=CLIP, epsilon=EPSILON, participations=1, neighbours=NODES - 1, kappa=KAPPA
    )
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan)
    strategy.start(grid, global_model(), num_rounds=1, timeout=1)
    assert strategy.rounds[0].survivors == NODES
    node = next(iter(grid.contexts))
    (charge,) = LedgerFile.read(folder / str(node) / "ledger.jsonl").entries
    assert charge.charges["self"].joint == pytest.approx(strategy.statement.clients[0].mu_joint)
    return charge.charges["self"].marginal, strategy.statement.clients[0].mu_marginal


def simulated_ledger(relation: str, exchange: str, folder) -> float:
    """The marginal mu in the ledger of a simulated run under the same plan."""
    import niss

    config = niss.Config(
        rounds=1,
        exchange=exchange,
        data={"dataset": "mnist-mini", "clients": NODES, "samples_per_client": 4},
        model={"name": "mlp", "hidden": [4]},
        training={"participants": NODES, "epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        privacy={"relation": relation, "clip": CLIP, "epsilon": EPSILON, "participations": 1},
        methods=[{"name": "niss", "neighbours": NODES - 1, "graph": "complete", "kappa": KAPPA}],
    )
    niss.run(config, out=folder)
    (charge,) = LedgerFile.read(folder / "ledger.jsonl").entries
    (marginal,) = {mu.marginal for mu in charge.charges.values()}
    return marginal


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize("exchange", ["simulated", "protocol"])
def test_flower_and_simulator_charge_the_same_marginal_mu(relation, exchange, tmp_path):
    pytest.importorskip("torch")
    client, server = flower_ledgers(relation, tmp_path / "nodes")
    simulated = simulated_ledger(relation, exchange, tmp_path / "run")
    assert client == pytest.approx(server)
    assert client == pytest.approx(simulated, rel=1e-6)
    assert math.isfinite(client)
