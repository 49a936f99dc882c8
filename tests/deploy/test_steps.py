"""The images without a container engine: their steps are carried out in folders, and what they start runs a round."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.dockerfile import lineage, stages
from niss.local import Processes, Started
from niss.local.deployment import free_port, make_certificates, make_node_key
from niss.protocol.keyfile import create_keyfile
from niss.protocol.keys import Identity
from support.waiting import wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STAGES = stages(ROOT / "deploy" / "Dockerfile")
APP = ROOT / "tests" / "flower" / "fault_app"
_INSIDE = re.compile(r"""(?<![\w.$/])/(?=(?:opt|src|wheels|niss)(?:[/ ;"']|$))""")
# Users are a container's own affair.
_NOT_HERE = re.compile(r"\b(?:groupadd|useradd)\b")


def carry_out(name: str, folder: Path, others: dict[str, Path]) -> None:
    """COPY and RUN of a stage and all it is built from, with `folder` in the place of `/`."""
    here, settings = folder, {}
    for stage in lineage(name, STAGES):
        for word, rest in stage.instructions:
            if word == "WORKDIR":
                here = folder / rest.lstrip("/")
                here.mkdir(parents=True, exist_ok=True)
            elif word == "ARG":
                settings.update([rest.split("=", 1)])
            elif word == "COPY":
                copy(rest, folder, here, others)
            elif word == "RUN" and not _NOT_HERE.search(rest):
                run(_INSIDE.sub(f"{folder}/", rest), here, settings)


def copy(words: str, folder: Path, here: Path, others: dict[str, Path]) -> None:
    *sources, target = words.split()
    base = ROOT
    if sources[0].startswith("--from="):
        base = others[sources.pop(0).removeprefix("--from=")]
    place = folder / target.lstrip("/") if target.startswith("/") else here / target
    for source in (base / one.lstrip("/") for one in sources):
        if source.is_dir():
            shutil.copytree(source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            into = place / source.name if target.endswith("/") else place
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, into)


def run(command: str, here: Path, settings: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=here,
        env=environment | settings,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode and re.search(
        r"Could not (?:find a version|fetch)|No matching distribution", done.stderr
    ):
        pytest.skip(f"pip cannot install here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("images")
    made = {"wheel": folder / "wheel"}
    carry_out("wheel", made["wheel"], {})
    assert len(list((made["wheel"] / "wheels").iterdir())) == 1
    for name in ("tracker", "node"):
        made[name] = folder / name
        carry_out(name, made[name], made)
    # Server and node are built from the same stage; only what they start differs.
    assert [one.name for one in lineage("server", STAGES)][:-1] == [
        one.name for one in lineage("node", STAGES)
    ][:-1]
    made["server"] = made["node"]
    return made


class Parts:
    """The parts of a federation, each in a folder as the guide fills it, started as its image starts it."""

    def __init__(self, folder: Path, images: dict[str, Path], processes: Processes) -> None:
        self.folder, self.images, self.processes = folder, images, processes
        self.ports = {name: free_port() for name in ("tracker", "server", "node-0", "node-1")}
        self.own: dict[str, dict[str, str]] = {}

    def environment(self, name: str) -> dict[str, str]:
        image = self.images[name.partition("-")[0]]
        return {
            "PATH": f"{image}/opt/niss/bin:/usr/bin:/bin",
            "HOME": str(self.folder / name),
            "FLWR_HOME": str(self.folder / name / ".flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "NISS_FOLDER": str(self.folder / name),
            "NISS_PORT": str(self.ports[name]),
            **self.own.get(name, {}),
        }

    def inside(self, name: str, word: str) -> list[str]:
        """The command of an instruction, as a list of words."""
        part = name.partition("-")[0]
        words = json.loads(re.sub(r"^.*?\[", "[", STAGES[part].last(word) or ""))
        return [_INSIDE.sub(f"{self.images[part]}/", one) for one in words]

    def start(self, name: str) -> Started:
        pairs = [f"{key}={value}" for key, value in self.environment(name).items()]
        return self.processes.start(name, ["/usr/bin/env", *pairs, *self.inside(name, "ENTRYPOINT")])

    def healthy(self, name: str) -> bool:
        command = self.inside(name, "HEALTHCHECK")
        done = subprocess.run(
            command, env=self.environment(name), capture_output=True, timeout=60, check=False
        )
        return done.returncode == 0

    def flwr(self, *words: str) -> str:
        done = subprocess.run(
            ["flwr", *words, "--format", "json"],
            env=self.environment("server"),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.stdout[done.stdout.find("{") :] if "{" in done.stdout else done.stdout + done.stderr


def fill(parts: Parts) -> None:
    """What docs/guides/deploy.md puts on each machine; here all of them are called localhost."""
    folder = parts.folder
    for name in (*parts.ports, "authority"):
        (folder / name).mkdir(mode=0o700)
    certificates = make_certificates(folder / "authority", datetime.datetime.now(datetime.UTC))
    server = create_keyfile(folder / "server" / "server.key", Identity.generate(os.urandom))
    members = []
    for name in ("node-0", "node-1"):
        state = folder / name / "state"
        node = create_keyfile(state / "identity.key", Identity.generate(os.urandom))
        members.append(f'[[members]]\nname = "{name}"\nidentity = "{node.public.hex()}"\n')
        make_node_key(folder / name, "auth")
    for name in parts.ports:
        (folder / name / "coalition.toml").write_text("\n".join(members))
        (folder / name / "server.pub").write_text(server.public.hex() + "\n")
        shutil.copy2(certificates.authority, folder / name / "ca.crt")
    for name in ("tracker", "server"):
        shutil.copy2(certificates.certificate, folder / name / "localhost.crt")
        shutil.copy2(certificates.key, folder / name / "tls.key")
        parts.own[name] = {"NISS_NAME": "localhost", "NISS_HOST": "127.0.0.1"}
    for number in range(2):
        parts.own[f"node-{number}"] = {
            "NISS_SERVER": "localhost",
            "NISS_SERVER_PORT": str(parts.ports["server"]),
            "NISS_TRACKER": "localhost",
            "NISS_TRACKER_PORT": str(parts.ports["tracker"]),
            "NISS_EPSILON": "8.0",
            "NISS_DELTA": "1e-5",
            "NISS_CLIP": "5.0",
            "NISS_NODE_CONFIG": f"partition-id={number} num-partitions=2",
        }
    (folder / "server" / ".flwr").mkdir()
    (folder / "server" / ".flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "fed"\n\n[superlink.fed]\naddress = "localhost:{parts.ports["server"]}"\n'
        f'root-certificates = "{folder / "server" / "ca.crt"}"\n'
    )


def test_the_steps_of_the_images_and_a_round_of_what_they_start(images, tmp_path):
    with Processes(tmp_path, {}) as processes:
        parts = Parts(tmp_path / "machines", images, processes)
        parts.folder.mkdir()
        fill(parts)
        for name in parts.ports:
            assert not parts.healthy(name), f"{name} is not even started"
        tracker = parts.start("tracker")
        parts.start("server")
        for name in ("tracker", "server"):
            wait_until(lambda name=name: parts.healthy(name), seconds=600.0, what=f"{name} is not healthy")
        ready = next(line for line in read(tmp_path, "tracker") if line.startswith('{"url"'))
        for name in ("node-0", "node-1"):
            (parts.folder / name / "holder.pub").write_text(json.loads(ready)["holder"] + "\n")
            key = str(parts.folder / name / "auth.pub")
            assert '"success": true' in parts.flwr("supernode", "register", key, "fed")
            parts.start(name)
        for name in ("node-0", "node-1"):
            wait_until(lambda name=name: parts.healthy(name), seconds=600.0, what=f"{name} is not healthy")
        answer = parts.flwr("run", str(APP), "fed", "--run-config", run_config(parts))
        run_id = str(json.loads(answer)["run-id"])

        def status() -> str:
            (one,) = json.loads(parts.flwr("ls", "fed", "--run-id", run_id))["runs"]
            return str(one["status"])

        wait_until(lambda: status().startswith("finished"), seconds=600.0, what="the run does not end")
        said = "\n".join(line for name in parts.ports for line in read(tmp_path, name)[-40:])
        assert status() == "finished:completed", said
        report = json.loads((parts.folder / "server" / "report.json").read_text())
        assert [one["survivors"] for one in report["rounds"]] == [2]
        tracker.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: any("lists read again" in line for line in read(tmp_path, "tracker")),
            seconds=600.0,
            what="no reload",
        )
        assert parts.healthy("tracker")
        tracker.process.terminate()
        assert tracker.process.wait(60) == 0, "it ends in good order, as a container is stopped"
    for name in ("node-0", "node-1"):
        assert (parts.folder / name / "state" / "ledger.jsonl").stat().st_mode & 0o777 == 0o600


def run_config(parts: Parts) -> str:
    home = parts.folder / "server"
    values = {
        "rounds": 1,
        "mode": "tolerate",
        "tau2": -1.0,
        "timeout": 300.0,
        "min-nodes": 2,
        "server-key": str(home / "server.key"),
        "coalition": str(home / "coalition.toml"),
        "report": str(home / "report.json"),
        "tracker": f"https://localhost:{parts.ports['tracker']}",
        "tracker-ca": str(home / "ca.crt"),
    }
    return " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())


def read(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.log").read_text(errors="replace").splitlines()
