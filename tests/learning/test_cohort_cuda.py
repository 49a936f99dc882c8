"""The CUDA cohort against the reference loop, and the noise on the device against its formulas.

Needs a CUDA device. Without pytest, `python tests/learning/test_cohort_cuda.py` runs every test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
from torch import Tensor, nn

if __name__ == "__main__" and "cryptography" not in sys.modules:
    try:
        import cryptography  # noqa: F401
    except ImportError:  # nothing here draws secret noise
        for missing in ("", ".hazmat", ".hazmat.primitives", ".hazmat.primitives.ciphers"):
            sys.modules["cryptography" + missing] = ModuleType("cryptography" + missing)
        ciphers = sys.modules["cryptography.hazmat.primitives.ciphers"]
        ciphers.Cipher = ciphers.CipherContext = ciphers.algorithms = ciphers.modes = None  # type: ignore[attr-defined]

from niss.graph import ShareGraph
from niss.learning import (
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    TokenSamples,
    batch_order,
    build_model,
    evaluate,
)
from niss.learning.cohort import BatchTable, Problem
from niss.randomness import SimStream
from niss.simulation.cuda import DeviceUploads, add_shares_on_device
from niss.simulation.uploads import HostUploads, Seats

try:
    import pytest

    needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
except ImportError:

    def needs_cuda(test: Callable[[], None]) -> Callable[[], None]:
        return test


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
def test_float64_equals_the_reference_on_uneven_clients() -> None:
    for name in ("mlp", "cnn"):
        module = small_model(name, torch.float64)
        layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL, starts=2)
        for settings in RULES:
            with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
                found = cohort.train(jobs, settings).cpu()
            expected = reference(module, layout, inputs, labels, jobs, settings)
            assert relative(found, expected).max() < 1e-10, name


@needs_cuda
def test_kernels_are_as_exact_as_float32_and_repeat_to_the_bit() -> None:
    for name in ("mlp", "cnn"):
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
def test_plain_path_agrees_with_the_kernels() -> None:
    from niss.learning import cuda as engine

    find_spec = engine.find_spec
    for name in ("mlp", "cnn"):
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
def test_a_diverged_client_stays_alone() -> None:
    for name in ("mlp", "cnn"):
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
def test_a_step_is_as_exact_as_float32_whatever_the_scale() -> None:
    """Inputs from tiny to huge, and slopes of 1e-9 below the output layer: layer by layer, after one step."""
    settings = LocalTraining(epochs=1, batch_size=40, learning_rate=0.5)
    for name in ("mlp", "cnn"):
        module, exact = small_model(name), small_model(name, torch.float64)
        layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL)
        dim = jobs[0].start.clone()
        outputs = sum(layout.sizes[-2:])
        dim[-outputs:] *= 1e-9
        for scale, start in ((1.0, jobs[0].start), (1e4, jobs[0].start), (1e-6, jobs[0].start), (1.0, dim)):
            some_jobs = [Job(start, job.samples, job.stream) for job in jobs]
            exact_jobs = [Job(start.double(), job.samples, job.stream) for job in jobs]
            images_now = inputs * scale
            expected = reference(
                exact, FlatLayout.of(exact), images_now.double(), labels, exact_jobs, settings
            )
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
def test_an_evaluation_that_is_repeated_follows_the_weights() -> None:
    """Launched, then captured, then replayed; for two test sets in turn."""
    for name in ("mlp", "cnn"):
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


class Mixing(nn.Linear):
    """Subtracts the batch's mean: a padded batch would be another batch."""

    def forward(self, batch: Tensor) -> Tensor:
        flat = batch.flatten(1)
        return super().forward(flat - flat.mean(dim=0))


@needs_cuda
def test_other_modules_are_vmapped_or_looped_and_say_so() -> None:
    tanh = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)).double()
    frozen = small_model("mlp", torch.float64)
    next(frozen.parameters()).requires_grad_(False)
    norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)).double()
    cases: tuple[tuple[nn.Module, str], ...] = (
        (tanh, "vmapped"),
        (frozen, "vmapped"),
        (norm, "one client after another"),
        (Mixing(64, 10).double(), "one client after another"),
    )
    for module, words in cases:
        layout, inputs, labels, jobs = cohort_data(module, (23, 7, 40), SMALL)
        settings = LocalTraining(epochs=2, batch_size=5, learning_rate=0.1, momentum=0.5)
        expected = reference(module, layout, inputs, labels, jobs, settings)
        with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
            assert words in cohort.engine, cohort.engine
            found = cohort.train(jobs, settings).cpu()
        assert relative(found, expected).max() < 1e-10, cohort.engine


class TorchGru(nn.Module):
    """An embedding, torch's own GRU and a linear output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.layer = nn.GRU(4, 6, num_layers=2, batch_first=True)
        self.output = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.layer(self.table(tokens))[0])
        return logits


def transformer_with_frozen_layers() -> nn.Module:
    samples = TokenSamples(length=7, vocabulary=11)
    module = build_model("transformer", samples=samples, classes=11, stream=SimStream(3), width=8, heads=2)
    module.get_submodule("layers").requires_grad_(False)
    return module


@needs_cuda
def test_models_of_every_kind_equal_the_reference_in_float64_and_repeat_to_the_bit() -> None:
    tokens = TokenSamples(length=7, vocabulary=11)
    narrow = {"width": 6, "embedding": 4}
    modules: dict[str, nn.Module] = {
        "resnet": build_model("resnet", samples=ImageSamples(SMALL), classes=10, stream=SimStream(3)),
        "gru": build_model("gru", samples=tokens, classes=11, stream=SimStream(3), **narrow),
        "lstm": build_model("lstm", samples=tokens, classes=11, stream=SimStream(3), **narrow),
        "transformer": build_model("transformer", samples=tokens, classes=11, stream=SimStream(3)),
        "frozen layers": transformer_with_frozen_layers(),
        "torch GRU": TorchGru(),
    }
    for name, module in modules.items():
        module.double()
        layout, pictures, classes, jobs = cohort_data(module, UNEVEN, SMALL)
        source = torch.Generator().manual_seed(4)
        if name == "resnet":
            inputs, labels = pictures, classes
        else:
            walk = torch.randint(0, 11, (len(classes), 8), generator=source)
            inputs, labels = walk[:, :-1].contiguous(), walk[:, 1:].contiguous()
        with (
            Cohort.of(module, layout, inputs, labels, device="cuda") as cohort,
            Cohort.of(module, layout, inputs, labels, plain=True) as plain,
        ):
            assert "vmapped in a CUDA graph" in cohort.engine, (name, cohort.engine)
            found, again, expected = (
                trainer.train(jobs, RULES[1]).cpu() for trainer in (cohort, cohort, plain)
            )
            assert relative(found, expected).max() < 1e-10, name
            assert torch.equal(found, again), name


@needs_cuda
def test_evaluation_equals_the_reference() -> None:
    for name in ("mlp", "cnn"):
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


def moments(uploads: Tensor) -> np.ndarray:
    return np.cov(uploads.cpu().double().numpy())


@needs_cuda
def test_shares_cancel_and_have_the_stated_covariance() -> None:
    clients, coordinates = 6, 400_003
    pairs = [(a, b, 1.0 + 0.1 * a) for a in range(clients) for b in range(clients) if a != b]
    graph = ShareGraph(clients, pairs)
    tau2 = np.linspace(0.0, 0.5, clients)
    weights = np.asarray(graph.weights)
    for triton in (True, False):
        for distortion in ("scalar", "coordinate", "additive"):
            arguments = {
                "unit_variance": 2.0,
                "distortion": distortion,
                "stream": SimStream(5),
                "triton": triton,
            }
            uploads = torch.zeros((clients, coordinates), device="cuda")
            add_shares_on_device(uploads, graph, tau2=0.0, **arguments)
            assert float(uploads.sum(dim=0).abs().max()) < 1e-4
            first = uploads.clone()
            uploads.zero_()
            add_shares_on_device(uploads, graph, tau2=0.0, **arguments)
            assert torch.equal(first, uploads)
            uploads.zero_()
            factors = add_shares_on_device(uploads, graph, tau2=tau2, **arguments)
            expected = np.zeros((clients, clients))
            for edge, (sender, receiver) in enumerate(zip(graph.senders, graph.receivers, strict=True)):
                variance = 2.0 * weights[edge]
                mean, spread = 1.0, tau2[receiver]
                if distortion == "scalar":
                    assert factors is not None
                    mean, spread = factors[edge], 0.0
                expected[sender, sender] += variance
                expected[receiver, receiver] += variance * (mean**2 + spread)
                expected[sender, receiver] -= variance * mean
                expected[receiver, sender] -= variance * mean
            scale = np.sqrt(np.outer(expected.diagonal(), expected.diagonal()))
            # Seven deviations of a sample covariance (kurtosis of the products at most 3.5 here).
            assert np.abs((moments(uploads) - expected) / scale).max() < 7.0 * 2.0 / np.sqrt(coordinates)


@needs_cuda
def test_shares_are_normal_far_out() -> None:
    edges = ShareGraph(2, [(0, 1, 1.0)])
    uploads = torch.zeros((2, 20_000_000), device="cuda")
    add_shares_on_device(
        uploads, edges, unit_variance=1.0, tau2=0.0, distortion="scalar", stream=SimStream(6), triton=True
    )
    draws = uploads[0].double()
    for level, probability in ((1.0, 0.3173105), (3.0, 2.699796e-3), (4.5, 6.795346e-6)):
        found = float((draws.abs() > level).double().mean())
        deviation = (probability / len(draws)) ** 0.5
        assert abs(found - probability) < 5.0 * deviation, level
    assert abs(float(draws.mean())) < 5.0 / len(draws) ** 0.5
    assert abs(float((draws[:-1] * draws[1:]).mean())) < 5.0 / len(draws) ** 0.5


@needs_cuda
def test_uploads_on_the_device_are_clipped_and_hidden_like_those_of_the_processor() -> None:
    module = small_model("mlp")
    layout, inputs, labels, jobs = cohort_data(module, UNEVEN, SMALL)
    weights = np.linspace(0.5, 1.0, len(jobs))
    with Cohort.of(module, layout, inputs, labels, device="cuda") as cohort:
        trained = cohort.train(jobs, RULES[0])
        trained[2, 5] = float("nan")
        here, there = HostUploads(trained.cpu().numpy()), DeviceUploads(trained)
        assert here.bound("l2", 0.1, weights) == there.bound("l2", 0.1, weights) == 1
        assert np.allclose(here.rows(), there.rows(), rtol=1e-5, atol=1e-9)
        before = there.total()
        options = {"unit_variance": 1.0, "distortion": "additive", "stream": SimStream(8)}
        assert there.add_shares(ShareGraph.complete(5), tau2=0.0, **options) is None
        assert np.abs(there.total() - before).max() < 1e-4
        assert abs(float(there.rows().var()) - 8.0) < 0.8
        there.add_own_noise(np.full(5, 100.0), SimStream(9))
        assert abs(float(there.rows().std()) / 100.0 - 1.0) < 0.1


@needs_cuda
def test_carried_noise_on_the_device_has_its_law_and_cancels_one_round_later() -> None:
    """Two rounds with one vector in common, and the ends of single edges in two rounds."""
    clients, coordinates, gap = 100, 200_003, SimStream(1).child("gap")
    rounds = [
        DeviceUploads(torch.zeros((clients, coordinates), device="cuda")),
        DeviceUploads(torch.zeros((clients, coordinates), device="cuda")),
    ]
    seats = np.arange(clients)
    rounds[0].add_spread(seats, 2.0, [(0.5, gap)], SimStream(2))
    rounds[1].add_spread(seats, 1.0, [(-0.5, gap)], SimStream(3))
    assert np.abs(rounds[0].total() + rounds[1].total()).max() < 1e-2
    assert abs(float(rounds[0].total().var()) / (clients * 0.5) ** 2 - 1.0) < 7.0 * (2.0 / coordinates) ** 0.5
    rows = np.concatenate([rounds[0].rows()[:3], rounds[1].rows()[:3]]).astype(np.float64)
    deviation = np.eye(3) - 1.0 / clients
    expected = np.block(
        [[2.0 * deviation + 0.25, np.full((3, 3), -0.25)], [np.full((3, 3), -0.25), deviation + 0.25]]
    )
    # Seven deviations of a mean of products of variables whose variances are at most 2.25.
    assert np.abs(rows @ rows.T / coordinates - expected).max() < 7.0 * 2.25 * (2.0 / coordinates) ** 0.5

    again = rounds[0].blank(Seats.all(clients))
    again.add_spread(seats, 2.0, [(0.5, gap)], SimStream(2))
    assert np.array_equal(again.rows(), rounds[0].rows())
    partly = rounds[0].blank(Seats.all(clients))
    partly.add_spread(seats[::2], 2.0, [(0.5, gap)], SimStream(2))
    assert not partly.rows()[1::2].any()


if __name__ == "__main__":
    failed = 0
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            try:
                test()
                sys.stdout.write(f"passed {name}\n")
            except Exception as problem:
                failed += 1
                import traceback

                traceback.print_exc()
                sys.stdout.write(f"FAILED {name}: {problem!r}\n")
    sys.exit(failed > 0)
