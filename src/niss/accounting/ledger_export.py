"""A ledger as CSV and as JSON, for spreadsheets and other programs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from niss.accounting.ledger_chain import FORMAT, Charge

if TYPE_CHECKING:
    from niss.accounting.ledger_file import LedgerFile

CSV_COLUMNS = ("round", "attempt", "client", "mu_joint", "mu_marginal")


def client_order(client: str) -> tuple[int, int, str]:
    """Numbers in their own order, then names."""
    return (0, int(client), client) if client.isdecimal() else (1, 0, client)


def charges_csv(entries: Sequence[Charge]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for entry in entries:
        for client in sorted(entry.mus, key=client_order):
            mu = entry.mus[client]
            writer.writerow((entry.round, entry.attempt, client, mu.joint, mu.marginal))
    return text.getvalue()


def ledger_json(ledger: LedgerFile) -> dict[str, Any]:
    header = ledger.header
    return {
        "format": FORMAT,
        "run": header.run,
        "delta": header.delta,
        "delta_failure": header.delta_failure,
        "unit": header.unit,
        "relation": header.relation,
        "head": ledger.head,
        "torn_bytes": len(ledger.torn),
        "clients": [_client(ledger, client) for client in ledger.clients],
        "charges": [
            {
                "round": entry.round,
                "attempt": entry.attempt,
                "mus": {
                    client: {"mu_joint": _finite(mu.joint), "mu_marginal": _finite(mu.marginal)}
                    for client, mu in entry.mus.items()
                },
                "basis": dict(entry.basis),
                "hash": entry.hash,
            }
            for entry in ledger.entries
        ],
    }


def _client(ledger: LedgerFile, client: str) -> dict[str, Any]:
    joint, marginal = ledger.spent(client), ledger.spent(client, view="marginal")
    budget = ledger.budget(client)
    return {
        "client": client,
        "participations": ledger.participations(client),
        "mu_spent": _finite(joint),
        "epsilon_spent": ledger.epsilon(joint),
        "mu_spent_marginal": _finite(marginal),
        "epsilon_spent_marginal": ledger.epsilon(marginal),
        "mu_claim": budget,
        "epsilon_claim": ledger.epsilon(budget),
    }


def _finite(mu: float) -> float | None:
    return mu if math.isfinite(mu) else None
