"""How fast a round is simulated: NISS beside a plain PyTorch loop, Flower and pfl-research, in one run.

The work is a round of the paper: every client takes some epochs of SGD in batches of 10 from the same start, and the
updates are averaged. Every contestant does it through its public API, with the same model, data, start and number of
steps; each has a process of its own (and may have more), is warmed up (compiled, started) before it is timed, and takes
turns with the others. Whether all did the same work shows in the length of the mean update.

The data are synthetic: ten blurred prototypes with noise in the shape of MNIST or CIFAR-10, random tokens or random
categories. Contestants that are not installed, or not written for a model or device, are named and skipped. With
`--device cuda` only torch and what niss needs have to be there; pfl-research and Flower take part if installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from harness import Report, command_line, cpu_seconds, family, megabytes, with_this_folder

BATCH, LEARNING_RATE, CLASSES, SIDE = 10, 0.01, 10, 28
LENGTH, VOCABULARY = 80, 90
NEEDED = {"flower": ("flwr", "ray"), "pfl": ("pfl",)}
HOW_TO_GET = {"flwr": "'flwr[simulation]'", "ray": "'flwr[simulation]'"}
ON_CUDA = ("niss", "plain", "pfl", "flower")
GPU_SHARE = 0.25
"""Of the device for each of Flower's clients: four train at a time."""
MOST_ROUNDS = 1000
CORES = len(os.sched_getaffinity(0))
Array = np.ndarray[Any, Any]
Play = Callable[[], float]
"""Plays one round, and returns the length of the mean update."""
ENGINE: list[str] = []
"""How niss trains in this process: what it stacks, or why it does not."""


@dataclass(frozen=True)
class Case:
    """One round: `clients` with `samples` each, `epochs` local epochs."""

    model: str
    clients: int
    samples: int
    epochs: int
    device: str = "cpu"

    @property
    def steps(self) -> int:
        return self.clients * self.epochs * -(-self.samples // BATCH)

    @property
    def title(self) -> str:
        return f"{self.model}: {self.clients} clients x {self.samples} samples x {self.epochs} epochs, {self.device}"


CASES = {
    "mlp": (30, 600, 5),
    "cnn": (6, 200, 2),
    "resnet": (16, 40, 1),
    "gru": (30, 40, 1),
    "torch-gru": (30, 40, 1),
    "transformer": (30, 40, 1),
    "lora": (30, 40, 1),
    "logistic": (100, 60, 5),
}
"""For each model clients, samples and epochs. The CNN's full round takes minutes one after another: fewer clients and
samples, the same steps."""
QUICK = (2, 20, 1)
CUDA_CASES = {"cnn": (30, 40, 1), "resnet": (30, 40, 1), "gru": (30, 10, 1), "logistic": (100, 60, 1)}
"""What is measured on a GPU instead: there the time of a step hardly depends on the model, but on its launches."""
SEQUENCES = ("gru", "lstm", "torch-gru", "transformer", "lora")


@cache
def make_data(case: Case) -> tuple[Array, Array]:
    """Images or tokens, [clients, samples, ...], and their labels; the same in every process.

    Tokens have one label each, the next token of a walk in which one in three is a jump.
    """
    draw = np.random.default_rng(7)
    shape = (case.clients, case.samples)
    if case.model in SEQUENCES:
        jumps = draw.integers(0, VOCABULARY, (*shape, LENGTH + 1)) * (
            draw.random((*shape, LENGTH + 1)) < 1 / 3
        )
        walk = (jumps + 7).cumsum(axis=-1) % VOCABULARY
        return walk[..., :-1].copy(), walk[..., 1:].copy()
    channels, side = picture(case)
    prototypes = draw.random((CLASSES, channels, side, side), dtype=np.float32)
    for axis in (2, 3):
        prototypes = (prototypes + np.roll(prototypes, 1, axis) + np.roll(prototypes, 2, axis)) / 3
    labels = draw.integers(0, CLASSES, shape)
    noise = draw.standard_normal((*shape, channels, side, side), dtype=np.float32)
    return prototypes[labels] + np.float32(0.3) * noise, labels


def picture(case: Case) -> tuple[int, int]:
    """Channels and side of the images."""
    return (3, 32) if case.model == "resnet" else (1, SIDE)


@cache
def batches(case: Case, client: int) -> tuple[Any, ...]:
    """Which samples of a client make each step, on the device: a new permutation each epoch, in pieces of ten.

    The order is that of niss, so that all updates are the same. It is drawn in the warm-up, by niss in every round.
    """
    from niss.learning import LocalTraining, batch_order
    from niss.randomness import SimStream

    settings = LocalTraining(case.epochs, BATCH, LEARNING_RATE)
    return tuple(batch.to(case.device) for batch in batch_order(case.samples, settings, SimStream(client)))


def make_module(case: Case) -> Any:
    """The model, on the CPU: one of the package's, or one as users write them (`lora`, `torch-gru`)."""
    from own_modules import TorchGru, adapted

    from niss.learning import ImageSamples, TokenSamples, build_model, seeded_torch
    from niss.randomness import SimStream

    if case.model in SEQUENCES:
        samples = TokenSamples(LENGTH, VOCABULARY)
        with seeded_torch(SimStream(1)):
            if case.model == "torch-gru":
                return TorchGru(VOCABULARY, embedding=16, width=128)
            name = "transformer" if case.model == "lora" else case.model
            module = build_model(name, samples=samples, classes=VOCABULARY, stream=SimStream(1))
            return adapted(module) if case.model == "lora" else module
    channels, side = picture(case)
    return build_model(
        case.model, samples=ImageSamples((channels, side, side)), classes=CLASSES, stream=SimStream(1)
    )


def loss_of(logits: Any, labels: Any) -> Any:
    """The mean cross-entropy over all labels, of samples or of positions."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.flatten(0, -2), labels.flatten())


class Paced:
    """A library's own loop over rounds, in a thread: it goes on by one round whenever it is asked to play."""

    def __init__(self, loop: Callable[[Callable[[Array], None]], None]) -> None:
        """Run `loop(rest)`; it calls `rest` with the weights, before the first round and after each."""
        self._go: SimpleQueue[None] = SimpleQueue()
        self._done: SimpleQueue[Array | BaseException] = SimpleQueue()
        self._norm: float | None = None
        Thread(target=self._run, args=(loop,), daemon=True).start()

    def _run(self, loop: Callable[[Callable[[Array], None]], None]) -> None:
        try:
            loop(self._rest)
            self._done.put(RuntimeError("the loop ended early"))
        except BaseException as error:
            self._done.put(error)

    def _rest(self, weights: Array) -> None:
        self._done.put(weights)
        self._go.get()

    def _wait(self) -> Array:
        answer = self._done.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def play(self) -> float:
        """One more round; the length is that of the first round's update, since the others begin elsewhere."""
        before = self._wait() if self._norm is None else None
        self._go.put(None)
        after = self._wait()
        if before is not None:
            self._norm = float(np.linalg.norm(after - before))
        assert self._norm is not None
        return self._norm


def make_jobs(case: Case) -> tuple[tuple[Any, ...], list[Any]]:
    """What a cohort of niss is made of (module, layout, samples, labels), and the work of its clients."""
    import torch

    from niss.learning import FlatLayout, Job
    from niss.randomness import SimStream

    module = make_module(case)
    layout = FlatLayout.of(module)
    inputs, labels = (torch.from_numpy(part).flatten(0, 1) for part in make_data(case))
    start, own = layout.flatten(module), torch.arange(len(labels)).view(case.clients, case.samples)
    jobs = [Job(start, own[client], SimStream(client)) for client in range(case.clients)]
    return (module, layout, inputs, labels), jobs


# The contestants: each prepares itself and returns a function that plays one round


def niss(case: Case) -> Play:
    """The cohort engine."""
    from niss.learning import Cohort, LocalTraining

    problem, jobs = make_jobs(case)
    settings = LocalTraining(case.epochs, BATCH, LEARNING_RATE)
    cohort = Cohort.of(*problem, device=case.device)
    ENGINE.append(cohort.engine)
    cohort.start()

    def play() -> float:
        return float(cohort.train(jobs, settings).mean(dim=0).norm())

    return play


@cache
def resident(case: Case) -> tuple[Any, Any]:
    """The data of all clients as tensors, on the device."""
    import torch

    images, labels = (torch.from_numpy(part).to(case.device) for part in make_data(case))
    return images, labels


@cache
def workbench(case: Case) -> tuple[Any, dict[str, Any]]:
    """The module in which clients are trained one after another, on the device, and its start."""
    module = make_module(case).to(case.device)
    return module, {name: part.clone() for name, part in module.state_dict().items()}


def train_plainly(case: Case, client: int) -> Any:
    """PyTorch as in a tutorial: one client, its update as a vector, on the device."""
    from torch.nn.utils import parameters_to_vector

    module, start = workbench(case)
    module.load_state_dict(start)
    before = parameters_to_vector(module.parameters()).detach().clone()
    take_steps(module, case, client, *(part[client] for part in resident(case)))
    return parameters_to_vector(module.parameters()).detach() - before


def take_steps(module: Any, case: Case, client: int, images: Any, labels: Any) -> None:
    """All steps of one client."""
    import torch

    optimizer = torch.optim.SGD(
        [part for part in module.parameters() if part.requires_grad], lr=LEARNING_RATE
    )
    for batch in batches(case, client):
        optimizer.zero_grad()
        loss_of(module(images[batch]), labels[batch]).backward()
        optimizer.step()


def train_elsewhere(case: Case, client: int) -> Array:
    """The same as an array, which goes between processes at less cost."""
    update: Array = train_plainly(case, client).numpy()
    return update


def plain(case: Case) -> Play:
    """The baseline: one client after another, one thread."""

    def play() -> float:
        return float(sum(train_plainly(case, client) for client in range(case.clients)).norm()) / case.clients

    return play


def one_thread(case: Case) -> None:
    """What a process of the pool does first."""
    import torch

    torch.set_num_threads(1)
    make_data(case)


def two_processes(case: Case) -> Play:
    """The baseline in as many processes as there are cores."""
    pool = ProcessPoolExecutor(
        CORES, mp_context=get_context("spawn"), initializer=one_thread, initargs=(case,)
    )

    def play() -> float:
        total = sum(pool.map(train_elsewhere, [case] * case.clients, range(case.clients)))
        return float(np.linalg.norm(total)) / case.clients

    return play


def flower(case: Case) -> Play:
    """Its simulation runtime on Ray: a core for each client, and on a GPU a share of it."""
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        module = make_module(case)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        client = int(context.node_config["partition-id"])
        own = (torch.from_numpy(part[client]).to(case.device) for part in make_data(case))
        take_steps(module.to(case.device), case, client, *own)
        content = RecordDict(
            {
                "arrays": ArrayRecord(module.cpu().state_dict()),
                "metrics": MetricRecord({"num-examples": case.samples}),
            }
        )
        return Message(content=content, reply_to=message)

    def loop(rest: Callable[[Array], None]) -> None:
        server = ServerApp()

        def after(_: int, arrays: ArrayRecord) -> None:
            rest(np.concatenate([array.ravel() for array in arrays.to_numpy_ndarrays()]))

        class Everyone(FedAvg):  # type: ignore[misc]
            """A round without some of its clients is less work: Flower goes on, a measurement cannot."""

            def aggregate_train(self, number: int, replies: Iterable[Message]) -> Any:
                trained = [answer for answer in replies if not answer.has_error()]
                if len(trained) < case.clients:
                    raise RuntimeError(f"{len(trained)} of {case.clients} clients trained in round {number}")
                return super().aggregate_train(number, trained)

        @server.main()
        def main(grid: Grid, _: Context) -> None:
            strategy = Everyone(
                fraction_evaluate=0.0, min_train_nodes=case.clients, min_available_nodes=case.clients
            )
            arrays = ArrayRecord(make_module(case).state_dict())
            strategy.start(grid=grid, initial_arrays=arrays, num_rounds=MOST_ROUNDS, evaluate_fn=after)

        on_gpu = case.device == "cuda"
        config = {
            "client_resources": {"num_cpus": 1, "num_gpus": GPU_SHARE if on_gpu else 0.0},
            "init_args": {"num_cpus": CORES, "num_gpus": int(on_gpu)},
        }
        run_simulation(server, app, num_supernodes=case.clients, backend_config=config)

    return Paced(loop).play


def pfl(case: Case) -> Play:
    """pfl-research: its simulated backend and federated averaging, the data as tensors on the device.

    It goes through the data of a client in the same order in each epoch; elsewhere that is the order of the first.
    """
    os.environ["PFL_PYTORCH_DEVICE"] = case.device
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from torch import nn
    from torch.nn.utils import parameters_to_vector

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_module(case)

        def forward(self, images: Any) -> Any:
            return self.inner(images)

        def loss(self, images: Any, labels: Any, eval: bool = False) -> Any:
            self.eval() if eval else self.train()
            return loss_of(self(images), labels)

        def metrics(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {}

    module = WithLoss().to(case.device)
    pieces = -(-case.samples // BATCH)
    order = [torch.cat(batches(case, client)[:pieces]) for client in range(case.clients)]
    images, labels = (
        torch.stack([part[client, order[client]] for client in range(case.clients)])
        for part in resident(case)
    )
    data = FederatedDataset(
        lambda user: Dataset(raw_data=[images[user], labels[user]], user_id=user),
        get_user_sampler("minimize_reuse", list(range(case.clients))),
    )

    def loop(rest: Callable[[Array], None]) -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())  # pfl asks for that of its thread

        def pause() -> None:
            rest(parameters_to_vector(module.parameters()).detach().cpu().numpy())

        class Clock(TrainingProcessCallback):  # type: ignore[misc,type-arg]
            def on_train_begin(self, **_: Any) -> Metrics:
                pause()
                return Metrics()

            def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
                pause()
                return False, Metrics()

        model = PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        )
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=MOST_ROUNDS,
                evaluation_frequency=MOST_ROUNDS + 1,
                train_cohort_size=case.clients,
                val_cohort_size=None,
            ),
            SimulatedBackend(training_data=data, val_data=data),
            model,
            NNTrainHyperParams(
                local_num_epochs=case.epochs, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
            ),
            callbacks=[Clock()],
            send_metrics_to_platform=False,
        )

    return Paced(loop).play


CONTESTANTS: dict[str, Callable[[Case], Play]] = {
    "plain": plain,
    "niss": niss,
    "two-processes": two_processes,
    "pfl": pfl,
    "flower": flower,
}


# Taking turns


class Seat:
    """A contestant in its own process: it prepares itself, then plays a round whenever asked."""

    def __init__(self, name: str, case: Case) -> None:
        self.name = name
        self.failure = ""
        self.rounds: list[tuple[float, float]] = []
        self.update_norm = float("nan")
        self.engine: list[str] = []
        self.log = Path(tempfile.gettempdir()) / f"niss-benchmark-{os.getpid()}-{name}-{case.model}.log"
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        quiet |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        # Imported, not run as a script: Ray's processes must find the functions of this file by name.
        code = "import sys, simulation; simulation.serve(*sys.argv[1:])"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, name, json.dumps(asdict(case))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | with_this_folder() | threads | quiet,
            )

    def play(self, *, counts: bool) -> None:
        """One round; a warm-up does not count."""
        if self.failure:
            return
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        before = cpu_seconds(family(self.process.pid))
        try:
            print("round", file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            seconds, self.update_norm, *self.engine = json.loads(answer)
        if not answer or not self.update_norm > 0.0:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            self.failure = f"no update: {lines[-1][:200] if lines else 'ended without a word'}"
        elif counts:
            self.rounds.append((seconds, cpu_seconds(family(self.process.pid)) - before))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # of the request that a dead process left unread
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.unlink(missing_ok=True)


def serve(name: str, case: str) -> None:
    """The other end of a seat."""
    import torch

    torch.set_num_threads(1)
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        play = CONTESTANTS[name](Case(**json.loads(case)))
        for _ in sys.stdin:
            began = time.perf_counter()
            norm = play()
            print(json.dumps([time.perf_counter() - began, norm, *ENGINE]), file=answers, flush=True)
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()  # else some of its processes live on
    os._exit(0)


def missing(name: str, case: Case) -> str:
    """Why a contestant cannot take part; empty where it can."""
    if case.device != "cpu" and name not in ON_CUDA:
        return "runs on the CPU here"
    for package in NEEDED.get(name, ()):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install {HOW_TO_GET.get(package, package)})"
    return ""


def measure(case: Case, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """All contestants on one case, in turns, the fastest first.

    The ratio to the baseline is taken turn by turn, because the machine may be shared: its load drifts, and neighbours
    in time meet the same.
    """
    for name in names:
        if reason := missing(name, case):
            print(f"{name} skipped: {reason}")
    seats = [Seat(name, case) for name in names if not missing(name, case)]
    memory: dict[str, float] = {}
    try:
        for seat in seats:
            seat.play(counts=False)
            if not seat.failure:
                memory[seat.name] = megabytes(family(seat.process.pid), "Pss")
        for _ in range(repeats):
            for seat in seats:
                seat.play(counts=True)
    finally:
        for seat in seats:
            seat.close()
    rows = []
    base = next((seat.rounds for seat in seats if seat.name == "plain" and not seat.failure), None)
    for seat in seats:
        if seat.failure:
            print(f"{seat.name} skipped: {seat.failure}")
            continue
        times = [wall for wall, _ in seat.rounds]
        ratios = [wall / mine for (wall, _), mine in zip(base, times, strict=True)] if base else []
        rows.append(
            {
                "contestant": seat.name,
                "s/round": statistics.median(times),
                "ms/step": 1e3 * statistics.median(times) / case.steps,
                "x plain": statistics.median(ratios) if ratios else None,
                "CPU s": statistics.median(cpu for _, cpu in seat.rounds),
                "|update|": f"{seat.update_norm:.5f}",
                "MB": memory[seat.name],
                "engine": ", ".join(seat.engine),
                "seconds": times,
            }
        )
    return sorted(rows, key=lambda row: row["s/round"])


def main() -> None:
    """Measure, print, write."""
    options = command_line(
        __doc__,
        only=list(CONTESTANTS),
        models={"nargs": "+", "choices": list(CASES), "default": list(CASES)},
        device={"default": "cpu", "choices": ("cpu", "cuda")},
    )
    report = Report(options, "torch", "flwr", "ray", "pfl")
    for model in options.models:
        sizes = CUDA_CASES.get(model, CASES[model]) if options.device == "cuda" else CASES[model]
        case = Case(model, *(QUICK if options.quick else sizes), options.device)
        rows = measure(case, options.only, options.repeats)
        if rows:
            report.add(case.title, rows)


if __name__ == "__main__":
    main()
