"""One method on its way through the rounds: its state in memory and in its folder.

Beside records, a simulated run keeps a charge per round and a checkpoint. One that was killed at any moment goes on
from its last checkpoint; what was written after it is dropped and done again.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from niss.accounting import Ledger, LedgerFile, Plan, stated_delta, stated_relation
from niss.errors import RunFolderError
from niss.files import CHECKPOINT, LEDGER, METRICS, MODEL, PRIVACY, RESULT, write_atomically, write_json
from niss.runs import RoundRecord, RunFolder
from niss.runs.folder import other_rounds
from niss.simulation.config import Config
from niss.simulation.materials import Materials
from niss.simulation.ranks import Ranks
from niss.simulation.results import RunResult, state_guarantee
from niss.simulation.round import Federation, FinishedRound
from niss.simulation.server import ServerState
from niss.simulation.training import Trainer


class MethodRun:
    """The global model, the ledger and the records of one method, after `rounds_done` whole rounds.

    config   the settings, with this method as the only one
    folder   where the state is kept, and read back from where the run was begun before; None: nowhere, or by rank 0
    label    what progress calls it, unless by the method's title

    A context manager: while it is open, charges go to the folder's ledger.jsonl.
    """

    def __init__(
        self,
        config: Config,
        materials: Materials,
        trainer: Trainer,
        folder: CheckpointFolder | None,
        label: str | None = None,
    ) -> None:
        (self.method,) = config.methods
        self.config, self._folder, self.label = config, folder, label or self.method.title
        self.federation = Federation.of(config, materials, trainer)
        plan = self.federation.plan
        # A target per round promises nothing about the whole training, so it is no budget.
        filtered = plan.calibrated and config.privacy.scope == "training"
        budget = plan.budget(config.clients) if filtered else None
        state = Checkpoint(0, materials.start, Ledger.empty(config.clients, budget))
        self.rounds: list[RoundRecord] = []
        with read_by_all(trainer.ranks, folder) as kept:
            if kept is not None:
                state = kept.load_checkpoint(budget) or state
                self.rounds = kept.rewind(state.rounds)
                if state.rounds < config.rounds:
                    state.ledger.history = kept.charged(state.rounds)
        self.rounds_done, self.weights, self.ledger = state.rounds, state.weights, state.ledger
        before = self.rounds[-1].model_noise_variance if self.rounds else 0.0
        self.server = ServerState.restored(state.server, before)
        self._open_files = contextlib.ExitStack()

    @property
    def finished(self) -> bool:
        return self.rounds_done >= self.config.rounds

    @property
    def clip(self) -> float | None:
        """Of the next round; None: the plan's."""
        adaptive = self.federation.adaptive
        if adaptive is None:
            return None
        # It follows from what the rounds released, so a run that is resumed goes on with the same one.
        last = self.rounds[-1] if self.rounds else None
        if last is None or last.clip is None:
            return adaptive.start
        return last.clip if last.below_clip is None else adaptive.after(last.clip, last.below_clip)

    def __enter__(self) -> Self:
        if not self.finished:
            basis = charge_basis(self.federation.plan)
            self.ledger = RecordedLedger(
                **vars(self.ledger), file=self._open_ledger(), rounds=self.rounds_done, basis=basis
            )
        return self

    def _open_ledger(self) -> LedgerFile | None:
        """The folder's ledger.jsonl, rewound to the checkpoint: a simulated upload has not really left, and its round
        is played again. A real client never rewinds its ledger.

        The delta in its header is for a client that takes part in as many rounds as it can; where the protocol is
        played, with what its grid costs.
        """
        if self._folder is None:
            return None
        path, plan, ledger = self._folder.path / LEDGER, self.federation.plan, self.ledger
        if self.rounds_done:
            return self._open_files.enter_context(LedgerFile.open(path))
        path.unlink(missing_ok=True)
        delta = stated_delta(plan, self.config.most_participations)
        on_grid = self.federation.exchange.real
        file = LedgerFile.create(
            path,
            run=f"{self.config.name}/{self.method.title}",
            budgets={
                str(client): None if ledger.budget is None else float(ledger.budget[client])
                for client in range(self.config.clients)
            },
            delta=delta,
            unit=plan.unit,
            relation=stated_relation(plan),
            delta_failure=max(delta - plan.gaussian_delta - (0.0 if on_grid else plan.grid_delta), 0.0),
        )
        return self._open_files.enter_context(file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()

    def record(self, done: FinishedRound, seconds: float) -> None:
        """Take over what a round left behind: in memory, then its lines in the files, then the checkpoint."""
        self.weights, self.server, self.rounds_done = done.weights, done.server, done.record.round
        self.rounds.append(done.record)
        if self._folder is not None:
            self._folder.append_diagnostics(done.record.round, done.zeroed_updates)
            self._folder.append_round(done.record, seconds)
            self._folder.save_checkpoint(
                Checkpoint(self.rounds_done, self.weights, self.ledger, self.server.tensors)
            )

    def conclude(self) -> RunResult:
        """Make the statement, and write it down with the final model; result.json comes last."""
        folder, module = self._folder, copy.deepcopy(self.federation.materials.module)
        self.federation.materials.layout.load(module, self.weights)
        result = RunResult(
            settings=self.method,
            rounds=self.rounds,
            statement=state_guarantee(self.federation, self.ledger, self.rounds),
            state_dict={name: tensor.detach().clone() for name, tensor in module.state_dict().items()},
            folder=None if folder is None else folder.path,
            kappa=self.federation.plan.kappa,
        )
        if folder is not None:
            folder.save_model(result.state_dict)
            write_json(folder.path / PRIVACY, result.statement.to_json())
            write_json(folder.path / RESULT, result.summary)
        return result


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
    basis   what the charges assume, written beside each
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
