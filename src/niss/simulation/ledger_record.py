"""The simulator's `ledger.jsonl`: one charge a round, on disk before the round's uploads leave."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Ledger, Plan
from niss.accounting.ledger_file import LedgerFile
from niss.errors import RunFolderError
from niss.simulation.records import LEDGER, write_atomically


@dataclass
class RecordedLedger(Ledger):
    """A ledger in memory that writes every charge through to its file."""

    file: LedgerFile | None = None
    rounds: int = 0
    basis: dict[str, Any] = field(default_factory=dict)

    def charge(
        self,
        participants: NDArray[np.int64],
        joint_mu: NDArray[np.float64],
        marginal_mu: NDArray[np.float64],
        attempt: int = 0,
    ) -> None:
        super().charge(participants, joint_mu, marginal_mu, attempt)
        self.rounds += 1
        if self.file is not None:
            mus = {
                str(client): (_or_infinite(joint), _or_infinite(marginal))
                for client, joint, marginal in zip(participants, joint_mu, marginal_mu, strict=True)
            }
            self.file.charge(self.rounds, attempt, mus, self.basis)


@contextlib.contextmanager
def recorded(
    ledger: Ledger, folder: Path | None, plan: Plan, *, run: str, rounds: int
) -> Iterator[RecordedLedger]:
    """`ledger` as it stood after `rounds` rounds, written on into the folder's ledger.jsonl, where there is one.

    What was charged after the checkpoint is rewound: a simulated upload has not really left, and the
    round is played again. A real client never rewinds its ledger.
    """
    spent = (ledger.joint_squared, ledger.marginal_squared, ledger.participations, ledger.budget)
    if folder is None:
        yield RecordedLedger(*spent, rounds=rounds)
        return
    path = folder / LEDGER
    if rounds:
        _rewind(path, rounds)
        file = LedgerFile.open(path)
    else:
        path.unlink(missing_ok=True)
        file = _create(path, ledger, plan, run)
    with file:
        yield RecordedLedger(*spent, file=file, rounds=rounds, basis=charge_basis(plan))


def charge_basis(plan: Plan) -> dict[str, Any]:
    """What the charges of a run assume, in a few words."""
    return {"method": plan.method, "heuristic": plan.heuristic, **plan.kind.ledger_basis(plan)}


def _create(path: Path, ledger: Ledger, plan: Plan, run: str) -> LedgerFile:
    count = ledger.participations.size
    budgets = [None] * count if ledger.budget is None else [float(mu) for mu in ledger.budget]
    return LedgerFile.create(
        path,
        run=run,
        budgets={str(client): budget for client, budget in enumerate(budgets)},
        delta=plan.delta,
        unit=plan.unit,
        relation=plan.relation if plan.unit == "client" else "replace-one",
        delta_failure=plan.delta - plan.gaussian_delta,
    )


def _rewind(path: Path, rounds: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    # The header, and one line a round.
    kept = lines[: rounds + 1]
    if len(kept) <= rounds:
        raise RunFolderError(
            f"{path} has {max(len(kept) - 1, 0)} rounds, the checkpoint {rounds}",
            hint="the folder was changed by hand or is of an older niss; start the run again in a new folder",
        )
    if len(lines) > len(kept):
        write_atomically(path, b"".join(kept))


def _or_infinite(mu: float) -> float:
    """A client of weight 0 in a round without noise has mu 0 / 0: nothing is claimed for it."""
    return math.inf if math.isnan(mu) else float(mu)
