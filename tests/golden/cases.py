"""Numbers that a rebuild must not change: what they are, and the one place that knows how today's code is asked.

`adapters` first: thin functions from plain values to plain values. When the code is rebuilt, they change and the cases
and `values.json` do not. A number that does change is explained where it was changed, and written anew by

    python tests/golden/cases.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import niss
from niss.accounting import (
    CommittedAccount,
    DrawnAccount,
    Plan,
    Promise,
    forecast,
    make_schedule,
    make_terms,
    upload_mu,
)
from niss.graph import ShareGraph
from niss.mechanism.grid import Grid
from niss.methods import PlainRows
from niss.randomness import SimStream
from niss.views import Corruption, calibrate_for, effective_variance, worst_case
from support.known_colluders import calibrate_tau2

VALUES = Path(__file__).with_name("values.json")
BEACON = b"golden beacon"
SIZE, ROUNDS, APART = 6, 9, 3

# Adapters.


def plan_of(**changes: Any) -> Plan:
    """An ordinary plan, or with method `niss-carried` one for a run of nine rounds of six."""
    values: dict[str, Any] = {"clip": 0.5, "epsilon": 3.0, "kappa": 20.0, "participations": ROUNDS // APART}
    if changes.get("method") == "niss-carried":
        values |= {"graph": "complete", "horizon": ROUNDS, "separation": APART, "participants": SIZE}
    return Plan(**{**values, **changes})


def committed_run(**changes: Any) -> dict[str, Any]:
    """K, worst cost and noise of a committed run, in units of Delta^2."""
    run = plan_of(method="niss-carried", **changes).committed(SIZE)
    return {
        "matrix": run.matrix,
        "mu": run.mu,
        "spatial": run.noise.spatial,
        "carried": SIZE * run.noise.carried,
        "residual": SIZE * run.noise.residual,
        "model": run.noise_in_model(),
        "after any past": [run.cost(number, None) for number in range(ROUNDS)],
        "charges": [run.charge(number, range(number % APART, number, APART)) for number in range(ROUNDS)],
        "self mask": run.needed_self_mask,
    }


def graph_of(kind: str) -> ShareGraph:
    if kind == "complete":
        return ShareGraph.complete(10, weight=0.5)
    if kind == "coalition":
        return ShareGraph.coalition(10, groups=[[0, 2, 4, 6], [1, 3, 5, 7, 8, 9]], degree=3, beacon=BEACON)
    size = 60 if kind == "large" else 10
    return (ShareGraph.random if kind == "random" else ShareGraph.regular)(size, degree=4, beacon=BEACON)


def joint_view(kind: str, **known: Any) -> dict[str, Any]:
    """Effective variances of a round, and the tau^2 that it needs."""
    graph, colluders = graph_of(kind), known.get("colluders", ())
    found = {"variance": effective_variance(graph, unit_variance=2.0, residual_variance=0.1, **known)}
    if kind != "random":
        found["tau2"] = calibrate_tau2(graph, unit_variance=2.0, target_variance=1.5, colluders=colluders)
    return found


def worst_view(kind: str, **assumed: Any) -> dict[str, Any]:
    """The worst case over colluders on a graph, and the tau^2 that withstands it."""
    graph, corruption = graph_of(kind), Corruption(**assumed)
    worst = worst_case(
        graph, corruption, unit_variance=2.0, residual_variance=0.1, target_variance=np.ones(graph.size)
    )
    tau2, found = calibrate_for(graph, corruption, unit_variance=2.0, target_variance=1.0)
    return {"ratio": worst.ratio, "client": worst.client, "tau2": tau2, "withstood": found.ratio}


def ordinary_plan(**target: Any) -> dict[str, Any]:
    planned, plan = forecast(**target), niss.plan(**target)
    assumed = plan.assumed(target["participants"])
    counts = [assumed.colluders, assumed.dropped, assumed.revealed, assumed.committee or None]
    return {
        "plan": [plan.kappa, plan.neighbours, *counts],
        "numbers": [planned.sigma, planned.tau2, planned.epsilon_joint, planned.epsilon_marginal],
        "ratio": planned.aggregate_variance_ratio_to_central,
        "curve": [point.total for point in planned.curve],
        "notes": list(planned.notes),
    }


def carried_plan(**target: Any) -> dict[str, Any]:
    # Without a clip: in units of the sensitivity of one upload.
    planned = forecast(**{"clip": float(target["participants"]), **target}, carry=True)
    return {
        "numbers": [planned.run.mu, planned.plan.kappa, planned.plan.carried_to_residual, planned.residual],
        "counts": [planned.run.noise.colluders, planned.run.noise.dropped, planned.plan.separation],
        "ratios": [
            planned.aggregate_variance_ratio_to_central,
            planned.ratio_to_central_final,
            planned.ratio_to_best,
        ],
        "noise": planned.over_rounds["niss"],
        "notes": list(planned.notes),
    }


def ordinary_terms(**changes: Any) -> dict[str, Any]:
    """Terms of a protocol round, and what a client charges for it on a drawn graph."""
    plan = plan_of(method="niss", **changes)
    terms = make_terms(plan, participants=SIZE, coordinates=100, run=b"run", number=0)
    if plan.neighbours >= SIZE - 1:
        graph = ShareGraph.complete(SIZE, weight=plan.neighbours / (SIZE - 1))
    else:
        graph = ShareGraph.regular(SIZE, degree=plan.neighbours, beacon=BEACON)
    agreed: Any = SimpleNamespace(
        terms=terms, participants=range(SIZE), graph=graph, digest=b"golden", grid=Grid(terms.grid_bits)
    )
    assessor = DrawnAccount(failure=plan.failure, promise=Promise.of(plan))
    return {
        "noise": [terms.unit_variance, terms.residual_variance, terms.self_variance],
        "counts": [terms.grid_bits, terms.committee, terms.threshold, terms.dropped, terms.revealed],
        "charge": [assessor(agreed, plan.assumed(SIZE).colluders), upload_mu(terms, SIZE, "zero-out")],
    }


def committed_terms(**changes: Any) -> dict[str, Any]:
    """What a carried run commits to on the wire, and what a client is charged for it."""
    plan = plan_of(method="niss-carried", **changes)
    schedule = make_schedule(plan, participants=SIZE, coordinates=100)
    account = CommittedAccount(
        schedule, colluders=plan.assumed(SIZE).colluders, promise=Promise.of(plan), earlier=[1]
    )
    return {
        "noise": [
            schedule.noise.unit,
            schedule.carried_variance,
            schedule.noise.residual,
            schedule.noise.self_mask,
        ],
        "counts": [schedule.rounds, schedule.grid_bits, schedule.noise.committee, schedule.noise.threshold],
        "costs": [account.cost(number) for number in (4, 7)],
        "marginal": [
            upload_mu(schedule.terms(b"run", number), SIZE, "zero-out", schedule.rounds)
            for number in range(schedule.horizon)
        ],
    }


def simulated_run(method: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Statements and charges of a small seeded run; nothing in them depends on what the clients learn."""
    config = niss.make_config(
        {
            "seed": 3,
            "rounds": 6,
            "data": {"clients": 12},
            "privacy": {"epsilon": 20.0, "clip": 1.0},
            **changes,
            "training": {"participants": 4, "sampling": "cyclic", "epochs": 1, **changes.get("training", {})},
            "methods": [method],
        }
    )
    generator = SimStream(7).generator()
    data = [(generator.standard_normal((4, 5), dtype=np.float32), np.arange(4) % 3) for _ in range(12)]
    from torch import nn

    result = niss.run(config, clients=data, test=data[0], model=lambda: nn.Linear(5, 3))
    statement = result.statement
    return {
        "statement": [statement.epsilon_joint, statement.epsilon_marginal, statement.epsilon_outsider],
        "clients": [
            [client.participations, client.epsilon_joint, client.epsilon_marginal]
            for client in statement.clients
        ],
        "rounds": [
            [
                one.mu_joint,
                one.mu_marginal,
                one.tau2,
                one.aggregate_variance_predicted,
                one.model_noise_variance,
            ]
            for one in result.rounds
        ],
        "words": statement.words,
    }


def uploads(dtype: str, **changes: Any) -> dict[str, Any]:
    """What the clients of two seeded rounds upload who learned nothing (the first numbers), and what the sums keep."""
    plan, stream = plan_of(**changes), SimStream(11)
    found: dict[str, Any] = {"sums": [], "left": [], "uploads": []}
    for number in range(2):
        numbers = plan.for_round(
            np.arange(SIZE) + SIZE * number, weights=1.0 / SIZE, records=1, beacon=BEACON, number=number
        )
        rows = np.zeros((SIZE, 20), dtype=dtype)
        plan.kind.add_client_noise(PlainRows(rows), numbers, stream)
        found["uploads"].append(rows[:, :4].tolist())
        found["sums"].append(float(np.sum(rows.sum(axis=0, dtype=np.float64) ** 2)))
        found["left"].append(numbers.aggregate_variance)
    return found


# Cases, by name.

REPAIR: dict[str, Any] = {"dropped": 1, "revealed": 1}
CARRIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "any pattern": {"pattern": "any"},
    "replace-one": {"relation": "replace-one"},
    "colluders": {"collusion": 2 / SIZE},
    "closing": {"closing": True},
    "repair": {"mode": "repair", "dropout": 0.1},
    "repair and colluders": {"mode": "repair", "collusion": 1 / SIZE, "pattern": "any"},
    "given tau2": {"tau2": 0.5},
    "given carried": {"carried_to_residual": 4.0},
}
ORDINARY: dict[str, dict[str, Any]] = {
    "complete": {"graph": "complete", "neighbours": 5.0},
    "sparse": {"neighbours": 3.0},
    "colluders": {"neighbours": 3.0, "collusion": 1 / SIZE},
    "replace-one": {"neighbours": 3.0, "relation": "replace-one"},
}
RUNS: dict[str, dict[str, Any]] = {
    "niss": {"method": {"name": "niss", "neighbours": 2, "kappa": 8}},
    "niss, repaired": {
        "method": {"name": "niss", "neighbours": 2, "kappa": 8},
        "privacy": {"epsilon": 20.0, "clip": 1.0, "dropout": 0.2, "mode": "repair"},
    },
    "niss-carried": {"method": {"name": "niss-carried"}},
    "niss-carried, repaired": {
        "method": {"name": "niss-carried"},
        "privacy": {"epsilon": 20.0, "clip": 1.0, "dropout": 0.2, "mode": "repair"},
    },
    "niss-carried, closing": {"method": {"name": "niss-carried", "closing": True}},
    "central-dp": {"method": {"name": "central-dp"}},
    "central-mf": {"method": {"name": "central-mf", "strategy": "square-root"}},
    "secagg-ddg": {"method": {"name": "secagg-ddg"}},
    "dp-fedavg": {"method": {"name": "dp-fedavg"}},
}


def _cases() -> dict[str, Callable[[], dict[str, Any]]]:
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, changes in CARRIED.items():
        cases[f"committed run: {name}"] = partial(committed_run, **changes)
    for kind in ("complete", "sparse", "coalition", "random"):
        cases[f"joint view: {kind}"] = partial(joint_view, kind)
        cases[f"joint view: {kind}, colluders"] = partial(joint_view, kind, colluders=(1, 4))
        cases[f"joint view: {kind}, repaired"] = partial(joint_view, kind, revealed=((0, 2), (1, 3)))
        cases[f"joint view: {kind}, dropped"] = partial(joint_view, kind, dropped=(3,))
    for kind in ("complete", "sparse", "coalition"):
        cases[f"worst case: {kind}"] = partial(worst_view, kind)
        cases[f"worst case: {kind}, colluders"] = partial(worst_view, kind, colluders=2, failure=1e-3)
        cases[f"worst case: {kind}, repaired"] = partial(worst_view, kind, colluders=1, **REPAIR)
    cases["worst case: large"] = partial(worst_view, "large", colluders=6, failure=1e-6)
    for name, target in {
        "small": {"participants": 30, "collusion": 0.2, "kappa": 4.0},
        "sparse": {"participants": 400, "collusion": 0.1, "participations": 5},
        "repaired": {"participants": 60, "dropout": 0.05, "mode": "repair", "collusion": 0.1},
        "dropouts": {"participants": 100, "dropout": 0.05},
        "given tau2": {"participants": 30, "tau2": 0.1},
    }.items():
        cases[f"plan: {name}"] = partial(ordinary_plan, **target)
    for name, target in {
        "plain": {"participants": 20, "clients": 100, "rounds": 20},
        "any pattern": {"participants": 20, "clients": 100, "rounds": 20, "pattern": "any", "kappa": 10.0},
        "colluders": {"participants": 20, "clients": 100, "rounds": 20, "collusion": 0.2, "clip": 0.5},
        "repaired": {"participants": 20, "clients": 100, "rounds": 20, "dropout": 0.05, "mode": "repair"},
        "dropouts": {"participants": 20, "clients": 100, "rounds": 20, "dropout": 0.05, "clip": 2.0},
        "closing": {"participants": 20, "clients": 100, "rounds": 20, "closing": True},
    }.items():
        cases[f"carried plan: {name}"] = partial(carried_plan, **target)
    for name, changes in ORDINARY.items():
        cases[f"terms: {name}"] = partial(ordinary_terms, **changes)
    cases["terms: repaired"] = partial(ordinary_terms, graph="complete", neighbours=5.0, mode="repair")
    for name, changes in CARRIED.items():
        cases[f"committed terms: {name}"] = partial(committed_terms, **changes)
    for name, settings in RUNS.items():
        cases[f"run: {name}"] = partial(simulated_run, **settings)
    for name, changes in ORDINARY.items():
        cases[f"uploads: {name}"] = partial(uploads, "float64", **changes)
    for dtype in ("float32", "float64"):
        cases[f"uploads: niss-carried, {dtype}"] = partial(uploads, dtype, method="niss-carried")
    cases["uploads: dp-fedavg"] = partial(uploads, "float64", method="dp-fedavg")
    cases["uploads: scalar"] = partial(uploads, "float64", distortion="scalar", tau2=0.2, neighbours=3.0)
    return cases


CASES = _cases()


def found(name: str) -> dict[str, Any]:
    """A case as it stands in `values.json`."""
    return {key: _plain(value) for key, value in CASES[name]().items()}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(np.asarray(value).tolist() if isinstance(value, np.ndarray) else value))


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(found(name))}" for name in CASES)
    VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
