"""What the shell offers on TAB, and that the names offered are those the commands accept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from niss.attacks.experiment import distortion_names, method_names
from niss.cli import completion
from niss.cli.completion import one_of, run_folders, several_of

NISS = Path(sys.executable).with_name("niss")


def offered(line: str, cwd: Path) -> list[str]:
    """What bash would be offered for the last word of `line`."""
    words = line.split(" ")
    environment = {
        **os.environ,
        "_NISS_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run([str(NISS)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, mark in (
        ("runs/demo", "summary.json"),
        ("runs/demo/niss", "manifest.json"),
        ("runs/mine-1", "manifest.json"),
        ("runs/attack-joint-1", "attack.json"),
        ("runs/no-run", "notes.txt"),
        ("runs/old/deep", "manifest.json"),
    ):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / mark).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("niss run --dataset mnist", ["mnist", "mnist-mini"]),
        ("niss run --method central-m", ["central-mf"]),
        ("niss run --method ", sorted(method_names())),
        ("niss compare --methods fedavg,n", ["fedavg,niss", "fedavg,niss-carried"]),
        ("niss compare --preset ", ["demo", "paper"]),
        ("niss run --device c", ["cpu", "cuda", "cuda:all"]),
        ("niss bench --device c", ["cpu", "cuda"]),
        ("niss data get cifar", ["cifar10", "cifar100"]),
        ("niss reproduce figure-3 --panel mnist-cnn", ["mnist-cnn-iid", "mnist-cnn-non-iid"]),
        ("niss report runs/", ["runs/attack-joint-1", "runs/demo", "runs/mine-1", "runs/old/deep"]),
        ("niss account runs/demo/", ["runs/demo/niss"]),
        ("niss run --resume runs/m", ["runs/mine-1"]),
        ("niss export runs/de", ["runs/demo"]),
        ("niss att", ["attack"]),
        ("niss attack dlg --view ", ["alone", "joint"]),
    ],
)
def test_the_shell_is_offered_what_fits(runs: Path, line: str, expected: list[str]) -> None:
    assert sorted(offered(line, runs)) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [str(NISS), "--show-completion", shell], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "_NISS_COMPLETE" in done.stdout


def test_bash_itself_completes_with_the_installed_script(runs: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{NISS.parent}:{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=runs, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(str(NISS), "--install-completion", "bash")
    script = home / ".bash_completions" / "niss.sh"
    assert str(script) in (home / ".bashrc").read_text()
    asked = (
        f"source {script}; COMP_WORDS=(niss run --preset d); COMP_CWORD=3; "
        "_niss_completion niss d --preset; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    assert run("bash", "--norc", "-c", asked).split() == ["demo"]


def test_completion_loads_nothing_heavy() -> None:
    heavy = ("torch", "scipy", "matplotlib", "pydantic", "numpy")
    code = (
        "import sys, niss.cli, niss.cli.completion as c; c.run_folders('');"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_in_a_list_are_offered_once() -> None:
    assert several_of(("a", "b"))("a,") == ["a,b"]
    assert one_of(("ab", "b"))("a") == ["ab"]


def test_folders_that_cannot_be_read_offer_nothing(tmp_path: Path) -> None:
    assert run_folders(f"{tmp_path}/absent/") == []
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "attack.json").touch()
    assert run_folders(f"{tmp_path}/") == [f"{tmp_path}/a"]


def test_the_names_are_those_of_the_settings() -> None:
    from niss.accounting import carried_charges
    from niss.data import list_datasets
    from niss.simulation import config

    def literal(section: Any, field: str) -> tuple[str, ...]:
        return get_args(section.model_fields[field].annotation)

    assert completion.PRESETS == config.PRESETS
    assert set(literal(config.MethodConfig, "name")) == set(method_names())
    assert literal(config.MethodConfig, "graph") == completion.GRAPHS
    assert set(literal(config.MethodConfig, "distortion")) == set(distortion_names())
    assert literal(config.ModelConfig, "name") == completion.MODELS
    assert literal(config.DataConfig, "split") == completion.SPLITS
    assert literal(config.TrainingConfig, "device") == completion.DEVICES
    assert literal(config.PrivacyConfig, "relation") == completion.RELATIONS
    assert literal(config.ProtocolConfig, "mode") == completion.MODES
    assert carried_charges.PATTERNS == completion.PATTERNS
    assert tuple(info.name for info in list_datasets()) == completion.DATASETS


def test_the_help_names_every_method() -> None:
    from niss.cli.simulate import Method, Methods

    for kind in (Method, Methods):
        assert set(re.findall(r"[a-z-]+", kind.__doc__ or "")) >= set(method_names())
