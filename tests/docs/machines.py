"""Machines with names and addresses of their own, all on this one: namespaces for the network, the name and the files.

Each machine has its own network (joined by a bridge, as by a switch), its own host name, an `/etc/hosts` that knows the
others, and a home folder that no other machine sees. Needs root, and the commands `ip` and `unshare`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "10.213.77"
_ENTER = """
set -e
mount --make-rprivate /
mount --bind "$MACHINE_HOSTS" /etc/hosts
mount --bind "$MACHINE_FOLDER" "$HOME"
mount -t tmpfs none "$MACHINES"
hostname "$MACHINE_NAME"
cd "$HOME"
exec bash -euo pipefail "$HOME/.block"
"""
# Copies to other machines wait in a folder until the block is done.
_SCP = """#!/bin/bash
set -e
target="${!#}"
mkdir -p "$HOME/.outbox/${target%%:*}/${target#*:}"
cp -- "${@:1:$#-1}" "$HOME/.outbox/${target%%:*}/${target#*:}"
"""


def why_not() -> str | None:
    """Why there can be no such machines here; None: there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for command in ("ip", "unshare", "openssl", "ssh-keygen"):
        if shutil.which(command) is None:
            return f"there is no command {command!r} here (apt-get install iproute2 util-linux openssl openssh-client)"
    probe = f"niss-probe-{os.getpid()}"
    made = _ip(f"netns add {probe}", check=False)
    joined = _ip(f"-n {probe} link add b0 type bridge", check=False)
    inside = ["ip", "netns", "exec", probe, "unshare", "--uts", "--mount", "true"]
    entered = subprocess.run(inside, capture_output=True, text=True, check=False)
    _ip(f"netns del {probe}", check=False)
    for done in (made, joined, entered):
        if done.returncode:
            return f"namespaces cannot be made here: {done.stderr.strip()}"
    return None


def _ip(words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=check)


class Machines:
    """Several machines by name; `run` types a block of bash on one of them."""

    def __init__(self, names: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.names, self._root = names, folder / "machines"
        self.home, self._bin = folder / "home", folder / "bin"
        for path in (self._root, self.home, self._bin):
            path.mkdir()
        scp = self._bin / "scp"
        scp.write_text(_SCP)
        scp.chmod(0o755)
        self._spaces = {name: f"niss-{os.getpid()}-{number}" for number, name in enumerate(names)}
        self._switch = f"niss-{os.getpid()}-switch"
        self._hosts = folder / "hosts"
        addresses = "".join(f"{self.address(name)} {name}\n" for name in names)
        self._hosts.write_text(f"127.0.0.1 localhost\n{addresses}")
        self._environment = {
            **environment,
            "PATH": f"{self._bin}:{environment['PATH']}",
            "HOME": str(self.home),
            "MACHINES": str(self._root),
            "MACHINE_HOSTS": str(self._hosts),
        }

    def address(self, name: str) -> str:
        return f"{_PREFIX}.{self.names.index(name) + 10}"

    def folder(self, name: str) -> Path:
        """The home of a machine, seen from outside."""
        return self._root / name

    def start(self) -> None:
        _ip(f"netns add {self._switch}")
        _ip(f"-n {self._switch} link add b0 type bridge")
        _ip(f"-n {self._switch} link set b0 up")
        for number, (name, space) in enumerate(self._spaces.items()):
            self.folder(name).mkdir()
            _ip(f"netns add {space}")
            _ip(f"-n {self._switch} link add p{number} type veth peer eth0 netns {space}")
            _ip(f"-n {self._switch} link set p{number} master b0 up")
            _ip(f"-n {space} addr add {self.address(name)}/24 dev eth0")
            for device in ("lo", "eth0"):
                _ip(f"-n {space} link set {device} up")

    def run(self, name: str, block: str, *, timeout: float = 300.0) -> str:
        """Type a block of bash on a machine, in its home; returns what it printed. What it leaves running runs on."""
        folder = self.folder(name)
        (folder / ".block").write_text(block)
        log = self._root.parent / f"{name}.out"
        entered = f"ip netns exec {self._spaces[name]} unshare --uts --mount bash -c"
        command = [*entered.split(), _ENTER]
        own = {"MACHINE_NAME": name, "MACHINE_FOLDER": str(folder)}
        with log.open("wb") as output:
            # Not a pipe: what the block leaves running would keep it open.
            done = subprocess.run(
                command,
                env={**self._environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
            )
        printed = log.read_text(errors="replace")
        assert done.returncode == 0, (
            f"on {name}: exit code {done.returncode}\n{block}\n{printed}\n{self.logs()}"
        )
        self._deliver(folder / ".outbox")
        return printed

    def _deliver(self, outbox: Path) -> None:
        if not outbox.exists():
            return
        for target in outbox.iterdir():
            shutil.copytree(target, self.folder(target.name), dirs_exist_ok=True)
        shutil.rmtree(outbox)

    def logs(self) -> str:
        """The ends of all logs on all machines."""
        paths = sorted(self._root.glob("*/niss/*.log"))
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def stop(self) -> None:
        """End whatever runs on the machines, and take them away."""
        for space in (*self._spaces.values(), self._switch):
            for _ in range(50):
                found = _ip(f"netns pids {space}", check=False).stdout.split()
                if not found:
                    break
                for process in found:
                    with suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                time.sleep(0.1)
            _ip(f"netns del {space}", check=False)


@contextmanager
def machines(names: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Machines]:
    """Machines that are up inside a `with` block."""
    made = Machines(names, folder, environment)
    try:
        made.start()
        yield made
    finally:
        made.stop()
