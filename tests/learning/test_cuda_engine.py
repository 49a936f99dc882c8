"""What the CUDA engine decides, with a processor in place of the device: who is stacked with whom, and who is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from learning.test_stacked_modules import problem
from niss.learning import LocalTraining
from niss.learning import cuda as engine_module
from niss.learning.cohort import BatchTable, Problem
from niss.learning.cuda import CudaEngine
from niss.learning.cuda.program import DeviceTable, PlainSteps, Steps, stacked_module
from support.stacked import assert_as_the_reference, make_jobs

WORK = LocalTraining(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.5)
MEMORY = 2**34


class Eager:
    """`GraphedSteps` without a graph; remembers how many clients it was made for."""

    made: ClassVar[list[int]] = []

    def __init__(self, lanes: Sequence[Steps], _unrolled: int, held: int) -> None:
        self.lanes, self.bytes_held = lanes, held
        self.capacity = lanes[0].table.capacity
        self.made.append(lanes[-1].table.clients.stop)

    def run(self, table: BatchTable, starts: Tensor) -> None:
        for lane in self.lanes:
            lane.table.restart()
            lane.load(starts if len(starts) == 1 else starts[lane.table.clients])
        for ready in table.fill():
            for lane in self.lanes:
                lane.table.write(table, 0, ready)
        with torch.no_grad():
            for lane in self.lanes:
                for step in range(table.steps):
                    lane.enqueue(step)

    def read(self) -> Tensor:
        return torch.cat([lane.read() for lane in self.lanes])


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "GraphedSteps", Eager)
    monkeypatch.setattr(Eager, "made", [])
    for name, value in {
        "get_device_properties": SimpleNamespace(total_memory=MEMORY),
        "mem_get_info": (MEMORY, MEMORY),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 2**20,
        "reset_peak_memory_stats": None,
        "get_device_name": "a processor",
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


SIZES = (8, 4, 9, 6, 3, 10)


def assert_equal(
    engine: CudaEngine,
    problem: Problem,
    starts: Sequence[Tensor],
    work: LocalTraining,
    sizes: Sequence[int] = SIZES,
) -> None:
    """For clients from these starts in turn, or from the weights of the module."""
    jobs = make_jobs(problem, sizes, starts)
    rows = torch.full((len(jobs), problem.layout.size), torch.nan, dtype=torch.float64)

    def take(numbers: Sequence[int], updates: Tensor) -> None:
        rows[list(numbers)] = updates

    engine.perform(work, jobs, take)
    assert_as_the_reference(problem, jobs, work, rows)


def test_clients_that_agree_in_what_is_frozen_are_stacked_and_others_are_not() -> None:
    task = problem("adapted")
    engine = CudaEngine(task, device="cpu")
    start = task.layout.flatten(task.module)
    trained = task.layout.trainable_mask()
    other = torch.where(trained, 0.7 * start, start)
    assert_equal(engine, task, [start, other], WORK)
    assert Eager.made == [6]
    third = torch.where(trained, start, 0.7 * start)
    assert_equal(engine, task, [start, other, third], WORK)
    assert sorted(Eager.made[1:]) == [2, 4]


def test_few_clients_of_a_recurrent_layer_are_trained_one_after_another() -> None:
    task = problem("gru")
    engine = CudaEngine(task, device="cpu")
    assert "fewer than 3 clients" in engine.engine
    assert_equal(engine, task, [], WORK, (9, 4))
    assert not Eager.made
    assert_equal(engine, task, [], WORK)
    assert Eager.made == [6]
    assert_equal(engine, task, [], WORK, ())


def test_clients_that_fill_the_device_alone_are_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    task = problem("adapted")
    engine = CudaEngine(task, device="cpu")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 2**31)
    assert_equal(engine, task, [], WORK)
    assert not Eager.made


def test_chunks_hold_what_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    task = problem("adapted")
    engine = CudaEngine(task, device="cpu")
    needed = engine._bytes_of_a_client(WORK, 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2 * 2 * needed, MEMORY))
    assert_equal(engine, task, [], WORK)
    assert Eager.made == [2]


class InLanes:
    """Stands for the kernels: plain steps, in lanes."""

    lanes = 4

    @staticmethod
    def abreast(
        problem: Problem, tables: Sequence[DeviceTable], settings: LocalTraining, *, precision: str
    ) -> list[PlainSteps]:
        assert precision == "tf32x3"
        return [PlainSteps(stacked_module(problem.module), problem, table, settings) for table in tables]


@pytest.mark.parametrize(("sizes", "lanes"), [(SIZES, 4), ((9, 4, 12), 3)])
def test_clients_are_dealt_to_lanes_and_stay_in_order(
    sizes: tuple[int, ...], lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = problem("gru")
    engine = CudaEngine(task, device="cpu")
    monkeypatch.setattr(engine_module, "_kernel_steps", lambda _: InLanes)
    engine._formulation = replace(engine._formulation, triton=True)
    start = task.layout.flatten(task.module)
    assert_equal(engine, task, [], WORK, sizes)
    assert_equal(engine, task, [start, 0.7 * start], WORK, sizes)
    assert Eager.made == [len(sizes)]
    (program,) = engine._programs.values()
    assert isinstance(program, Eager)
    held = [lane.table.sizes.shape[1] for lane in program.lanes]
    assert len(held) == lanes
    assert sum(held) == len(sizes)
    assert max(held) - min(held) <= 1
