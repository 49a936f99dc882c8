"""`--device cuda:all`: a process for each GPU, watched by the one that started them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import pytest
import torch
import typer

from niss.cli import launch as launching
from niss.cli.launch import launch, on_all_gpus, refuse_together
from niss.errors import ConfigError, RanksError


def ranks(script: str, count: int = 2) -> int:
    return launch([sys.executable, "-c", f"import os, sys, time\n{script}"], [{}] * count)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Mapping[str, str]]]:
    """Two GPUs that are not there; collects what would have been started on them."""
    started: list[Sequence[Mapping[str, str]]] = []

    def fake(_command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        started.append(environments)
        return 5

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launching, "launch", fake)
    return started


def test_each_gpu_has_a_process_of_its_own(gpus: list[Sequence[Mapping[str, str]]]) -> None:
    with pytest.raises(typer.Exit) as end:
        on_all_gpus("cuda:all")
    assert end.value.exit_code == 5
    assert gpus == [[{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_other_devices_need_no_other_process(gpus: list[Sequence[Mapping[str, str]]], device: str) -> None:
    on_all_gpus(device)
    assert gpus == []


def test_one_gpu_needs_no_other_process(
    gpus: list[Sequence[Mapping[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    on_all_gpus("cuda:all")
    assert gpus == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.device: torch finds no CUDA GPU"):
        on_all_gpus("cuda:all")


def test_every_process_is_told_its_place() -> None:
    names = "'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'"
    assert ranks(f"sys.exit([os.environ[n] for n in ({names})] not in (list('0022'), list('1122')))") == 0


def test_one_that_fails_takes_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_GRACE", 0.2)
    assert ranks("sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(100_000)") == 3


def test_what_was_killed_is_named() -> None:
    with pytest.raises(RanksError, match="rank 1 by signal 9"):
        ranks("os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else None")


def test_commands_of_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_together("plan")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuse_together("run")
    with pytest.raises(ConfigError, match="niss plan is done by one process"):
        refuse_together("plan")
