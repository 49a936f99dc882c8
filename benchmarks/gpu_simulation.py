"""A round of the paper on a CUDA device: training of all clients, evaluation, and the noise of the shares.

    python benchmarks/gpu_simulation.py [--json PATH] [--only NAMES] [--quick]

The work: m clients x 600 samples x E = 5 epochs x batches of 10, then the mean of the updates and its
evaluation on 10,000 images, all on the device; images are synthetic, of MNIST's shape. Contestants take
turns, and medians over the repeats are printed. `one by one` is the plain PyTorch loop on the device; it
runs for fewer clients, as its lines say, and its ratio compares seconds per client.

    mlp, cnn      rounds of 30 and 120 models, float32 and TF32
    noise         shares of all m (m - 1) edges against torch.randn of as many numbers
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

try:
    import cryptography  # noqa: F401
except ImportError:  # a GPU machine may lack it, and nothing here draws secret noise
    for missing in ("", ".hazmat", ".hazmat.primitives", ".hazmat.primitives.ciphers"):
        sys.modules["cryptography" + missing] = ModuleType("cryptography" + missing)
    ciphers = sys.modules["cryptography.hazmat.primitives.ciphers"]
    ciphers.Cipher = ciphers.algorithms = ciphers.modes = None  # type: ignore[attr-defined]

from niss.graph import ShareGraph
from niss.learning import Cnn, Cohort, FlatLayout, ImageSamples, Job, LocalTraining, Mlp, build_model
from niss.learning.cuda import CudaEngine, Formulation
from niss.learning.cuda.program import stacked_mlp, stacked_module
from niss.randomness import SimStream
from niss.simulation.cuda import add_shares_on_device

SHAPE, SAMPLES = (1, 28, 28), 600
ALONE = 2
"""Clients of the plain loop."""


def images(count: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    centres = torch.rand(10, *SHAPE, generator=source)
    labels = torch.randint(0, 10, (count,), generator=source)
    return 0.5 * centres[labels] + 0.5 * torch.rand(count, *SHAPE, generator=source), labels


def formulation(kind: str, module: Mlp | Cnn) -> Formulation | None:
    if kind == "vmap":
        return Formulation("vmap in a CUDA graph", stacked_module(module))
    if kind == "plain" and isinstance(module, Mlp):
        return Formulation("batched products in a CUDA graph", stacked_mlp(module))
    if kind == "one by one":
        return Formulation("one client after another", None)
    return None


class Round:
    """One contestant: a cohort, its jobs, and what is repeated."""

    def __init__(self, name: str, kind: str, clients: int, *, tf32: bool) -> None:
        module = build_model(name, samples=ImageSamples(SHAPE), classes=10, stream=SimStream(3))
        layout = FlatLayout.of(module)
        assert isinstance(module, Mlp | Cnn)
        inputs, labels = images(clients * SAMPLES)
        self.start = layout.flatten(module)
        self.jobs = [
            Job(self.start, torch.arange(k * SAMPLES, (k + 1) * SAMPLES), SimStream(k))
            for k in range(clients)
        ]
        self.cohort = Cohort(module, layout, inputs, labels, device="cuda", tf32=tf32)
        engine = self.cohort._engine
        assert isinstance(engine, CudaEngine)
        if (chosen := formulation(kind, engine._problem.module)) is not None:
            engine._formulation = chosen
        self.test = images(10_000)

    def __call__(self) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        updates = self.cohort.train_in_place(self.jobs, LocalTraining())
        self.cohort.evaluate(self.start.cuda() + updates.mean(dim=0), *self.test)
        torch.cuda.synchronize()
        return time.perf_counter() - begin


def rounds(name: str, *, quick: bool) -> list[dict[str, object]]:
    contestants = [("niss", 30, False), ("niss", 30, True), ("vmap", 30, False)]
    contestants += [("plain", 30, False)] if name == "mlp" else []
    contestants += [] if quick else [("vmap", 30, True), ("niss", 120, False), ("niss", 120, True)]
    contestants.append(("one by one", ALONE, False))
    results: list[dict[str, object]] = []
    made = [
        (kind, clients, tf32, Round(name, kind, clients, tf32=tf32)) for kind, clients, tf32 in contestants
    ]
    seconds: list[list[float]] = [[] for _ in made]
    for *_, contestant in made:
        contestant()
    for _ in range(2 if quick else 7):
        for times, (kind, *_, contestant) in zip(seconds, made, strict=True):
            if kind != "one by one" or len(times) < 2:
                times.append(contestant())
    reference = statistics.median(seconds[-1]) / ALONE
    for times, (kind, clients, tf32, contestant) in zip(seconds, made, strict=True):
        median = statistics.median(times)
        results.append(
            {
                "model": name, "contestant": kind, "clients": clients, "tf32": tf32,
                "seconds": median, "lowest": min(times), "highest": max(times),
                "ratio_to_plain_per_client": reference / (median / clients), "engine": contestant.cohort.engine,
            }
        )  # fmt: skip
        contestant.cohort.close()
    return results


def timed(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def noise(*, quick: bool) -> list[dict[str, object]]:
    clients, coordinates, repeats = 30, 199_210, 3 if quick else 9
    graph = ShareGraph.complete(clients)
    edges = graph.senders.size
    uploads = torch.zeros((clients, coordinates), device="cuda")
    pool = torch.empty(edges * coordinates, device="cuda")
    raw = edges * coordinates / timed(pool.normal_, repeats)
    del pool
    results: list[dict[str, object]] = [{"noise": "torch.randn", "draws_per_second": raw, "of_raw": 1.0}]
    for distortion, draws in (("scalar", 1), ("additive", 1), ("coordinate", 2)):
        for coordinate_count in (coordinates, 1_663_370):
            uploads = torch.zeros((clients, coordinate_count), device="cuda")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()

            def add(uploads: Tensor = uploads, distortion: str = distortion) -> None:
                add_shares_on_device(
                    uploads, graph, unit_variance=1.0, tau2=0.1, distortion=distortion, stream=SimStream(1)
                )

            seconds = timed(add, repeats)
            rate = draws * edges * coordinate_count / seconds
            extra = torch.cuda.max_memory_allocated() - before
            results.append(
                {
                    "noise": distortion, "h": coordinate_count, "seconds": seconds,
                    "draws_per_second": rate, "of_raw": rate / raw, "extra_bytes": extra,
                }
            )  # fmt: skip
    return results


def show(result: dict[str, object]) -> None:
    if "noise" in result:
        line = (
            f"{result['noise']:12} h={result.get('h', '-')!s:>8}  {result['draws_per_second'] / 1e9:8.1f} G/s"
        )
        line += f"  {result['of_raw']:5.2f} of raw"
        line += (
            f"  {result['seconds'] * 1e3:7.2f} ms, {result['extra_bytes']} bytes more"
            if "h" in result
            else ""
        )
    else:
        digits = "TF32" if result["tf32"] else "float32"
        line = f"{result['model']}  {result['contestant']:11} {result['clients']:4} clients  {digits:8}"
        line += f"{result['seconds']:8.4f} s ({result['lowest']:.4f} to {result['highest']:.4f})"
        line += f"  {result['ratio_to_plain_per_client']:7.1f} x per client"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", default="mlp,cnn,noise", help="comma-separated: mlp, cnn, noise")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and contestants")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, numpy {np.__version__}")
    results: list[dict[str, object]] = []
    for name in arguments.only.split(","):
        found = noise(quick=arguments.quick) if name == "noise" else rounds(name, quick=arguments.quick)
        for result in found:
            show(result)
        results += found
    if arguments.json is not None:
        report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
