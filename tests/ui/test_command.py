"""`niss ui` as a process: what it prints, warns of and refuses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from niss.cli.services import ui_command
from niss.errors import ConfigError


@contextlib.contextmanager
def started(runs: Path, before: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`niss --quiet ui` as a process of its own, with the address that it prints; `before` is run in it first."""
    flags = ["--quiet", "ui", "--port", "0", "--no-open", "--runs", str(runs)]
    # A job in the background of a shell inherits an ignored SIGINT; a user at a terminal does not.
    process = subprocess.Popen(
        [sys.executable, "-c", f"{before}\nfrom niss.cli import main\nmain()", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_it_prints_its_address_answers_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    with started(tmp_path) as (address, process):
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert b"Plan the noise" in answer.read()
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    assert process.returncode == 0
    assert messages == ""


def test_a_connection_that_brings_no_whole_request_is_closed(tmp_path: Path) -> None:
    soon = "from niss.tracker import serve\nserve._SILENT_SECONDS, serve._LOOK_SECONDS = 0.2, 0.05\n"
    with started(tmp_path, soon) as (address, _):
        place = urllib.parse.urlsplit(address)
        with socket.create_connection((place.hostname, place.port), timeout=60) as half_open:
            half_open.sendall(b"GET / HT")
            with contextlib.suppress(ConnectionResetError):
                assert half_open.recv(4096) == b""


def test_a_taken_port_is_said_to_be(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="cannot listen") as raised:
            ui_command(port=taken.getsockname()[1], host="127.0.0.1", runs=tmp_path, no_open=True)
        assert "--port 0" in (raised.value.hint or "")


def test_a_file_is_no_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        ui_command(port=0, host="127.0.0.1", runs=tmp_path / "file", no_open=True)


@pytest.mark.parametrize(
    ("host", "warned"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_it_warns_beyond_this_machine_and_opens_a_browser_unless_told(
    monkeypatch: pytest.MonkeyPatch, host: str, warned: bool
) -> None:
    seen: dict[str, object] = {}

    def serve(**given: object) -> None:
        seen.update(given)

    monkeypatch.setattr("niss.ui.app.serve", serve)
    app = typer.Typer()
    app.command()(ui_command)
    done = CliRunner().invoke(app, ["--host", host])
    assert done.exit_code == 0
    assert ("warning: listening on" in done.stderr) == warned
    assert seen["open_browser"] is True
    assert CliRunner().invoke(app, ["--host", host, "--no-open"]).exit_code == 0
    assert seen["open_browser"] is False


def test_the_pages_start_without_torch_or_matplotlib() -> None:
    heavy = ("torch", "matplotlib", "niss.simulation.runner")
    code = f"import sys, niss.ui.app; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
