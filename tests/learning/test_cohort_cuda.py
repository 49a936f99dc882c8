"""The CUDA cohort against the reference loop, and the noise on the device against its formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learning.test_stacked_modules import LOOPED, NAMES, WORK, problem
from niss.graph import ShareGraph
from niss.learning import (
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    batch_order,
    build_model,
    evaluate,
)
from niss.learning.cohort import BatchTable, Problem
from niss.randomness import SimStream
from niss.simulation.cuda import DeviceUploads
from support.stacked import assert_as_the_reference, make_jobs, two_starts

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
of_both = pytest.mark.parametrize("name", ["mlp", "cnn"])


def images(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    centres = torch.rand(10, *shape, generator=source)
    labels = torch.randint(0, 10, (count,), generator=source)
    noise = torch.rand(count, *shape, generator=source)
    return (0.6 * centres[labels] + 0.4 * noise).to(dtype), labels


def cohort_data(
    module: nn.Module, counts: tuple[int, ...], shape: tuple[int, ...], starts: int = 1
) -> tuple[FlatLayout, Tensor, Tensor, list[Job]]:
    layout = FlatLayout.of(module)
    inputs, labels = images(sum(counts), shape, layout.dtype)
    vectors = [layout.flatten(module) * (1.0 - 0.1 * number) for number in range(starts)]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2))
    jobs = [
        Job(vectors[number % starts], samples, SimStream(7).child("client", number))
        for number, samples in enumerate(torch.split(order, list(counts)))
    ]
    return layout, inputs, labels, jobs


def reference(
    module: nn.Module,
    layout: FlatLayout,
    inputs: Tensor,
    labels: Tensor,
    jobs: list[Job],
    work: LocalTraining,
) -> Tensor:
    problem = Problem(module, layout, inputs, labels)
    return torch.stack([problem.update_of(job, work) for job in jobs])


def relative(found: Tensor, expected: Tensor) -> Tensor:
    return (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)


SMALL = (1, 8, 8)
UNEVEN = (23, 7, 40, 16, 3)
RULES = (
    LocalTraining(epochs=2, batch_size=5, learning_rate=0.1),
    LocalTraining(epochs=3, batch_size=8, learning_rate=0.05, momentum=0.9, weight_decay=0.01),
)


def small_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    hidden = (24, 17) if name == "mlp" else None
    return build_model(
        name,
        samples=ImageSamples(SMALL),
        classes=10,
        stream=SimStream(3),
        hidden=hidden,
    ).to(dtype)


def test_table_has_the_batches_of_batch_order() -> None:
    layout, _, _, jobs = cohort_data(small_model("mlp"), UNEVEN, SMALL)
    assert layout.size
    # The same clients from another start, another client with the same samples, another with the same stream.
    jobs += [Job(job.start + 1.0, job.samples, job.stream) for job in jobs]
    jobs.append(Job(jobs[0].start, jobs[0].samples, SimStream(99)))
    jobs.append(Job(jobs[0].start, jobs[2].samples, jobs[0].stream))
    settings = RULES[0]
    table = BatchTable(jobs, settings)
    ready = list(table.fill())
    assert ready[-1] == table.steps
    for client, job in enumerate(jobs):
        batches = [job.samples[batch] for batch in batch_order(len(job.samples), settings, job.stream)]
        assert int((table.sizes[:, client] > 0).sum()) == len(batches)
        for step, batch in enumerate(batches):
            assert table.sizes[step, client] == len(batch)
            assert table.rows[step, client, : len(batch)].tolist() == batch.tolist()
            assert set(table.rows[step, client, len(batch) :].tolist()) <= {int(batch[0])}


@needs_cuda
@of_both
def test_float64_equals_the_reference_on_uneven_clients(name: str) -> None:
    module = small_model(name, torch.float64)
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL, starts=2)
    for settings in RULES:
        with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
            found = cohort.train(jobs, settings).cpu()
        expected = reference(module, layout, inputs, labels, jobs, settings)
        assert relative(found, expected).max() < 1e-10, name


@needs_cuda
@of_both
def test_kernels_are_as_exact_as_float32_and_repeat_to_the_bit(name: str) -> None:
    module = small_model(name)
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL, starts=2)
    exact = small_model(name, torch.float64)
    exact_jobs = [Job(job.start.double(), job.samples, job.stream) for job in jobs]
    for settings in RULES:
        expected = reference(exact, FlatLayout.of(exact), inputs.double(), labels, exact_jobs, settings)
        plain = reference(module, layout, inputs, labels, jobs, settings)
        with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
            found = cohort.train(jobs, settings).cpu()
            again = cohort.train(jobs, settings).cpu()
        assert torch.equal(found, again)
        bound = 4.0 * relative(plain, expected).median() + 1e-6
        assert relative(found, expected).median() < bound, name


@needs_cuda
def test_paper_models_agree_after_one_epoch() -> None:
    for name, count in (("mlp", 200), ("cnn", 60)):
        module = build_model(name, samples=ImageSamples((1, 28, 28)), classes=10, stream=SimStream(3))
        layout, inputs, labels, jobs = cohort_data(module, (count,) * 5, (1, 28, 28))
        settings = LocalTraining(epochs=1)
        expected = reference(module, layout, inputs, labels, jobs, settings)
        with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
            found = cohort.train(jobs, settings).cpu()
        assert relative(found, expected).median() < 1e-5, name


@needs_cuda
@of_both
def test_plain_path_agrees_with_the_kernels(name: str) -> None:
    from niss.learning import cuda as engine

    find_spec = engine.find_spec
    module = small_model(name)
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL)
    with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
        fused = cohort.train(jobs, RULES[1]).cpu()
    try:
        engine.find_spec = lambda _name: None  # type: ignore[assignment]
        with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
            assert "Triton is not installed" in cohort.engine
            plain = cohort.train(jobs, RULES[1]).cpu()
    finally:
        engine.find_spec = find_spec
    assert relative(fused, plain).median() < 1e-5, name


@needs_cuda
@of_both
def test_a_diverged_client_stays_alone(name: str) -> None:
    module = small_model(name)
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL)
    poisoned = inputs.clone()
    poisoned[jobs[1].samples] = 1e30
    astray = [
        Job(job.start * (1e30 if k == 1 else 1.0), job.samples, job.stream) for k, job in enumerate(jobs)
    ]
    expected = reference(module, layout, inputs, labels, jobs, RULES[0])
    for some_inputs, some_jobs in ((poisoned, jobs), (inputs, astray)):
        with Cohort.of(module, layout, some_inputs, labels, device="cuda") as cohort:
            found = cohort.train(some_jobs, RULES[0]).cpu()
        assert not found[1].isfinite().all()
        others = [0, 2, 3, 4]
        assert relative(found[others], expected[others]).median() < 1e-5


@needs_cuda
@of_both
def test_a_step_is_as_exact_as_float32_whatever_the_scale(name: str) -> None:
    """Inputs from tiny to huge, and slopes of 1e-9 below the output layer: layer by layer, after one step."""
    settings = LocalTraining(epochs=1, batch_size=40, learning_rate=0.5)
    module, exact = small_model(name), small_model(name, torch.float64)
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL)
    dim = jobs[0].start.clone()
    outputs = sum(layout.sizes[-2:])
    dim[-outputs:] *= 1e-9
    for scale, start in ((1.0, jobs[0].start), (1e4, jobs[0].start), (1e-6, jobs[0].start), (1.0, dim)):
        some_jobs = [Job(start, job.samples, job.stream) for job in jobs]
        exact_jobs = [Job(start.double(), job.samples, job.stream) for job in jobs]
        images_now = inputs * scale
        expected = reference(exact, FlatLayout.of(exact), images_now.double(), labels, exact_jobs, settings)
        plain = reference(module, layout, images_now, labels, some_jobs, settings)
        with Cohort.of(module, layout, images_now, labels, device="cuda") as cohort:
            assert "Triton" in cohort.engine
            found = cohort.train(some_jobs, settings).cpu()
        entries = zip(
            *(torch.split(rows, layout.sizes, dim=1) for rows in (found, plain, expected)), strict=True
        )
        for entry, (some_found, some_plain, some_expected) in zip(layout.names, entries, strict=True):
            if bool((some_expected.norm(dim=1) > 0.0).all()):
                bound = 4.0 * relative(some_plain, some_expected).median() + 1e-6
                assert relative(some_found, some_expected).median() < bound, (name, scale, entry)


@needs_cuda
def test_images_too_uneven_for_a_common_unit_are_left_to_torch() -> None:
    module = small_model("cnn")
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL)
    uneven = inputs.clone()
    uneven[jobs[0].samples[0]] *= 1e-6
    expected = reference(module, layout, uneven, labels, jobs, RULES[0])
    with Cohort.of(module, layout, uneven, labels, device="cuda") as cohort:
        assert "not one for the kernels" in cohort.engine
        assert relative(cohort.train(jobs, RULES[0]).cpu(), expected).median() < 1e-5
    with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
        assert "fused Triton kernels" in cohort.engine
        layout.load(module, jobs[0].start)
        exact = evaluate(module, uneven, labels)
        assert abs(cohort.evaluate(jobs[0].start, uneven, labels).loss - exact.loss) < 1e-6 * exact.loss


@needs_cuda
@of_both
def test_an_evaluation_that_is_repeated_follows_the_weights(name: str) -> None:
    """Launched, then captured, then replayed; for two test sets in turn."""
    module = small_model(name)
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL)
    sets = ((inputs, labels), (inputs[:7], labels[:7]))
    with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
        for some_inputs, some_labels in sets:
            for factor in (1.0, 0.5, 2.0, 1.0):
                layout.load(module, jobs[0].start * factor)
                expected = evaluate(module, some_inputs, some_labels)
                found = cohort.evaluate(jobs[0].start * factor, some_inputs, some_labels)
                assert found.accuracy == expected.accuracy, (name, factor)
                assert abs(found.loss - expected.loss) < 1e-5 * expected.loss, (name, factor)


@needs_cuda
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", [*NAMES, *LOOPED])
def test_modules_of_every_kind_equal_the_reference_in_float64_and_repeat_to_the_bit(name: str) -> None:
    task = problem(name)
    jobs = make_jobs(task, (8, 6, 5, 3, 2), two_starts(task))
    with Cohort.of(task.module, task.layout, task.inputs, task.labels, device="cuda") as cohort:
        assert ("in a CUDA graph" in cohort.engine) == (name not in LOOPED), cohort.engine
        found, again = (cohort.train(jobs, WORK).cpu() for _ in range(2))
    assert torch.equal(found, again)
    if name != "dropout":  # a device draws other masks
        assert_as_the_reference(task, jobs, WORK, found)


@needs_cuda
@of_both
def test_evaluation_equals_the_reference(name: str) -> None:
    module = small_model(name, torch.float64)
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL)
    with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
        scores = cohort.evaluate(jobs[0].start, inputs, labels)
    layout.load(module, jobs[0].start)
    expected_scores = evaluate(module, inputs, labels)
    assert scores.accuracy == expected_scores.accuracy
    assert abs(scores.loss - expected_scores.loss) < 1e-12


@needs_cuda
def test_chunks_give_the_same_rows_and_progress() -> None:
    module = small_model("mlp")
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL, starts=2)
    told: list[int] = []
    with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
        whole = cohort.train(jobs, RULES[0])
        cohort.close()  # what is captured has fitted, and is not measured again
        cohort._room = lambda *_: 2  # type: ignore[attr-defined]
        parts = cohort.train(jobs, RULES[0], progress=told.append)
    assert torch.equal(whole, parts)
    assert told == [2, 2, 1]


@needs_cuda
@pytest.mark.parametrize("distortion", ["scalar", "coordinate", "additive"])
@pytest.mark.parametrize("triton", [True, False])
def test_shares_cancel_and_have_the_stated_covariance(
    monkeypatch: pytest.MonkeyPatch, triton: bool, distortion: str
) -> None:
    monkeypatch.setattr("niss.simulation.cuda._triton_installed", lambda: triton)
    clients, coordinates = 6, 400_003
    pairs = [(a, b, 1.0 + 0.1 * a) for a in range(clients) for b in range(clients) if a != b]
    graph = ShareGraph(clients, pairs)
    tau2 = np.linspace(0.0, 0.5, clients)

    def shared(tau2: Any) -> tuple[Tensor, Any]:
        rows = torch.zeros((clients, coordinates), device="cuda")
        options = {"unit_variance": 2.0, "distortion": distortion, "stream": SimStream(5)}
        return rows, DeviceUploads(rows).add_shares(graph, tau2=tau2, **options)

    plain, _ = shared(0.0)
    assert float(plain.sum(dim=0).abs().max()) < 1e-4
    assert torch.equal(plain, shared(0.0)[0])
    uploads, factors = shared(tau2)
    expected = np.zeros((clients, clients))
    for edge, (sender, receiver) in enumerate(zip(graph.senders, graph.receivers, strict=True)):
        variance = 2.0 * graph.weights[edge]
        mean, spread = 1.0, tau2[receiver]
        if distortion == "scalar":
            mean, spread = factors[edge], 0.0
        expected[sender, sender] += variance
        expected[receiver, receiver] += variance * (mean**2 + spread)
        expected[sender, receiver] -= variance * mean
        expected[receiver, sender] -= variance * mean
    scale = np.sqrt(np.outer(expected.diagonal(), expected.diagonal()))
    measured = np.cov(uploads.cpu().double().numpy())
    # Seven deviations of a sample covariance (kurtosis of the products at most 3.5 here).
    assert np.abs((measured - expected) / scale).max() < 7.0 * 2.0 / np.sqrt(coordinates)


@needs_cuda
def test_shares_are_normal_far_out() -> None:
    edges = ShareGraph(2, [(0, 1, 1.0)])
    uploads = torch.zeros((2, 20_000_000), device="cuda")
    options = {"unit_variance": 1.0, "tau2": 0.0, "distortion": "scalar", "stream": SimStream(6)}
    DeviceUploads(uploads).add_shares(edges, **options)
    draws = uploads[0].double()
    for level, probability in ((1.0, 0.3173105), (3.0, 2.699796e-3), (4.5, 6.795346e-6)):
        found = float((draws.abs() > level).double().mean())
        deviation = (probability / len(draws)) ** 0.5
        assert abs(found - probability) < 5.0 * deviation, level
    assert abs(float(draws.mean())) < 5.0 / len(draws) ** 0.5
    assert abs(float((draws[:-1] * draws[1:]).mean())) < 5.0 / len(draws) ** 0.5
