"""One method on its way through the rounds: its state in memory and in its folder."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from niss.accounting import Ledger
from niss.files import PRIVACY, RESULT, write_json
from niss.runs import RoundRecord
from niss.simulation.clipping import next_clip
from niss.simulation.config import Config
from niss.simulation.materials import Materials
from niss.simulation.records import Checkpoint, CheckpointFolder, read_by_all, recorded
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
        self._open_files = ExitStack()

    @property
    def finished(self) -> bool:
        return self.rounds_done >= self.config.rounds

    @property
    def clip(self) -> float | None:
        """Of the next round; None: the plan's."""
        adaptive = self.federation.adaptive
        return None if adaptive is None else next_clip(adaptive, self.rounds[-1] if self.rounds else None)

    def __enter__(self) -> Self:
        if not self.finished:
            path = None if self._folder is None else self._folder.path
            name = f"{self.config.name}/{self.method.title}"
            self.ledger = self._open_files.enter_context(
                recorded(
                    self.ledger,
                    path,
                    self.federation.plan,
                    run=name,
                    rounds=self.rounds_done,
                    participations=self.config.most_participations,
                    on_grid=self.federation.exchange.real,
                )
            )
        return self

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
