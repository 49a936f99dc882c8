"""A whole federation on this machine: tracker, SuperLink and SuperNodes, with TLS and everyone's keys pinned.

The processes and their options are those that several machines would have (`docs/guides/deploy.md`), on ports of the
loopback interface that were free a moment ago. Everything is made in one folder:

    keys/           TLS certificates, the server's identity, and the keys by which SuperNodes authenticate themselves
    nodes/N/        state folder of node N: identity, protocol memory and ledger
    coalition.toml  the identities of all nodes
    flower/         Flower's own settings and database (FLWR_HOME)
    tracker.db      the tracker's store, and its identity beside it
    logs/           the output of every process
    server/         the run as the ServerApp saves it, to go on from
    report.json     what the ServerApp reports, after every round
    federation.json what was started, and the tracker's port, which nodes have agreed to

A folder in which there was a federation before is used as it is, with its keys, identities, ledgers and tracker.

Keys and certificates are made for one `niss up` and thrown away with it; for several machines, use the authority you
trust. TLS proves the SuperLink and the tracker to those who connect to them. A SuperNode proves itself to the SuperLink
with its own key, and a client to the others with its NISS identity.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from niss.errors import ConfigError, NissError
from niss.files import SHARED, find_json, write_json, write_new
from niss.local import Processes, Started
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.protocol.keys import Identity

NAME = "niss-up"
"""How Flower's configuration calls the SuperLink of the federation."""
_READY_SECONDS = 90.0
_FEDERATION = "federation.json"
_STARTED = ("nodes", "tls", "tracker", "pinned")
_DAYS = 30
_PEM = serialization.Encoding.PEM
_UNENCRYPTED = serialization.NoEncryption()


@dataclass(frozen=True)
class Settings:
    """What to start.

    nodes         number of SuperNodes, at least 2
    tls           use certificates everywhere, and have SuperNodes authenticate themselves with registered keys
    tracker       start a tracker; without one the server relays keys and holds the beacon
    pinned        nodes pin the server, the beacon's holder and each other
    node_options  changes to the node configuration of single nodes, by number; None takes an entry out
    simulated     start no SuperNodes: the SuperLink simulates them with Ray, one at a time
    """

    nodes: int = 5
    tls: bool = True
    tracker: bool = True
    pinned: bool = True
    node_options: Mapping[int, Mapping[str, str | int | float | None]] = field(default_factory=dict)
    simulated: bool = False

    @classmethod
    def of_folder(cls, folder: Path) -> Settings:
        """What was started in a folder before; `ConfigError` where nothing was."""
        values = find_json(folder / _FEDERATION)
        if values is None:
            raise ConfigError(f"no federation was started in {folder}", field="--resume")
        return cls(**{name: values[name] for name in _STARTED})


class Deployment:
    """A federation that is up inside a `with` block; all its processes are ended when the block is left.

    Entering the block makes the keys, then starts the tracker, the SuperLink and the nodes, and waits for the first two
    to answer. Raises `NissError`, with the end of its output, where one of them does not come up.

    folder       where everything is made
    home         Flower's own folder in it
    environment  what every process is started with
    report       the file that the ServerApp writes its report to, `saved_run` the folder in which it saves the run
    processes    all that were started, to be stopped or killed one by one
    nodes        the SuperNodes by number
    tracker      the tracker's process, where there is one
    server_key   public key of the server, in hex
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        say: Callable[[str], None] = lambda _line: None,
        passing: bool = False,
    ) -> None:
        """`folder` is where everything is made, `say` is called with a line of progress at a time.

        A folder that is `passing` is removed should this process be killed.
        """
        if settings.nodes < 2:
            raise ConfigError("a federation has at least 2 nodes", field="nodes")
        self.folder, self.settings, self._say = folder, settings, say
        self.home, self._keys = folder / "flower", folder / "keys"
        for subfolder in (self.home, self._keys, folder / "logs"):
            subfolder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }
        scratch = folder if passing else None
        self.processes = Processes(folder / "logs", self.environment, scratch=scratch)
        self.nodes: dict[int, Started] = {}
        self.certificates = Certificates.in_folder(self._keys) if settings.tls else None
        self._authority = None if self.certificates is None else str(self.certificates.authority)
        self._coalition = folder / "coalition.toml"
        self.report, self.saved_run = folder / "report.json", folder / "server"
        before = find_json(folder / _FEDERATION)
        self.port = free_port()
        self.tracker_port = free_port() if before is None else int(before["tracker_port"])
        self.tracker_address = f"{'https' if settings.tls else 'http'}://127.0.0.1:{self.tracker_port}"
        self._node_ports = {number: free_port() for number in range(settings.nodes)}
        self.tracker: Started | None = None
        self._holder = ""

    def __enter__(self) -> Self:
        self.processes.__enter__()
        try:
            self._make_keys()
            if self.settings.tracker:
                self.start_tracker()
            self.start_superlink()
            for number in range(0 if self.settings.simulated else self.settings.nodes):
                if self.settings.tls:
                    self._register(number)
                self.start_node(number)
        except BaseException:
            self.processes.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._say("taking everything down")
        self.processes.__exit__()

    def state_folder(self, number: int) -> Path:
        """The `niss-state` folder of a node: its identity, its protocol memory and its ledger."""
        return self.folder / "nodes" / str(number)

    def start_tracker(self) -> None:
        """Start the tracker and wait until it answers; one that was killed goes on from its store."""
        store = f"sqlite:///{self.folder / 'tracker.db'}"
        command: list[str | Path] = [sys.executable, "-m", "niss", "tracker", "--server-key", self.server_key]
        command += ["--port", str(self.tracker_port), "--store", store]
        if self.certificates is not None:
            command += ["--tls-cert", self.certificates.certificate, "--tls-key", self.certificates.key]
        self.tracker = self.processes.start("tracker", command)
        self._holder = self._wait_for(self.tracker, self._tracker_holder)
        self._say(f"tracker at {self.tracker_address}")

    def start_node(self, number: int, *, key: Path | None = None) -> Started:
        """Start a SuperNode; `key` is a private key to use instead of the one registered for it."""
        command: list[str | Path] = ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--port", str(self._node_ports.setdefault(number, free_port()))]
        command += ["--node-config", self._node_config(number), *self._tls_options()]
        if self.certificates is not None:
            command += ["--root-certificates", self.certificates.authority]
            command += ["--auth-supernode-private-key", key or self._keys / f"node-{number}"]
        self.nodes[number] = self.processes.start(f"node-{number}", command)
        self._say(f"node {number} started")
        return self.nodes[number]

    def run_config(self, more: Mapping[str, Any]) -> str:
        """The run configuration that tells an app where its keys are, with the settings in `more` added to it.

        The names are those of the example's `[tool.flwr.app.config]`.
        """
        values = {
            "server-key": str(self._keys / "server.key"),
            "report": str(self.report),
            "min-nodes": self.settings.nodes,
            "coalition": str(self._coalition) if self.settings.pinned else None,
            "tracker": self.tracker_address if self.settings.tracker else None,
            "tracker-ca": self._authority if self.settings.tracker else None,
        }
        return _toml_pairs(values | dict(more))

    def submit(self, app: Path, more: Mapping[str, Any]) -> str:
        """Start a run of the Flower app in the folder `app`, with the run settings in `more`; returns the run's id."""
        command = ["flwr", "run", str(app), NAME, "--run-config", self.run_config(more), "--format", "json"]
        if self.settings.simulated:
            federation = {
                "num-supernodes": self.settings.nodes,
                "client-resources-num-cpus": 1,
                "init-args-num-cpus": 1,
            }
            command += ["--federation-config", _toml_pairs(federation)]
        return self._ask_flower(command, "cannot start the run", lambda answer: answer["run-id"])

    def status(self, run: str) -> str:
        """The status of a run in Flower's words, for example `finished:completed`.

        `flwr run` exits with 0 even where a run failed, so this is the only way to know.
        """
        command = ["flwr", "ls", NAME, "--run-id", run, "--format", "json"]
        return self._ask_flower(command, "cannot read its status", lambda answer: answer["runs"][0]["status"])

    def stream(self, run: str, show: Callable[[str], None]) -> None:
        """Call `show` with each line of a run's log until the run ends."""
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

    def flwr(self, command: list[str]) -> str:
        """Run one of Flower's commands; returns what it printed."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=_READY_SECONDS, check=False
        )
        return done.stdout + done.stderr

    def _ask_flower(self, command: list[str], failure: str, pick: Callable[[dict[str, Any]], Any]) -> str:
        """What `pick` takes from the JSON that a command of Flower's prints; warnings may stand before the JSON."""
        answer = self.flwr(command)
        try:
            return str(pick(json.loads(answer[answer.index("{") :])))
        except (ValueError, KeyError, IndexError):
            raise NissError(f"{failure}:\n{answer}") from None

    def _make_keys(self) -> None:
        """Write certificates, identities, the coalition file, and where `flwr` finds the SuperLink."""
        trust = "insecure = true" if self._authority is None else f'root-certificates = "{self._authority}"'
        if self.certificates is not None and not self.certificates.key.exists():
            make_certificates(self._keys, datetime.datetime.now(datetime.UTC))
        self.server_key = _identity(self._keys / "server.key")
        members = [
            f'[[members]]\nname = "node {number}"\n'
            f'identity = "{_identity(self.state_folder(number) / "identity.key")}"\n'
            for number in range(self.settings.nodes)
        ]
        self._coalition.write_text("\n".join(members))
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n'
            f'[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\n{trust}\n'
        )
        started = {name: value for name, value in asdict(self.settings).items() if name in _STARTED}
        write_json(self.folder / _FEDERATION, started | {"tracker_port": self.tracker_port}, mode=SHARED)

    def _node_config(self, number: int) -> str:
        """The node configuration: which part of the data it has, and what it pins (`niss.flower.Limits`)."""
        pinned = self.settings.pinned
        values = {
            "partition-id": number,
            "num-partitions": self.settings.nodes,
            "niss-state": str(self.state_folder(number)),
            "niss-server": self.server_key if pinned else None,
            "niss-coalition": str(self._coalition) if pinned else None,
            "niss-holder": (self._holder or None) if pinned else None,
            "niss-tracker": self.tracker_address if self.settings.tracker else None,
            "niss-tracker-ca": self._authority if self.settings.tracker else None,
        }
        return _toml_pairs(values | dict(self.settings.node_options.get(number, {})))

    def _tls_options(self) -> list[str | Path]:
        """The options that SuperLink and SuperNodes share."""
        if self.certificates is None:
            return ["--insecure"]
        authority, certificate, key = astuple(self.certificates)
        return ["--ssl-ca-certfile", authority, "--ssl-certfile", certificate, "--ssl-keyfile", key]

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it listens; apps may not install packages."""
        command: list[str | Path] = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation", *self._tls_options()]
        command += ["--simulation"] if self.settings.simulated else []
        command += ["--enable-supernode-auth"] if self.settings.tls else []
        self.superlink = self.processes.start("superlink", command)
        self._wait_for(self.superlink, lambda: "yes" if _listening(self.port) else "")
        self._say(f"SuperLink at 127.0.0.1:{self.port}{' (TLS)' if self.certificates else ''}")

    def _register(self, number: int) -> None:
        """Make the key of a SuperNode, unless it has one, and tell the SuperLink its public half."""
        public = self._keys / f"node-{number}.pub"
        if not public.exists():
            _, public = make_node_key(self._keys, f"node-{number}")
        answer = self.flwr(["flwr", "supernode", "register", str(public), NAME, "--format", "json"])
        if '"success": true' not in answer:
            raise NissError(f"cannot register node {number}:\n{answer}")

    def _tracker_holder(self) -> str:
        """The beacon holder's key, from the line that the tracker prints when it is ready; empty until then."""
        assert self.tracker is not None
        for line in self.tracker.log.read_text(errors="replace").splitlines():
            if line.startswith('{"url"') and _listening(self.tracker_port):
                return str(json.loads(line)["holder"])
        return ""

    def _wait_for(self, one: Started, answer: Callable[[], str]) -> str:
        """Ask until the answer is not empty; a process that ends first, or takes too long, is an error."""
        end = time.monotonic() + _READY_SECONDS
        while time.monotonic() < end:
            if text := answer():
                return text
            one.require_running()
            time.sleep(0.2)
        raise NissError(f"{one.name} was not ready after {_READY_SECONDS:g} s\n{one.last_output()}")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _identity(path: Path) -> str:
    """The public key, in hex, of the identity in a key file; made where there is none."""
    if path.exists():
        return load_identity(path).public.hex()
    return create_keyfile(path, Identity.generate(os.urandom)).public.hex()


def _toml_pairs(values: Mapping[str, Any]) -> str:
    """`key=value` pairs as Flower's command line reads them: TOML values, separated by spaces; None is left out."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None)


@dataclass(frozen=True)
class Certificates:
    """Where the TLS files of this machine are, all in PEM.

    authority    certificate of the authority, which everyone is told to trust
    certificate  this machine's own, for 127.0.0.1 and localhost, signed by the authority
    key          its private key, mode 0600
    """

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """Where `make_certificates` puts them."""
        return cls(folder / "ca.crt", folder / "tls.pem", folder / "tls.key")


def make_certificates(folder: Path, now: datetime.datetime) -> Certificates:
    """Make an authority, and a certificate for 127.0.0.1 and localhost that it signed.

    Both are valid for 30 days from `now`. The authority's private key is never written: nobody can sign with it
    once this returns. Raises FileExistsError where `folder` already has a TLS key.
    """
    authority_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    issuer, subject = _name("niss up: authority of one run"), _name("localhost")
    authority = (
        _certificate(issuer, issuer, authority_key, now, signs_certificates=True)
        .sign(authority_key, hashes.SHA256())
        .public_bytes(_PEM)
    )
    addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _certificate(subject, issuer, server_key, now, signs_certificates=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(authority_key, hashes.SHA256())
        .public_bytes(_PEM)
    )
    paths = Certificates.in_folder(folder)
    paths.authority.write_bytes(authority)
    paths.certificate.write_bytes(certificate)
    pem = serialization.PrivateFormat.TraditionalOpenSSL
    write_new(paths.key, server_key.private_bytes(_PEM, pem, _UNENCRYPTED))
    return paths


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Make the key pair by which a SuperNode authenticates itself: ECDSA P-384 in OpenSSH format, as Flower wants it.

    Returns the paths of the private key (`name`, mode 0600) and of the public one (`name.pub`).
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    write_new(private, key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _UNENCRYPTED))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return private, public


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    *,
    signs_certificates: bool,
) -> x509.CertificateBuilder:
    """What the two certificates have in common; it starts an hour early for clocks that are slow."""
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=signs_certificates, path_length=0 if signs_certificates else None)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )
