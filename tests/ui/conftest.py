from __future__ import annotations

import http.client
import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi", reason="FastAPI is not installed: pip install 'niss[ui]'")


def write_run(folder: Path, *, rounds: int, done: int, finished: bool, **changes: Any) -> Path:
    """A single run of NISS that has played `done` of `rounds` rounds."""
    folder.mkdir(parents=True)
    manifest = {
        "kind": "run",
        "created": "2026-01-02T03:04:05+00:00",
        "config": {
            "name": folder.name,
            "seed": 1,
            "rounds": rounds,
            "data": {"dataset": "mnist-mini", "split": "iid", "clients": 20},
            "training": {"participants": 10},
            "privacy": {"unit": "client", "relation": "zero-out", "epsilon": 3.0, "delta": 1e-5},
            "methods": [{"name": "niss", "kappa": 4.0, "neighbours": 9.0, "graph": "regular"}],
        },
        "versions": {"niss": "0.1.0"},
    } | changes
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (folder / "metrics.jsonl").touch()
    for number in range(1, done + 1):
        play_round(folder, number)
    if finished:
        result = {"label": "niss", "method": "niss", "accuracy": 0.8}
        result |= {"epsilon_joint": 3.0, "epsilon_marginal": 1.0}
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def play_round(folder: Path, number: int) -> None:
    noise = {"aggregate_variance": 1.1e-4, "aggregate_variance_predicted": 1.0e-4, "tau2": 0.01}
    noise["model_noise_variance"] = number * 1.0e-4
    heads = {"participants": 10, "survivors": 10}
    line = {"round": number, "accuracy": 0.8 * number / (number + 2), "loss": 1.0, **noise, **heads}
    for name, written in (("metrics", line), ("timing", {"round": number, "seconds": 0.5})):
        with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(written) + "\n")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run, one in progress, one in a folder of its own, and a broken one."""
    root = tmp_path / "runs"
    write_run(root / "done", rounds=5, done=5, finished=True)
    write_run(root / "going", rounds=10, done=3, finished=False)
    write_run(root / "deep" / "inner", rounds=5, done=5, finished=True)
    (root / "broken").mkdir()
    (root / "broken" / "summary.json").write_text("{", encoding="utf-8")
    (root / "no-run").mkdir()
    return root


@contextmanager
def serving(runs: Path, *, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a server that believes to listen on `host`, and is reached on loopback."""
    from niss.tracker.serve import TidyServer, address, listen
    from niss.ui import make_app

    listening, running = listen("127.0.0.1", 0), TidyServer(make_app(runs, host=host))
    thread = threading.Thread(target=running.run, args=([listening],))
    thread.start()
    try:
        yield address(listening)
    finally:
        running.should_exit = True
        thread.join(timeout=20)
        listening.close()


@pytest.fixture
def server(runs: Path) -> Iterator[str]:
    """The address of a running server for these runs."""
    with serving(runs) as address:
        yield address


@dataclass(frozen=True)
class Answer:
    """What a server said."""

    status: int
    headers: dict[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


def get(
    address: str,
    path: str,
    params: dict[str, Any] | None = None,
    *,
    host: str | None = None,
    method: str = "GET",
    body: bytes | None = None,
    **headers: str,
) -> Answer:
    """Ask for exactly this path: nothing is tidied up on the way."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    try:
        query = f"?{urlencode(params)}" if params else ""
        connection.putrequest(method, path + query, skip_host=True)
        connection.putheader("Host", connection.host if host is None else host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        fields = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, fields, answer.read().decode())
    finally:
        connection.close()


def cli_plan(line: str) -> dict[str, Any]:
    """What the command in `line` prints, which must be a `niss plan ... --json`."""
    from niss.cli import app

    words = shlex.split(line)
    assert words[:2] == ["niss", "plan"]
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]
