"""Runs that a page starts: who may, one at a time, cancelled as by Ctrl-C, resumed, and ended with the server."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from niss.data.catalog import CATALOG, spec_named
from niss.errors import ConfigError
from niss.learning.models import accepts
from niss.simulation.materials import sample_spec
from niss.ui import jobs as jobs_module
from niss.ui.jobs import BusyError, Jobs
from niss.ui.planning import PlanQuestion, answer, data_arguments
from ui.conftest import Answer, get, serving, write_run

# Stands for `niss run`: says what it was given, then works until it is interrupted, or fails where it is told to.
_WORKER = """
import pathlib, signal, sys, time
arguments = sys.argv[1:]
if "--fail" in arguments:
    print("round 1 of 3", file=sys.stderr)
    print("error: training.participants: too many\\nhint: lower it", file=sys.stderr)
    sys.exit(2)
pathlib.Path("arguments.txt").write_text("\\n".join(arguments))
try:
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path("interrupted.txt").touch()
    sys.exit(130)
"""
START = {"question": {"participants": 12, "rounds": 2, "epsilon": 8}, "name": "mine"}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The stand-in, in a folder of its own."""
    monkeypatch.setattr(jobs_module, "COMMAND", (sys.executable, "-c", _WORKER))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def jobs(worker: Path) -> Iterator[Jobs]:
    found = Jobs(worker / "runs")
    yield found
    found.close()


def until(holds: Any) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came about")


def post(server: str, path: str, body: Any, **changes: str | None) -> Answer:
    """As the page asks, but for `changes`; None leaves a header out."""
    token = re.search(r'name="niss-token" content="([^"]+)"', get(server, "/").text)
    assert token is not None
    headers = {
        "origin": server,
        "content_type": "application/json",
        "x_niss_token": token[1],
        "sec_fetch_site": "same-origin",
    } | changes
    sent = {name: value for name, value in headers.items() if value is not None}
    host = server.removeprefix("http://")
    return get(server, path, method="POST", body=json.dumps(body).encode(), host=host, **sent)


def test_a_job_is_started_cancelled_and_forgotten_with_nothing_left_behind(jobs: Jobs, worker: Path) -> None:
    job = jobs.start("mine", ["--rounds", "3"])
    until((worker / "arguments.txt").is_file)
    arguments = (worker / "arguments.txt").read_text().split("\n")
    assert arguments == ["--rounds", "3", "--out", str(worker / "runs" / "mine")]
    with pytest.raises(BusyError, match="still running"):
        jobs.start("other", [])
    with pytest.raises(ConfigError, match="not being worked on"):
        jobs.cancel("other")
    assert jobs.about("mine") == job.to_json()
    jobs.cancel("mine")
    until(lambda: not jobs.busy())
    assert (worker / "interrupted.txt").is_file()
    assert job.to_json() == {"run": "mine", "running": False, "code": 130, "cancelled": True, "message": None}


def test_a_job_of_a_server_in_the_background_of_a_script_can_be_cancelled(jobs: Jobs, worker: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        jobs.start("mine", [])
    finally:
        signal.signal(signal.SIGINT, before)
    until((worker / "arguments.txt").is_file)
    jobs.cancel("mine")
    until(lambda: not jobs.busy())
    assert (worker / "interrupted.txt").is_file()


def test_a_job_that_fails_says_why(jobs: Jobs) -> None:
    job = jobs.start("mine", ["--fail"])
    until(lambda: not jobs.busy())
    assert job.to_json()["message"] == "error: training.participants: too many\nhint: lower it"


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", ".hidden", "a b", "x" * 65, "a\n"])
def test_a_name_is_a_plain_folder(jobs: Jobs, name: str) -> None:
    with pytest.raises(ConfigError, match="name:"):
        jobs.start(name, [])


def test_no_run_is_replaced_and_only_runs_are_resumed(jobs: Jobs, worker: Path) -> None:
    write_run(worker / "runs" / "old", rounds=5, done=2, finished=False)
    (worker / "runs" / "empty").mkdir()
    with pytest.raises(ConfigError, match="already"):
        jobs.start("old", [])
    with pytest.raises(ConfigError, match="no run"):
        jobs.resume("empty", worker / "runs" / "empty")
    jobs.resume("old", worker / "runs" / "old")
    until((worker / "arguments.txt").is_file)
    assert (worker / "arguments.txt").read_text().split("\n") == ["--resume", str(worker / "runs" / "old")]


def test_a_job_ends_with_its_server(worker: Path) -> None:
    found = Jobs(worker / "runs")
    found.start("mine", [])
    until((worker / "arguments.txt").is_file)
    found.close()
    assert not found.busy()
    assert (worker / "interrupted.txt").is_file()


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"x_niss_token": None}, 403),
        ({"x_niss_token": "guessed"}, 403),
        ({"origin": None}, 403),
        ({"origin": "https://elsewhere.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": None}, 415),
    ],
    ids=str,
)
def test_no_other_page_can_start_anything(
    server: str, worker: Path, changes: dict[str, str | None], status: int
) -> None:
    refused = post(server, "/api/jobs", START, **changes)
    assert refused.status == status, refused.text
    assert not (worker / "arguments.txt").exists()


def test_nothing_is_started_for_other_machines(runs: Path, worker: Path) -> None:
    with serving(runs, host="0.0.0.0") as server:
        refused = post(server, "/api/jobs", START)
    assert refused.status == 403
    assert "from the machine itself" in refused.json()["message"]
    assert not (worker / "arguments.txt").exists()


def test_the_page_starts_follows_cancels_and_resumes(server: str, runs: Path, worker: Path) -> None:
    started = post(server, "/api/jobs", START)
    assert started.status == 202, started.text
    until((worker / "arguments.txt").is_file)
    arguments = (worker / "arguments.txt").read_text().split("\n")
    assert arguments[:-2] == answer(PlanQuestion(**START["question"]))["run_arguments"]
    assert get(server, "/api/run", {"run": "mine"}).json()["state"] == "starting"
    assert post(server, "/api/jobs", {**START, "name": "two"}).status == 409
    assert post(server, "/api/jobs/resume", {"run": "going"}).status == 409
    assert post(server, "/api/jobs/cancel", {"run": "mine"}).status == 202
    until(lambda: not get(server, "/api/run", {"run": "mine"}).json()["job"]["running"])
    (worker / "arguments.txt").unlink()
    assert post(server, "/api/jobs/resume", {"run": "going"}).status == 202
    until((worker / "arguments.txt").is_file)
    assert (worker / "arguments.txt").read_text().split("\n") == ["--resume", str(runs / "going")]
    assert get(server, "/api/run", {"run": "going"}).json()["job"]["running"]
    assert post(server, "/api/jobs/cancel", {"run": "going"}).status == 202


def test_the_page_offers_every_dataset_with_a_model_that_fits(server: str, worker: Path) -> None:
    page = get(server, "/").text
    offered = re.findall(r'<option value="([a-z0-9-]+)" data-model="([a-z]+)">', page)
    assert [name for name, _ in offered] == [spec.name for spec in CATALOG]
    for name, model in offered[1:]:
        assert data_arguments(name) == ["--dataset", name, "--model", model]
        assert accepts(model, sample_spec(spec_named(name)))
    assert post(server, "/api/jobs", {**START, "dataset": "shakespeare"}).status == 202
    until((worker / "arguments.txt").is_file)
    arguments = (worker / "arguments.txt").read_text().split("\n")
    assert arguments[-6:-2] == ["--dataset", "shakespeare", "--model", "gru"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {**START, "dataset": "--out"},
        {"question": {"participants": 0}, "name": "a"},
        {**START, "shell": "x"},
        {**START, "name": "../up"},
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused(server: str, worker: Path, body: Any) -> None:
    assert post(server, "/api/jobs", body).status == 422
    assert not (worker / "arguments.txt").exists()
    assert post(server, "/api/jobs/resume", {"run": "../done"}).status == 404
