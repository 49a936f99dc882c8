"""The guarantee of a run, or of one graph and its noise, in words and in numbers.

`make_statement` speaks of a run, from what its rounds really did (the ledger); `assess` of one graph, without a run.
A statement says which view and which adversary it holds against, and says so plainly where there is no guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.accounting.ledger import Ledger, epsilon_of
from niss.accounting.outsider import OutsiderClaim
from niss.accounting.plans import Plan
from niss.claims import digits, rounded_up
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.mechanism import Slots, gdp_epsilon
from niss.mechanism.shares import per_client
from niss.methods import marginal_mu, mu_of, server_adversary
from niss.methods.niss import Niss
from niss.views import effective_variance

FloatArray = NDArray[np.float64]

_UNITS = {
    "client": "one client's whole data",
    "record": "one record (added or removed)",
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
    "Yet all parties ran in one process, which held every update: nothing here is hidden from whoever ran it. The "
    "measured noise in metrics.jsonl and result.json, and all of diagnostics.jsonl, are computed from bare updates: "
    "they are no part of this claim, and whoever is given them may learn more than it allows.",
}

PEOPLE = (2, 5, 10)
"""For people with so many records a statement says what they are promised."""
NOT_PROTECTED = (
    "that a client took part, and when",
    "what follows about a client from everybody else's data",
    "the sum of the updates itself, and the model made of it",
    "anything a client sends outside this protocol",
)


@dataclass(frozen=True)
class ClientStatement:
    """One client's numbers, in the joint and in the marginal view; None where there is no guarantee."""

    client: int
    participations: int
    mu_joint: float | None
    epsilon_joint: float | None
    mu_marginal: float | None
    epsilon_marginal: float | None


class ClientStatements(Sequence[ClientStatement]):
    """Those of all clients, in columns named as the fields of a `ClientStatement`: there may be a million of them.

    In a column nan stands for None.
    """

    def __init__(self, **columns: NDArray[Any]) -> None:
        self.columns = columns

    @classmethod
    def of(
        cls, clients: ArrayLike, counts: ArrayLike, mus: ArrayLike, deltas: tuple[float | None, float]
    ) -> Self:
        """From the mu of both views, a row each; without a delta there is no epsilon in the joint view."""
        joint, marginal = np.where(np.isfinite(mus), mus, np.nan)
        return cls(
            client=np.asarray(clients),
            participations=np.broadcast_to(counts, joint.shape),
            mu_joint=joint,
            epsilon_joint=_epsilons(joint, deltas[0]),
            mu_marginal=marginal,
            epsilon_marginal=_epsilons(marginal, deltas[1]),
        )

    def changed(self, **columns: ArrayLike) -> Self:
        """With these columns, or the same for all clients, in place of their own."""
        new = {name: np.broadcast_to(np.asarray(values), len(self)) for name, values in columns.items()}
        return type(self)(**(self.columns | new))

    @property
    def taken(self) -> Self:
        """Those of clients who took part."""
        took_part = self.columns["participations"] > 0
        return type(self)(**{name: column[took_part] for name, column in self.columns.items()})

    def worst(self, name: str) -> float | None:
        """The largest of a column; None where a client has none, or where there is no client."""
        column = self.columns[name]
        return float(column.max()) if column.size and not np.isnan(column).any() else None

    def to_json(self) -> dict[str, list[Any]]:
        """The columns as lists, null where there is no number."""
        return {
            name: [None if value != value else value for value in column.tolist()]
            for name, column in self.columns.items()
        }

    def __len__(self) -> int:
        return len(self.columns["client"])

    @overload
    def __getitem__(self, place: int) -> ClientStatement: ...

    @overload
    def __getitem__(self, place: slice) -> Self: ...

    def __getitem__(self, place: int | slice) -> ClientStatement | Self:
        if isinstance(place, slice):
            return type(self)(**{name: column[place] for name, column in self.columns.items()})
        row: dict[str, Any] = {name: column[place].item() for name, column in self.columns.items()}
        row = {name: None if value != value else value for name, value in row.items()}
        return ClientStatement(**row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientStatements) and all(
            np.array_equal(column, other.columns[name], equal_nan=True)
            for name, column in self.columns.items()
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What is promised to the clients of a run; every number belongs to the worst-off client.

    epsilon_joint     against `adversary`, who combines everything it sees; None: no guarantee
    epsilon_marginal  of one upload looked at alone, which is what the paper counts
    epsilon_outsider  against someone who sees the released models alone
    budget_epsilon    what was promised in advance, and is never exceeded; None: nothing was
    heuristic         whether the noise follows a rule that proves nothing
    colluders         how many participants of a round are assumed to tell the server all they know
    clients           the numbers of each, a `ClientStatement`
    words, paper      the guarantee, and the paper's own numbers for it, as sentences
    not_protected     what differential privacy does not hide
    caveats           what a reader has to know besides
    """

    method: str
    unit: str
    relation: str
    delta: float
    epsilon_joint: float | None
    epsilon_marginal: float | None
    budget_epsilon: float | None = None
    heuristic: bool = False
    collusion: float
    adversary: str
    words: str
    paper: str
    not_protected: tuple[str, ...] = NOT_PROTECTED
    caveats: tuple[str, ...] = ()
    clients: ClientStatements = field(repr=False)
    epsilon_outsider: float | None = None
    outsider: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`; of the clients how many there are, and the largest joint mu.

        What each of them has spent is in the ledger of the run, which `niss account` reads.
        """
        clients = {"clients": len(self.clients), "mu_joint": self.clients.taken.worst("mu_joint")}
        return {one.name: getattr(self, one.name) for one in fields(self)} | clients


def make_statement(
    plan: Plan,
    ledger: Ledger,
    *,
    notes: tuple[str, ...] = (),
    outsider: OutsiderClaim | None = None,
    noise_from: Literal["seed", "entropy", "clients"] = "seed",
    noise_multipliers: Sequence[float] = (),
) -> Statement:
    """The statement for what `ledger` says was spent under `plan`.

    notes       further caveats
    outsider    the claim against an outsider, where one was computed; in the plan's unit and relation, or refused
    noise_from  where the noise of the run came from: a seed, the operating system's entropy in one process, or
                clients of their own, which is no simulation
    noise_multipliers  of the rounds that were released, for methods whose claim is about the whole run
    """
    most = int(ledger.participations.max(initial=0))
    rounds = max(most, len(ledger.history))
    delta = stated_delta(plan, most, rounds)
    # Noise that a simulation draws from a seed lies on no grid, so nothing of delta is spent on one.
    gaussian = plan.gaussian_delta + (plan.grid_delta if noise_from == "seed" else 0.0)
    known = ""
    spent = np.full((2, ledger.participations.size), np.inf)
    if plan.private:
        spent = np.sqrt([ledger.joint_squared, ledger.marginal_squared])
    deltas = None if plan.heuristic or delta >= 1.0 else gaussian, plan.delta
    clients = ClientStatements.of(np.arange(ledger.participations.size), ledger.participations, spent, deltas)
    if plan.unit == "record" and plan.private:
        clients = _of_records(clients, ledger, deltas[0])
        worst = max(ledger.slots.values(), key=lambda slots: slots.size, default=Slots())
        known = if_batches_were_known(worst, gaussian)
        notes = (of_people(worst, gaussian), *notes) if known else notes
    if (whole := plan.kind.epsilon_of_run(plan, noise_multipliers)) is not None and noise_multipliers:
        told = clients.taken.worst("epsilon_joint")
        if told is not None:
            left = (
                f"Against someone who sees the released models and knows who took part, the same noise gives epsilon = "
                f"{rounded_up(told)} at delta = {digits(plan.delta)}; that is what the ledger holds."
            )
            notes = (left, *notes)
        clients = clients.changed(
            mu_joint=math.nan, epsilon_joint=whole if math.isfinite(whole) else math.nan
        )
    joint, marginal = clients.taken.worst("epsilon_joint"), clients.taken.worst("epsilon_marginal")
    budget = None
    if isinstance(ledger.budget, Slots):
        budget = ledger.budget.epsilon(plan.gaussian_delta)
    elif ledger.budget is not None:
        budget = max(gdp_epsilon(float(mu), plan.gaussian_delta) for mu in np.unique(ledger.budget))
    adversary = plan.kind.adversary(plan)
    least = joint
    if outsider is not None:
        # Numbers of different units, relations or deltas do not compare, and do not go into one statement.
        claimed, stated = (outsider.unit, outsider.relation), (plan.unit, stated_relation(plan))
        if claimed != stated or outsider.delta > plan.delta:
            raise ConfigError(
                f"is about {', '.join(claimed)} at delta {digits(outsider.delta)}, the statement about "
                f"{', '.join(stated)} at {digits(plan.delta)}",
                field="outsider",
                hint="compute it for the unit, relation and delta of the plan",
            )
        # The joint claim holds against an outsider too, in the same relation: the smaller one counts.
        known_claims = [value for value in (joint, outsider.epsilon) if value is not None]
        least = min(known_claims, default=None)
    return Statement(
        method=plan.kind.name,
        unit=plan.unit,
        relation=stated_relation(plan),
        delta=delta,
        epsilon_joint=joint,
        epsilon_marginal=marginal,
        budget_epsilon=budget,
        heuristic=plan.heuristic,
        collusion=plan.collusion if plan.kind.uses("collusion") else 0.0,
        adversary=adversary,
        words=_words(plan, most, delta, joint, marginal, adversary, known),
        paper=_paper(plan, marginal),
        not_protected=NOT_PROTECTED if plan.private else (),
        caveats=_caveats(plan, rounds, delta, noise_from) + notes,
        clients=clients,
        epsilon_outsider=least,
        outsider=None if outsider is None else f"Seeing only the released models: {outsider.words}",
    )


def _of_records(clients: ClientStatements, ledger: Ledger, delta: float | None) -> ClientStatements:
    """Of each silo's records, from the slots that its rounds took; one upload alone is not looked at."""
    spent = [ledger.spent(client) for client in range(len(clients))]
    epsilons = {one: math.nan if delta is None else epsilon_of(one, delta) for one in set(spent)}
    joint = np.array([epsilons[one] for one in spent])
    joint[~np.isfinite(joint)] = np.nan
    unknown = dict.fromkeys(("mu_joint", "mu_marginal", "epsilon_marginal"), math.nan)
    return clients.changed(epsilon_joint=joint, **unknown)


def if_batches_were_known(taken: Slots, delta: float) -> str:
    """What is left of a claim whose batches all became known, as a sentence; empty where there is no number."""
    epsilon = taken.epsilon_if_known(delta)
    if not 0.0 < epsilon < math.inf:
        return ""
    return (
        "The claim rests on every batch staying secret (its size, training time and loss, too); if all became known, "
        f"epsilon would be {rounded_up(epsilon)}."
    )


def of_people(taken: Slots, delta: float) -> str:
    """What people are promised who have several records, as a sentence."""
    epsilons = ((records, taken.epsilon_of_person(records, delta)) for records in PEOPLE)
    words = ", ".join(f"{rounded_up(epsilon)} with {records}" for records, epsilon in epsilons)
    return f"A person with several records, in all silos together, has epsilon {words}."


def assess(
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
    """What this noise promises to each honest client over `participations` such rounds, without a run.

    sensitivity      how far one client can move its upload in L2 norm (`p_k clip` for zero-out): one, or one per client
    delta            of the claim
    unit, relation   what is hidden, for the words alone; the sensitivity has to match

    The rest is as in `effective_variance`. No worst case is searched: the statement holds against these colluders.

    >>> graph = ShareGraph.complete(10)
    >>> bare = assess(graph, unit_variance=1.0, residual_variance=0.0, sensitivity=1.0, delta=1e-5)
    >>> bare.epsilon_joint is None
    True
    >>> hidden = assess(graph, unit_variance=1.0, residual_variance=0.2, sensitivity=1.0, delta=1e-5)
    >>> round(hidden.epsilon_joint, 2)
    3.09
    """
    if participations < 1:
        raise ConfigError(f"must be at least 1, not {participations}", field="participations")
    moved = math.sqrt(participations) * per_client(sensitivity, graph.size, "sensitivity")
    residual = per_client(residual_variance, graph.size, "residual_variance")
    variance = effective_variance(
        graph,
        unit_variance=unit_variance,
        residual_variance=residual,
        colluders=colluders,
        dropped=dropped,
        revealed=revealed,
        scales=scales,
    )
    honest = np.setdiff1d(np.arange(graph.size), [*colluders, *dropped])
    joint = mu_of(moved[honest], variance)
    marginal = marginal_mu(
        moved,
        unit_variance=unit_variance,
        sent=graph.out_weight,
        received=graph.in_weight,
        residual_variance=residual,
    )[honest]
    clients = ClientStatements.of(honest, participations, [joint, marginal], (delta, delta))
    worst, worst_marginal = clients.worst("epsilon_joint"), clients.worst("epsilon_marginal")
    share = len(set(colluders)) / graph.size
    adversary = server_adversary(share, revealed=len(set(revealed)))
    words = f"No guarantee against {adversary}: the noises of some honest clients cancel exactly in its sum."
    if worst is not None:
        words = (
            f"({rounded_up(worst)}, {digits(delta)})-differential privacy for every honest client "
            f"over {participations} round{'s' if participations != 1 else ''}, hiding one {unit} ({relation}), "
            f"against {adversary}."
        )
    number = "no number" if worst_marginal is None else f"epsilon = {rounded_up(worst_marginal)}"
    return Statement(
        method=Niss.name,
        unit=unit,
        relation=relation,
        delta=delta,
        epsilon_joint=worst,
        epsilon_marginal=worst_marginal,
        collusion=share,
        adversary=adversary,
        words=words,
        paper=f"One upload alone, which is what the paper counts: {number}. It does not hold against this adversary.",
        clients=clients,
    )


def stated_delta(plan: Plan, participations: int, rounds: int) -> float:
    """The delta of everything that is said about a client who took part so often in a run of so many rounds.

    Each graph that was drawn may fail its bound on colluding neighbours, whoever was shown it, and each participation
    has its part of what the grid costs. The plan's delta pays for those it was made for; every further one adds its own
    (`scope = "round"`, and a plan that names no horizon).
    """
    graphs = plan.attempts * max(rounds - plan.possible_rounds, 0)
    further = max(participations - plan.turns, 0)
    return plan.delta + graphs * plan.failure + further * plan.grid_delta / plan.turns


def stated_relation(plan: Plan) -> str:
    """The relation that every number of a plan's statement is about; the heuristic replaces a record."""
    return "replace-one" if plan.unit == "nbafl" else plan.relation


def _epsilons(mus: FloatArray, delta: float | None) -> FloatArray:
    """The epsilon of each mu; nan where there is no mu, and everywhere without a delta."""
    if delta is None:
        return np.full(mus.size, np.nan)
    different, places = np.unique(mus, return_inverse=True)
    found = [mu if np.isnan(mu) else gdp_epsilon(mu, delta) if mu > 0.0 else 0.0 for mu in different.tolist()]
    return np.array(found, dtype=np.float64)[places]


# Every number that a user reads is rounded up: a claim may be too weak, never too strong.
def _words(
    plan: Plan,
    most: int,
    delta: float,
    joint: float | None,
    marginal: float | None,
    adversary: str,
    known: str,
) -> str:
    """For clients of whom the busiest took part in `most` rounds; `known` is what is left if batches are known."""
    if not plan.private:
        return "No privacy: updates are uploaded as they are."
    if most == 0:
        return "Nothing was uploaded, so nothing was revealed."
    over = plan.kind.over(plan, most)
    hidden = _UNITS[plan.unit] + (f" ({_RELATIONS[plan.relation]})" if plan.unit == "client" else "")
    alone = "One upload alone carries no noise."
    if plan.unit == "record":
        alone = known
    elif marginal is not None:
        alone = (
            "Looked at alone (the paper's view), the uploads of a client would give epsilon = "
            f"{rounded_up(marginal)} {over}."
        )
    if plan.heuristic:
        return (
            f"No guarantee: the noise follows a heuristic the paper uses ({hidden}), which proves nothing. {alone} "
            "That number is a label, not a promise."
        )
    if joint is None:
        return f"No guarantee in the joint view. {plan.kind.why_no_guarantee(plan)} {alone}".rstrip()
    whom = "record" if plan.unit == "record" else "client"
    return (
        f"({rounded_up(joint)}, {digits(delta)})-differential privacy for every {whom} {over}, hiding {hidden}, "
        f"against {adversary}. {alone}"
    )


def _paper(plan: Plan, marginal: float | None) -> str:
    """The paper's own numbers, labelled as what they are: one upload alone, and its Theorem 3."""
    if not plan.kind.shares_noise or plan.unit == "record":
        return ""
    share = "epsilon = " + rounded_up(marginal) if marginal is not None else "no number"
    return (
        f"The paper counts one upload alone ({share}, composed over the participations) and asks of tau^2 only "
        "max(2 rho - 1, 0) against a share rho of colluders (its Theorem 3): nothing at all below one half. "
        "Neither holds against a server that combines the uploads."
    )


def _caveats(plan: Plan, rounds: int, delta: float, noise_from: str) -> tuple[str, ...]:
    if not plan.private:
        return ()
    caveats = [_SIMULATED[noise_from]] if noise_from in _SIMULATED else []
    caveats += plan.kind.caveats(plan)
    if delta > plan.delta:
        caveats.append(
            f"The plan's delta of {digits(plan.delta)} is for {plan.possible_rounds} rounds, of which there were "
            f"{rounds}, and for {plan.turns} in which a client takes part: each further one may have an unlucky graph, "
            f"and noise on a grid. For all of them delta is {digits(delta)}."
        )
    return tuple(caveats)
