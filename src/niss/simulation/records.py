"""What a simulated run keeps in its folder beside records: a charge per round, checkpoints, and the way back to them.

A run that was killed at any moment goes on from its last checkpoint; what was written after it is dropped and done
again.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from niss.accounting import Ledger, LedgerFile, Plan, stated_delta, stated_relation
from niss.errors import RunFolderError
from niss.files import (
    CHECKPOINT,
    LEDGER,
    METRICS,
    MODEL,
    write_atomically,
)
from niss.runs.folder import RunFolder, other_rounds
from niss.simulation.ranks import Ranks


@dataclass(frozen=True)
class Checkpoint:
    """The state after `rounds` whole rounds: weights of the global model, what each client has spent, and what the
    server's optimiser remembers, by name (`ServerState.tensors`)."""

    rounds: int
    weights: Tensor
    ledger: Ledger
    server: dict[str, Tensor] = field(default_factory=dict)


class CheckpointFolder(RunFolder):
    """The folder of a simulated run, which goes on from the checkpoints in it."""

    def charged(self, rounds: int) -> list[NDArray[np.int64]]:
        """The participants of each of that many rounds, from the ledger, which is cut back to them."""
        if not rounds:
            return []
        _rewind_ledger(self.path / LEDGER, rounds)
        with LedgerFile.open(self.path / LEDGER) as file:
            return [np.array(sorted(map(int, entry.mus)), dtype=np.int64) for entry in file.entries]

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint of an earlier round."""
        ledger = checkpoint.ledger
        tensors = {
            "weights": checkpoint.weights,
            "joint_squared": torch.from_numpy(ledger.joint_squared),
            "marginal_squared": torch.from_numpy(ledger.marginal_squared),
            "participations": torch.from_numpy(ledger.participations),
            **checkpoint.server,
        }
        write_atomically(self.path / CHECKPOINT, save(tensors, {"rounds": str(checkpoint.rounds)}))

    def load_checkpoint(self, budget: NDArray[np.float64] | None) -> Checkpoint | None:
        """The last checkpoint, or None if the run was killed before its first; the budget follows from the plan."""
        path = self.path / CHECKPOINT
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                rounds = int(file.metadata()["rounds"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, KeyError, ValueError) as error:
            raise RunFolderError(
                f"{path} is damaged: {error}", hint="start the run again in a new folder"
            ) from None
        ledger = Ledger(
            tensors["joint_squared"].numpy(),
            tensors["marginal_squared"].numpy(),
            tensors["participations"].numpy(),
            budget,
        )
        server = {name: tensor for name, tensor in tensors.items() if name.startswith("server_")}
        return Checkpoint(rounds, tensors["weights"], ledger, server)

    def save_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the final model, by parameter name."""
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_atomically(self.path / MODEL, save(contiguous))


@contextlib.contextmanager
def read_by_all(ranks: Ranks, folder: CheckpointFolder | None) -> Iterator[CheckpointFolder | None]:
    """The folder that a run is resumed from: on ranks other than the first a copy, which need no disk in common."""
    if not ranks.several:
        yield folder
        return
    names = (CHECKPOINT, METRICS, LEDGER)
    paths = {} if folder is None else {name: folder.path / name for name in names}
    contents = {
        name: ranks.from_first(path.read_bytes() if (path := paths.get(name)) and path.exists() else b"")
        for name in names
    }
    if ranks.first:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="niss-rank-") as place:
        for name, content in contents.items():
            if content:
                write_atomically(Path(place) / name, content)
        yield CheckpointFolder(Path(place))


@dataclass
class RecordedLedger(Ledger):
    """A ledger in memory that writes every charge through to `ledger.jsonl`, one line a round.

    file    where charges go; None keeps them in memory only
    rounds  rounds charged so far
    basis   what the charges assume, written beside each (`charge_basis`)
    """

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
        """Charge a round in memory, then on disk: both before its uploads are summed."""
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
    ledger: Ledger,
    folder: Path | None,
    plan: Plan,
    *,
    run: str,
    rounds: int,
    participations: int,
    on_grid: bool = False,
) -> Iterator[RecordedLedger]:
    """`ledger` as it stood after `rounds` rounds, written on into the folder's ledger.jsonl, where there is one.

    What was charged after the checkpoint is rewound: a simulated upload has not really left, and the
    round is played again. A real client never rewinds its ledger. `run` names the run in the file's header, whose delta
    is for a client that takes part in `participations` rounds; `on_grid`: with what the protocol's grid costs.
    """
    spent = (ledger.joint_squared, ledger.marginal_squared, ledger.participations, ledger.budget)
    history = ledger.history
    if folder is None:
        yield RecordedLedger(*spent, history=history, rounds=rounds)
        return
    path = folder / LEDGER
    if rounds:
        file = LedgerFile.open(path)
    else:
        path.unlink(missing_ok=True)
        count = ledger.participations.size
        budgets = [None] * count if ledger.budget is None else [float(mu) for mu in ledger.budget]
        delta = stated_delta(plan, participations)
        file = LedgerFile.create(
            path,
            run=run,
            budgets={str(client): budget for client, budget in enumerate(budgets)},
            delta=delta,
            unit=plan.unit,
            relation=stated_relation(plan),
            delta_failure=max(delta - plan.gaussian_delta - (0.0 if on_grid else plan.grid_delta), 0.0),
        )
    with file:
        yield RecordedLedger(*spent, history=history, file=file, rounds=rounds, basis=charge_basis(plan))


def charge_basis(plan: Plan) -> dict[str, Any]:
    """What the charges of a run assume, in a few words, for whoever reads the ledger without the manifest."""
    return {"method": plan.method, "heuristic": plan.heuristic, **plan.kind.ledger_basis(plan)}


def _rewind_ledger(path: Path, rounds: int) -> None:
    """Cut the ledger back to that many rounds; a prefix of a hash chain is a hash chain."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    # The header, and one line a round.
    if len(lines) <= rounds:
        raise other_rounds(path, max(len(lines) - 1, 0), rounds)
    if len(lines) > rounds + 1:
        write_atomically(path, b"".join(lines[: rounds + 1]))


def _or_infinite(mu: float) -> float:
    """A client of weight 0 in a round without noise has mu 0 / 0: nothing is claimed for it."""
    return math.inf if math.isnan(mu) else float(mu)
