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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from niss.errors import ConfigError, RunFolderError
from niss.files import lock_file, read_private, write_atomically
from niss.protocol import Identity, SecretBytes, load_identity
from niss.session.books import RunState
from niss.session.proposal import IN_HEX
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


def server_identity(key: str | Path | None, folder: ServerFolder | None) -> Identity:
    """That in the key file, or the one that the run in the folder began with, or a new one."""
    if key is not None:
        return load_identity(Path(key).expanduser())
    saved = None if folder is None else folder.read()
    known = None if saved is None else saved.identity
    return Identity.generate(os.urandom) if known is None else Identity(known)


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


def plain(metrics: MetricsByRound) -> dict[str, dict[int, dict[str, Any]]]:
    """By kind and round, as JSON holds it."""
    return {
        kind: {number: dict(record) for number, record in records.items()}
        for kind, records in metrics.items()
    }
