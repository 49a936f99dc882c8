"""The command line as a user meets it: the installed entry point, in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.terminals import NISS, Ended, in_pipe, run_python
from niss.claims import digits

SMALL = ["--clients", "40", "--participants", "10"]
SMALL += ["--set", "data.samples_per_client=20", "--set", "model.hidden=[8]"]
PLAN = [
    "plan",
    "--participants",
    "30",
    "--neighbours",
    "29",
    "--clip",
    "3",
    "--epsilon",
    "8",
    "--delta",
    "1e-5",
]
PLAN += ["--rounds", "100", "--participations", "30", "--collusion", "0.2", "--dropout", "0.05"]
CARRY = ["plan", "--carry", "--rounds", "40", "--participants", "50", "--clients", "250"]
# `niss`, which ends by saying what it has loaded.
TELLING = """
import sys
from niss.cli import main
try:
    main()
finally:
    print("loaded:", *(name for name in ("torch", "matplotlib") if name in sys.modules), file=sys.stderr)
"""


def niss(*arguments: str, cwd: Path = Path()) -> Ended:
    return in_pipe(*arguments, cwd=cwd, NO_COLOR="1", COLUMNS="160")


def test_run_from_a_file_prints_a_table_on_stdout(tmp_path):
    (tmp_path / "c.toml").write_text(
        'name = "mine"\nrounds = 1\n[data]\nclients = 20\nsplit = "shards"\n[model]\nhidden = [4]\n'
        '[training]\nparticipants = 5\n[[methods]]\nname = "dp-fedavg"\n'
    )
    done = niss("run", "c.toml", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dp-fedavg" in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "runs/mine-1/result.json").exists()


def test_compare_writes_the_summary(tmp_path):
    done = niss(
        "compare", "--methods", "fedavg,niss", "--rounds", "1", *SMALL, "--out", "c", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads((tmp_path / "c/summary.json").read_text())
    assert [line["method"] for line in printed["methods"]] == ["fedavg", "niss"]


def test_resume_after_kill_nine_gives_the_same_bytes(tmp_path):
    command = ["run", "--rounds", "6", "--method", "niss", *SMALL, "--quiet"]
    assert niss(*command, "--out", "whole", cwd=tmp_path).returncode == 0
    process = subprocess.Popen([str(NISS), *command, "--out", "cut"], cwd=tmp_path)
    while not (tmp_path / "cut/checkpoint.safetensors").exists():
        assert process.poll() is None, "the run ended before its first checkpoint"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = niss("run", "--resume", "cut", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("metrics.jsonl", "model.safetensors", "privacy.json", "result.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name


def test_ctrl_c_says_how_to_go_on(tmp_path):
    command = [str(NISS), "run", "--rounds", "500", *SMALL, "--out", "long"]
    # A job in the background of a shell inherits an ignored SIGINT; a user at a terminal does not.
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (tmp_path / "long/checkpoint.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "niss run --resume long" in messages
    assert "Traceback" not in messages


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("run --tau2 much", 2, "tau2: must be calibrated or number"),
        ("run --method nis", 2, "did you mean 'niss'"),
        ("run --set privacy.epsiln=3", 2, "did you mean 'epsilon'"),
        ("run --set epsilon", 2, "KEY=VALUE"),
        ("run absent.toml", 2, "absent.toml"),
        ("run --preset paper", 2, "--method"),
        ("run --preset demmo", 2, "demo, silos, paper"),
        ("run --dataset mnsit", 2, "mnist"),
        ("run --dataset mnist", 3, "NISS_DATA"),
        ("run --resume absent", 5, "absent"),
        ("run --resume absent --rounds 3", 2, "--rounds"),
        ("run --rounds many", 2, "--rounds"),
        ("run --rounds 0", 2, "rounds"),
        ("run --participants 20 --neighbours 500", 2, "only 19 others"),
        ("compare --methods fedavg,magic", 2, "magic"),
        ("report absent", 5, "absent"),
        ("account absent", 5, "absent"),
        ("data get mnsit", 2, "did you mean 'mnist'"),
        ("nonsense", 2, "nonsense"),
        ("plan", 2, "--participants"),
        ("plan --participants 0", 2, "participants"),
        ("plan --participants 10 --collusion 0.95", 4, "infeasible"),
        ("plan --participants 10 --rounds 3 --participations 5", 2, "--participations"),
        ("plan --participants 10 --plot plan.docx", 2, "neither .png nor .svg"),
        ("plan --participants 10 --epsilon 0", 2, "epsilon"),
        ("CARRY --clients 260", 2, "do not make whole cohorts of 50"),
        ("CARRY --clients 40", 2, "cannot fill a round of 50"),
        ("CARRY --delta 2", 2, "less than 1"),
        ("CARRY --clip -1", 2, "clip"),
        ("CARRY --tau2 0.1", 2, "--tau2"),
        ("CARRY --kappa 0", 2, "kappa"),
        ("CARRY --collusion 0.97 --dropout 0.3 --mode repair", 4, "colluders"),
        ("plan --carry --participants 50 --clients 250", 2, "--rounds"),
        ("plan --participants 50 --clients 250", 2, "--rounds"),
        ("plan --participants 50 --pattern any", 2, "carry shares too"),
    ],
)
def test_wrong_input_is_refused_with_a_code_and_a_hint(tmp_path, line, code, message):
    """Before torch is loaded, unless a run was begun. Every proxy points at a closed port: a download fails."""
    closed = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    here = dict.fromkeys(("NISS_DATA", "XDG_CACHE_HOME"), str(tmp_path))
    done = run_python(
        TELLING, *line.replace("CARRY", " ".join(CARRY)).split(), cwd=tmp_path, **closed, **here
    )
    assert done.returncode == code, done.stderr
    *said, loaded = done.stderr.splitlines()
    assert message in "\n".join(said)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert loaded == "loaded:" or "--resume" in line or line == "run --dataset mnist"


def test_the_plan_as_text_and_as_json_agree() -> None:
    text, data = niss(*PLAN), niss(*PLAN, "--json")
    assert text.returncode == data.returncode == 0, text.stderr + data.stderr
    plan = json.loads(data.stdout)
    assert plan["rounds"] == 100
    for name, value in {
        "kappa": plan["plan"]["kappa"],
        "tau2": plan["tau2"],
        "epsilon of each client": 8.0,
    }.items():
        shown = f"{value:.2f}" if name.startswith("epsilon") else digits(value)
        assert re.search(f"^{name} +{re.escape(shown)} ", text.stdout, re.MULTILINE)
    assert "6 static colluders of 30" in text.stdout


def test_what_a_tau2_promises() -> None:
    assert "no guarantee" in niss("plan", "--participants", "30", "--tau2", "0").stdout
    asked = json.loads(niss("plan", "--participants", "30", "--tau2", "0.3", "--json").stdout)
    assert asked["tau2"] == 0.3
    assert asked["epsilon_joint"] < 3.0


def test_a_plan_that_carries_shares_says_what_it_promises_and_asks() -> None:
    faults = ["--collusion", "0.1", "--dropout", "0.02", "--mode", "repair", "--pattern", "any"]
    text, data = niss(*CARRY, *faults), niss(*CARRY, *faults, "--json")
    assert text.returncode == data.returncode == 0, text.stderr + data.stderr
    plan = json.loads(data.stdout)
    assert (plan["run"]["separation"], plan["plan"]["participations"], plan["rounds"]) == (5, 8, 40)
    assert plan["run"]["noise"]["colluders"] == 5
    assert (plan["dropout"], plan["plan"]["mode"], plan["plan"]["pattern"]) == (0.02, "repair", "any")
    for name in ("aggregate_variance_ratio_to_central", "ratio_to_central_final", "ratio_to_best"):
        assert f"{digits(plan[name])} ×" in text.stdout
    assert digits(plan["plan"]["carried_to_residual"]) in text.stdout
    words = " ".join(text.stdout.split())
    for part in ("over all 40 rounds", "at least so many rounds", "5 static colluders of 50", "Adam"):
        assert part in words
    assert "going on is a new run" in words


def test_where_carrying_does_not_help_the_plan_says_so() -> None:
    crowded = niss("plan", "--carry", "--rounds", "20", "--participants", "50", "--clients", "50")
    assert "hides nothing" in " ".join(crowded.stdout.split())
    assert "the run is short" in " ".join(niss(*CARRY, "--rounds", "3").stdout.split())


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("plan", [PLAN, CARRY], ids=["trade-off", "rounds"])
def test_a_plan_is_drawn(tmp_path: Path, plan: list[str], suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    done = niss(*plan, "--plot", str(path))
    assert done.returncode == 0, done.stderr
    assert path.stat().st_size > 5_000


def test_data_list_and_fetch_of_the_embedded_dataset(tmp_path):
    listed = niss("data", "list", "--json", cwd=tmp_path)
    names = {entry["name"]: entry for entry in json.loads(listed.stdout)}
    assert set(names) >= {"mnist-mini", "mnist", "fashion-mnist", "cifar10", "cifar100", "shakespeare"}
    assert (names["shakespeare"]["kind"], names["shakespeare"]["clients"]) == ("tokens", 627)
    assert names["mnist-mini"]["available"]
    fetched = niss("data", "get", "mnist-mini", cwd=tmp_path)
    assert Path(fetched.stdout.strip()).exists()
