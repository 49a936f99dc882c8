"""NISS in Flower's messages: one record beside, or instead of, what the app itself sends.

Everything is a Flower message of type `train` with a stage (`niss.session.ports`), because a mod only sees the
actions that an app registered. The record `niss` of a message has the request; the record `niss-upload` of the answer
has the reply's body, and a round's request goes beside the app's own records.

A model's arrays become one vector, and a vector arrays again, in `Model`. Only arrays of floating-point numbers take
part. Integers (the step counters of some layers) are not part of an update, since a single counter would use up the
whole clip; they stay as the server sent them.

What the wrapped strategy gets to see is here too: nodes that could take part, and metrics that clients let out; and
what is said of a round.
"""

from __future__ import annotations

import io
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import SType
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from niss.accounting import Plan
from niss.accounting.assumed import most_dropped
from niss.errors import ConfigError, LocalProtocolError, ProtocolError, RemoteProtocolError
from niss.mechanism.blocks import Blocks
from niss.redaction import printable
from niss.runs import RoundRecord
from niss.session.ports import NO_REPLY, Reply, Request, Stage, in_words
from niss.version import __version__

LOG = logging.getLogger("flwr")
RECORD = "niss"
UPLOAD = "niss-upload"
METRICS = "metrics"
METRICS_FUNCTION = "train_metrics_aggr_fn"
OURS = "niss: "
"""What begins the reason of an unsigned refusal, of a node that has the mod."""
_USE_THE_MOD = "Does its ClientApp have `mods=[niss_mod]`, and is it the first mod?"
_ITS_LOG = "It has NISS and refuses: its own log says why."
_AWAY = "Is it running, and connected? It is asked again."
_LARGEST_STEP = 2**63 - 1
PULLED_BYTES = 2**28
"""About as many bytes of replies are pulled together."""
# After which Flower's grid asks again.
_PULL_SECONDS = 3.0
# A string of bytes as numpy saves it, and nothing else that numpy could read: the header is text that it evaluates.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00(?P<size>..)"
    rb"(?P<header>\{'descr': '\|u1', 'fortran_order': False, 'shape': \((?P<length>[0-9]{1,15}),\), \} {0,200}\n)",
    re.DOTALL,
)

# Deviations of noise from which on blanks are said to be there: in one round of 30,000 without any.
_SURELY = 4.0
# And the least part of the uploads that is worth a warning, where a plan has no noise.
_FEW = 0.01


FloatArray = NDArray[np.float64]
MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]
Value = TypeVar("Value")


def to_record(request: Request) -> ConfigRecord:
    """The record `niss` of a message to a client."""
    return ConfigRecord(
        {
            "stage": request.stage.value,
            "body": request.body,
            "after": request.after,
            "run": request.run,
            "summed": request.summed,
        }
    )


def to_content(reply: Reply) -> RecordDict:
    """The content of a message to the server."""
    # An array rather than plain bytes: Flower cuts large arrays into pieces, not large bytes.
    body = Array(np.frombuffer(reply.body, dtype=np.uint8))
    content = RecordDict({RECORD: ConfigRecord({"step": reply.step}), UPLOAD: ArrayRecord({"body": body})})
    if reply.clear:
        content[METRICS] = MetricRecord(dict(reply.clear))  # type: ignore[arg-type]
    return content


def records_of(content: RecordDict, kind: type[Value]) -> dict[str, Value]:
    """The records of one kind, by name.

    Flower's own `array_records` and its like refer to themselves and to the whole content, so that nothing of a message
    that they were asked of is freed before the garbage collector comes by: with large models, several messages later.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def take_request(content: RecordDict) -> Request | None:
    """Take our record out of a message, so that the app does not see it; None where there is none.

    Raises `RemoteProtocolError` for a record that is not a request.
    """
    record = records_of(content, ConfigRecord).get(RECORD)
    if record is None:
        return None
    del content[RECORD]
    try:
        stage = Stage(_field(record, "stage", str))
    except ValueError:
        raise RemoteProtocolError(
            f"the message has a stage that niss {__version__} on this node does not know: upgrade it"
        ) from None
    return Request(
        stage,
        _field(record, "body", bytes),
        _field(record, "after", int),
        _field(record, "run", bytes),
        _field(record, "summed", int),
    )


def read_reply(message: Message) -> Reply:
    """A client's reply; raises `RemoteProtocolError` for anything else in its place."""
    content = message.content
    note, upload = content.get(RECORD), content.get(UPLOAD)
    if not isinstance(note, ConfigRecord) or not isinstance(upload, ArrayRecord):
        raise RemoteProtocolError(
            "the reply was made without NISS",
            hint=_USE_THE_MOD,
        )
    step = _field(note, "step", int)
    if not 0 <= step <= _LARGEST_STEP:
        raise RemoteProtocolError("the step of the reply is out of range")
    return Reply(_body(upload.get("body")), step, records_of(content, MetricRecord).get(METRICS, {}))


def _body(array: Array | None) -> bytes:
    """The bytes in an array of a reply; raises `RemoteProtocolError` unless it is exactly what `to_content` makes.

    Type, shape and length are compared before anything is made of them: a header can name a shape of 2^80 or nest
    brackets as deep as it likes.
    """
    found = None if array is None or array.stype != "numpy.ndarray" else _NPY.match(array.data)
    if array is None or found is None:
        raise RemoteProtocolError("the body of the reply is not a string of bytes")
    body = array.data[found.end() :]
    if int.from_bytes(found["size"], "little") != len(found["header"]) or int(found["length"]) != len(body):
        raise RemoteProtocolError("the body of the reply is not as long as it says")
    return body


def _field(record: ConfigRecord, name: str, kind: type[Value]) -> Value:
    value = record.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RemoteProtocolError(f"field {name!r} of the message is missing or not of type {kind.__name__}")
    return value


def send_requests(
    grid: Grid, requests: Mapping[int, Request], *, message_type: str, timeout: float | None
) -> dict[int, Reply | str]:
    """Send each node its request, and wait up to `timeout` seconds for the replies."""
    messages = [
        Message(RecordDict({RECORD: to_record(request)}), dst_node_id=node, message_type=message_type)
        for node, request in requests.items()
    ]
    return sort_replies(messages, grid.send_and_receive(messages, timeout=timeout))


def sort_replies(
    sent: Sequence[Message],
    replies: Iterable[Message],
    take: Callable[[int, Reply], None] | None = None,
) -> dict[int, Reply | str]:
    """By node, what came back for the messages in `sent`, or why nothing did; only the first reply of a node counts.

    Flower reports a lost node in the server's name, so the id of the message replied to says whose reply it is. With
    `take`, replies are handed over as they come and nothing of them is kept: a round's are as large as so many models.
    """
    node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    nodes, found, answered = dict.fromkeys(node_of.values()), dict[int, Reply | str](), set[int]()
    for message in replies:
        node = node_of.get(message.metadata.reply_to_message_id, message.metadata.src_node_id)
        if node not in nodes or node in answered:
            continue
        if message.has_error():
            found[node] = printable(message.error.reason or f"error {message.error.code}")
            continue
        try:
            reply = read_reply(message)
            del message.content[UPLOAD]  # The body was copied out of it.
        except Exception as error:
            # Whatever a node sends is at most that node's failure.
            found[node] = in_words(error)
            continue
        answered.add(node)
        found.pop(node, None)
        if take is None:
            found[node] = reply
        else:
            take(node, reply)
    return {node: found.get(node, NO_REPLY) for node in nodes if node in found or node not in answered}


class OneByOne:
    """A grid that hands over a round's replies as they are pulled, a few at a time, however many there are.

    Flower's own waits until all are there, in memory for all of them.

    grid  the one that it stands for, and that does everything else
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        # A grid that waits in its own way is to do so.
        self._flowers = type(grid).send_and_receive.__module__.startswith("flwr.")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send the messages; those of NISS are answered by an iterator, which waits while it is read."""
        messages = list(messages)
        if not self._flowers or not all(RECORD in message.content for message in messages):
            return self._grid.send_and_receive(messages, timeout=timeout)
        largest = max((_size_of(message) for message in messages), default=1)
        # A number is 8 bytes of an upload at most, and 2 of a model at least.
        together = max(1, PULLED_BYTES // (4 * largest))
        sent = [one for one in self._grid.push_messages(messages) if one]  # None: it could not be sent.
        return self._pulled(sent, together, timeout)

    def _pulled(self, waiting: list[str], together: int, timeout: float | None) -> Iterator[Message]:
        ends = time.monotonic() + (math.inf if timeout is None else timeout)
        while waiting and time.monotonic() < ends:
            for some in [waiting[at : at + together] for at in range(0, len(waiting), together)]:
                for reply in self._grid.pull_messages(some):
                    if reply.metadata.reply_to_message_id in waiting:
                        waiting.remove(reply.metadata.reply_to_message_id)
                    yield reply
            if waiting:
                time.sleep(getattr(self._grid, "pull_interval", _PULL_SECONDS))


def _size_of(message: Message) -> int:
    records = records_of(message.content, ArrayRecord).values()
    return max(1, sum(len(array.data) for record in records for array in record.values()))


@dataclass(frozen=True)
class Model:
    """The global model of a round as it was sent: arrays by name, in the order of the message."""

    arrays: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, record: ArrayRecord) -> Self:
        """The model in a record; raises `ConfigError` if nothing in it is a floating-point number."""
        model = cls({name: numbers_of(array) for name, array in record.items()})
        if not model.size:
            raise ConfigError("the model has no floating-point numbers to train", field="arrays")
        return model

    @property
    def size(self) -> int:
        """The length of an update: how many floating-point numbers there are."""
        return sum(array.size for _, array in self._floating)

    @property
    def _floating(self) -> list[tuple[str, NDArray[Any]]]:
        return [item for item in self.arrays.items() if np.issubdtype(item[1].dtype, np.floating)]

    @property
    def vector(self) -> FloatArray:
        """The floating-point numbers one after another, in the order of the message."""
        return np.concatenate([array.astype(np.float64).reshape(-1) for _, array in self._floating])

    def update_to(self, trained: ArrayRecord) -> Blocks:
        """Trained weights minus these, as one vector of float64, each block of which is subtracted when it is read.

        Arrays are matched by name, in whatever order they come. Raises `LocalProtocolError` where names or shapes are
        not those that were sent. Infinities and NaN of a training that diverged are passed on; what to do about them
        is the caller's business.
        """
        if set(trained) != set(self.arrays):
            differing = sorted(set(trained) ^ set(self.arrays))
            raise LocalProtocolError(
                f"the trained arrays are not those that the server sent; they differ in {differing[0]!r}",
                hint="return all arrays of the message, and no others, under the names they came with",
            )
        parts = []
        for name, before in self._floating:
            after = numbers_of(trained[name])
            if after.shape != before.shape:
                raise LocalProtocolError(f"array {name!r} has shape {after.shape} instead of {before.shape}")
            parts.append(_difference(after.reshape(-1), before.reshape(-1)))
        return Blocks.joined(parts)

    def moved_by(self, update: FloatArray) -> ArrayRecord:
        """These weights plus an update of length `size`, in the dtypes they were sent in."""
        if update.shape != (self.size,):
            raise LocalProtocolError(f"expected an update of {self.size} numbers, got shape {update.shape}")
        floating, moved, start = dict(self._floating), dict[str, Array](), 0
        for name, before in self.arrays.items():
            after = before
            if name in floating:
                part = update[start : start + before.size].reshape(before.shape)
                after = np.empty_like(before)
                np.add(before, part, out=after, dtype=np.float64, casting="unsafe")
                start += before.size
            moved[name] = Array(np.asarray(after))
        return ArrayRecord(moved)

    def restored(self, aggregated: ArrayRecord) -> ArrayRecord:
        """What a strategy made of these weights, in their order and dtypes, and with their whole numbers.

        Strategies multiply every array by a float. A counter that came back as one would be a weight from the next
        round on, and use up the clip; a model in half precision would be sent in full. Arrays that a strategy added
        of its own, or gave another shape, are left as they are.
        """
        floating, restored = dict(self._floating), dict(aggregated.items())
        for name, before in self.arrays.items():
            if name in restored and restored[name].numpy().shape == before.shape:
                after = restored[name].numpy().astype(before.dtype) if name in floating else before
                restored[name] = Array(np.asarray(after))
        order = [name for name in self.arrays if name in restored]
        order += [name for name in restored if name not in self.arrays]
        return ArrayRecord({name: restored[name] for name in order})


def numbers_of(array: Array) -> NDArray[Any]:
    """The numbers of an array where they lie in it, read-only; `array.numpy()` makes a copy of them."""
    file = io.BytesIO(array.data)
    if array.stype == SType.NUMPY and np.lib.format.read_magic(file) == (1, 0):
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(file)
        if not in_columns and not dtype.hasobject and min(shape, default=0) >= 0:
            return np.frombuffer(array.data, dtype, math.prod(shape), file.tell()).reshape(shape)
    return array.numpy()


def _difference(after: NDArray[Any], before: NDArray[Any]) -> Blocks:
    def read(start: int, stop: int) -> FloatArray:
        with np.errstate(invalid="ignore", over="ignore"):
            part = np.subtract(after[start:stop], before[start:stop], dtype=np.float64, casting="unsafe")
        return np.asarray(part)

    return Blocks(before.size, read)


def shared_model(messages: Sequence[Message]) -> tuple[Model, str]:
    """The one model that all participants start from, and the name of its record in the messages.

    A sum of updates to different models means nothing: a strategy that sends such is refused with `ConfigError`.
    """
    records = [records_of(message.content, ArrayRecord) for message in messages]
    if any(len(record) != 1 for record in records):
        raise ConfigError("a training message must have exactly one record of arrays", field="strategy")
    key, first = next(iter(records[0].items()))
    for record in records[1:]:
        other = next(iter(record.values()))
        if other is not first and other != first:
            raise ConfigError(
                "sends different arrays to different nodes",
                field="strategy",
                hint="NISS sums updates of one model; use a strategy that sends everyone the same",
            )
    return Model.of(first), key


def fewest_nodes(strategy: Strategy) -> int:
    """How many connected nodes a strategy waits for before it samples, as far as it says."""
    return max(int(getattr(strategy, name, 0)) for name in ("min_available_nodes", "min_train_nodes"))


class WillingNodes:
    """A grid as the wrapped strategy sees it: without the nodes that could not take part if they were drawn.

    A strategy that drew them would have a smaller round than it wanted, with the noise of a smaller round.

    grid      the one that it stands for, and that does everything else
    willing   of these nodes, those that can take part
    strategy  the wrapped one
    """

    def __init__(self, grid: Grid, willing: Callable[[list[int]], list[int]], strategy: Strategy) -> None:
        self._grid, self._willing, self._fewest = grid, willing, fewest_nodes(strategy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> list[int]:
        """The nodes that can take part.

        Raises `ProtocolError` where they are too few for the strategy though enough are connected: it would wait for
        ever.
        """
        connected = list(self._grid.get_node_ids())
        willing = self._willing(connected)
        if len(willing) < self._fewest <= len(connected):
            raise ProtocolError(
                f"{len(willing)} of {len(connected)} nodes could take part, the strategy waits for {self._fewest}; "
                "the others have spent what the plan allows, or were left out"
            )
        return willing


def what_to_do(reason: str) -> str:
    """About a node that did not join for this reason."""
    reason = reason.removeprefix("did not join: ")
    if reason.startswith(("declined", OURS)):
        return _ITS_LOG
    return _AWAY if reason == NO_REPLY or "unavailable" in reason.lower() else _USE_THE_MOD


def say_round(
    record: RoundRecord, plan: Plan, blanks: tuple[float, float] | None, waited: float = 0.0
) -> None:
    """One line for the round, and one for each upload that is not in the sum and each problem of the repair.

    blanks  of the run so far, as in `Books`
    waited  seconds until no more uploads came
    """
    LOG.info(
        "niss: %d of %d uploads summed, noise deviation %.3g per coordinate",
        record.survivors,
        record.participants,
        math.sqrt(record.noise.variance),
    )
    for node, why in record.lost.items():
        LOG.info("niss: \t> node %s: %s", node, why)
    if record.lost:
        LOG.info(
            "niss: waited %.0f seconds for uploads; with a `deadline` it is no more than that and stage_timeout",
            waited,
        )
    for problem in record.problems:
        LOG.warning("niss: \t> %s", problem)
    _warn_of_losses(plan, record)
    if record.blanks is not None and blanks is not None:
        _say_blanks(record, blanks)


def _warn_of_losses(plan: Plan, record: RoundRecord) -> None:
    """Warn of a round that lost more uploads than its plan allows for."""
    if plan.settled_mode == "repair":
        expected = plan.assumed(record.participants).dropped
    else:
        expected = most_dropped(record.participants, plan.dropout, plan.delta)
    if len(record.lost) > expected:
        LOG.warning(
            "niss: round %d lost %d of %d uploads, and the plan (%s, dropout %g) allows for %d%s. A larger dropout, or "
            "mode 'repair', makes room for such rounds",
            *(record.round, len(record.lost), record.participants, plan.settled_mode, plan.dropout, expected),
            "" if record.exact else ": noise of the lost stays in the sum",
        )


def _say_blanks(record: RoundRecord, blanks: tuple[float, float]) -> None:
    """Say how many blanks were counted, and warn once their number, over all rounds so far, is more than noise."""
    LOG.info(
        "niss: about %.1f of %d uploads were blanks (noise of %.1f)",
        *(max(record.blanks or 0.0, 0.0), record.survivors, record.blanks_deviation),
    )
    part, noise = blanks
    if part > max(_SURELY * noise, _FEW):
        LOG.warning(
            "niss: about %.0f %% of the uploads so far were blanks (noise of %.0f %%): %s. Nodes' own logs say why",
            *(100.0 * part, 100.0 * noise),
            "most apps fail or are late" if part > 0.5 else "apps fail, or are late",
        )


def mean_metrics(records: Sequence[Mapping[str, object]]) -> MetricRecord:
    """The mean, with equal weights, of each number that every client sent; everything else is left out."""
    means: dict[str, int | float | list[int] | list[float]] = {}
    for name in records[0] if records else ():
        values = [record.get(name) for record in records]
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            # Opposite infinities, or numbers beyond a float: such a metric has no mean.
            with suppress(OverflowError, ValueError):
                means[name] = math.fsum(numbers) / len(numbers)
    return MetricRecord(means)


def shown(reply: Message) -> Message:
    """A reply that is an error, with a reason that Flower can print."""
    reply.error = Error(reply.error.code, printable(reply.error.reason or ""))
    return reply


def alike(replies: Iterable[Message]) -> list[Message]:
    """The errors, and the replies whose metrics have the names and kinds that most replies have."""
    errors, made = [], []
    for reply in replies:
        if reply.has_error():
            errors.append(shown(reply))
        else:
            made.append((reply, _layout(reply)))
    if not made:
        return errors
    usual, _ = Counter(layout for _, layout in made).most_common(1)[0]
    return [reply for reply, layout in made if layout == usual] + errors


def _layout(reply: Message) -> tuple[object, ...]:
    """Of each entry of the metrics: its record, its name, whether it is a list and how long."""
    records = sorted(records_of(reply.content, MetricRecord).items())
    return tuple(
        (key, name, len(value) if isinstance(value, list) else -1)
        for key, record in records
        for name, value in sorted(record.items())
    )


def guard_metrics(strategy: Strategy) -> None:
    """From here on a function of the strategy that fails on the metrics of a round costs the metrics, not the round.

    By the time it is called the clients have paid for the round.
    """
    function: MetricsFunction | None = getattr(strategy, METRICS_FUNCTION, None)
    if function is None or isinstance(function, GuardedMetrics):
        return
    setattr(strategy, METRICS_FUNCTION, GuardedMetrics(function))


class GuardedMetrics:
    """A function that aggregates metrics; where it fails there are none, and the log says why."""

    def __init__(self, function: MetricsFunction) -> None:
        self.function = function

    def __call__(self, records: list[RecordDict], weighted_by: str) -> MetricRecord:
        try:
            return self.function(records, weighted_by)
        except Exception as error:
            LOG.warning("niss: %s", failed_metrics(error, records))
            return MetricRecord()


def failed_metrics(error: Exception, records: list[RecordDict]) -> str:
    names = sorted(records_of(records[0], MetricRecord).get(METRICS, {}))
    return (
        f"{METRICS_FUNCTION} fails ({type(error).__name__}: {error}), so there are no metrics of `train`: it is given "
        + ", ".join(names)
    )
