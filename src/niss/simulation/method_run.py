"""Methods on their way through the rounds, in step: the state of each in memory and in its folder.

Beside records, a simulated run keeps a charge per round and a checkpoint. One that was killed at any moment goes on
from its last checkpoint; what was written after it is dropped and done again.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from niss.accounting import Charge, Ledger, LedgerFile, LedgerHeader, Outlook, stated_delta, stated_relation
from niss.accounting.ledger import LedgerEntry
from niss.errors import RunFolderError
from niss.files import CHECKPOINT, LEDGER, METRICS, MODEL, PRIVACY, RESULT, write_atomically, write_json
from niss.learning import threads
from niss.mechanism import Slots
from niss.runs import RoundRecord, RunFolder, other_rounds
from niss.simulation import Config
from niss.simulation.federation import Federation
from niss.simulation.inputs import Inputs
from niss.simulation.ranks import Ranks
from niss.simulation.results import RunResult, state_guarantee
from niss.simulation.round import FinishedRound, begin_round
from niss.simulation.server import FRESH, ServerState
from niss.simulation.training import Done, Trainer


@dataclass(frozen=True)
class RoundEvent:
    """Told to `progress` after every round of every method.

    label          of the method, or of the config and the method where several are compared
    method_number  its place among all methods, from 1
    methods        how many methods there are
    round, rounds  the round just done, and of how many
    accuracy       after it; None where it was not tested
    seconds        that it took
    """

    label: str
    method_number: int
    methods: int
    round: int
    rounds: int
    accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class TrainingEvent:
    """Told to `progress.training` while clients train.

    labels         of the methods whose clients are trained now, as one cohort
    methods        how many methods there are in all
    round, rounds  the round that is under way, and of how many
    done, clients  clients of these methods that have been trained, and how many there are
    """

    labels: tuple[str, ...]
    methods: int
    round: int
    rounds: int
    done: int
    clients: int


Progress = Callable[[RoundEvent], None]
"""Told of every round. Where it has a method `training`, that is told of every group of clients."""

OnRound = Callable[[RoundRecord], None]


class MethodRun:
    """The global model, the ledger and the records of one method, after `rounds_done` whole rounds.

    config   the settings, with this method as the only one
    folder   where the state is kept, and read back from where the run was begun before; None: nowhere, or by rank 0
    label    what progress calls it, unless by the method's title
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        trainer: Trainer,
        folder: CheckpointFolder | None,
        label: str | None = None,
    ) -> None:
        (self.method,) = config.methods
        self.config, self._folder, self.label = config, folder, label or self.method.title
        self.federation = Federation(config, inputs, trainer)
        plan = self.federation.plan
        basis = {"method": plan.kind.name, "heuristic": plan.heuristic, **plan.kind.ledger_basis(plan)}
        self.ledger = RecordedLedger(**vars(self._empty()), basis=basis)
        # Of its own: clients that start from one tensor are computed together, down to the last bits of their sums.
        self.weights, self.server, self.rounds_done = inputs.start.clone(), FRESH, 0
        self.rounds: list[RoundRecord] = []
        with read_by_all(trainer.ranks, folder) as kept:
            if kept is not None:
                self._restore(kept)
        if 0 < self.rounds_done < config.rounds and self.federation.exchange.real and plan.kind.carries:
            raise RunFolderError(
                f"round {self.rounds_done + 1} of a run whose noise is carried over cannot be played on: the keys that "
                "its clients were announced with are gone with the process that made them",
                hint="start the run again, or resume runs with exchange = 'simulated'",
            )

    def _empty(self) -> Ledger:
        """A ledger before the first round. A target per round promises nothing about all of them: it is no budget."""
        plan, clients = self.federation.plan, self.config.clients
        filtered = plan.calibrated and self.config.privacy.scope == "training"
        return Ledger.empty(clients, plan.budget(clients) if filtered else None, unit=plan.unit)

    def _restore(self, kept: CheckpointFolder) -> None:
        """Go on from the last checkpoint, if the run was not killed before its first."""
        self.rounds_done, tensors = kept.load_checkpoint()
        self.rounds = kept.rewind(self.rounds_done)
        if self.rounds_done:
            self.weights = tensors.pop("weights")
            self.server = ServerState.restored(tensors, self.rounds[-1].model_noise_variance)
            for entry in kept.charged(self.rounds_done):
                self.ledger.replay(entry)

    @cached_property
    def outlook(self) -> Outlook | None:
        """Whether such rounds can learn anything, by the first of them; of a run that goes on it is drawn again."""
        ledger, start = self._empty(), self.federation.inputs.start
        adaptive = self.federation.adaptive
        clip = None if adaptive is None else adaptive.start
        return begin_round(self.federation, start, ledger, 0, clip, FRESH).outlook

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

    @contextlib.contextmanager
    def charging(self) -> Iterator[None]:
        """While it is open, charges go to the folder's ledger.jsonl, rewound to the checkpoint: a simulated upload has
        not really left, and its round is played again. A real client never rewinds its ledger.
        """
        if self._folder is None or self.finished:
            yield
            return
        path = self._folder.path / LEDGER
        if not self.rounds_done:
            path.unlink(missing_ok=True)
        with LedgerFile.open(path) if self.rounds_done else LedgerFile.create(path, self._header()) as file:
            self.ledger.file = file
            yield

    def _header(self) -> LedgerHeader:
        """The delta is for a client that takes part in as many rounds as it can; where the protocol is played, with
        what its grid costs.
        """
        plan, config, budget = self.federation.plan, self.config, self.ledger.budget
        delta = stated_delta(plan, config.most_participations(config.sampling_of(self.method)), config.rounds)
        grid = 0.0 if self.federation.exchange.real else plan.grid_delta
        # A million clients with one target are a number of clients and a budget.
        clients: dict[str, Any] = {"numbered": config.clients}
        if isinstance(budget, Slots):
            clients["each"] = budget.rounds
        elif budget is not None and (budget == budget[0]).all():
            clients["each"] = float(budget[0])
        elif budget is not None:
            clients = {"budgets": {str(client): mu for client, mu in enumerate(budget.tolist())}}
        return LedgerHeader(
            run=f"{config.name}/{self.method.title}",
            **clients,
            delta=delta,
            unit=plan.unit,
            relation=stated_relation(plan),
            delta_failure=max(delta - plan.gaussian_delta - grid, 0.0),
        )

    def record(self, done: FinishedRound, seconds: float) -> None:
        """Take over what a round left behind: in memory, then its lines in the files, then the checkpoint."""
        self.weights, self.server, self.rounds_done = done.weights, done.server, done.record.round
        self.rounds.append(done.record)
        if self._folder is not None:
            self._folder.append_diagnostics(done.record.round, done.zeroed_updates)
            self._folder.append_round(done.record, seconds)
            self._folder.save_checkpoint(self.rounds_done, {"weights": self.weights, **self.server.tensors})

    def conclude(self) -> RunResult:
        """Make the statement, and write it down with the final model; result.json comes last."""
        folder, module = self._folder, copy.deepcopy(self.federation.inputs.module)
        self.federation.inputs.layout.load(module, self.weights)
        result = RunResult(
            settings=self.method,
            rounds=self.rounds,
            statement=state_guarantee(self.federation, self.ledger, self.rounds),
            state_dict={name: tensor.detach().clone() for name, tensor in module.state_dict().items()},
            folder=None if folder is None else folder.path,
            kappa=self.federation.plan.kappa,
            outlook=self.outlook,
        )
        if folder is not None:
            contiguous = {name: tensor.contiguous() for name, tensor in result.state_dict.items()}
            write_atomically(folder.path / MODEL, save(contiguous))
            write_json(folder.path / PRIVACY, result.statement.to_json())
            write_json(folder.path / RESULT, result.summary)
        return result


def play_runs(
    runs: Sequence[MethodRun],
    trainer: Trainer,
    progress: Progress | None,
    on_round: OnRound | None = None,
) -> list[RunResult]:
    """Play the rounds that are still missing, all runs in step, then write down what came of it.

    Runs whose clients do the same local work train as one cohort, as many as have room for their updates.
    """
    if not trainer.ranks.first:
        progress = on_round = None
    with contextlib.ExitStack() as stack, threads(runs[0].config.training.threads):
        for one in runs:
            stack.enter_context(one.charging())
        while waiting := [one for one in runs if not one.finished]:
            first = min(waiting, key=lambda one: one.rounds_done)
            alike = [
                one
                for one in waiting
                if one.rounds_done == first.rounds_done and one.federation.work == first.federation.work
            ]
            turn = alike[: trainer.together(first.federation.size)]
            _play_round(runs, turn, trainer, progress)
            if on_round is not None:
                for one in turn:
                    on_round(one.rounds[-1])
    return [one.conclude() for one in runs]


def _play_round(
    runs: Sequence[MethodRun], turn: Sequence[MethodRun], trainer: Trainer, progress: Progress | None
) -> None:
    """One round of the methods whose turn it is, their clients trained as one cohort.

    The seconds of a method are its part of what all did together and those in which it finished the round.
    """
    began = time.perf_counter()
    opened = [
        begin_round(one.federation, one.weights, one.ledger, one.rounds_done, one.clip, one.server)
        for one in turn
    ]
    for one, each in zip(turn, opened, strict=True):
        if one.rounds_done == 0:
            one.outlook = each.outlook
            _tell_outlook(one, progress)
    jobs = [each.jobs for each in opened]
    done = _client_progress(runs, turn, sum(map(len, jobs)), progress)
    updates = trainer.train(jobs, turn[0].federation.work, done)
    together = (time.perf_counter() - began) / len(turn)
    for one, each, rows in zip(turn, opened, updates, strict=True):
        began = time.perf_counter()
        result = each.finish(rows)
        seconds = together + time.perf_counter() - began
        one.record(result, seconds)
        if progress is not None:
            place, rounds = runs.index(one) + 1, one.config.rounds
            accuracy = one.rounds[-1].accuracy
            progress(RoundEvent(one.label, place, len(runs), one.rounds_done, rounds, accuracy, seconds))


def _tell_outlook(run: MethodRun, progress: Progress | None) -> None:
    """To `progress.outlook`, where there is such a method; else a bad outlook is a warning."""
    if (judged := run.outlook) is None:
        return
    if (tell := getattr(progress, "outlook", None)) is not None:
        tell(run.label, judged)
    elif judged.verdict != "good":
        warnings.warn(f"{run.label}: {judged.words}", UserWarning, stacklevel=5)


def _client_progress(
    runs: Sequence[MethodRun], turn: Sequence[MethodRun], clients: int, progress: Progress | None
) -> Done | None:
    """A function that tells `progress.training`, where there is such a method, of clients newly done."""
    tell = getattr(progress, "training", None)
    if tell is None:
        return None
    titles, done = tuple(one.label for one in turn), 0.0
    number, rounds = turn[0].rounds_done + 1, turn[0].config.rounds

    def count(more: float) -> None:
        nonlocal done
        done += more
        tell(TrainingEvent(titles, len(runs), number, rounds, round(done), clients))

    return count


class CheckpointFolder(RunFolder):
    """The folder of a simulated run, which goes on from the checkpoints in it."""

    def charged(self, rounds: int) -> tuple[LedgerEntry, ...]:
        """What was charged in each of that many rounds, from the ledger, which is cut back to them."""
        path = self.path / LEDGER
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        # The header, and one line a round.
        if len(lines) <= rounds:
            raise other_rounds(path, max(len(lines) - 1, 0), rounds)
        if len(lines) > rounds + 1:
            # A prefix of a hash chain is a hash chain.
            write_atomically(path, b"".join(lines[: rounds + 1]))
        return LedgerFile.read(path).entries

    def save_checkpoint(self, rounds: int, tensors: dict[str, Tensor]) -> None:
        """Replace the checkpoint of an earlier round: the global model, and what the server remembers."""
        write_atomically(self.path / CHECKPOINT, save(tensors, {"rounds": str(rounds)}))

    def load_checkpoint(self) -> tuple[int, dict[str, Tensor]]:
        """After how many rounds the last checkpoint was made, and what is in it."""
        path = self.path / CHECKPOINT
        if not path.exists():
            return 0, {}
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                return int(file.metadata()["rounds"]), tensors
        except (SafetensorError, KeyError, ValueError) as error:
            raise RunFolderError(
                f"{path} is damaged: {error}", hint="start the run again in a new folder"
            ) from None


@contextlib.contextmanager
def read_by_all(ranks: Ranks, folder: CheckpointFolder | None) -> Iterator[CheckpointFolder | None]:
    """The folder that a run is resumed from: on ranks other than the first a copy, which need no disk in common."""
    if not ranks.several:
        yield folder
        return
    names = (CHECKPOINT, METRICS, LEDGER)
    paths = {} if folder is None else {name: folder.path / name for name in names}
    contents = {
        name: ranks.from_all(path.read_bytes() if (path := paths.get(name)) and path.exists() else b"")[0]
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

    file   where charges go; None keeps them in memory only
    basis  what the charges assume, in a few words, written beside each for whoever reads it without the manifest
    """

    file: LedgerFile | None = None
    basis: dict[str, Any] = field(default_factory=dict)

    def charge(self, participants: NDArray[np.int64], charge: Charge, attempt: int = 0) -> None:
        """Charge a round in memory, then on disk: both before its uploads are summed."""
        super().charge(participants, charge, attempt)
        if self.file is not None:
            joint = np.broadcast_to(charge.mu2, participants.shape).tolist()
            marginal = np.broadcast_to(charge.marginal_mu2, participants.shape).tolist()
            charges = {
                str(client): Charge(_or_infinite(mu2), _or_infinite(marginal_mu2), charge.slot)
                for client, mu2, marginal_mu2 in zip(participants.tolist(), joint, marginal, strict=True)
            }
            self.file.charge(len(self.history), attempt, charges, self.basis)

    def replay(self, entry: LedgerEntry) -> None:
        """Charge again, in memory alone, what is on disk."""
        charges = sorted((int(client), charge) for client, charge in entry.charges.items())
        joint, marginal = (
            np.array([getattr(charge, name) for _, charge in charges]) for name in ("mu2", "marginal_mu2")
        )
        super().charge(
            np.array([client for client, _ in charges]), Charge(joint, marginal, charges[0][1].slot)
        )


def _or_infinite(mu2: float) -> float:
    """A client of weight 0 in a round without noise has mu 0 / 0: nothing is claimed for it."""
    return math.inf if math.isnan(mu2) else mu2
