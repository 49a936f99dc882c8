"""The worker processes: same results as without them, and nothing left behind however it ends."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from niss.errors import ConfigError, NissError
from niss.learning import (
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    build_model,
)
from niss.learning.cpu import CpuEngine, pool
from niss.learning.cpu.pool import WorkerError
from niss.randomness import SimStream

SIZES = (13, 31, 1, 20, 7, 40, 10)
WORK = LocalTraining(epochs=2, momentum=0.5)
needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")


@pytest.fixture(autouse=True)
def _shared_whatever_the_clock_says(monkeypatch) -> None:
    monkeypatch.setattr(CpuEngine, "_gains_by_workers", lambda engine, _samples: engine._has_workers())


def federation(
    module: nn.Module | None = None, workers: int = 2, spoilt: float | None = None
) -> tuple[Cohort, list[Job]]:
    """Of an MLP unless told otherwise; `spoilt` is a value of the largest client, which is not trained here."""
    if module is None:
        module = build_model("mlp", samples=ImageSamples((1, 6, 6)), classes=10, stream=SimStream(5))
    layout = FlatLayout.of(module)
    starts = [layout.flatten(module), layout.flatten(module) * 1.5]
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(sum(SIZES), 1, 6, 6, generator=generator)
    labels = torch.randint(0, 10, (sum(SIZES),), generator=generator)
    rows = torch.arange(sum(SIZES)).split(list(SIZES))
    if spoilt is not None:
        inputs[sum(SIZES[:5])] = spoilt
    jobs = [Job(starts[n % 2], own, SimStream(n)) for n, own in enumerate(rows)]
    return Cohort.of(module, layout, inputs, labels, workers=workers), jobs


@contextmanager
def running(**options: Any) -> Iterator[tuple[Cohort, list[Job]]]:
    """A federation whose workers have loaded."""
    cohort, jobs = federation(**options)
    with cohort:
        cohort.start()
        yield cohort, jobs


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Cohort, list[Job]]]:
    with running() as both:
        yield both


def worker_ids(cohort: Cohort) -> list[int]:
    assert cohort._pool is not None
    return [process.pid for process in cohort._pool._processes]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 20.0
    while any(is_running(process) for process in processes):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.02)


def test_workers_give_bit_for_bit_what_one_process_gives(started) -> None:
    cohort, jobs = started
    same_groups, _ = federation()
    done: list[int] = []
    updates = cohort.train(jobs, WORK, progress=done.append)
    assert sum(done) == len(jobs)
    assert cohort.train([], WORK).shape == (0, cohort._problem.layout.size)
    assert torch.equal(updates, same_groups.train(jobs, WORK))
    assert same_groups._pool is None
    alone, _ = federation(workers=1)
    assert torch.allclose(updates, alone.train(jobs, WORK), rtol=1e-4, atol=1e-6)
    assert "2 processes" in cohort.engine
    assert "one process" in alone.engine


def test_the_first_shared_round_does_not_count_against_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (cohort, jobs):
        left_to_workers = shared_by(cohort, monkeypatch)
        cohort.train(jobs, WORK)
        assert not cohort._together.samples
        cohort.train(jobs, WORK)
        assert cohort._together.samples
    assert len(left_to_workers) == 2


def test_more_starts_than_before_and_jobs_in_any_order(started) -> None:
    cohort, jobs = started
    many = [Job(job.start + 0.001 * number, job.samples, job.stream) for number, job in enumerate(jobs * 3)]
    alone, _ = federation(workers=1)
    assert torch.allclose(
        cohort.train(many[::-1], WORK).flip(0), alone.train(many, WORK), rtol=1e-4, atol=1e-6
    )


def test_work_begins_here_and_moves_to_workers_when_it_lasts(monkeypatch) -> None:
    cohort, jobs = federation()
    with cohort:
        first = cohort.train(jobs, WORK)
        assert cohort._pool is None
        monkeypatch.setattr("niss.learning.cpu.WORTH_WORKERS", 0.0)
        assert torch.equal(cohort.train(jobs, WORK), first)
        processes = worker_ids(cohort)
        cohort.start()
        assert worker_ids(cohort) == processes
        assert torch.equal(cohort.train(jobs, WORK), first)


@pytest.mark.slow
@needs_proc
@pytest.mark.usefixtures("started")  # what any first pool leaves open is open
def test_close_ends_every_worker_and_work_can_go_on() -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    cohort, jobs = federation()
    cohort.start()
    processes = worker_ids(cohort)
    if Path("/dev/shm").exists():
        assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "niss" in path.name]
    cohort.close()
    cohort.close()
    assert not any(is_running(process) for process in processes)
    assert cohort.train(jobs, WORK).isfinite().all()
    del cohort
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@needs_proc
def test_a_killed_worker_is_an_error_that_says_so_and_ends_the_others() -> None:
    with running(workers=3) as (cohort, jobs):
        processes = worker_ids(cohort)
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(
            WorkerError, match=rf"worker 2 of 2 \(process {processes[1]}\) was killed by SIGKILL"
        ):
            cohort.train(jobs, WORK)
        assert not any(is_running(process) for process in processes)
        assert cohort.train(jobs, WORK).isfinite().all()
    assert issubclass(WorkerError, NissError)


@needs_proc
def test_an_interrupt_leaves_no_workers() -> None:
    cohort, jobs = federation()

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with cohort:
        cohort.start()
        processes = worker_ids(cohort)
        os.kill(processes[0], signal.SIGINT)  # ignored there
        with pytest.raises(KeyboardInterrupt):
            cohort.train(jobs, WORK, progress=interrupt)
        assert not any(is_running(process) for process in processes)


@pytest.mark.slow
@needs_proc
def test_an_interrupt_while_workers_start_ends_those_that_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is held back while a process starts, and comes before the pool knows of it."""
    begun: list[Any] = []
    start = pool._Worker.start

    def interrupted(worker: Any) -> None:
        start(worker)
        begun.append(worker)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._Worker, "start", interrupted)
    cohort, _ = federation()
    with pytest.raises(KeyboardInterrupt):
        cohort.start()
    (worker,) = begun
    worker.join(20.0)
    assert worker.exitcode == -signal.SIGKILL


def test_workers_end_when_the_parent_is_killed(tmp_path) -> None:
    # A script without `if __name__ == "__main__"`, as users write them.
    script = tmp_path / "script.py"
    script.write_text(
        "import time, torch\n"
        "from niss.learning import Cohort, FlatLayout, ImageSamples, build_model\n"
        "from niss.randomness import SimStream\n"
        "module = build_model('mlp', samples=ImageSamples((1, 6, 6)), classes=10, stream=SimStream(5))\n"
        "data = torch.zeros(4, 1, 6, 6), torch.zeros(4, dtype=torch.int64)\n"
        "cohort = Cohort.of(module, FlatLayout.of(module), *data, workers=3)\n"
        "cohort.start()\n"
        "print(*[process.pid for process in cohort._pool._processes], flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        processes = [int(word) for word in parent.stdout.readline().split()]
        assert len(processes) == 2
        parent.kill()
    wait_until_gone(processes)


@pytest.mark.slow
def test_an_error_inside_a_worker_arrives_as_it_was(tmp_path, monkeypatch) -> None:
    (tmp_path / "picky_layers.py").write_text(
        "from torch import nn\n"
        "from niss.errors import ConfigError\n"
        "class Picky(nn.Linear):\n"
        "    def forward(self, images):\n"
        "        if bool((images == 77.0).any()):\n"
        "            raise ConfigError('77 is not allowed', field='images', hint='use 78')\n"
        "        return super().forward(images)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    picky = importlib.import_module("picky_layers").Picky
    module = nn.Sequential(nn.Flatten(), picky(36, 10))
    with running(module=module) as (cohort, jobs):
        assert cohort.train(jobs, WORK).isfinite().all()
    refused = pytest.raises(ConfigError, match="77 is not allowed")
    with running(module=module, spoilt=77.0) as (cohort, jobs), refused as caught:
        cohort.train(jobs, WORK)
    assert caught.value.field == "images"
    assert caught.value.hint == "use 78"
    assert "picky_layers.py" in str(caught.value.__cause__)


def test_what_cannot_be_sent_is_trained_here_and_says_why() -> None:
    class Local(nn.Linear):
        pass

    module = nn.Sequential(nn.Flatten(), Local(36, 10))
    cohort, jobs = federation(module)
    with cohort:
        assert "one process, because the module cannot be pickled" in cohort.engine
        cohort.start()
        assert cohort.train(jobs, WORK).isfinite().all()
        assert cohort._pool is None


@pytest.mark.slow
def test_what_workers_cannot_import_is_trained_here_and_says_why(tmp_path, monkeypatch) -> None:
    source = tmp_path / "vanishing_layers.py"
    source.write_text("from torch import nn\nclass Vanishing(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    vanishing = importlib.import_module("vanishing_layers").Vanishing
    source.unlink()
    module = nn.Sequential(nn.Flatten(), vanishing(36, 10))
    with running(module=module) as (cohort, jobs):
        assert "one process, because workers cannot load the module" in cohort.engine
        assert cohort.train(jobs, WORK).isfinite().all()


def shared_by(cohort: Cohort, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on: how many groups of each call were left to the workers of this cohort."""
    counts: list[int] = []
    pool = cohort._pool
    assert pool is not None
    run = pool.run

    def counted(work, groups, take, train) -> None:
        here: list[object] = []
        everything = len(groups)
        run(work, groups, take, lambda *given: (here.append(given), train(*given)))
        counts.append(everything - len(here))

    monkeypatch.setattr(pool, "run", counted)
    return counts


def stacked() -> nn.Module:
    """Small, and none of the package's: groups by vmap."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 10))


def looped() -> nn.Module:
    """Convolutions that are none of the package's: the plain loop."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))


def convolved() -> nn.Module:
    return build_model("cnn", samples=ImageSamples((1, 6, 6)), classes=10, stream=SimStream(5))


@pytest.mark.parametrize("build", [stacked, looped, convolved], ids=["vmap", "loop", "cnn"])
def test_every_formulation_gives_the_same_bits_here_and_in_workers(build, monkeypatch) -> None:
    """In both processes at once, in this one alone, and with the shared data in this one alone."""
    module = build()
    cohort, some = federation(module)
    many = [replace(job, stream=SimStream(n)) for n, job in enumerate(some * 5)]
    with cohort:
        before = cohort.train(many, WORK)
        cohort.start()
        left_to_workers = shared_by(cohort, monkeypatch)
        assert torch.equal(cohort.train(many, WORK), before)
        assert left_to_workers[0] > 0
        monkeypatch.setattr(CpuEngine, "_gains_by_workers", lambda _engine, _samples: False)
        assert torch.equal(cohort.train(many, WORK), before)
        assert len(left_to_workers) == 1


def test_one_group_stays_here(started, monkeypatch) -> None:
    cohort, jobs = started
    left_to_workers = shared_by(cohort, monkeypatch)
    cohort.train(jobs[:1], WORK)
    assert left_to_workers == []
    cohort.train(jobs, WORK)
    assert len(left_to_workers) == 1
