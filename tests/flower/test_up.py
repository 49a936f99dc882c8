"""`niss up` as far as it goes without starting anything, and the keys it makes."""

from __future__ import annotations

import datetime
import json
import os
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from niss.cli import app, up
from niss.errors import ConfigError, NissError, PausedError
from niss.local import OWNER, Processes, marked
from niss.local.deployment import Deployment, Settings, make_certificates, make_node_key
from support.waiting import wait_until

REPORT = {
    "paused": "",
    "rounds": [{"round": 1, "survivors": 2, "skipped": None, "lost": {"7": "no answer in time"}}],
    "metrics": {"server": {"0": {"accuracy": 0.1}, "1": {"accuracy": 0.5}}},
    "statement": {"words": "a promise", "caveats": ["a caveat"]},
}


class FakeDeployment:
    """Stands for a federation whose run ends as the test says."""

    status_at_end, report_at_end = "finished:completed", REPORT

    def __init__(self, folder, settings, *, say, passing):
        self.report, self.settings, self.say = folder / "report.json", settings, say
        type(self).passing = passing

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.say("down")

    def submit(self, app, more):
        type(self).app, type(self).more = app, dict(more)
        more = {name: value for name, value in more.items() if name != "resume"}
        self.report.write_text(json.dumps({**self.report_at_end, "more": more}))
        return "1"

    def stream(self, _run, show):
        show("\x1b[92mINFO\x1b[0m: hello")

    def status(self, _run):
        return self.status_at_end


SETTINGS = (
    "rounds",
    "mode",
    "clip",
    "min-nodes",
    "server-key",
    "coalition",
    "report",
    "tracker",
    "tracker-ca",
)


def write_app(folder, names=SETTINGS):
    lines = "\n".join(f'{name} = ""' for name in names)
    (folder / "pyproject.toml").write_text(f"[tool.flwr.app.config]\n{lines}\n")


@pytest.fixture
def bring_up(monkeypatch, tmp_path):
    write_app(tmp_path)
    monkeypatch.setattr("niss.local.deployment.Deployment", FakeDeployment)
    monkeypatch.setattr(up.shutil, "which", lambda *_, **__: "/bin/true")
    return lambda **changes: up.up_command(**{"nodes": 3, "rounds": 2, "app": tmp_path, **changes})


def test_the_result_goes_to_stdout_and_the_log_without_its_colours_to_stderr(bring_up, capsys):
    bring_up()
    shown = capsys.readouterr()
    assert "after round 1: accuracy 0.5" in shown.out
    assert "round 1: node 7 was lost: no answer in time" in shown.out
    assert "a promise" in shown.out
    assert "- a caveat" in shown.out
    assert shown.err == "run 1 started\nINFO: hello\ndown\n"


def test_settings_are_read_as_toml(bring_up, capsys):
    """As those of `niss run`: a bare word is text."""
    bring_up(settings=['mode="repair"', "clip=0.5", "report=r.json"], as_json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["more"] == {"rounds": 2, "mode": "repair", "clip": 0.5, "report": "r.json"}
    with pytest.raises(ConfigError, match="--set"):
        bring_up(settings=["mode"])


@pytest.mark.usefixtures("bring_up")
def test_quiet_leaves_the_report_alone(tmp_path):
    done = CliRunner().invoke(app, ["up", f"--app={tmp_path}", "--json", "--quiet"])
    assert json.loads(done.stdout)["more"] == {"rounds": 3}
    assert not done.stderr


def test_a_run_that_failed_or_gave_nothing_is_an_error(bring_up, monkeypatch):
    empty = [{"round": 1, "survivors": 0, "skipped": "too few", "lost": {}}]
    monkeypatch.setattr(FakeDeployment, "report_at_end", {**REPORT, "rounds": empty})
    with pytest.raises(NissError, match="no round gave a result: too few"):
        bring_up()
    monkeypatch.setattr(FakeDeployment, "status_at_end", "finished:failed")
    with pytest.raises(NissError, match="'finished:failed': no round gave a result: too few") as failed:
        bring_up()
    assert "use more nodes" in failed.value.hint
    for rounds in ([], REPORT["rounds"]):
        monkeypatch.setattr(FakeDeployment, "report_at_end", {**REPORT, "rounds": rounds})
        with pytest.raises(NissError) as failed:
            bring_up()
        assert failed.value.message == "the run ended as 'finished:failed'"
        assert "read the logs" in failed.value.hint


def test_a_run_that_paused_says_why_and_how_it_goes_on(bring_up, monkeypatch, tmp_path):
    paused = {**REPORT, "paused": "round 2 could not begin for 600 seconds: the tracker does not answer"}
    monkeypatch.setattr(FakeDeployment, "report_at_end", paused)
    monkeypatch.setattr(FakeDeployment, "status_at_end", "finished:failed")
    with pytest.raises(PausedError, match="round 2 could not begin") as failed:
        bring_up(keep=tmp_path / "kept")
    assert failed.value.exit_code == 8
    assert f"niss up --resume {tmp_path / 'kept'}" in failed.value.hint
    with pytest.raises(PausedError) as failed:
        bring_up()
    assert "--keep FOLDER" in failed.value.hint


def test_what_cannot_be_run_is_refused_before_anything_starts(bring_up, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is no Flower app"):
        bring_up(app=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is not empty"):
        bring_up(keep=tmp_path)
    monkeypatch.setattr(up.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="Flower is not installed"):
        bring_up()


def test_an_app_without_a_setting_that_it_needs_is_refused_with_the_name_of_it(bring_up, tmp_path):
    write_app(tmp_path, [name for name in SETTINGS if name not in ("report", "tracker-ca")])
    with pytest.raises(ConfigError, match="has no setting 'report', 'tracker-ca'") as refused:
        bring_up()
    assert 'report = ""' in refused.value.hint
    write_app(tmp_path, [name for name in SETTINGS if not name.startswith("tracker")])
    bring_up(tracker=False)
    with pytest.raises(ConfigError, match="has no setting 'epsilom'"):
        bring_up(tracker=False, settings=["epsilom=3.0"])


def test_metrics_that_are_lists_are_printed_as_lists(bring_up, monkeypatch, capsys):
    metrics = {"1": {"by class": [0.123456, 1], "accuracy": 0.5, "nothing": None}}
    monkeypatch.setattr(FakeDeployment, "report_at_end", {**REPORT, "metrics": {"server": metrics}})
    bring_up()
    assert "after round 1: by class [0.1235, 1], accuracy 0.5, nothing None" in capsys.readouterr().out


@pytest.mark.usefixtures("bring_up")
def test_the_built_in_app_needs_no_checkout(monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    up.up_command(keep=tmp_path / "kept")
    assert FakeDeployment.app == tmp_path / "kept" / "app"
    assert (FakeDeployment.app / "flower_app" / "server_app.py").is_file()
    assert FakeDeployment.more["resume"] == str(tmp_path / "kept" / "server")
    assert FakeDeployment.more["clip"] == 1.0
    assert not FakeDeployment.passing


@pytest.mark.usefixtures("bring_up")
def test_a_run_that_was_kept_is_resumed_as_it_was(tmp_path):
    kept = tmp_path / "kept"
    up.up_command(keep=kept, nodes=4, rounds=7, tls=False, settings=["clip=0.25"])
    before, app = FakeDeployment.more, FakeDeployment.app
    with pytest.raises(ConfigError, match="no federation was started"):
        up.up_command(resume=kept)
    one = Deployment(kept, Settings(nodes=4, tls=False))
    one._make_keys()
    up.up_command(resume=kept)
    assert (FakeDeployment.more, FakeDeployment.app) == (before, app)
    assert before == {"rounds": 7, "clip": 0.25, "resume": str(kept / "server")}
    with pytest.raises(ConfigError, match="was not kept by niss up"):
        up.up_command(resume=tmp_path)
    with pytest.raises(ConfigError, match="kept where it is"):
        up.up_command(resume=kept, keep=tmp_path / "other")


@pytest.mark.parametrize("tls", [False, True])
def test_a_federation_that_is_resumed_has_the_same_keys_and_the_same_tracker(tmp_path, tls):
    def made():
        one = Deployment(tmp_path, Settings(nodes=2, tls=tls))
        one._make_keys()
        return one.server_key, one.tracker_address, one._node_config(0), one._node_config(1)

    assert made() == made()
    assert Settings.of_folder(tmp_path) == Settings(nodes=2, tls=tls)


def test_a_killed_owner_leaves_neither_processes_nor_its_folder(tmp_path):
    scratch = tmp_path / "scratch"
    owner = (
        "import os, pathlib, sys, time\n"
        "from niss.local import Processes\n"
        f"scratch = pathlib.Path({str(scratch)!r})\n"
        "scratch.mkdir()\n"
        "with Processes(scratch, os.environ, scratch=scratch) as processes:\n"
        "    detached = 'import subprocess, sys, time; subprocess.Popen([sys.executable, \"-c\", '\\\n"
        "        '\"import time; time.sleep(300)\"], start_new_session=True); time.sleep(300)'\n"
        "    processes.start('one', [sys.executable, '-c', detached])\n"
        "    print(processes._owner, flush=True)\n"
        "    time.sleep(300)\n"
    )
    started = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    mark = started.stdout.readline().strip()
    try:
        wait_until(lambda: len(marked(mark, OWNER)) == 2)
    finally:
        started.kill()
        started.communicate()
    wait_until(lambda: not marked(mark, OWNER))
    wait_until(lambda: not scratch.exists())


def test_the_certificate_is_one_that_the_authority_signed_for_this_machine(tmp_path):
    made = make_certificates(tmp_path, datetime.datetime.now(datetime.UTC))
    assert made.key.stat().st_mode & 0o777 == 0o600
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made.certificate, made.key)
    asking = ssl.create_default_context(cafile=made.authority)
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    answer = threading.Thread(target=lambda: serving.wrap_socket(theirs, server_side=True).close())
    answer.start()
    asking.wrap_socket(ours, server_hostname="127.0.0.1").close()
    answer.join()


def test_a_node_key_is_one_that_flower_reads(tmp_path):
    private, public = make_node_key(tmp_path, "node")
    assert private.stat().st_mode & 0o777 == 0o600
    key = load_ssh_private_key(private.read_bytes(), None)
    assert key.curve.name == "secp384r1"
    assert key.public_key() == load_ssh_public_key(public.read_bytes())


def test_a_process_that_ends_before_it_is_ready_says_its_last_output(tmp_path):
    with Processes(tmp_path, os.environ) as processes:
        one = processes.start("short", [sys.executable, "-c", "raise SystemExit('no room')"])
        one.process.wait(30)
        with pytest.raises(NissError, match="short ended with status 1\nno room"):
            one.require_running()


def test_everything_is_down_after_an_error(tmp_path):
    processes = Processes(tmp_path, os.environ)
    one = processes.start("long", [sys.executable, "-c", "import time; time.sleep(300)"])
    with pytest.raises(ZeroDivisionError), processes:
        raise ZeroDivisionError
    assert one.process.returncode is not None


def test_a_process_that_does_not_obey_is_made_to(tmp_path):
    stubborn = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('on', flush=True)\n"
        "time.sleep(99)\n"
    )
    with Processes(tmp_path, os.environ) as processes:
        one = processes.start("stubborn", [sys.executable, "-c", stubborn])
        while "on" not in one.last_output():
            one.require_running()
        with pytest.raises(subprocess.TimeoutExpired):
            one.process.wait(0.01)
        processes.stop(one, grace=0.2)
    assert one.process.returncode == -9


def test_a_federation_of_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 2"):
        Deployment(tmp_path, Settings(nodes=1))


def test_node_configurations_pin_what_is_to_be_pinned(tmp_path):
    one = Deployment(
        tmp_path, Settings(nodes=2, tls=False, tracker=False, node_options={1: {"niss-state": None}})
    )
    one._make_keys()
    assert f'niss-server="{one.server_key}"' in one._node_config(0)
    assert "niss-state" in one._node_config(0)
    assert "niss-state" not in one._node_config(1)
    assert "tracker" not in one.run_config({})
