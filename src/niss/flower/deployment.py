"""A whole federation on this machine: tracker, SuperLink and SuperNodes, with TLS and everyone's keys pinned.

Everything is made in one folder: certificates, identities, the coalition file, the state folders of the nodes, logs.
The processes are those that several machines would run, with the same options.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from niss.errors import ConfigError, NissError
from niss.flower.certificates import Certificates, make_certificates, make_node_key
from niss.flower.loopback import free_port, listening, toml_pairs
from niss.flower.processes import Processes, Started
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity

NAME = "niss-up"
_TRACKER = "import typer; from niss.cli.tracker import tracker_command; typer.run(tracker_command)"
_READY_SECONDS = 90.0


@dataclass(frozen=True)
class Settings:
    """What to start.

    tls           with certificates, and with keys by which SuperNodes authenticate themselves
    pinned        nodes pin the server, the holder and each other
    node_options  changes to the node configuration of single nodes, by number; None takes an entry out
    simulated     no SuperNodes: the SuperLink simulates them with Ray, one at a time
    """

    nodes: int = 5
    tls: bool = True
    tracker: bool = True
    pinned: bool = True
    node_options: Mapping[int, Mapping[str, str | int | float | None]] = field(default_factory=dict)
    simulated: bool = False


class Deployment:
    """Up inside a `with` block, and down with all its processes after it."""

    def __init__(
        self, folder: Path, settings: Settings, *, say: Callable[[str], None] = lambda _line: None
    ) -> None:
        if settings.nodes < 2:
            raise ConfigError("a federation has at least 2 nodes", field="nodes")
        self.folder, self.settings, self._say = folder, settings, say
        self.home = folder / "flower"
        for made in (self.home, folder / "logs", folder / "keys"):
            made.mkdir(parents=True, exist_ok=True)
        quiet = {
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **quiet}
        self.processes = Processes(folder / "logs", self.environment)
        self.nodes: dict[int, Started] = {}
        self.certificates: Certificates | None = None
        self.port, self.tracker_port = free_port(), free_port()
        self._node_ports = {number: free_port() for number in range(settings.nodes)}
        self.tracker: Started | None = None
        self._holder = ""

    def __enter__(self) -> Self:
        self.processes.__enter__()
        try:
            self._make_keys()
            if self.settings.tracker:
                self.start_tracker()
            self._start_superlink()
            for number in range(0 if self.settings.simulated else self.settings.nodes):
                if self.settings.tls:
                    self._register(number)
                self.start_node(number)
        except BaseException:
            self.processes.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._say("taking everything down")
        self.processes.__exit__(kind, error, trace)

    def start_tracker(self) -> None:
        """A tracker; started again, it goes on from its store."""
        command: list[str | Path] = [sys.executable, "-c", _TRACKER, "--server-key", self.server_key]
        command += ["--port", str(self.tracker_port), "--store", f"sqlite:///{self.folder / 'tracker.db'}"]
        if self.certificates is not None:
            command += ["--tls-cert", self.certificates.certificate, "--tls-key", self.certificates.key]
        self.tracker = self.processes.start("tracker", command)
        self._holder = self._wait_for(self.tracker, self._tracker_holder)
        self._say(f"tracker at {self.tracker_address}")

    def start_node(self, number: int, *, key: Path | None = None) -> Started:
        """A SuperNode; `key` is another than the one that was registered for it."""
        command: list[str | Path] = ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--port", str(self._node_ports.setdefault(number, free_port()))]
        command += ["--node-config", self._node_config(number)]
        if self.certificates is None:
            command += ["--insecure"]
        else:
            command += ["--root-certificates", self.certificates.authority]
            command += ["--ssl-ca-certfile", self.certificates.authority]
            command += [
                "--ssl-certfile",
                self.certificates.certificate,
                "--ssl-keyfile",
                self.certificates.key,
            ]
            command += ["--auth-supernode-private-key", key or self.folder / "keys" / f"node-{number}"]
        self.nodes[number] = self.processes.start(f"node-{number}", command)
        self._say(f"node {number} started")
        return self.nodes[number]

    @property
    def tracker_address(self) -> str:
        scheme = "http" if self.certificates is None else "https"
        return f"{scheme}://127.0.0.1:{self.tracker_port}"

    @property
    def report(self) -> Path:
        """Where the ServerApp writes the statement."""
        return self.folder / "report.json"

    def run_config(self, more: Mapping[str, Any]) -> str:
        """The run configuration that tells the app of the example where its keys are."""
        values: dict[str, Any] = {
            "server-key": str(self.folder / "keys" / "server.key"),
            "report": str(self.report),
            "min-nodes": self.settings.nodes,
        }
        if self.settings.pinned:
            values["coalition"] = str(self.folder / "coalition.toml")
        if self.settings.tracker:
            values["tracker"] = self.tracker_address
            if self.certificates is not None:
                values["tracker-ca"] = str(self.certificates.authority)
        return toml_pairs(values | dict(more))

    def submit(self, app: Path, more: Mapping[str, Any]) -> str:
        """Start a run of an app; returns its id."""
        words = ["flwr", "run", str(app), NAME, "--run-config", self.run_config(more), "--format", "json"]
        if self.settings.simulated:
            size = {
                "num-supernodes": self.settings.nodes,
                "client-resources-num-cpus": 1,
                "init-args-num-cpus": 1,
            }
            words += ["--federation-config", toml_pairs(size)]
        answer = self.flwr(words)
        try:
            values: dict[str, Any] = json.loads(answer[answer.index("{") :])
            return str(values["run-id"])
        except (ValueError, KeyError):
            raise NissError(f"the run could not be started:\n{answer}") from None

    def status(self, run: str) -> str:
        """The state of a run as Flower words it, for example `finished:completed`."""
        answer = self.flwr(["flwr", "ls", NAME, "--run-id", run, "--format", "json"])
        try:
            values: dict[str, Any] = json.loads(answer[answer.index("{") :])
            return str(values["runs"][0]["status"])
        except (ValueError, KeyError, IndexError):
            raise NissError(f"the state of the run cannot be told:\n{answer}") from None

    def stream(self, run: str, show: Callable[[str], None]) -> None:
        """Show the log of a run until it ends."""
        follow = self.processes.start("stream", ["flwr", "log", run, NAME, "--stream"])
        with follow.log.open(errors="replace") as output:
            while True:
                ended = not follow.running
                for line in output:
                    show(line.rstrip("\n"))
                if ended:
                    break
                time.sleep(0.5)
        self.processes.kill(follow)

    def flwr(self, words: list[str]) -> str:
        """What a command of Flower's answers."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=_READY_SECONDS, check=False
        )
        return done.stdout + done.stderr

    def _make_keys(self) -> None:
        keys = self.folder / "keys"
        if self.settings.tls:
            self.certificates = make_certificates(keys, datetime.datetime.now(datetime.UTC))
        server = create_keyfile(keys / "server.key", Identity.generate(os.urandom))
        self.server_key = server.identity.public.hex()
        entries = []
        for number in range(self.settings.nodes):
            made = create_keyfile(self.state_folder(number) / "identity.key", Identity.generate(os.urandom))
            entries.append(
                f'[[members]]\nname = "node {number}"\nidentity = "{made.identity.public.hex()}"\n'
            )
        (self.folder / "coalition.toml").write_text("\n".join(entries))
        address = f'address = "127.0.0.1:{self.port}"\n'
        trust = (
            "insecure = true\n"
            if self.certificates is None
            else f'root-certificates = "{self.certificates.authority}"\n'
        )
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n{address}{trust}'
        )

    def state_folder(self, number: int) -> Path:
        """Where a node keeps its identity, its memory and its ledger."""
        return self.folder / "nodes" / str(number)

    def _node_config(self, number: int) -> str:
        values: dict[str, Any] = {
            "partition-id": number,
            "num-partitions": self.settings.nodes,
            "niss-state": str(self.state_folder(number)),
        }
        if self.settings.pinned:
            values |= {
                "niss-server": self.server_key,
                "niss-coalition": str(self.folder / "coalition.toml"),
            }
            if self._holder:
                values["niss-holder"] = self._holder
        if self.settings.tracker and self.certificates is not None:
            values["niss-tracker-ca"] = str(self.certificates.authority)
        return toml_pairs(values | dict(self.settings.node_options.get(number, {})))

    def _start_superlink(self) -> None:
        command: list[str | Path] = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--simulation"] if self.settings.simulated else []
        if self.certificates is None:
            command += ["--insecure"]
        else:
            command += ["--ssl-ca-certfile", self.certificates.authority]
            command += [
                "--ssl-certfile",
                self.certificates.certificate,
                "--ssl-keyfile",
                self.certificates.key,
            ]
            command += ["--enable-supernode-auth"]
        link = self.processes.start("superlink", command)
        self._wait_for(link, lambda: "yes" if listening(self.port) else "")
        self._say(f"SuperLink at 127.0.0.1:{self.port}{' (TLS)' if self.certificates else ''}")

    def _register(self, number: int) -> None:
        _, public = make_node_key(self.folder / "keys", f"node-{number}")
        answer = self.flwr(["flwr", "supernode", "register", str(public), NAME, "--format", "json"])
        if '"success": true' not in answer:
            raise NissError(f"node {number} could not be registered:\n{answer}")

    def _tracker_holder(self) -> str:
        assert self.tracker is not None
        for line in self.tracker.log.read_text(errors="replace").splitlines():
            if line.startswith('{"url"') and listening(self.tracker_port):
                return str(json.loads(line)["holder"])
        return ""

    def _wait_for(self, one: Started, answer: Callable[[], str]) -> str:
        """Ask until there is an answer; a process that ends before it has given one is an error."""
        end = time.monotonic() + _READY_SECONDS
        while time.monotonic() < end:
            if found := answer():
                return found
            one.require_running()
            time.sleep(0.2)
        raise NissError(f"{one.name} is not ready after {_READY_SECONDS:g} s\n{one.last_words()}")
