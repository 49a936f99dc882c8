"""Where a server keeps a run from round to round, so that it goes on after the ServerApp or the SuperLink was killed.

`ServerFolder` is a folder for the server alone (mode 0700, its files 0600):

    state.json   the run: proposal, members, what is held against them, the account, metrics, and which rounds are done;
                 secrets among it: the server's key where it has no key file, and where there is no tracker the
                 beacon holder's key and the seed of the chain
    arrays-N.npz the model after round N, and the moments of the wrapped strategy

The arrays are written before the state that names them, each file whole or not at all, so a kill at any moment leaves a
state and the arrays that belong to it.

Saved is: when the run begins, before anyone is asked to join it; when a round is opened, before anyone is asked to
answer it; when its sum is in the model; and with the metrics that follow. `niss.session.server` says why nothing is
charged twice. Clients enrol again under the same proposal, which costs them nothing, and are known by their identity.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from niss.errors import ConfigError, PausedError, RunFolderError
from niss.files import SHARED, lock_file, read_private, write_atomically
from niss.protocol.keyfile import load_identity
from niss.protocol.keys import Identity
from niss.redaction import SecretBytes
from niss.session.books import RunState
from niss.session.proposal import IN_HEX
from niss.session.server import Session
from niss.session.store import make_folder, require_private
from niss.settings import check_json, to_values

LOG = logging.getLogger("flwr")
_STATE = "state.json"
_DAMAGED = "restore the folder from a copy, or start a new run in a new one"
# What Flower's strategies that average carry from round to round: FedAdam, FedYogi and FedAdagrad, and FedAvgM.
_MOMENTS = ("m_t", "v_t", "momentum_vector")

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
Named = dict[str, NDArray[Any]]
MetricsByRound = dict[str, dict[int, MetricRecord]]
"""By kind (`train`, `evaluate`, `server`) and round."""


@dataclass
class SavedRun:
    """A run as it stands in `state.json`. Secret.

    rounds    of the whole run
    done      rounds that are over
    session   what it remembers
    metrics   so far
    arrays    file with the model after the last round that is done, and with what the wrapped strategy carries on
    layout    their names in it
    identity  secret of the server, where it has no key file
    """

    __pydantic_config__: ClassVar[Any] = IN_HEX

    rounds: int
    done: int
    session: RunState
    metrics: dict[str, dict[int, dict[str, Any]]]
    arrays: str
    layout: dict[str, list[str] | int]
    identity: bytes | None = None
    version: Literal[1] = 1


class ServerFolder:
    """Where a run is saved; made for its owner alone, and refused where others can enter it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser()
        make_folder(self._folder, "resume")
        require_private(self._folder, "700")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other servers out of the folder: two that go on with one run would open the same rounds."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            lock_file(descriptor, wait=False)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"another server is running in {self._folder}", field="resume", hint="stop it first"
            ) from None
        except OSError:
            pass  # Some network disks lock no folders.
        try:
            yield
        finally:
            os.close(descriptor)

    def load(self, rounds: int, inner: Strategy) -> tuple[SavedRun, ArrayRecord] | None:
        """The run that was saved here and its model, None where there is none; `ConfigError` if it is not one of so
        many rounds.

        The wrapped strategy is given back what it carries from round to round.
        """
        if not type(inner).__module__.startswith("flwr."):
            LOG.warning(
                "niss: of what %s carries from round to round, %s are saved, and nothing else",
                type(inner).__name__,
                ", ".join(_MOMENTS),
            )
        saved = self.read()
        if saved is None:
            return None
        if saved.rounds != rounds:
            raise ConfigError(
                f"the saved run is one of {saved.rounds} rounds, not {rounds}",
                field="resume",
                hint="give the number of rounds of that run, or a new folder",
            )
        try:
            model, moments = _unpack((self._folder / saved.arrays).read_bytes(), saved.layout)
        except (OSError, KeyError, TypeError, ValueError, StopIteration) as error:
            raise RunFolderError(
                f"the run saved in {self._folder} is damaged ({type(error).__name__})", hint=_DAMAGED
            ) from None
        for attribute, value in moments.items():
            setattr(inner, attribute, value)
        return saved, model

    def write_arrays(self, done: int, model: ArrayRecord, inner: Strategy) -> dict[str, Any]:
        """Write model and moments after so many rounds; returns what a `SavedRun` says of them."""
        content, layout = _pack(model, inner)
        name = f"arrays-{done}.npz"
        write_atomically(self._folder / name, content, temporary=self._folder / ".arrays.new")
        return {"arrays": name, "layout": layout}

    def write(self, saved: SavedRun) -> None:
        """Replace the state, and remove the arrays that it does not name."""
        text = SecretBytes(json.dumps(to_values(saved)).encode())
        write_atomically(self._folder / _STATE, text, temporary=self._folder / ".state.new")
        for path in self._folder.glob("arrays-*.npz"):
            if path.name != saved.arrays:
                path.unlink(missing_ok=True)

    def read(self) -> SavedRun | None:
        """What was saved here last, None where nothing was; `RunFolderError` where it cannot be read."""
        path = self._folder / _STATE
        try:
            text = SecretBytes(read_private(path))
        except FileNotFoundError:
            return None
        with suppress(ConfigError):
            return check_json(SavedRun, text)
        # Raised here: what was not read of secrets is no part of the error.
        raise RunFolderError(f"{path} is damaged, or was written by another version of niss", hint=_DAMAGED)


class KeptRun:
    """What a server keeps of a run while it goes on: metrics by round, the report, and the folder to go on from.

    identity  of the server: that in the key file, or the one that the run in the folder began with, or a new one
    metrics   so far
    before    rounds that servers before this one played
    paused    why the run waits to be gone on with; empty: it does not
    """

    def __init__(
        self,
        inner: Strategy,
        *,
        resume: str | Path | None,
        report: str | Path | None,
        key: str | Path | None,
    ) -> None:
        self._inner = inner
        self._folder = None if resume is None else ServerFolder(Path(resume))
        self._report = None if report is None else Path(report)
        if self._report is not None and not self._report.parent.is_dir():
            raise ConfigError(f"the folder {self._report.parent} does not exist", field="report")
        saved = self._folder.read() if self._folder is not None and key is None else None
        if key is not None:
            self.identity = load_identity(Path(key).expanduser())
        elif saved is not None and saved.identity is not None:
            self.identity = Identity(saved.identity)
        else:
            self.identity = Identity.generate(os.urandom)
        self._secret = None if key is not None else bytes(self.identity.secret_bytes())
        self.begin(0)

    def begin(self, rounds: int) -> None:
        """A run of so many rounds begins, or is about to be gone on with."""
        self._rounds, self._done, self.before, self.paused = rounds, 0, 0, ""
        self._arrays: dict[str, Any] = {}
        self.metrics: MetricsByRound = {"train": {}, "evaluate": {}, "server": {}}

    def locked(self) -> AbstractContextManager[None]:
        """While a server runs, no other uses the folder."""
        return nullcontext() if self._folder is None else self._folder.locked()

    def load(self) -> tuple[RunState, ArrayRecord] | None:
        """What was saved of the run, and the model that it had come to; None where nothing was.

        Flower counts rounds from 1 in each `start`; from here on they are counted on from those of the run.
        """
        if self._folder is None or (found := self._folder.load(self._rounds, self._inner)) is None:
            return None
        saved, model = found
        for kind, records in saved.metrics.items():
            self.metrics[kind] = {number: MetricRecord(record) for number, record in records.items()}
        last = saved.session.rounds[-1].round if saved.session.rounds else 0
        if saved.session.pending is not None:
            last = max(last, saved.session.pending.round)
        self._done = self.before = max(saved.done, last)
        self._arrays = {"arrays": saved.arrays, "layout": saved.layout}
        LOG.info("niss: going on after round %d of %d", self._done, self._rounds)
        return saved.session, model

    def pause(self, why: str) -> PausedError:
        """The run waits to be gone on with, for this reason; nobody has paid for what did not begin."""
        self.paused = why
        saved = "start again with the same settings, and the run goes on"
        lost = "without `resume` the run was not saved, and is over"
        return PausedError(why, hint=f"nobody has paid for it; {lost if self._folder is None else saved}")

    def begin_with(self, arrays: ArrayRecord, session: Session) -> None:
        """Save the run with the model that it begins with, unless it is saved."""
        if self._folder is not None and not self._arrays:
            self._arrays = self._folder.write_arrays(self._done, arrays, self._inner)
            session.save()

    def model(self, done: int, arrays: ArrayRecord) -> None:
        """The model after that round; nothing is written before the run began."""
        self._done = done
        if self._folder is not None and self._arrays:
            self._arrays = self._folder.write_arrays(done, arrays, self._inner)

    def save(self, session: RunState) -> None:
        """Replace the run in the folder, durably; nothing before it has a model."""
        if self._folder is None or not self._arrays:
            return
        metrics = _plain(self.metrics)
        self._folder.write(
            SavedRun(self._rounds, self._done, session, metrics, identity=self._secret, **self._arrays)
        )

    def keep(self, kind: str, number: int, metrics: MetricRecord | None, session: Session | None) -> None:
        """Note metrics of a round, and keep report and run up to date."""
        if metrics is not None:
            self.metrics[kind][number] = metrics
        if session is not None:
            self.write_report(session)
            session.save()

    def evaluation(self, evaluate: Evaluate | None, session: Callable[[], Session | None]) -> Evaluate | None:
        """The evaluation on the server, with the round's number in the run; what it says is kept."""

        def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate is not None
            metrics = evaluate(self.before + server_round, arrays)
            self.keep("server", self.before + server_round, metrics, session())
            return metrics

        return None if evaluate is None else evaluated

    def write_report(self, session: Session) -> None:
        """Replace the report, if there is to be one."""
        if self._report is None:
            return
        report = session.books.to_json() | {"metrics": _plain(self.metrics), "paused": self.paused}
        write_atomically(self._report, (json.dumps(report, indent=2) + "\n").encode(), mode=SHARED)


def _pack(model: ArrayRecord, inner: Strategy) -> tuple[bytes, dict[str, Any]]:
    """The arrays in numpy's own format, numbered, and their names."""
    arrays = [array.numpy() for array in model.values()]
    layout: dict[str, Any] = {"model": list(model)}
    for attribute in _MOMENTS:
        value = getattr(inner, attribute, None)
        if isinstance(value, dict):
            layout[attribute] = list(value)
            arrays += value.values()
        elif isinstance(value, list):
            layout[attribute] = len(value)
            arrays += value
    file = io.BytesIO()
    numbered: dict[str, Any] = {str(number): np.asarray(array) for number, array in enumerate(arrays)}
    np.savez(file, **numbered)
    return file.getvalue(), layout


def _unpack(
    content: bytes, layout: dict[str, Any]
) -> tuple[ArrayRecord, dict[str, Named | list[NDArray[Any]]]]:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = iter([file[str(number)] for number in range(len(file.files))])
    model = ArrayRecord({name: Array(next(arrays)) for name in layout["model"]})
    moments: dict[str, Named | list[NDArray[Any]]] = {}
    for attribute in _MOMENTS:
        names = layout.get(attribute)
        if isinstance(names, int):
            moments[attribute] = [next(arrays) for _ in range(names)]
        elif names is not None:
            moments[attribute] = {name: next(arrays) for name in names}
    return model, moments


def _plain(metrics: MetricsByRound) -> dict[str, dict[int, dict[str, Any]]]:
    """By kind and round, as JSON holds it."""
    return {
        kind: {number: dict(record) for number, record in records.items()}
        for kind, records in metrics.items()
    }
