"""The guarantee of a run, in words and in numbers.

A statement is made from what the rounds really did (the ledger), says which view and which adversary it
holds against, and says so plainly where there is no guarantee.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from niss.accounting.ledger import Ledger
from niss.accounting.outsider import OutsiderClaim
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
_SIMULATED = {
    "seed": "The noise of a simulation comes from a seed: the numbers describe the mechanism, "
    "they do not protect the data that was simulated with.",
    "entropy": "Keys and noise came from the operating system's entropy and do not follow from the seed. "
    "Yet all parties ran in one process, which held every update: nothing here is hidden from whoever ran it.",
}

NOT_PROTECTED = (
    "that a client took part, and when",
    "what follows about a client from everybody else's data",
    "the sum of the updates itself, and the model made of it",
    "anything a client sends outside this protocol",
)


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
    colluders: int
    adversary: str
    words: str
    paper: str
    not_protected: tuple[str, ...]
    caveats: tuple[str, ...]
    clients: tuple[ClientStatement, ...]
    epsilon_outsider: float | None = None
    outsider: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`."""
        return asdict(self)


def make_statement(
    plan: Plan,
    ledger: Ledger,
    *,
    notes: tuple[str, ...] = (),
    outsider: OutsiderClaim | None = None,
    noise_from: Literal["seed", "entropy", "clients"] = "seed",
) -> Statement:
    """The statement for what `ledger` says was spent under `plan`.

    `noise_from` says where the noise of the run came from: a seed, the operating system's entropy in one process, or
    clients of their own, which is no simulation.
    """
    rounds = max(plan.participations, int(ledger.participations.max(initial=0)))
    delta = plan.delta - rounds * plan.attempts * plan.corruption.failure
    clients = tuple(_client(plan, ledger, number, delta) for number in range(ledger.participations.size))
    taken = [client for client in clients if client.participations]
    joint = None if plan.heuristic else worst_epsilon([client.epsilon_joint for client in taken])
    marginal = worst_epsilon([client.epsilon_marginal for client in taken])
    budget = None
    if ledger.budget is not None:
        budget = max(gdp_epsilon(float(mu), plan.gaussian_delta) for mu in np.unique(ledger.budget))
    adversary = plan.kind.adversary(plan)
    return Statement(
        method=plan.method,
        unit=plan.unit,
        relation="replace-one" if plan.unit != "client" else plan.relation,
        delta=plan.delta,
        epsilon_joint=joint,
        epsilon_marginal=marginal,
        budget_epsilon=budget,
        heuristic=plan.heuristic,
        colluders=plan.colluders if plan.kind.uses("colluders") else 0,
        adversary=adversary,
        words=_words(plan, ledger, joint, marginal, adversary),
        paper=_paper(plan, marginal),
        not_protected=NOT_PROTECTED if plan.private else (),
        caveats=_caveats(plan, noise_from) + notes,
        clients=clients,
        epsilon_outsider=_outsider_epsilon(outsider, joint),
        outsider=None if outsider is None else f"Seeing only the released models: {outsider.words}",
    )


def _outsider_epsilon(outsider: OutsiderClaim | None, joint: float | None) -> float | None:
    """The joint claim holds against an outsider too: the smaller one counts."""
    known = [value for value in (joint, outsider.epsilon if outsider else None) if value is not None]
    return min(known) if known else None


def _client(plan: Plan, ledger: Ledger, number: int, delta: float) -> ClientStatement:
    joint = math.sqrt(ledger.joint_squared[number])
    marginal = math.sqrt(ledger.marginal_squared[number])
    private = plan.private
    return ClientStatement(
        client=number,
        participations=int(ledger.participations[number]),
        mu_joint=joint if private and math.isfinite(joint) else None,
        epsilon_joint=_epsilon(joint, delta) if private and not plan.heuristic else None,
        mu_marginal=marginal if private and math.isfinite(marginal) else None,
        epsilon_marginal=_epsilon(marginal, plan.delta) if private else None,
    )


def _epsilon(mu: float, delta: float) -> float | None:
    if not math.isfinite(mu):
        return None
    return gdp_epsilon(mu, delta) if mu > 0.0 else 0.0


def worst_epsilon(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _words(plan: Plan, ledger: Ledger, joint: float | None, marginal: float | None, adversary: str) -> str:
    if not plan.private:
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
        f"{rounded_up(marginal)} {over}."
    )
    if plan.heuristic:
        return (
            f"No guarantee: the noise follows a heuristic the paper uses ({hidden}), which proves nothing. {alone} "
            "That number is a label, not a promise."
        )
    if joint is None:
        return f"No guarantee in the joint view. {plan.kind.why_no_guarantee(plan)} {alone}"
    return (
        f"({rounded_up(joint)}, {plan.delta:g})-differential privacy for every client {over}, hiding {hidden}, "
        f"against {adversary}. {alone}"
    )


def _paper(plan: Plan, marginal: float | None) -> str:
    """The paper's own numbers, labelled as what they are: one upload alone, and its Theorem 3."""
    if not plan.kind.shares_noise:
        return ""
    share = "epsilon = " + rounded_up(marginal) if marginal is not None else "no number"
    return (
        f"The paper counts one upload alone ({share}, composed over the participations) and asks of tau^2 only "
        "max(2 rho - 1, 0) against a share rho of colluders (its Theorem 3): nothing at all below one half. "
        "Neither holds against a server that combines the uploads."
    )


def rounded_up(epsilon: float) -> str:
    """Two digits, never below the number itself (a rounding error of 1e-8 apart)."""
    return f"{math.ceil(epsilon * 100.0 - 1e-6) / 100.0:.2f}"


def _caveats(plan: Plan, noise_from: str) -> tuple[str, ...]:
    if not plan.private:
        return ()
    caveats = [_SIMULATED[noise_from]] if noise_from in _SIMULATED else []
    caveats += plan.kind.caveats(plan)
    if plan.unit == "client" and plan.relation == "zero-out":
        caveats.append("Zero-out neighbours do not hide that a client took part.")
    return tuple(caveats)
