"""What a server keeps of a run, so that the run goes on after the ServerApp or the SuperLink was killed.

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
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from niss.errors import ConfigError, PrivacyError, RunFolderError
from niss.files import lock_file, parse_json, read_private, write_atomically
from niss.protocol import Identity, SecretBytes

LOG = logging.getLogger("flwr")
_STATE, _VERSION = "state.json", 1
_DAMAGED = "restore the folder from a copy, or start a new run in a new one"
# What Flower's strategies that average carry from round to round: FedAdam, FedYogi and FedAdagrad, and FedAvgM.
_MOMENTS = ("m_t", "v_t", "momentum_vector")

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
Named = dict[str, NDArray[Any]]
MetricsByRound = dict[str, dict[int, MetricRecord]]
"""By kind (`train`, `evaluate`, `server`) and round."""


@dataclass(frozen=True)
class Saved:
    """A run as it was saved.

    done      rounds that are over
    session   `Session.to_json`
    metrics   so far
    model     after the last round that is done
    """

    done: int
    session: dict[str, Any]
    metrics: MetricsByRound
    model: ArrayRecord


class ServerFolder:
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

    def load(self, rounds: int, inner: Strategy) -> Saved | None:
        """The run that was saved here, None where there is none; `ConfigError` if it is not one of so many rounds.

        The wrapped strategy is given back what it carries from round to round.
        """
        if not type(inner).__module__.startswith("flwr."):
            LOG.warning(
                "niss: of what %s carries from round to round, %s are saved, and nothing else",
                type(inner).__name__,
                ", ".join(_MOMENTS),
            )
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
            metrics = {
                kind: {int(number): MetricRecord(record) for number, record in records.items()}
                for kind, records in values["metrics"].items()
            }
            saved = Saved(int(values["done"]), values["session"], metrics, model)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"the run saved in {self._folder} is damaged ({type(error).__name__})", hint=_DAMAGED
            ) from None
        for attribute, value in moments.items():
            setattr(inner, attribute, value)
        return saved

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


def saved_or_new(folder: ServerFolder | None) -> Identity:
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


def plain(metrics: MetricsByRound) -> dict[str, dict[str, dict[str, Any]]]:
    """By kind and round, as JSON holds it."""
    return {
        kind: {str(number): dict(record) for number, record in records.items()}
        for kind, records in metrics.items()
    }
