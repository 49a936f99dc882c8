"""The guarantee of a run, in words and in numbers.

A statement is made from what the rounds really did (the ledger), says which view and which adversary it
holds against, and says so plainly where there is no guarantee.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from niss.accounting.ledger import Ledger
from niss.accounting.plan import Plan
from niss.mechanism import gdp_epsilon

_UNITS = {
    "client": "one client's whole data",
    "record": "one record of a client, the number of its records being public",
    "nbafl": "one record, by the heuristic sensitivity 2 clip / d_k",
}
_RELATIONS = {
    "zero-out": "replaced by an update of zero; that the client took part is not hidden",
    "replace-one": "replaced by any other; that the client took part is not hidden",
}


@dataclass(frozen=True)
class ClientStatement:
    """One client's numbers; epsilon is None where there is no guarantee."""

    client: int
    participations: int
    mu_joint: float | None
    epsilon_joint: float | None
    mu_marginal: float | None
    epsilon_marginal: float | None


@dataclass(frozen=True)
class Statement:
    """What was promised to the clients of a run: `epsilon_*` belong to the worst-off client."""

    method: str
    unit: str
    relation: str
    delta: float
    epsilon_joint: float | None
    epsilon_marginal: float | None
    budget_epsilon: float | None
    heuristic: bool
    adversary: str
    words: str
    caveats: tuple[str, ...]
    clients: tuple[ClientStatement, ...]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`."""
        return asdict(self)


def make_statement(plan: Plan, ledger: Ledger, *, notes: tuple[str, ...] = ()) -> Statement:
    """The statement for what `ledger` says was spent under `plan`."""
    clients = tuple(_client(plan, ledger, number) for number in range(ledger.participations.size))
    taken = [client for client in clients if client.participations]
    joint = None if plan.heuristic else _worst([client.epsilon_joint for client in taken])
    marginal = _worst([client.epsilon_marginal for client in taken])
    budget = None
    if ledger.budget is not None:
        budget = max(gdp_epsilon(float(mu), plan.delta) for mu in np.unique(ledger.budget))
    adversary = _adversary(plan)
    return Statement(
        method=plan.method,
        unit=plan.unit,
        relation="replace-one" if plan.unit != "client" else plan.relation,
        delta=plan.delta,
        epsilon_joint=joint,
        epsilon_marginal=marginal,
        budget_epsilon=budget,
        heuristic=plan.heuristic,
        adversary=adversary,
        words=_words(plan, ledger, joint, marginal, adversary),
        caveats=_caveats(plan) + notes,
        clients=clients,
    )


def _client(plan: Plan, ledger: Ledger, number: int) -> ClientStatement:
    joint = math.sqrt(ledger.joint_squared[number])
    marginal = math.sqrt(ledger.marginal_squared[number])
    private = plan.private
    return ClientStatement(
        client=number,
        participations=int(ledger.participations[number]),
        mu_joint=joint if private and math.isfinite(joint) else None,
        epsilon_joint=_epsilon(joint, plan) if private and not plan.heuristic else None,
        mu_marginal=marginal if private and math.isfinite(marginal) else None,
        epsilon_marginal=_epsilon(marginal, plan) if private else None,
    )


def _epsilon(mu: float, plan: Plan) -> float | None:
    if not math.isfinite(mu):
        return None
    return gdp_epsilon(mu, plan.delta) if mu > 0.0 else 0.0


def _worst(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _adversary(plan: Plan) -> str:
    if plan.method == "central-dp":
        return "anyone who sees the released models; the server sees every bare update and is trusted"
    if plan.method == "fedavg":
        return "none: the server sees every bare update"
    return (
        "a server that sees every upload, knows the share graph and may know all other clients' data; "
        "no client colludes with it"
    )


def _words(plan: Plan, ledger: Ledger, joint: float | None, marginal: float | None, adversary: str) -> str:
    if plan.method == "fedavg":
        return "No privacy: updates are uploaded as they are."
    most = int(ledger.participations.max(initial=0))
    if most == 0:
        return "Nothing was uploaded, so nothing was revealed."
    over = f"over {most} participation{'s' if most != 1 else ''}"
    hidden = _UNITS[plan.unit] + (f" ({_RELATIONS[plan.relation]})" if plan.unit == "client" else "")
    alone = (
        "One upload alone carries no noise."
        if marginal is None
        else "Looked at alone (the paper's view), the uploads of a client would give epsilon = "
        f"{_rounded_up(marginal)} {over}."
    )
    if plan.heuristic:
        return (
            f"No guarantee: the noise follows a heuristic the paper uses ({hidden}), which proves nothing. {alone} "
            "That number is a label, not a promise."
        )
    if joint is None:
        return f"No guarantee in the joint view. {_why_none(plan)} {alone}"
    return (
        f"({_rounded_up(joint)}, {plan.delta:g})-differential privacy for every client {over}, hiding {hidden}, "
        f"against {adversary}. {alone}"
    )


def _rounded_up(epsilon: float) -> str:
    """Two digits, never below the number itself (a rounding error of 1e-8 apart)."""
    return f"{math.ceil(epsilon * 100.0 - 1e-6) / 100.0:.2f}"


def _why_none(plan: Plan) -> str:
    tau2 = plan.tau2 if isinstance(plan.tau2, tuple) else (plan.tau2,)
    if any(value != 0.0 for value in tau2):
        if plan.distortion == "coordinate":
            return "For a distortion per coordinate no joint-view bound is computed."
        if plan.distortion == "scalar":
            return "For a scalar distortion there is no bound without the factors that were drawn."
        return "The uploads of some group of clients carry too little noise of their own, so their sum lays them open."
    return (
        "The noises of all uploads cancel exactly, so a server that knows the other updates subtracts them from the "
        "sum and is left with the bare one."
    )


def _caveats(plan: Plan) -> tuple[str, ...]:
    if not plan.private:
        return ()
    caveats = [
        "The noise of a simulation comes from a seed: the numbers describe the mechanism, "
        "they do not protect the data that was simulated with.",
    ]
    if plan.method == "niss":
        caveats.append("Clients that collude with the server are not counted here.")
        if plan.graph == "random":
            caveats.append(
                "In a random list clients receive unequal numbers of shares: the worst-off client decides the epsilon, "
                "and the aggregate variance differs from Theorem 2."
            )
    if plan.unit == "client" and plan.relation == "zero-out":
        caveats.append("Zero-out neighbours do not hide that a client took part.")
    return tuple(caveats)
