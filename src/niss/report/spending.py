"""What the clients of a run spent, round by round, read from its ledger and verified on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from niss.accounting.ledger_file import LedgerFile
from niss.errors import PrivacyError
from niss.report.ledger_rows import is_heuristic
from niss.report.source import MethodResult, ReportInput

# A curve of so many steps looks no different from one of more.
MOST_ROUNDS = 150
# So many clients can be drawn as lines of their own; of more, the spread is drawn.
MOST_LINES = 40

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Spending:
    """Epsilon spent by the clients of one method after each of `rounds`, at `delta`.

    `least`, `median` and `most` are over all clients, those that never took part included; `lines` holds
    each client's own curve where they are few, else nothing. `budget` is the largest claim, None without.
    """

    label: str
    delta: float
    clients: int
    worst_client: str
    rounds: tuple[int, ...]
    least: FloatArray
    median: FloatArray
    most: FloatArray
    lines: tuple[FloatArray, ...]
    budget: float | None


def read_spending(report: ReportInput, notes: list[str]) -> list[Spending]:
    """The spending of every method whose ledger holds finite charges; a damaged ledger becomes a note."""
    found = []
    for method in report.methods:
        if not method.is_private or method.folder is None:
            continue
        path = method.folder / "ledger.jsonl"
        if not path.is_file():
            continue
        try:
            ledger = LedgerFile.read(path)
        except PrivacyError as error:
            notes.append(f"The ledger of {method.label} cannot be trusted and was left out: {error.message}")
            continue
        spending = _spending(method, ledger)
        if spending is not None:
            found.append(spending)
    return found


def _spending(method: MethodResult, ledger: LedgerFile) -> Spending | None:
    if not ledger.entries or is_heuristic(ledger):
        return None
    clients = {client: place for place, client in enumerate(ledger.clients)}
    rounds, spent = _mu_spent(ledger)
    if not np.all(np.isfinite(spent)):
        return None
    shown = _shown(len(rounds) + 1)
    spent = spent[:, shown]
    epsilon = _epsilons(ledger)
    budgets = [mu for mu in map(ledger.budget, clients) if mu is not None]
    worst = int(np.argmax(spent[:, -1]))
    return Spending(
        label=method.label,
        delta=ledger.header.delta,
        clients=len(clients),
        worst_client=list(clients)[worst],
        rounds=tuple([0, *rounds][place] for place in shown),
        least=epsilon(spent.min(axis=0)),
        median=epsilon(np.median(spent, axis=0)),
        most=epsilon(spent.max(axis=0)),
        lines=tuple(epsilon(line) for line in spent) if len(clients) <= MOST_LINES else (),
        budget=ledger.epsilon(max(budgets)) if budgets else None,
    )


def worst_spent(method: MethodResult) -> dict[int, float]:
    """Epsilon that the worst-off client has spent in the joint view after each round; finite ones alone.

    Empty where nothing is guaranteed: no ledger, one that cannot be trusted, or one that rests on a heuristic.
    """
    path = None if method.folder is None or not method.is_private else method.folder / "ledger.jsonl"
    if path is None or not path.is_file():
        return {}
    try:
        ledger = LedgerFile.read(path)
    except PrivacyError:
        return {}
    if not ledger.entries or is_heuristic(ledger):
        return {}
    rounds, spent = _mu_spent(ledger)
    most = spent.max(axis=0)[1:]
    epsilons = _epsilons(ledger)(most[np.isfinite(most)])
    # Infinite totals come last: what is spent never shrinks.
    return {
        number: float(value) for number, value in zip(rounds, epsilons, strict=False) if math.isfinite(value)
    }


def _mu_spent(ledger: LedgerFile) -> tuple[list[int], FloatArray]:
    """The rounds, and each client's total `sqrt(sum mu^2)` before the first and after each of them."""
    clients = {client: place for place, client in enumerate(ledger.clients)}
    rounds = sorted({entry.round for entry in ledger.entries})
    columns = {number: place for place, number in enumerate(rounds, start=1)}
    squares = np.zeros((len(clients), len(rounds) + 1))
    for entry in ledger.entries:
        for client, mu in entry.mus.items():
            squares[clients[client], columns[entry.round]] += mu.joint * mu.joint
    return rounds, np.sqrt(np.cumsum(squares, axis=1))


def _shown(count: int) -> list[int]:
    """The places of at most so many evenly spaced rounds, the first and the last among them."""
    if count <= MOST_ROUNDS:
        return list(range(count))
    return sorted({round(place * (count - 1) / (MOST_ROUNDS - 1)) for place in range(MOST_ROUNDS)})


def _epsilons(ledger: LedgerFile) -> Callable[[FloatArray], FloatArray]:
    @cache
    def one(mu: float) -> float:
        epsilon = ledger.epsilon(mu) if mu else 0.0
        return math.inf if epsilon is None else epsilon

    # Totals that differ by rounding alone need not be computed again.
    return lambda mus: np.array([one(float(f"{mu:.9g}")) for mu in mus])
