"""What a ledger says of each client, worst-off first. A total is "spent"; only the budget is a claim."""

from __future__ import annotations

import math
from dataclasses import dataclass

from niss.accounting.ledger_export import client_order
from niss.accounting.ledger_file import LedgerFile

NONE = "–"
NO_GUARANTEE = "no guarantee"


@dataclass(frozen=True)
class ClientRow:
    """One client's totals; epsilon is None where nothing is guaranteed (spent) or was promised (claim)."""

    client: str
    participations: int
    mu_spent: float
    epsilon_spent: float | None
    epsilon_claim: float | None


def is_heuristic(ledger: LedgerFile) -> bool:
    """Whether any charge rests on a heuristic, so that its numbers are labels and promise nothing."""
    return any(entry.basis.get("heuristic") is True for entry in ledger.entries)


def client_rows(ledger: LedgerFile) -> list[ClientRow]:
    """One row per client, the one that spent most first."""
    known: dict[float, float | None] = {}
    heuristic = is_heuristic(ledger)

    def epsilon(mu: float | None) -> float | None:
        if mu is None or heuristic:
            return None
        if mu not in known:
            known[mu] = ledger.epsilon(mu)
        return known[mu]

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
    """A client's charges: round, attempt, mu of the charge, and epsilon spent up to and with it."""
    heuristic = is_heuristic(ledger)
    total, steps = 0.0, []
    for entry in ledger.entries:
        if client in entry.mus:
            mu = entry.mus[client].joint
            total += mu * mu
            epsilon = None if heuristic else ledger.epsilon(math.sqrt(total))
            steps.append((entry.round, entry.attempt, mu, epsilon))
    return steps


def format_spent(epsilon: float | None) -> str:
    return NO_GUARANTEE if epsilon is None else rounded_up(epsilon)


def format_claim(epsilon: float | None) -> str:
    return NONE if epsilon is None else rounded_up(epsilon)


def format_mu(mu: float) -> str:
    return f"{mu:.4g}" if math.isfinite(mu) else "∞"


def rounded_up(epsilon: float) -> str:
    """Two digits, never below the number itself (a rounding error of 1e-8 apart)."""
    return f"{math.ceil(epsilon * 100.0 - 1e-6) / 100.0:.2f}"
