"""Where both sides keep what must not be forgotten: a client between messages, a server from round to round.

**Client.** Its identity, the protocol's memory, what it agreed to, what it spent. Flower gives a ClientApp one durable
thing, the Context of a run, and in a deployment saves it only after the reply has left: a crash in between brings back
an old Context. A node that has a folder of its own (`niss-state`) does not depend on the Context. There everything is
on disk before anything is sent, and one budget holds for all runs together:

    identity.key   the identity, as `niss keys new` makes it; made at first use where there is none
    notes          the `ClientState`: protocol memory with its one-time keys, and what was agreed to; mode 0600
    ledger.jsonl   what was spent, in every run, against one budget; mode 0600
    limits.json    the owner's limit when a run was last answered, for `niss account`; nothing rests on it

The folder has mode 0700. Notes and ledger name each other: the notes say what the head of the ledger was, each charge
how often the notes had been written. A ledger that is gone or was cut, and notes that were put back to before a charge,
are noticed and refused. Nothing here notices a copy of the whole folder; against that each reply carries a step.

A folder, and its ledger, is of one unit and one dataset: a run that hides records is refused where whole clients were
charged, and the other way round.

A Context has one record, `niss`, with the identity, the same `notes`, the budget, the sums of mu^2 in the joint and the
marginal view, the slots that were taken, the number of charges, and what their grids cost in delta.

**Server.** The run, so that it goes on after the ServerApp or the SuperLink was killed.
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
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from niss.accounting import Charge, ChargeableLedger, Ledger, LedgerFile, LedgerHeader
from niss.errors import ConfigError, LocalProtocolError, PrivacyError, RunFolderError
from niss.files import LEDGER, LIMITS, PRIVATE, lock_file, locked_folder, read_private, write_atomically
from niss.mechanism import Slots
from niss.protocol import Identity, SecretBytes, create_keyfile, load_identity
from niss.session.books import RunState
from niss.session.limits import Budget, Spent
from niss.session.proposal import IN_HEX
from niss.session.store import SELF, ClientState, MemoryStore, Store
from niss.settings import check_json, to_values

LOG = logging.getLogger("flwr")
RECORD = "niss"
OWN_KEY, NOTES = "identity.key", "notes"
_START_ANEW = (
    "it could answer a round twice, or overspend; a new folder and identity are a new budget on the same data"
)
_CONTEXT = {"identity", "notes", "joint", "marginal", "charges", "failures", "slots", "budget", "unit"}
_STATE = "state.json"
_DAMAGED = "restore the folder from a copy, or start a new run in a new one"
# What Flower's strategies that average carry from round to round: FedAdam, FedYogi and FedAdagrad, and FedAvgM.
_MOMENTS = ("m_t", "v_t", "momentum_vector")

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
Named = dict[str, NDArray[Any]]
MetricsByRound = dict[str, dict[int, MetricRecord]]
"""By kind (`train`, `evaluate`, `server`) and round."""


class ContextStore(MemoryStore):
    """Keeps everything in the Context of a run: all there is in a simulation, and gone with the run."""

    def __init__(self, context: Context) -> None:
        super().__init__(os.urandom)
        self._context = context
        record: Any = context.state.config_records.get(RECORD)
        if record is None:
            return
        if missing := _CONTEXT - record.keys():
            raise LocalProtocolError(
                f"this client's Context has no {min(missing)!r}: another version of niss wrote it",
                hint=_START_ANEW,
            )
        self.identity = Identity(record["identity"])
        self.state = ClientState.from_bytes(record["notes"])
        self.charged = Ledger(*(np.array([record[name]]) for name in ("joint", "marginal", "charges")))
        self.charged.slots = {0: _slots(record["slots"])}
        if record["budget"]:
            delta, failing, *most = record["budget"]
            unit, dataset = record["unit"]
            whole = _slots(most) if len(most) > 1 else most[0]
            self.budget = Budget(whole, delta, failing, unit=unit, dataset=dataset)
        self.failures = float(record["failures"])

    def save(self) -> None:
        super().save()
        first = self.budget or Budget(math.inf, 0.0, 0.0)
        most = _flat(first.most) if isinstance(first.most, Slots) else [first.most]
        self._context.state[RECORD] = ConfigRecord(
            {
                "identity": bytes(self.identity.secret_bytes()),
                "notes": bytes(self.state.to_bytes()),
                "joint": float(self.charged.joint_squared[0]),
                "marginal": float(self.charged.marginal_squared[0]),
                "charges": int(self.charged.participations[0]),
                "failures": self.failures,
                "slots": _flat(self.charged.slots.get(0, Slots())),
                "budget": [] if self.budget is None else [first.delta, first.delta_failure, *most],
                "unit": [first.unit, first.dataset],
            }
        )


class FolderStore(Store):
    """Keeps everything in a folder of the node; `open_store` locks it for one process at a time.

    Raises `PrivacyError` for a folder in which something is missing or older than the rest, or that others can enter:
    a client without its memory could answer a round twice, one without its ledger overspend.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._ledger = folder, folder / LEDGER
        _require_private(folder, "700")
        key = folder / OWN_KEY
        if not key.exists():
            if (folder / NOTES).exists() or self._ledger.exists():
                raise PrivacyError(
                    f"{folder} has been used before but has no identity",
                    hint="restore its key file, or use a new folder",
                )
            create_keyfile(key, Identity.generate(os.urandom))
        self.identity = load_identity(key)
        try:
            saved = SecretBytes(read_private(folder / NOTES, follow_links=True))
            self.state = ClientState.from_bytes(saved)
        except FileNotFoundError:
            self.state = ClientState()
        if self._ledger.exists():
            self._check_ledger()
        elif self.state.ledger is not None:
            raise PrivacyError(f"{folder} has lost its ledger, the file {LEDGER!r}", hint=_START_ANEW)

    def _check_ledger(self) -> None:
        """Ledger and notes must name each other."""
        if not self.state.saves:
            raise PrivacyError(
                f"{self._folder} has a ledger but has lost its memory, the file {NOTES!r}", hint=_START_ANEW
            )
        if self.state.ledger is None and not stat.S_IMODE(self._ledger.stat().st_mode) & 0o022:
            # Made, and not yet closed to those who could not enter the folder either, when this client was killed.
            self._ledger.chmod(PRIVATE)
        _require_private(self._ledger, "600")
        ledger = LedgerFile.read(self._ledger, expected_head=self.state.ledger)
        paid = all(
            SELF in entry.charges and entry.charges[SELF].grid_delta is not None for entry in ledger.entries
        )
        if not paid or any("notes" not in entry.basis for entry in ledger.entries):
            raise PrivacyError(
                f"{self._ledger} has charges that this version of niss did not write", hint=_START_ANEW
            )
        if self.state.saves < max((int(entry.basis["notes"]) for entry in ledger.entries), default=0):
            raise PrivacyError(
                f"the file {NOTES!r} in {self._folder} is older than the last charge of its ledger",
                hint=_START_ANEW,
            )

    def save(self) -> None:
        self.state.saves += 1
        path = self._folder / NOTES
        write_atomically(path, self.state.to_bytes(), temporary=self._folder / f".{NOTES}.new")

    def spent(self, budget: Budget) -> Spent:
        self._note_limits(budget)
        if not self._ledger.exists():
            return Spent(Slots() if budget.unit == "record" else 0.0, self.state.failures, budget)
        return self.spent_by(LedgerFile.read(self._ledger))

    def spent_by(self, ledger: LedgerFile) -> Spent:
        """`spent`, of a ledger that is open."""
        header, most = ledger.header, ledger.budget(SELF)
        first = Budget(
            math.inf if most is None else most,
            header.delta,
            header.delta_failure,
            unit=header.unit,
            dataset=header.dataset,
        )
        grids = math.fsum(entry.charges[SELF].grid_delta or 0.0 for entry in ledger.entries)
        return Spent(ledger.spent(SELF), grids + self.state.failures, first)

    def ledger(self, run: str, relation: str, budget: Budget) -> ChargeableLedger:
        self._note_limits(budget)
        return _FolderLedger(self, self._ledger, run, relation, budget)

    def _note_limits(self, budget: Budget) -> None:
        limits = {} if budget.ceiling is None else {**asdict(budget.ceiling), "failures": self.state.failures}
        path, text = self._folder / LIMITS, (json.dumps(limits) + "\n").encode()
        if not path.exists() or path.read_bytes() != text:
            write_atomically(path, text)


@dataclass(frozen=True)
class _FolderLedger:
    """One ledger file for all runs: rounds are numbered as they come, and the basis says which run they were of."""

    store: FolderStore
    path: Path
    run: str
    relation: str
    budget: Budget

    def charge(
        self, round: int, attempt: int, charges: Mapping[str, Charge], basis: Mapping[str, Any]
    ) -> None:
        state = self.store.state
        with self._open() as ledger:
            counted, this = ledger.header.relation, {"run": self.run, "round": round, "attempt": attempt}
            if any(this.items() <= entry.basis.items() for entry in ledger.entries):
                raise PrivacyError(f"round {round}, attempt {attempt}, of this run was charged before")
            if counted == "zero-out" and self.relation != "zero-out":
                # A round that hides more also hides this: its mu is for twice the distance.
                basis = {**basis, "relation": self.relation}
            elif counted != self.relation:
                raise PrivacyError(
                    f"this node's ledger counts {counted}, but the run hides only {self.relation}"
                )
            if self.budget.promises and ledger.budget(SELF) is None:
                raise PrivacyError(
                    f"{self.path} was started without a budget, so it can promise nothing",
                    hint="use a new niss-state folder, with a new identity; what left before stays uncovered",
                )
            charge = self.store.spent_by(ledger).require_room(self.budget, charges[SELF])
            basis = {**basis, **this, "notes": state.saves}
            ledger.charge(len(ledger.entries), 0, {SELF: charge}, basis)
            state.ledger = ledger.head
        self.store.save()

    def _open(self) -> LedgerFile:
        """The node's ledger; the first run that charges it fixes budget and relation for all that follow."""
        if self.path.exists():
            return LedgerFile.open(self.path)
        most = self.budget.most.rounds if isinstance(self.budget.most, Slots) else self.budget.most
        ledger = LedgerFile.create(
            self.path,
            LedgerHeader(
                run="all runs of this node",
                budgets={SELF: most if self.budget.promises else None},
                delta=self.budget.delta,
                unit=self.budget.unit,
                dataset=self.budget.dataset,
                relation=self.relation,
                delta_failure=self.budget.delta_failure,
            ),
        )
        self.path.chmod(PRIVATE)  # Until now nobody else could reach it: the folder is private.
        return ledger


def _flat(slots: Slots) -> list[float]:
    """Slots as Flower's Context holds them: q, z and how many, one after the other."""
    return [float(value) for one in slots.rounds for value in one]


def _slots(flat: list[float]) -> Slots:
    return Slots.of(
        *((q, z, int(count)) for q, z, count in zip(flat[::3], flat[1::3], flat[2::3], strict=True))
    )


def _require_private(path: Path, wanted: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise PrivacyError(
            f"others on this machine have rights to {path} (mode {mode:04o})", hint=f"chmod {wanted} {path}"
        )


def _make_folder(folder: Path, field: str) -> None:
    """Make a folder that does not exist, for its owner alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(folder, os.O_RDONLY))  # As it is opened when it is locked.
    except OSError as error:
        raise ConfigError(f"cannot use {folder}: {error.strerror}", field=field) from None


@contextmanager
def open_store(context: Context, folder: Path | None) -> Iterator[Store]:
    """The store in `folder`, while no other process uses it, or in the Context where there is no folder.

    A folder that does not exist is made, for its owner alone.
    """
    if folder is None:
        yield ContextStore(context)
        return
    _make_folder(folder, "niss-state")
    with locked_folder(folder):
        yield FolderStore(folder)


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
        _make_folder(self._folder, "resume")
        _require_private(self._folder, "700")

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
