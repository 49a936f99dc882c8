"""The client's side on Flower: a mod that trains nothing itself and lets no bare update out.

    app = ClientApp(mods=[niss_mod])

It must be the first mod: one before it would get the upload after it was signed, and could change it. Mods after it
stand between it and the app, and see the bare update on this node. Whatever is not a round of NISS does not reach the
app: `evaluate` at weights of the server's choice gives a gradient by differences, and so does any other door.
`NissMod(allow=("evaluate",))` opens one knowingly; `NissMod(metrics=...)` sends metrics inside the upload instead.

**Where a run hides single records** the app's training is not called: one local step of an app has no bound on what a
record moves. `NissMod(records=...)` names model, loss and data, and the mod draws the batch, sums and clips
(`niss.records`) and hides. Nothing else of a node leaves then: metrics are refused, since one record moves them further
than its clip.

What happens to a round: `take_request` takes our record out of the message, and `niss.session.node` checks and charges
it. Only then the app trains, and the difference of the weights is clipped, noised and signed. An app that fails,
however it fails, uploads a blank, zeros like any other update: what it says about its data in an exception, an error or
a NaN does not leave. So does one that is late, where the run has a deadline: it trains in a thread of its own with a
copy of the Context, whatever it makes after the deadline is dropped, and the process of a deployment ends with the
reply. The node's own log counts blanks; `niss-raises=true` in its configuration, which no server writes, lets a failure
out.
"""

from __future__ import annotations

import contextvars
import copy
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from niss.accounting import Ledger
from niss.errors import ConfigError, LocalProtocolError, NissError, ProtocolError, RemoteProtocolError
from niss.files import locked_folder
from niss.flower.transport import OURS, RECORD, Model, records_of, take_request, to_content
from niss.mechanism import Slots
from niss.mechanism.blocks import Blocks
from niss.protocol.keys import Identity
from niss.records import Records
from niss.redaction import printable
from niss.session.limits import Budget, Limits
from niss.session.metrics import NoisyMetrics
from niss.session.node import Node, Training, shown
from niss.session.ports import Reply, Request, Stage
from niss.session.store import START_ANEW, ClientState, FolderStore, MemoryStore, Store, make_folder
from niss.tracker.coordinator import NodesTracker

# Flower's own logger, so that its settings decide what is shown.
LOG = logging.getLogger("flwr")
# Flower has no code of its own for "the client declines".
REFUSED = 901

_DOORS = ("evaluate", "query")
"""What may be opened; `train` never is, and message types of Flower's past are not known to any app that has a mod."""
_ONLY_ROUNDS = "this client answers NISS rounds only"
_OUT_OF_ORDER = "this node cannot answer; its own log says why"
_CONTEXT = {"identity", "notes", "joint", "marginal", "charges", "failures", "slots", "budget", "unit"}
Made = TypeVar("Made")


class _LateError(Exception):
    """The deadline of the round has passed."""


class _AppError(Exception):
    """The app failed, and its node lets that out."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


class NissMod:
    """A mod for a ClientApp, with limits of its own and with what may pass beside NISS.

    limits         what this client insists on; the node's own configuration takes precedence
    allow          other messages that reach the app and are answered without any protection: `evaluate`, `query`
    metrics        by name the ranges (least, greatest) of metrics of `train` that may travel inside the upload, hidden
                   and charged with it (`niss.session.metrics`); a run that wants others, or other ranges, is declined
    clear_metrics  names of metrics of `train` that are sent as they are, without any protection; no others are sent
    records        what is learned, for runs that hide single records: a `Records`, or a function that gives the one of
                   a node's Context, asked with every message. The server sends its trained parameters and nothing
                   else, in the order of `Records.weights`

    Raises `ConfigError` for a name that cannot be allowed, for a range that is empty or not finite, and for metrics and
    open doors beside records.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        records: Records | Callable[[Context], Records] | None = None,
        allow: Collection[str] = (),
        metrics: Mapping[str, tuple[float, float]] | None = None,
        clear_metrics: Collection[str] = (),
    ) -> None:
        self._limits, self._records = Limits() if limits is None else limits, records
        for name, given in (("metrics", metrics), ("clear_metrics", clear_metrics), ("allow", allow)):
            if records is not None and given:
                raise ConfigError(
                    "says of a silo's records what no noise hides: one of them moves it further than its clip",
                    field=name,
                    hint="leave it out, and evaluate on public data at the server",
                )
        self._metrics, self._clear = NoisyMetrics(dict(metrics or {})), frozenset(clear_metrics)
        if both := self._clear & self._metrics.ranges.keys():
            raise ConfigError(f"{min(both)!r} is hidden as well", field="clear_metrics", hint="choose one")
        self._allow = frozenset((allow,) if isinstance(allow, str) else allow)
        if unknown := self._allow - set(_DOORS):
            raise ConfigError(
                f"{min(unknown)!r} cannot be opened", field="allow", hint="use some of: " + ", ".join(_DOORS)
            )

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message of Flower's; `call_next` is the app, or the mod after this one."""
        kind = message.metadata.message_type.partition(".")[0]
        if kind in self._allow:
            return call_next(message, context)
        request = None
        try:
            if kind == "train":
                request = take_request(message.content)
            if request is None:
                return _decline(message, _ONLY_ROUNDS)
            limits, records = self._limits.of_node(context.node_config), self._records_of(context)
            with open_store(context, limits.state) as store:
                model = _model_of(request, message.content)
                if records is not None and model is not None:
                    _require_trained(model, records)
                tracker = NodesTracker(store.identity, limits.tracker_ca, _log)
                dataset = "" if records is None else records.name
                node = Node(
                    store,
                    limits,
                    tracker,
                    metrics=self._metrics,
                    entropy=os.urandom,
                    dataset=dataset,
                    warn=_warn,
                )
                answer = node.answer(request, None if model is None else model.size)
            if isinstance(answer, Training):
                assert model is not None
                if records is None:
                    app = _App(call_next, message, context, limits)
                    answer = self._upload(answer, model, app, request.run)
                else:
                    seconds = answer.deadline
                    answer = answer.upload_records(records, model.vector, lambda rows: _within(seconds, rows))
            if answer.note:
                joined = answer.note.startswith("joined")
                LOG.log(logging.INFO if joined else logging.WARNING, "niss: %s", answer.note)
            return Message(to_content(answer), reply_to=message)
        except _AppError as error:
            raise error.cause from None
        except ProtocolError as error:
            return _decline(message, error.message)
        except Exception as error:
            # Without its own state in order a client cannot even sign that it declines. What is wrong with it, down to
            # the names of its files, is nobody else's business.
            _log(error)
            return _decline(message, _OUT_OF_ORDER)

    def _records_of(self, context: Context) -> Records | None:
        return self._records(context) if callable(self._records) else self._records

    def _upload(self, training: Training, model: Model, app: _App, run: bytes) -> Reply:
        """Train, and hide the update: the app's bare one, which does not leave this process, or a blank.

        Of its metrics those that this node names leave in the clear.
        """
        try:
            update, metrics = app.update(model, training.deadline)
        except Exception as error:
            late = isinstance(error, _LateError)
            blanks = app.note_blank(run)
            LOG.warning(
                "niss: the app %s; a blank takes the place of its update, number %d of this node in the run",
                f"was not done within {training.deadline:g} seconds"
                if late
                else f"failed ({_in_log(error)})",
                blanks,
            )
            LOG.debug("niss: how the app failed", exc_info=not late)
            if app.raises and not late:
                LOG.warning(
                    "niss: raised instead, as niss-raises is set on this node; the round was charged already"
                )
                raise _AppError(error) from error
            return training.blank()
        clear = {name: value for name, value in metrics.items() if name in self._clear}
        # For the owner alone, who may want to know whether the clip fits; never sent.
        LOG.info("niss: the update has norm %.3g, the clip is %g", update.norm, training.terms.clip)
        return training.upload(update, metrics, clear)


class _App:
    """What is behind the mod, for one round on one node."""

    def __init__(
        self, call_next: ClientAppCallable, message: Message, context: Context, limits: Limits
    ) -> None:
        self._call, self._message, self._context, self._limits = call_next, message, context, limits
        self.raises = limits.raises

    def update(self, model: Model, seconds: float | None) -> tuple[Blocks, Mapping[str, object]]:
        """How far it moved the model, and the metrics that it reported; nothing else of either message stays in memory.

        Raises whatever it raises, `_LateError`, and what is wrong with its answer.
        """
        trained = self._train(seconds)
        update = model.update_to(_only_arrays(trained))
        if not math.isfinite(update.largest):
            raise LocalProtocolError("the trained weights are not finite")
        # Now the update alone reads both models, and lets go of them once it is rounded.
        model.arrays.clear()
        self._message.content.clear()
        records = records_of(trained, MetricRecord).values()
        return update, {name: value for record in records for name, value in record.items()}

    def _train(self, seconds: float | None) -> RecordDict:
        # One that is late goes on with a state that nobody keeps.
        own = self._context if seconds is None else copy.deepcopy(self._context)

        def answers() -> Iterator[RecordDict]:
            yield self._call(self._message, own).content  # An error in place of content raises.

        try:
            return next(_within(seconds, answers()))
        except _LateError:
            own = self._context
            raise
        finally:
            self._context.state = own.state

    def note_blank(self, run: bytes) -> int:
        """How many blanks of this node that makes in the run."""
        with open_store(self._context, self._limits.state) as store:
            return store.note_blank(run)


def _within(seconds: float | None, work: Iterator[Made]) -> Iterator[Made]:
    """What `work` yields, made in a thread of its own; raises what it raises, and `_LateError` once the time is over.

    Python ends no thread: a late one works until it has something to hand over, which nobody takes. None: no limit,
    and no thread.
    """
    if seconds is None:
        yield from work
        return
    ends, made, over = time.monotonic() + seconds, queue.Queue[tuple[str, object]](1), threading.Event()

    def make() -> None:
        try:
            for one in work:
                made.put(("made", one))
                if over.is_set():
                    return
            made.put(("done", None))
        except BaseException as error:
            made.put(("failed", error))

    threading.Thread(target=contextvars.copy_context().run, args=(make,), daemon=True).start()
    try:
        while True:
            try:
                what, value = made.get(timeout=max(ends - time.monotonic(), 0.0))
            except queue.Empty:
                raise _LateError from None
            if what == "failed":
                assert isinstance(value, BaseException)
                raise value
            if what == "done":
                return
            yield cast("Made", value)
    finally:
        over.set()
        with suppress(queue.Empty):
            made.get_nowait()


class ContextStore(MemoryStore):
    """Keeps everything in the Context of a run, as one record: all there is in a simulation, and gone with the run.

    In a deployment Flower saves it only after the reply has left: a crash in between brings back an old one, against
    which each reply carries a step. A node with a folder of its own (`niss-state`) does not depend on it.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(os.urandom)
        self._context = context
        record: Any = context.state.config_records.get(RECORD)
        if record is None:
            return
        if missing := _CONTEXT - record.keys():
            raise LocalProtocolError(
                f"this client's Context has no {min(missing)!r}: another version of niss wrote it",
                hint=START_ANEW,
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


def _flat(slots: Slots) -> list[float]:
    """Slots as Flower's Context holds them: q, z and how many, one after the other."""
    return [float(value) for one in slots.rounds for value in one]


def _slots(flat: list[float]) -> Slots:
    return Slots.of(
        *((q, z, int(count)) for q, z, count in zip(flat[::3], flat[1::3], flat[2::3], strict=True))
    )


@contextmanager
def open_store(context: Context, folder: Path | None) -> Iterator[Store]:
    """The store in `folder`, while no other process uses it, or in the Context where there is no folder.

    A folder that does not exist is made, for its owner alone.
    """
    if folder is None:
        yield ContextStore(context)
        return
    make_folder(folder, "niss-state")
    with locked_folder(folder):
        yield FolderStore(folder)


def _model_of(request: Request, content: RecordDict) -> Model | None:
    """The model that a round sends along, decoded before anything is charged; None in the other stages."""
    if request.stage is not Stage.ROUND:
        return None
    try:
        return Model.of(_only_arrays(content))
    except NissError:
        raise
    except Exception:
        # An array of somebody else's making can raise anything.
        raise RemoteProtocolError("the arrays of the message cannot be read") from None


def _require_trained(model: Model, records: Records) -> None:
    """Refuse, before anything is charged, a model that is not what these records are learned with."""
    if model.size != (size := records.weights.size):
        raise RemoteProtocolError(
            f"the model that was sent has {model.size} numbers, and {size} are trained on this node",
            hint="send the trained parameters alone: no buffers, nothing frozen",
        )


def _only_arrays(content: RecordDict) -> ArrayRecord:
    """The record of arrays in a message, which must be the model and nothing else."""
    records = list(records_of(content, ArrayRecord).values())
    if len(records) != 1:
        raise LocalProtocolError(f"expected one record of arrays, the model, but got {len(records)}")
    return records[0]


def _in_log(error: Exception) -> str:
    """An error for this node's own log."""
    return shown(error) if isinstance(error, NissError) else type(error).__name__


def _log(error: Exception) -> None:
    _warn(_in_log(error))


def _warn(words: str) -> None:
    LOG.warning("niss: %s", words)


def _decline(message: Message, reason: str) -> Message:
    """An error in Flower's terms, unsigned: there is no identity yet to sign with, or no run to refuse."""
    LOG.warning("niss: declined: %s", printable(reason))
    return Message(Error(REFUSED, f"{OURS}{reason}"), reply_to=message)


niss_mod = NissMod()
"""The mod with nothing pinned but what the node's own configuration pins."""
