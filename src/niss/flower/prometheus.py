"""Numbers for Prometheus, of a ServerApp and of a node; none unless a variable of the environment says where.

    NISS_SERVER_METRICS=9464             a ServerApp answers http://127.0.0.1:9464/metrics as long as its run lasts
    NISS_SERVER_METRICS=0.0.0.0:9464     the same, on another address
    NISS_SERVER_METRICS=/srv/niss.prom   a file in the same format, for the textfile collector of node_exporter
    NISS_NODE_METRICS=/srv/niss.prom     such a file of a node

A node gives a file alone: Flower starts a process for each message, and a port would close with it. Its counters go on
from what the file says.

Nothing here names a client, and no number is made of data: not the norm of an update, not a metric of `train`, not
whether an app failed. What a node shows, the server that asked it knows already, or its owner's ledger says.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from niss.accounting import LedgerFile
from niss.accounting.node_limits import binding
from niss.errors import ConfigError
from niss.files import LEDGER, SHARED, locked_folder, write_atomically
from niss.flower.limits import Limits
from niss.flower.transport import RECORD, UPLOAD, Stage, read_reply
from niss.protocol import Refusal, decode
from niss.report.ledger import node_limits
from niss.tracker.observability import CONTENT_TYPE, family
from niss.version import __version__

if TYPE_CHECKING:
    from niss.flower.strategy import NissStrategy

LOG = logging.getLogger("flwr")
SERVER, NODE = "NISS_SERVER_METRICS", "NISS_NODE_METRICS"
Answer = Callable[[Message, Context, ClientAppCallable], Message]
DECLINED = "declined: "
"""What the reason of a lost upload begins with where the node declined under its signature."""
_ADDRESS = re.compile(r"(?:(?P<host>[^/]+):)?(?P<port>[0-9]{1,5})")
_REQUESTS = "niss_node_requests_total"
_COUNTED = re.compile(
    rf'^{_REQUESTS}\{{stage="(?P<stage>[a-z]+)",outcome="(?P<outcome>[a-z]+)"\}} (?P<count>[0-9]{{1,15}})$',
    re.MULTILINE,
)
# No message that declines is longer.
_LONGEST_REFUSAL = 4096
_SECONDS = 10.0


class Exporter:
    """Where the numbers of a ServerApp go, inside a `with` block; `publish` replaces all of them."""

    def __init__(self, where: str) -> None:
        """`where` is what the variable says; empty: nowhere. Raises `ConfigError` for what is neither port nor file."""
        self._text = ""
        self._path: Path | None = None
        self._server: ThreadingHTTPServer | None = None
        if not where:
            return
        if found := _ADDRESS.fullmatch(where):
            try:
                self._server = _Pages((found["host"] or "127.0.0.1", int(found["port"])), self)
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"cannot listen on {where}: {error}", field=SERVER, hint="give a port that is free"
                ) from None
        else:
            self._path = metrics_file(where, field=SERVER)

    @property
    def wanted(self) -> bool:
        """Whether anybody looks."""
        return self._server is not None or self._path is not None

    def __enter__(self) -> Self:
        if self._server is not None:
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def publish(self, strategy: NissStrategy) -> None:
        """Show how the run of a strategy stands; a disk that is full does not end the run."""
        if not self.wanted or not strategy.has_begun:
            return
        self._text = server_text(strategy)
        if self._path is not None:
            _write(self._path, self._text)

    @property
    def text(self) -> str:
        """What was published last."""
        return self._text


class _Pages(ThreadingHTTPServer):
    """Answers `GET /metrics`, and nothing else."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], exporter: Exporter) -> None:
        self.exporter = exporter
        super().__init__(address, _Page)


class _Page(BaseHTTPRequestHandler):
    server: _Pages
    timeout = _SECONDS

    def do_GET(self) -> None:
        known = self.path == "/metrics"
        body = self.server.exporter.text.encode() if known else b"see /metrics\n"
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "niss"

    def log_message(self, format: str, *args: object) -> None:
        """Not in the log of the run."""


def server_text(strategy: NissStrategy) -> str:
    """How a run stands, from the server's own account of it: sums over clients, and the worst of them."""
    account, session, rounds = strategy.account, strategy.session, strategy.rounds
    statement = strategy.statement
    played = [one for one in rounds if one.skipped is None]
    declined = sum(why.startswith(DECLINED) for one in rounds for why in one.lost.values())
    lost = sum(len(one.lost) for one in rounds) - declined
    last = played[-1] if played else None
    uploads = {"summed": sum(one.survivors for one in played), "declined": declined, "lost": lost}
    counted = {
        "summed": sum(one.survivors > 0 for one in played),
        "lost": sum(not one.survivors for one in played),
        "skipped": len(rounds) - len(played),
    }
    families = [
        family("niss_server_info", "gauge", "Which niss this is.", [({"version": __version__}, 1)]),
        family(
            "niss_server_rounds_total", "counter", "Rounds by what became of them.", _by("outcome", counted)
        ),
        family(
            "niss_server_uploads_total", "counter", "Uploads asked for, by outcome.", _by("outcome", uploads)
        ),
        family(
            "niss_server_uploaded_bytes_total",
            "counter",
            "Size of all uploads that were accepted.",
            [({}, sum(one.bytes_uploaded for one in rounds))],
        ),
    ]
    gauges: list[tuple[str, str, float | None]] = [
        ("members", "Clients that joined.", len(session.members)),
        ("left_out", "Clients that the run goes on without.", len(session.left_out)),
        ("participants", "Clients asked in the last round.", None if last is None else last.participants),
        ("survivors", "Uploads in the last sum.", None if last is None else last.survivors),
        (
            "noise_deviation",
            "Noise in a coordinate of the last mean.",
            None if last is None else last.deviation,
        ),
        ("extra_variance", "Noise that dropouts left in the last sum.", account.extra_variance),
        ("epsilon_spent", "Of the worst-off client so far, at the plan's delta.", statement.epsilon_joint),
        ("epsilon_promised", "What no client will exceed.", statement.budget_epsilon),
        ("delta", "Of both epsilons.", statement.delta),
    ]
    families += [
        family(f"niss_server_{name}", "gauge", meaning, [({}, value)])
        for name, meaning, value in gauges
        if value is not None
    ]
    return "".join(families)


def counted(answer: Answer, limits: Limits) -> Answer:
    """A mod whose answers are counted, where the variable wants it; what goes wrong with that is logged."""
    where = os.environ.get("NISS_NODE_METRICS", "")
    if not where:
        return answer

    def answered(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        stage = _stage(message)
        reply = answer(message, context, call_next)
        try:
            _count(metrics_file(where), stage, _outcome(reply), limits.of_node(context.node_config).state)
        except ConfigError as error:
            LOG.warning("niss: no metrics: %s", error.message)
        except Exception as error:
            LOG.warning("niss: no metrics: %s", type(error).__name__)
        return reply

    return answered


def metrics_file(where: str, *, field: str = NODE) -> Path:
    """The file that a value of a variable names; `ConfigError` for a port, and for a folder that is not there."""
    path = Path(where).expanduser()
    if _ADDRESS.fullmatch(where):
        raise ConfigError(
            "a node can write a file, but has no process that stays to listen on a port",
            field=NODE,
            hint="give the path of a file",
        )
    if not path.is_absolute() or not path.parent.is_dir() or path.is_dir():
        raise ConfigError(
            f"{where} is no file in a folder that exists", field=field, hint="give a whole path"
        )
    return path


def node_text(counts: Mapping[tuple[str, str], int], state: Path | None, now: float) -> str:
    """How a node stands: how often it answered and declined, and what its ledger says.

    state  its `niss-state` folder; without one nothing is known of what was spent before this run
    """
    samples = [
        ({"stage": stage, "outcome": outcome}, count) for (stage, outcome), count in sorted(counts.items())
    ]
    families = [
        family("niss_node_info", "gauge", "Which niss this is.", [({"version": __version__}, 1)]),
        family(_REQUESTS, "counter", "Requests of servers, by stage and by what became of them.", samples),
        family(
            "niss_node_last_request_time_seconds", "gauge", "When the last one was answered.", [({}, now)]
        ),
    ]
    if state is not None and (state / LEDGER).exists():
        families += _spent(LedgerFile.read(state / LEDGER))
    return "".join(families)


def _spent(ledger: LedgerFile) -> Iterable[str]:
    """What all runs of a node cost it, and the limit that binds."""
    (client,) = ledger.clients
    uploads = sum(any(mu.joint > 0.0 for mu in entry.mus.values()) for entry in ledger.entries)
    yield family("niss_node_charges_total", "counter", "Uploads charged, in all runs.", [({}, uploads)])
    limit, spent = binding(node_limits(ledger)), ledger.epsilon(ledger.spent(client)) if uploads else 0.0
    if limit is not None:
        spent = limit.spent(ledger.spent(client))
        yield family("niss_node_epsilon_limit", "gauge", "The limit that binds.", [({}, limit.epsilon)])
        yield family("niss_node_delta", "gauge", "Of both epsilons.", [({}, limit.delta)])
    if spent is not None:
        yield family("niss_node_epsilon_spent", "gauge", "What all runs have cost.", [({}, spent)])


def _count(path: Path, stage: str, outcome: str, state: Path | None) -> None:
    with locked_folder(path.parent):
        before = path.read_text() if path.exists() else ""
        counts = Counter(
            {(hit["stage"], hit["outcome"]): int(hit["count"]) for hit in _COUNTED.finditer(before)}
        )
        counts[stage, outcome] += 1
        _write(path, node_text(counts, state, time.time()))


def _stage(message: Message) -> str:
    """What a message is about; a server can write anything there, and labels are few."""
    record = message.content.get(RECORD) if message.has_content() else None
    stage = None if record is None else record.get("stage")
    return stage if isinstance(stage, str) and stage in set(Stage) else "other"


def _outcome(reply: Message) -> str:
    """Whether a reply of this node's own making answers, or declines."""
    if reply.has_error():
        return "declined"
    upload = reply.content.get(UPLOAD)
    if not isinstance(upload, ArrayRecord) or len(upload["body"].data) > _LONGEST_REFUSAL:
        return "answered"
    body = read_reply(reply).body
    return "declined" if body.startswith(b"NISS") and isinstance(decode(body), Refusal) else "answered"


def _by(label: str, counts: Mapping[str, int]) -> list[tuple[dict[str, str], float]]:
    return [({label: name}, count) for name, count in counts.items()]


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode(), mode=SHARED)
    except OSError as error:
        LOG.warning("niss: cannot write %s: %s", path, error.strerror)
