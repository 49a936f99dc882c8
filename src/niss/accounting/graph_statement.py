"""A statement for one graph and its noise, without a run: what would this promise?"""

from __future__ import annotations

import math
from collections.abc import Collection

from numpy.typing import ArrayLike

from niss.accounting.statement import (
    NOT_PROTECTED,
    ClientStatement,
    Statement,
    rounded_up,
    worst_epsilon,
)
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.mechanism import gdp_epsilon
from niss.methods import server_adversary
from niss.views import effective_variance
from niss.views.covariance import per_client


def statement(
    graph: ShareGraph,
    *,
    unit_variance: float,
    residual_variance: ArrayLike,
    sensitivity: ArrayLike,
    delta: float,
    participations: int = 1,
    colluders: Collection[int] = (),
    dropped: Collection[int] = (),
    revealed: Collection[tuple[int, int]] = (),
    scales: ArrayLike | None = None,
    unit: str = "client",
    relation: str = "zero-out",
) -> Statement:
    """What this noise promises to each honest client over `participations` such rounds.

    `sensitivity` is how far one client can move its upload in L2 norm (`p_k clip` for zero-out). The rest is as
    in `effective_variance`. With known colluders no worst case is searched: the statement holds against these.
    """
    if participations < 1:
        raise ConfigError(f"must be at least 1, not {participations}", field="participations")
    moved = per_client(sensitivity, graph.size, "sensitivity")
    joint = effective_variance(
        graph,
        unit_variance=unit_variance,
        residual_variance=residual_variance,
        colluders=colluders,
        dropped=dropped,
        revealed=revealed,
        scales=scales,
    )
    alone = unit_variance * (graph.out_weight + graph.in_weight) + per_client(
        residual_variance, graph.size, "residual_variance"
    )
    kept = [client for client in range(graph.size) if client not in {*colluders, *dropped}]
    rounds = math.sqrt(participations)
    clients = tuple(
        _client(
            client, participations, rounds * moved[client], float(joint[seat]), float(alone[client]), delta
        )
        for seat, client in enumerate(kept)
    )
    worst = worst_epsilon([client.epsilon_joint for client in clients])
    marginal = worst_epsilon([client.epsilon_marginal for client in clients])
    adversary = server_adversary(len(set(colluders)), revealed=len(set(revealed)))
    return Statement(
        method="niss",
        unit=unit,
        relation=relation,
        delta=delta,
        epsilon_joint=worst,
        epsilon_marginal=marginal,
        budget_epsilon=None,
        heuristic=False,
        colluders=len(set(colluders)),
        adversary=adversary,
        words=_words(worst, delta, participations, unit, relation, adversary),
        paper=_paper(marginal),
        not_protected=NOT_PROTECTED,
        caveats=(),
        clients=clients,
    )


def _client(
    number: int, participations: int, moved: float, joint: float, alone: float, delta: float
) -> ClientStatement:
    mu_joint = moved / math.sqrt(joint) if joint > 0.0 else None
    mu_alone = moved / math.sqrt(alone) if alone > 0.0 else None
    return ClientStatement(
        client=number,
        participations=participations,
        mu_joint=mu_joint,
        epsilon_joint=None if mu_joint is None else gdp_epsilon(mu_joint, delta),
        mu_marginal=mu_alone,
        epsilon_marginal=None if mu_alone is None else gdp_epsilon(mu_alone, delta),
    )


def _words(
    epsilon: float | None, delta: float, participations: int, unit: str, relation: str, adversary: str
) -> str:
    rounds = f"{participations} round{'s' if participations != 1 else ''}"
    if epsilon is None:
        return (
            f"No guarantee against {adversary}: the noises of some honest clients cancel exactly in its sum."
        )
    return (
        f"({rounded_up(epsilon)}, {delta:g})-differential privacy for every honest client "
        f"over {rounds}, hiding one {unit} ({relation}), against {adversary}."
    )


def _paper(marginal: float | None) -> str:
    number = "no number" if marginal is None else f"epsilon = {rounded_up(marginal)}"
    return f"One upload alone, which is what the paper counts: {number}. It does not hold against this adversary."
