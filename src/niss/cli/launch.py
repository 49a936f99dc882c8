"""niss as one of several processes that train together: who speaks, and the processes of `--device cuda:all`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import typer

from niss.cli.errors import INTERRUPTED
from niss.cli.terminal import STATE, terminated_like_interrupted
from niss.errors import ConfigError, RanksError

ALL_GPUS = "cuda:all"
TOGETHER = ("run", "compare")
"""The commands that several processes can do together."""
_GRACE = 15.0
"""Seconds for the other processes to end by themselves once one has failed, or once they were interrupted."""


def rank() -> int | None:
    """The number of this process among those started together, by torchrun for instance; None: it is the only one."""
    if "RANK" not in os.environ:
        return None
    from niss.simulation.ranks import rank_in

    own = rank_in(os.environ)
    return None if own is None else own.number


@contextlib.contextmanager
def only_first_speaks() -> Iterator[None]:
    """Let nothing be printed but by rank 0."""
    if not rank():
        yield
        return
    with Path(os.devnull).open("w") as end, contextlib.redirect_stdout(end), contextlib.redirect_stderr(end):
        yield


def refuse_together(command: str | None) -> None:
    """Refuse a command that every rank would do for itself."""
    if command not in TOGETHER and rank() is not None:
        raise ConfigError(
            f"niss {command} is done by one process",
            field="WORLD_SIZE",
            hint=f"start it without torchrun; several processes can do: niss {', niss '.join(TOGETHER)}",
        )


def on_all_gpus(device: str) -> None:
    """With `cuda:all` on a machine with several GPUs, run this command once for each of them, and end with their code.

    Does nothing where another device is asked for, where there is one GPU, or in one of those processes.
    """
    if device != ALL_GPUS or rank() is not None:
        return
    from niss.learning.cohort import choose_device, visible_gpus

    choose_device(device, field="training.device")
    own = [{"CUDA_VISIBLE_DEVICES": name} for name in visible_gpus()]
    if len(own) > 1:
        raise typer.Exit(launch([sys.executable, "-m", "niss", *sys.argv[1:]], own))


def launch(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run a command as ranks of this machine, one with each of these variables; returns the code to end with.

    They find each other through this process. Once one fails the others are given time to say so and then ended, so
    that none waits for what never comes; a `RanksError` names those that were killed. They are no part of the
    terminal's process group: Ctrl-C reaches them through here, once.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from niss.local import Processes

    count = len(environments)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    with terminated_like_interrupted(), Processes(None, common) as processes:
        ranks = []
        for number, own in enumerate(environments):
            place = {"RANK": str(number), "LOCAL_RANK": str(number)}
            ranks.append(processes.start(f"rank {number}", command, {**own, **place}).process)

        def wait(seconds: float, end: Callable[[], bool] = lambda: False) -> None:
            """Wait until all have ended, or until `end`, or for so long."""
            until = time.monotonic() + seconds
            while time.monotonic() < until and not end() and any(one.poll() is None for one in ranks):
                time.sleep(0.05)

        try:
            wait(math.inf, lambda: any(one.poll() for one in ranks))
            wait(_GRACE)
        except KeyboardInterrupt:
            for one in ranks:
                one.send_signal(signal.SIGINT)
            wait(_GRACE)
            STATE.interruption_reported = True  # by rank 0
            return INTERRUPTED
        killed = {number: -code for number, one in enumerate(ranks) if (code := one.poll() or 0) < 0}
    if killed:
        words = ", ".join(f"rank {number} by signal {by}" for number, by in killed.items())
        hint = "every whole round is kept. Go on with: niss run --resume FOLDER"
        raise RanksError(f"ranks were killed: {words}", hint=hint)
    # That of the first rank which failed by itself; those that were ended here have negative ones.
    codes = [one.wait() for one in ranks]
    return next((code for code in codes if code > 0), int(any(codes)))
