"""What a server keeps of a run, so that the run goes on after the ServerApp or the SuperLink was killed.

`RunFolder` is a folder for the server alone (mode 0700, its files 0600):

    state.json   the run: proposal, members, what is held against them, the account, metrics, and which rounds are done;
                 secrets among it: the server's key where it has no key file, and where there is no tracker the
                 beacon holder's key and the seed of the chain
    arrays-N.npz the model after round N, and the moments of the wrapped strategy

The arrays are written before the state that names them, each file whole or not at all, so a kill at any moment leaves a
state and the arrays that belong to it.

`RunRecorder` drives a strategy as Flower does, and saves: when the run begins, before anyone is asked to join it; when
a round is opened, before anyone is asked to answer it; when its sum is in the model; and with the metrics that follow.

**Nothing is charged twice.** A client answers no attempt of a round a second time, and pays before it answers. So a
round that was open when the server died is given up and charged, as those asked may have paid for it, and the run goes
on with the next. A round that nobody was asked about is begun anew. Clients enrol again under the same proposal, which
costs them nothing, and are known by their identity.
"""

from __future__ import annotations

import io
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from niss.errors import ConfigError, PrivacyError, RunFolderError
from niss.files import lock_file, parse_json, read_private, write_atomically
from niss.flower.account import Pending
from niss.protocol import Identity, SecretBytes

if TYPE_CHECKING:
    from niss.flower.strategy import NissStrategy

LOG = logging.getLogger("flwr")
_STATE, _VERSION = "state.json", 1
_DAMAGED = "restore the folder from a copy, or start a new run in a new one"
# What Flower's strategies that average carry from round to round: FedAdam, FedYogi and FedAdagrad, and FedAvgM.
_MOMENTS = ("m_t", "v_t", "momentum_vector")
_KILLED = "the server ended while it was open; it is charged to those who were asked"

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
Named = dict[str, NDArray[Any]]
MetricsByRound = dict[str, dict[int, MetricRecord]]
"""By kind (`train`, `evaluate`, `server`) and round."""


@dataclass(frozen=True)
class Saved:
    """A run as it was saved.

    done      rounds that are over
    pending   the round that was open, if one was
    session   `Session.to_json`
    account   `Account.saved`
    metrics   by kind and round, in text, the metrics so far
    model     after the last round that is done
    moments   by attribute of the wrapped strategy: what it carries from round to round
    """

    done: int
    pending: Pending | None
    session: dict[str, Any]
    account: dict[str, Any]
    metrics: dict[str, dict[str, dict[str, Any]]]
    model: ArrayRecord
    moments: dict[str, Named | list[NDArray[Any]]]


class RunFolder:
    """Where a run is saved; made for its owner alone, and refused where others can enter it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = stat.S_IMODE(self._folder.stat().st_mode)
        except OSError as error:
            raise ConfigError(f"cannot use {folder}: {error.strerror}", field="resume") from None
        if os.name == "posix" and mode & 0o077:
            raise PrivacyError(
                f"others on this machine have rights to {folder} (mode {mode:04o})",
                hint=f"chmod 700 {folder}",
            )

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

    def identity(self) -> SecretBytes | None:
        """The secret of the server's identity, where it was saved here."""
        values = self._values()
        secret = None if values is None else values["identity"]
        return None if secret is None else SecretBytes(bytes.fromhex(secret))

    def load(self, rounds: int) -> Saved | None:
        """The run that was saved here, None where there is none; `ConfigError` if it is not one of so many rounds."""
        values = self._values()
        if values is None:
            return None
        if values["rounds"] != rounds:
            raise ConfigError(
                f"the saved run is one of {values['rounds']} rounds, not {rounds}",
                field="resume",
                hint="give the number of rounds of that run, or a new folder",
            )
        try:
            model, moments = _unpack((self._folder / values["arrays"]).read_bytes(), values["layout"])
            pending = values["pending"]
            return Saved(
                int(values["done"]),
                None if pending is None else Pending.from_json(pending),
                values["session"],
                values["account"],
                values["metrics"],
                model,
                moments,
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"the run saved in {self._folder} is damaged ({type(error).__name__})", hint=_DAMAGED
            ) from None

    def write_arrays(self, done: int, model: ArrayRecord, inner: Strategy) -> dict[str, Any]:
        """Write model and moments after so many rounds; returns what `write` must be given of them."""
        content, layout = _pack(model, inner)
        name = f"arrays-{done}.npz"
        write_atomically(self._folder / name, content, temporary=self._folder / ".arrays.new")
        return {"arrays": name, "layout": layout}

    def write(self, values: Mapping[str, Any]) -> None:
        """Replace the state, and remove the arrays that it does not name."""
        text = SecretBytes(json.dumps({"version": _VERSION, **values}).encode())
        write_atomically(self._folder / _STATE, text, temporary=self._folder / ".state.new")
        for path in self._folder.glob("arrays-*.npz"):
            if path.name != values["arrays"]:
                path.unlink(missing_ok=True)

    def _values(self) -> dict[str, Any] | None:
        path = self._folder / _STATE
        try:
            text = SecretBytes(read_private(path))
        except FileNotFoundError:
            return None
        values = _parsed(text)
        if values is None:
            raise RunFolderError(
                f"{path} is damaged, or was written by another version of niss", hint=_DAMAGED
            )
        return values


def saved_or_new(folder: RunFolder | None) -> Identity:
    """The server's identity: the one that the run in the folder began with, or a new one."""
    secret = None if folder is None else folder.identity()
    return Identity.generate(os.urandom) if secret is None else Identity(secret)


def _parsed(text: SecretBytes) -> dict[str, Any] | None:
    try:
        values = parse_json(text.decode())
        return values if values["version"] == _VERSION else None
    except (ValueError, KeyError, TypeError):
        return None


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


class RunRecorder(Strategy):
    """Runs a `NissStrategy`, from where it stopped, with its metrics and report kept up to date.

    Flower counts rounds from 1 in each `start`; the strategy is called with the number of the round in the run.
    """

    def __init__(self, strategy: NissStrategy, folder: RunFolder | None, rounds: int) -> None:
        self._strategy, self._folder, self._rounds = strategy, folder, rounds
        self._done = self._before = 0
        self._arrays: dict[str, Any] = {}
        self.metrics: MetricsByRound = {"train": {}, "evaluate": {}, "server": {}}
        strategy.save = self._save

    def run(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: Evaluate | None,
    ) -> Result:
        """The rounds that are left; the result has the metrics of those before too."""
        with nullcontext() if self._folder is None else self._folder.locked():
            self._model = arrays
            if self._folder is not None:
                self._resume(self._folder)
            evaluate = None if evaluate_fn is None else self._evaluation(evaluate_fn)
            left = self._rounds - self._before
            result = self.start(grid, self._model, left, timeout, train_config, evaluate_config, evaluate)
        if not result.arrays and self._before:
            result.arrays = self._model
        result.train_metrics_clientapp = self.metrics["train"]
        result.evaluate_metrics_clientapp = self.metrics["evaluate"]
        result.evaluate_metrics_serverapp = self.metrics["server"]
        return result

    def _resume(self, folder: RunFolder) -> None:
        strategy = self._strategy
        if not type(strategy.inner).__module__.startswith("flwr."):
            LOG.warning(
                "niss: of what %s carries from round to round, %s are saved, and nothing else",
                type(strategy.inner).__name__,
                ", ".join(_MOMENTS),
            )
        saved = folder.load(self._rounds)
        if saved is None:
            return
        strategy.restore(saved.session, saved.account)
        self._model, self._done = saved.model, saved.done
        for attribute, value in saved.moments.items():
            setattr(strategy.inner, attribute, value)
        for kind, records in saved.metrics.items():
            self.metrics[kind] = {int(number): MetricRecord(values) for number, values in records.items()}
        if saved.pending is not None:
            strategy.account.lose(saved.pending, _KILLED)
            self._done = saved.pending.round
        self._before = self._done
        strategy.account.resumed += 1
        self._arrays = folder.write_arrays(self._done, self._model, strategy.inner)
        self._save()
        LOG.info("niss: going on after round %d of %d", self._done, self._rounds)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        number, strategy = self._before + server_round, self._strategy
        self._model = arrays
        if self._folder is not None and not self._arrays:
            self._arrays = self._folder.write_arrays(self._done, arrays, strategy.inner)
            self._save()
        messages = list(strategy.configure_train(number, arrays, config, grid))
        if (pending := strategy.pending) is not None:
            self._save(pending)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        number, strategy = self._before + server_round, self._strategy
        arrays, metrics = strategy.aggregate_train(number, replies)
        self._model = self._model if arrays is None else arrays
        self._done = number
        if metrics is not None:
            self.metrics["train"][number] = metrics
        if self._folder is not None and self._arrays:
            self._arrays = self._folder.write_arrays(number, self._model, strategy.inner)
        self._keep()
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._strategy.configure_evaluate(self._before + server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        number = self._before + server_round
        metrics = self._strategy.aggregate_evaluate(number, replies)
        if metrics is not None:
            self.metrics["evaluate"][number] = metrics
            self._keep()
        return metrics

    def summary(self) -> None:
        self._strategy.summary()

    def _evaluation(self, evaluate: Evaluate) -> Evaluate:
        """The evaluation on the server, with the round's number in the run."""

        def evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            number = self._before + server_round
            metrics = evaluate(number, arrays)
            if metrics is not None:
                self.metrics["server"][number] = metrics
                self._keep()
            return metrics

        return evaluated

    def _keep(self) -> None:
        self._strategy.write_report(self.metrics)
        self._save()

    def _save(self, pending: Pending | None = None) -> None:
        if self._folder is None or not self._arrays:
            return
        strategy = self._strategy
        secret = strategy.secret_to_save
        self._folder.write(
            {
                **self._arrays,
                "rounds": self._rounds,
                "done": self._done,
                "pending": None if pending is None else asdict(pending),
                "identity": None if secret is None else secret.hex(),
                "session": strategy.session.to_json(),
                "account": strategy.account.saved(),
                "metrics": {
                    kind: {str(number): dict(record) for number, record in records.items()}
                    for kind, records in self.metrics.items()
                },
            }
        )
