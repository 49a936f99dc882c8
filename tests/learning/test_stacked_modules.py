"""Models by name and modules of the user's, stacked over clients and over samples: as the reference, or looped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from niss.learning import (
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    Mlp,
    Samples,
    TokenSamples,
    build_model,
)
from niss.learning.cohort import Problem, why_not_stacked
from niss.learning.cpu import WORTH_STACKING, VmapGroups, make_groups, why_not
from niss.learning.cuda.program import DeviceTable, PlainSteps, stacked_module, train_once
from niss.learning.models import MODEL_NAMES
from niss.randomness import SimStream
from support.stacked import assert_as_the_reference, make_jobs, two_starts

CLASSES, LENGTH, TOKENS = 5, 6, 7
WORK = LocalTraining(epochs=2, batch_size=3, learning_rate=0.2, momentum=0.5, weight_decay=0.01)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
SIZES = (8, 7, 6, 5, 5, 4, 3, 2)  # groups are in falling order


class Sequences(nn.Module):
    """An embedding, a recurrent layer of torch's, a linear output."""

    def __init__(self, layer: type[nn.RNNBase], **options: bool | int) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 4)
        self.layer = layer(4, 3, batch_first=True, **options)
        self.output = nn.Linear(6 if options.get("bidirectional") else 3, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.layer(self.table(tokens))[0])
        return logits


class Attention(nn.Module):
    """A layer of torch's transformer, which sees what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.output = nn.Linear(4, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.output.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, weight.device, weight.dtype)
        logits: Tensor = self.output(self.layer(self.table(tokens), src_mask=mask, is_causal=True))
        return logits


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(24, 12)
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.full((), 0.5))
        self.down = nn.Linear(24, 2, bias=False)
        self.up = nn.Linear(2, 12, bias=False)
        self.output = nn.Linear(12, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        logits: Tensor = self.output(torch.tanh(self.fixed(flat) + self.scale * self.up(self.down(flat))))
        return logits


class PartlyUnused(nn.Module):
    """One layer does not reach the loss: it must not even decay."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(24, CLASSES)
        self.unused = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.used(images.flatten(1))
        return logits


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.second = nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.output = nn.Linear(24, CLASSES)

    def forward(self, batch: Tensor) -> Tensor:
        logits: Tensor = self.output(torch.tanh(self.second(torch.tanh(self.first(batch.flatten(1))))))
        return logits


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, (1, 2), padding="same", bias=False),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 6, 1),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )


class Shared(Tied):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.second = self.first


def hooked() -> nn.Module:
    module = Mlp(24, (5,), CLASSES)
    module.layers[1].register_forward_hook(lambda _layer, _images, output: output * 2.0)
    return module


class Mixing(nn.Module):
    """Subtracts the batch's mean: a padded batch would be another batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, CLASSES)

    def forward(self, batch: Tensor) -> Tensor:
        flat = batch.flatten(1)
        logits: Tensor = self.layer(flat - flat.mean(dim=0))
        return logits


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.layer(batch.flatten(1))
        return logits


class Forgetful(nn.Module):
    """Trains on weights that it keeps outside its parameters, so that stacked ones never reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, CLASSES)
        self.kept = [self.layer.weight]

    def forward(self, batch: Tensor) -> Tensor:
        logits: Tensor = batch.flatten(1) @ self.kept[0].t() + self.layer.bias
        return logits


MODULES: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: Sequences(nn.GRU, num_layers=2, bidirectional=True),
    "lstm": lambda: Sequences(nn.LSTM, bidirectional=True),
    "rnn": lambda: Sequences(nn.RNN, bias=False),
    "rnn-relu": lambda: Sequences(nn.RNN, nonlinearity="relu"),
    "attention": Attention,
    "convolutions": convolutions,
    "adapted": Adapted,
    "tied": Tied,
    "shared": Shared,
    "partly-unused": PartlyUnused,
    "hooked": hooked,
    "layer norm": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(24, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, CLASSES)
    ),
}
# What cannot be stacked, each with the reason on a device.
LOOPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mixing": (Mixing, "trains differently"),
    "counting": (Counting, "changes its buffers"),
    "forgetful": (Forgetful, "trains differently"),
    "dropout": (
        lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(24, CLASSES)),
        "random numbers",
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, CLASSES)),
        "mixes the samples",
    ),
}
# Of the line of a cohort on the processor; of all others: "vmap groups".
ENGINES = {
    "lstm": "LSTM gains nothing",
    "attention": "Dropout gains nothing",
    "convolutions": "Conv2d gains nothing",
    "partly-unused": "trains differently",
    "model mlp": "MLP groups",
    "model cnn": "CNN client by client",
    "model resnet": "channels-last",
    "model resnet, deep": "channels-last",
    "model logistic": "MLP groups",
    "mixing": "trains differently",
    "counting": "changes its buffers",
    "forgetful": "trains differently",
    "dropout": "Dropout gains nothing",
    "batch norm": "BatchNorm1d gains nothing",
}


PICTURES, LARGER, SPOKEN = ImageSamples((2, 4, 3)), ImageSamples((2, 6, 5)), TokenSamples(LENGTH, TOKENS)
MODELS: dict[str, tuple[str, Samples, dict[str, Any]]] = {
    "model mlp": ("mlp", LARGER, {"hidden": (6,)}),
    "model cnn": ("cnn", LARGER, {}),
    "model resnet": ("resnet", LARGER, {"width": 8, "layers": 1}),
    "model resnet, deep": ("resnet", LARGER, {"width": 16, "layers": 2}),
    "model logistic": ("logistic", LARGER, {}),
    "model gru": ("gru", SPOKEN, {"width": 6, "embedding": 4}),
    "model gru, deep": ("gru", SPOKEN, {"width": 6, "embedding": 4, "layers": 2}),
    "model lstm": ("lstm", SPOKEN, {"width": 6, "embedding": 4}),
    "model lstm, deep": ("lstm", SPOKEN, {"width": 6, "embedding": 4, "layers": 2}),
    "model transformer": ("transformer", SPOKEN, {"width": 8, "heads": 2}),
}
NAMES = (*MODULES, *MODELS)


def make_problem(module: nn.Module, samples: Samples = PICTURES) -> Problem:
    source = torch.Generator().manual_seed(1)
    count = sum(SIZES)
    if isinstance(samples, TokenSamples):
        inputs = torch.randint(0, TOKENS, (count, LENGTH), generator=source)
        labels = torch.randint(0, CLASSES, (count, LENGTH), generator=source)
    else:
        inputs = torch.randn(count, *samples.shape, generator=source, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (count,), generator=source)
    module = module.double()
    return Problem(module, FlatLayout.of(module), inputs, labels)


def problem(name: str) -> Problem:
    if name in MODELS:
        model, samples, sizes = MODELS[name]
        built = build_model(model, samples=samples, classes=CLASSES, stream=SimStream(1), **sizes)
        return make_problem(built, samples)
    module = LOOPED[name][0]() if name in LOOPED else MODULES[name]()
    embedded = any(isinstance(part, nn.Embedding) for part in module.modules())
    return make_problem(module, SPOKEN if embedded else PICTURES)


def why_not_on_a_device(task: Problem) -> str | None:
    train = partial(train_once, task, stacked_module(task.module))
    return why_not_stacked(task, train, tolerance=1e-6)


def test_every_model_is_tried() -> None:
    assert {name for name, _, _ in MODELS.values()} == set(MODEL_NAMES)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("way", ["products", "torch", "groups"])
@pytest.mark.parametrize("name", NAMES)
def test_stacked_clients_equal_the_reference(name: str, way: str) -> None:
    """On a device, with its replacements and without, and in groups on the processor."""
    task = problem(name)
    if way == "groups":
        if name == "partly-unused":
            assert str(why_not(task)).startswith("stacked, it trains differently")
            return
        jobs = make_jobs(task, SIZES)
        rows = torch.empty(len(jobs), task.layout.size, dtype=torch.float64)
        VmapGroups(task).perform(WORK, jobs, rows)
    else:
        assert why_not_on_a_device(task) is None
        jobs = make_jobs(task, SIZES, two_starts(task))
        rows = train_once(task, stacked_module(task.module, products=way == "products"), jobs, WORK)
    assert_as_the_reference(task, jobs, WORK, rows)


@pytest.mark.parametrize("name", [*NAMES, *LOOPED])
def test_a_cohort_equals_the_reference(name: str) -> None:
    """By the formulation that its line names."""
    task, sizes = problem(name), SIZES
    if name in ("counting", "forgetful", "batch norm"):  # a last batch of one is refused
        sizes = tuple(size for size in SIZES if size % WORK.batch_size != 1)
    with Cohort.of(task.module, task.layout, task.inputs, task.labels, workers=1) as cohort:
        assert ENGINES.get(name, "vmap groups") in cohort.engine
        for some, starts in ((sizes, ()), (sizes[:2], ()), (sizes, two_starts(task))):
            jobs = make_jobs(task, some, starts)
            assert_as_the_reference(task, jobs, WORK, cohort.train(jobs, WORK))


def test_what_is_frozen_is_there_once() -> None:
    task = problem("adapted")
    jobs, trained, forward = make_jobs(task, SIZES), task.layout.trainable_mask(), stacked_module(task.module)
    table = DeviceTable(1, len(jobs), 3, torch.device("cpu"))
    steps = PlainSteps(forward, task, table, WORK)
    held = sum(value.numel() for value in vars(steps).values() if isinstance(value, Tensor))
    data = task.inputs.numel() + task.labels.numel()
    assert held - data < len(jobs) * (2 * int(trained.sum()) + 10) + task.layout.size
    updates = train_once(task, forward, jobs, WORK)
    assert not updates[:, ~trained].any()
    assert updates[:, trained].any()


@pytest.mark.parametrize("name", LOOPED)
def test_what_cannot_be_stacked_is_looped_with_a_reason(name: str) -> None:
    task, (_, reason) = problem(name), LOOPED[name]
    before = {name: buffer.clone() for name, buffer in task.module.named_buffers()}
    found = why_not_on_a_device(task)
    assert found is not None
    assert reason in found
    for name, buffer in task.module.named_buffers():
        assert torch.equal(buffer, before[name])


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def some_jobs(sizes: tuple[int, ...]) -> list[Job]:
    start = torch.zeros(1)
    return [Job(start, torch.zeros(size, dtype=torch.int64), SimStream(n)) for n, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "batch_size", "stacked"),
    [
        ((3,) * WORTH_STACKING, 3, True),
        ((3,) * (WORTH_STACKING - 1), 3, False),
        ((90, *(3,) * 15), 3, False),
        ((9, *(3,) * 15), 9, True),  # one step each
        ((12, *(9,) * 7), 3, True),
        ((400,) * 16, 10, True),
        ((400,) * 16, 400, False),
        ((10,) * 16, 400, True),  # no batch has more than there are
    ],
)
def test_clients_are_stacked_where_many_are_at_work_on_small_batches(sizes, batch_size, stacked) -> None:
    form = VmapGroups(make_problem(wide()))
    jobs = some_jobs(sizes)
    assert form.gains(LocalTraining(epochs=2, batch_size=batch_size), jobs) is stacked


def test_a_giant_is_trained_alone_and_the_others_together() -> None:
    form = VmapGroups(make_problem(wide()))
    jobs = some_jobs((*(6,) * 20, 600, 3))
    groups = make_groups(jobs, 16, 2, partial(form.gains, LocalTraining(batch_size=3)))
    assert [len(numbers) for numbers, _ in groups] == [1, 11, 10]
    assert groups[0][0] == (20,)


def test_the_form_of_a_group_follows_the_rule(monkeypatch) -> None:
    """Large batches go through the reference itself, bit for bit; small ones do not."""
    task = make_problem(wide())
    jobs = [replace(job, samples=job.samples.repeat(80)) for job in make_jobs(task, (5,) * 8)]
    loops: list[int] = []
    update_of = Problem.update_of
    monkeypatch.setattr(Problem, "update_of", lambda *given: loops.append(1) or update_of(*given))
    with Cohort.of(task.module, task.layout, task.inputs, task.labels, workers=1) as cohort:
        for batch_size, looped in ((400, len(jobs)), (5, 0)):
            loops.clear()
            work = LocalTraining(epochs=1, batch_size=batch_size, learning_rate=0.01)
            rows = cohort.train(jobs, work)
            assert len(loops) == looped
            assert_as_the_reference(task, jobs, work, rows)
