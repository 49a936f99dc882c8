"""One marginal mu: the ledgers of a Flower round and those of the simulator show the same number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flower.grid import FIRST, NODES, PLAN, FakeGrid, start
from niss.accounting import LedgerFile


def flower_ledgers(relation: str, folder) -> tuple[float, float]:
    """A client's own marginal mu after a round, from its ledger file, and the server's view of it."""
    grid = FakeGrid(NODES).keep_state(folder)
    strategy = start(grid, rounds=1, plan=replace(PLAN, relation=relation, participations=1))
    assert strategy.rounds[0].survivors == NODES
    (charge,) = grid.ledger(FIRST).entries
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
        privacy={"relation": relation, "clip": PLAN.clip, "epsilon": PLAN.epsilon, "participations": 1},
        methods=[{"name": "niss", "neighbours": NODES - 1, "graph": "complete", "kappa": PLAN.kappa}],
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
