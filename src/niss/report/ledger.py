"""What the clients of a run spent, read from its ledger, whose hash chain is verified on the way.

A client's total after some rounds is `mu = sqrt(sum mu_r^2)` over those it took part in, and its epsilon the one of
Gaussian differential privacy at that mu and the ledger's delta. Such a total is called "spent": it says where the
client stands. Only the budget, fixed before the first round, is a claim.

Charges may rest on a heuristic. Their mu is then a label that proves nothing, and no epsilon is made from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from niss.accounting import LedgerFile
from niss.accounting.ledger import Limit, client_order
from niss.charts import evenly_spaced
from niss.claims import rounded_up
from niss.errors import PrivacyError
from niss.files import LIMITS, find_json
from niss.runs.folder import MethodResult, ReportInput
from niss.runs.privacy import NOT_APPLICABLE, read_ledger

# A curve of so many steps looks no different from one of more.
MOST_ROUNDS = 150

# So many clients can be drawn as lines of their own; of more, the spread is drawn.
MOST_LINES = 40

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class ClientRow:
    """One client's totals over all charges so far.

    participations  how many charges it had
    mu_spent        infinite where an upload had no noise at all
    epsilon_spent   None where nothing is guaranteed
    epsilon_claim   its budget, None where nothing was promised
    """

    client: str
    participations: int
    mu_spent: float
    epsilon_spent: float | None
    epsilon_claim: float | None


@dataclass(frozen=True)
class Spending:
    """Epsilon spent by the clients of one method after each of `rounds`, at the delta of its ledger.

    rounds               numbers of rounds, from 0 (nothing spent) to the last; at most `MOST_ROUNDS` of them
    least, median, most  over all clients, those that never took part included
    lines                each client's own curve where they are at most `MOST_LINES`, else nothing
    budget               the largest claim, None where nothing was promised
    """

    label: str
    rounds: tuple[int, ...]
    least: FloatArray
    median: FloatArray
    most: FloatArray
    lines: tuple[FloatArray, ...]
    budget: float | None


def is_heuristic(ledger: LedgerFile) -> bool:
    """Whether any charge rests on a heuristic, so that its numbers are labels and promise nothing."""
    return any(entry.basis.get("heuristic") is True for entry in ledger.entries)


def client_rows(ledger: LedgerFile) -> list[ClientRow]:
    """One row per client, the worst-off first: by what it spent, then by how often it took part, then by name.

    All epsilons are None where the ledger rests on a heuristic.
    """
    heuristic = is_heuristic(ledger)

    @cache
    def epsilon(mu: float | None) -> float | None:
        return None if mu is None or heuristic else ledger.epsilon(mu)

    rows = [
        ClientRow(
            client,
            ledger.participations(client),
            ledger.spent(client),
            epsilon(ledger.spent(client)),
            epsilon(ledger.budget(client)),
        )
        for client in ledger.clients
    ]
    # Totals that differ by rounding alone count as equal.
    return sorted(
        rows, key=lambda row: (-round(row.mu_spent, 9), -row.participations, client_order(row.client))
    )


def spending(ledger: LedgerFile, client: str) -> list[tuple[int, int, float, float | None]]:
    """A client's charges in order: round, attempt, mu of the charge, and epsilon spent up to and with it.

    A round that was tried several times is charged for each attempt. Epsilon is None where nothing is guaranteed.
    """
    heuristic = is_heuristic(ledger)
    total, steps = 0.0, []
    for entry in ledger.entries:
        if client in entry.charges:
            charge = entry.charges[client]
            total += float(charge.mu2)
            epsilon = None if heuristic else ledger.epsilon(math.sqrt(total))
            steps.append((entry.round, entry.attempt, charge.joint, epsilon))
    return steps


def format_claim(epsilon: float | None) -> str:
    return NOT_APPLICABLE if epsilon is None else rounded_up(epsilon)


def format_mu(mu: float) -> str:
    """Four digits; a mu is compared and added up, never claimed, so it is not rounded up."""
    return f"{mu:.4g}" if math.isfinite(mu) else "∞"


def read_spending(report: ReportInput, notes: list[str]) -> list[Spending]:
    """The spending of every private method whose ledger holds finite charges, for drawing.

    notes  a ledger whose chain does not verify is left out and named here
    """
    spendings = []
    for method in report.methods:
        try:
            ledger = _proving(method)
        except PrivacyError as error:
            notes.append(f"The ledger of {method.label} cannot be trusted and was left out: {error.message}")
            continue
        rounds, spent = _mu_spent(ledger) if ledger is not None else ([], np.full((1, 1), math.inf))
        if ledger is None or not np.all(np.isfinite(spent)):
            continue
        places = evenly_spaced(range(len(rounds) + 1), MOST_ROUNDS)
        spent, epsilon = spent[:, places], _epsilons(ledger)
        budgets = [mu for mu in map(ledger.budget, ledger.clients) if mu is not None]
        spendings.append(
            Spending(
                label=method.label,
                rounds=tuple([0, *rounds][place] for place in places),
                least=epsilon(spent.min(axis=0)),
                median=epsilon(np.median(spent, axis=0)),
                most=epsilon(spent.max(axis=0)),
                lines=tuple(map(epsilon, spent)) if len(spent) <= MOST_LINES else (),
                budget=ledger.epsilon(max(budgets)) if budgets else None,
            )
        )
    return spendings


def worst_spent(method: MethodResult) -> dict[int, float]:
    """Epsilon that the worst-off client has spent in the joint view after each round; finite ones alone.

    Empty where nothing is guaranteed: no ledger, one that cannot be trusted, or one that rests on a heuristic.
    """
    try:
        ledger = _proving(method)
    except PrivacyError:
        return {}
    if ledger is None:
        return {}
    rounds, spent = _mu_spent(ledger)
    most = spent.max(axis=0)[1:]
    epsilons = _epsilons(ledger)(most[np.isfinite(most)])
    # Infinite totals come last: what is spent never shrinks.
    return {
        number: float(value) for number, value in zip(rounds, epsilons, strict=False) if math.isfinite(value)
    }


def _proving(method: MethodResult) -> LedgerFile | None:
    """The ledger of a method, where its charges prove something."""
    ledger = read_ledger(method)
    return ledger if ledger is not None and ledger.entries and not is_heuristic(ledger) else None


def _mu_spent(ledger: LedgerFile) -> tuple[list[int], FloatArray]:
    """The rounds, and each client's total `sqrt(sum mu^2)` before the first and after each of them."""
    clients = {client: place for place, client in enumerate(ledger.clients)}
    rounds = sorted({entry.round for entry in ledger.entries})
    columns = {number: place for place, number in enumerate(rounds, start=1)}
    squares = np.zeros((len(clients), len(rounds) + 1))
    for entry in ledger.entries:
        for client, charge in entry.charges.items():
            squares[clients[client], columns[entry.round]] += charge.mu2
    return rounds, np.sqrt(np.cumsum(squares, axis=1))


def _epsilons(ledger: LedgerFile) -> Callable[[FloatArray], FloatArray]:
    """Epsilon of each mu in an array, infinite where there is none; totals that differ by rounding share one."""

    @cache
    def one(mu: float) -> float:
        epsilon = ledger.epsilon(mu) if mu else 0.0
        return math.inf if epsilon is None else epsilon

    return lambda mus: np.array([one(float(f"{mu:.9g}")) for mu in mus])


def node_limits(ledger: LedgerFile) -> list[Limit]:
    """What holds for all runs of a node; nothing for the ledger of anything else."""
    header = ledger.header
    owner = find_json(ledger.path.parent / LIMITS)
    if owner is None or ledger.clients != ("self",):
        return []
    limits, mu = [], ledger.budget("self")
    if mu is not None:
        limits.append(Limit.of_ledger(mu, header.delta, header.delta_failure))
    if owner:
        failing = sum(entry.charges["self"].grid_delta or 0.0 for entry in ledger.entries)
        setting, epsilon, delta = (owner[name] for name in ("setting", "epsilon", "delta"))
        limits.append(Limit.of_owner(setting, epsilon, delta, failing + float(owner["failures"])))
    return limits
