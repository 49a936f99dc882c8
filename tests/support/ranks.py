"""Processes that train together as ranks, as a launcher would start them; `do` is what each of them does."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from niss.randomness import SimStream

TESTS = Path(__file__).parents[1]


def blobs(count: int, name: str, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Three well-separated classes in five dimensions."""
    generator = SimStream(7).child("blobs", name).generator()
    centres = 3.0 * SimStream(7).child("centres").generator().standard_normal((3, 5))
    labels = generator.integers(0, 3, count)
    return (centres[labels] + generator.standard_normal((count, 5))).astype(dtype), labels.astype(np.int64)


def blank_linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model for them, of zeros."""
    module = nn.Linear(5, 3, dtype=dtype)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


def materials(clients: int = 12, dtype: str = "float64") -> dict[str, Any]:
    """Clients with between 3 and 11 samples each, and a linear model."""
    datasets = [blobs(3 + number * number % 9, f"client {number}", dtype) for number in range(clients)]
    return {
        "model": blank_linear(getattr(torch, dtype)),
        "clients": datasets,
        "test": blobs(201, "test", dtype),
    }


def environment_of(count: int) -> dict[str, str]:
    """What so many ranks on this machine have in common."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
    }


def start_ranks(arguments: Sequence[str], count: int = 2) -> list[subprocess.Popen[str]]:
    """`python ARGUMENTS` as so many ranks on this machine."""
    common = environment_of(count)
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def ended(processes: Sequence[subprocess.Popen[str]], seconds: float = 600.0) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of each, once all have ended; whoever is left after so many seconds is killed."""
    until, found = time.monotonic() + seconds, []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(until - time.monotonic(), 0.1))
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return found


def play(work: Sequence[dict[str, Any]], folder: Path, count: int = 2) -> list[list[str]]:
    """Do each piece of work (`do`) with that many ranks; returns what came of each piece, on each rank.

    The ranks are forks of one process, since importing torch takes longer than all they do.
    """
    path = folder / f"work-{time.monotonic_ns()}.json"
    path.write_text(json.dumps(list(work)))
    command = [sys.executable, "-m", "support.ranks", str(path), str(count)]
    done = subprocess.run(
        command, env=environment_of(count), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(found_by(rank, path).read_text()) for rank in range(count)]


def found_by(rank: int, work: Path) -> Path:
    return work.with_suffix(f".{rank}.json")


def be_rank(rank: int, work: Path) -> None:
    os.environ["RANK"] = str(rank)
    found_by(rank, work).write_text(json.dumps([do(piece) for piece in json.loads(work.read_text())]))


def do(piece: dict[str, Any]) -> str:
    """`{"do": "run" | "compare" | "resume", "config": ..., "out": ..., "materials": ..., "stop": ...}`.

    `stop` ends it after that round, as an error would. Returns the message of the error that it ended with; or nothing.
    """
    import niss
    from niss.errors import NissError

    def progress(event: Any) -> None:
        if event.round == piece.get("stop"):
            raise NissError("stopped")

    given = {**materials(**piece.get("materials", {})), "progress": progress}
    try:
        if piece["do"] == "resume":
            niss.resume(piece["out"], **given)
        else:
            make = niss.run if piece["do"] == "run" else niss.compare
            make(niss.make_config(piece["config"]), out=piece["out"], **given)
    except NissError as error:
        return error.message
    return ""


if __name__ == "__main__":
    # What training imports at its first step.
    for name in (
        "niss.simulation.ranks",
        "dp_accounting",
        "torch._dynamo",
        "torch.fx.experimental.symbolic_shapes",
    ):
        importlib.import_module(name)
    forked = multiprocessing.get_context("fork")
    ranks = [
        forked.Process(target=be_rank, args=(rank, Path(sys.argv[1]))) for rank in range(int(sys.argv[2]))
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
