"""What the methods of a comparison have in common: clients with their data, test data, model, initial weights.

Everything that can fail for lack of data or for a wrong model fails here, before any work starts.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from niss.data import Dataset, load_dataset, partition, partition_by_owner
from niss.data.catalog import DatasetSpec, find_spec
from niss.errors import ConfigError
from niss.learning import (
    FlatLayout,
    ImageSamples,
    Samples,
    TokenSamples,
    build_model,
    check_model,
    seeded_torch,
    to_tensor,
)
from niss.learning.local import borrowed, require_logits
from niss.randomness import SimStream
from niss.settings import to_values
from niss.simulation import Config, with_overrides
from niss.simulation.config_checks import check_split
from niss.simulation.sections import DataConfig
from niss.simulation.training import Clients, Examples
from niss.version import __version__

Pair = tuple[Any, Any]
"""(inputs, labels), as arrays or tensors."""

Datasets = Sequence[Pair] | Mapping[Any, Pair]
"""The user's own data: a pair for each client, in order or by name."""

ModelSource = nn.Module | Callable[[], nn.Module]
"""A module, which is copied, or a function that makes one; its initial weights are where training starts."""


# Many tensors of a few numbers each take more memory for themselves than for their numbers.
_TENSORS_OF_A_PART = 4_096
# A model is tried on so many examples, and so many clients are named that are at fault.
_TRIED, _NAMED = 8, 5


def own_clients(datasets: Datasets, dtype: torch.dtype) -> Clients:
    """The user's own data, checked and put end to end; inputs that are no whole numbers are `dtype`, as the model."""
    if len(datasets) < 2:
        raise ConfigError(
            f"got {len(datasets)} datasets", field="clients", hint="a federation has at least two clients"
        )
    sizes: list[int] = []
    shapes: set[tuple[int, ...]] = set()
    inputs: list[Tensor] = []
    labels: list[Tensor] = []
    pairs = iter(datasets.values() if isinstance(datasets, Mapping) else datasets)
    while some := list(itertools.islice(pairs, _TENSORS_OF_A_PART)):
        first = len(sizes)
        examples = [
            to_examples(pair, functools.partial(_name_of, datasets, number))
            for number, pair in enumerate(some, start=first)
        ]
        sizes += [len(its_labels) for _, its_labels in examples]
        shapes |= {tuple(its_inputs.shape[1:]) for its_inputs, its_labels in examples if len(its_labels)}
        if len(shapes) > 1:
            raise ConfigError(f"inputs of different shapes: {sorted(shapes)}", field="clients")
        if not all(sizes[first:]):
            continue  # They are all named below.
        inputs.append(_as_taken(torch.cat([its_inputs for its_inputs, _ in examples]), dtype))
        labels.append(torch.cat([its_labels for _, its_labels in examples]))
        ends = np.cumsum(sizes[first:])
        _require_numbers(inputs[-1], labels[-1], lambda row: _place(datasets, ends, row, first))  # noqa: B023
    if empty := [number for number, size in enumerate(sizes) if not size]:
        named = ", ".join(_name_of(datasets, number) for number in empty[:_NAMED])
        more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
        raise ConfigError(
            f"no examples in {named}{more}", field="clients", hint="leave clients without data out"
        )
    return Clients(sizes, (_end_to_end(inputs), _end_to_end(labels)))


def own_test(pair: Pair, dtype: torch.dtype) -> Examples:
    """The user's own test data, checked alike."""
    inputs, labels = to_examples(pair, lambda: "test")
    if not len(labels):
        raise ConfigError("no examples", field="test")
    inputs = _as_taken(inputs, dtype)
    _require_numbers(inputs, labels, lambda row: ("test", row))
    return inputs, labels


def _name_of(datasets: Datasets, number: int) -> str:
    """The client of that number, as the user can find it."""
    return f"clients[{list(datasets)[number] if isinstance(datasets, Mapping) else number!r}]"


def _place(datasets: Datasets, ends: NDArray[np.int64], row: int, first: int = 0) -> tuple[str, int]:
    """Whose example this row is, and which of theirs; `ends` are those of the clients from number `first` on."""
    number = int(np.searchsorted(ends, row, side="right"))
    return _name_of(datasets, first + number), row - int(ends[number - 1] if number else 0)


def _as_taken(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def _require_numbers(inputs: Tensor, labels: Tensor, place: Callable[[int], tuple[str, int]]) -> None:
    """Refuse inputs that are not finite, and labels that are no class; `place` says whose a row is, and which."""
    if not bool(inputs.isfinite().all()):
        row, *column = (~inputs.isfinite()).nonzero()[0].tolist()
        whose, which = place(row)
        at = f", column {', '.join(map(str, column))}" if column else ""
        raise ConfigError(
            f"example {which}{at} of the inputs is {inputs[(row, *column)].item()}",
            field=whose,
            hint=f"fill in what is missing or leave it out; inputs must be finite as {inputs.dtype}",
        )
    _refuse_labels(labels < 0, "a negative label", place)


def _refuse_labels(wrong: Tensor, what: str, place: Callable[[int], tuple[str, int]]) -> None:
    if bool(wrong.any()):
        whose, which = place(int(wrong.nonzero()[0, 0]))
        raise ConfigError(
            f"example {which} has {what}",
            field=whose,
            hint="classes count from 0; the model has a score for each",
        )


def _end_to_end(parts: list[Tensor]) -> Tensor:
    """What `torch.cat` makes of these parts, which are let go of on the way: never is all of it in memory twice."""
    if len(parts) == 1:
        return parts.pop()
    kind = functools.reduce(torch.promote_types, {part.dtype for part in parts})
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    whole, start = torch.empty(shape, dtype=kind, device=parts[0].device), 0
    parts.reverse()
    while parts:
        part = parts.pop()
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def to_examples(pair: Pair, name: Callable[[], str]) -> Examples:
    """A pair of tensors from a pair of arrays or tensors, which may be empty; `name` is what errors call it."""
    try:
        inputs, labels = (torch.as_tensor(part) for part in pair)
    except (TypeError, ValueError, RuntimeError) as error:
        got = (
            f"a {type(pair).__name__} of {', '.join(map(str, pair))}" if isinstance(pair, Mapping) else error
        )
        raise ConfigError(
            f"expected a pair of arrays: {got}", field=name(), hint="give (inputs, labels)"
        ) from None
    if not labels.numel() and not len(inputs):
        return inputs, labels.to(torch.int64)
    if labels.ndim not in (1, 2) or len(inputs) != len(labels):
        raise ConfigError(
            f"inputs of shape {tuple(inputs.shape)} and labels of shape {tuple(labels.shape)} do not match",
            field=name(),
            hint="labels are class numbers, one per input, or a row of them, one per position",
        )
    if labels.is_floating_point():
        raise ConfigError(
            f"labels are {labels.dtype}", field=name(), hint="give whole class numbers, such as int64"
        )
    return inputs, labels.to(torch.int64)


def try_model(module: nn.Module, layout: FlatLayout, parts: Mapping[str, Examples]) -> int:
    """The classes that a model tells apart, by a forward pass on a few examples of each part, named for errors.

    A model that does not take the data is refused here, before any work starts.
    """
    classes, device = 0, next(module.parameters()).device
    for name, (inputs, labels) in parts.items():
        some, wanted = inputs[:_TRIED].to(device), labels[:_TRIED]
        try:
            with torch.no_grad(), borrowed(module, layout, None):
                scores = module(some)
        except Exception as problem:  # whatever a user's module raises
            why = (str(problem).strip().splitlines() or ["no reason given"])[0]
            whole = not some.is_floating_point()
            raise ConfigError(
                f"it fails on {name}, of which {len(some)} examples are {some.dtype} of shape {tuple(some.shape)}: "
                f"{type(problem).__name__}: {why}",
                field="model",
                hint="whole numbers are passed on as they are: give pixels and measurements as floating-point numbers"
                if whole
                else "model(inputs) is called with the examples of a batch along the first axis",
            ) from None
        classes = require_logits(scores, shape=wanted.shape, highest_label=-1).shape[-1]
    return classes


@dataclass(frozen=True)
class Inputs:
    """What all methods start from.

    clients  who has which training examples
    test     the examples that models are tested on
    module   the network; it is copied where weights are put into it
    data     where the data comes from, for the manifest: the dataset's checksums, or that of the user's own sizes
    layout   how parameters and buffers of the network lie in one flat vector
    start    the initial weights as such a vector
    """

    clients: Clients
    test: Examples
    module: nn.Module
    data: dict[str, Any]

    @cached_property
    def layout(self) -> FlatLayout:
        return FlatLayout.of(self.module)

    @cached_property
    def start(self) -> Tensor:
        return self.layout.flatten(self.module)


def gather(
    config: Config,
    model: ModelSource | None,
    datasets: Datasets | None,
    test: tuple[Any, Any] | None,
) -> tuple[Config, Inputs]:
    """Load the data the config names, or take the user's own, and build the model.

    With the user's own datasets, their number is the number of clients in the config that is returned, and another one
    in the settings is refused. Partition and initial weights follow from its seed. The arguments are those of
    `niss.run`, which checks nothing of them itself: raises `ConfigError`, or `DataError` where a dataset cannot be had.
    """
    if datasets is None:
        return config, gather_together([config], model=model)[0]
    if test is None:
        raise ConfigError("is missing", field="test", hint="give (inputs, labels) to evaluate on")
    if model is None:
        raise ConfigError("is missing", field="model", hint="your own data needs your own model")
    module = _own_module(model, SimStream(config.seed).child("model"))
    layout = FlatLayout.of(module)
    clients, test_examples = own_clients(datasets, layout.dtype), own_test(test, layout.dtype)
    if len(clients) != config.clients:
        for name in ("clients", "silos"):
            if (named := getattr(config.data, name)) is not None:
                raise ConfigError(
                    f"{named} by the settings, but {len(clients)} datasets are given",
                    field=f"data.{name}",
                    hint=f"set it to {len(clients)}" + (", or leave it out" if name == "clients" else ""),
                )
        wanted = config.training.participants
        if wanted is not None and wanted > len(clients):
            raise ConfigError(
                f"{wanted} in a round, but there are only {len(clients)} clients",
                field="training.participants",
                hint="lower it, or give more clients",
            )
        participants = min(config.participants, len(clients))
        count = {"data.clients": len(clients), "training.participants": participants}
        config = with_overrides(config, count)
    inputs, labels = clients.examples
    first = slice(int(clients.sizes[0]))
    tried = {_name_of(datasets, 0): (inputs[first], labels[first]), "test": test_examples}
    classes = try_model(module, layout, tried)
    beyond = f"a label beyond the {classes} classes of the model"
    _refuse_labels(labels >= classes, beyond, lambda row: _place(datasets, np.cumsum(clients.sizes), row))
    _refuse_labels(test_examples[1] >= classes, beyond, lambda row: ("test", row))
    sizes = hashlib.sha256(clients.sizes.tobytes()).hexdigest()
    data = {"source": "given", "examples": len(labels), "sizes": sizes}
    return config, Inputs(clients, test_examples, module, data)


def gather_together(
    configs: Sequence[Config], dataset: Dataset | None = None, model: ModelSource | None = None
) -> list[Inputs]:
    """What each config needs, over one copy of the data: only partition and initial weights differ.

    The first holds the training examples for all. `dataset` stands in for the one the configs name.
    """
    if dataset is None:
        spec = find_spec(configs[0].data.dataset)
        if model is None and spec is not None:
            # Before anything is downloaded or read.
            for config in configs:
                check_model(config.model.name, sample_spec(spec), **_sizes(config))
        dataset = load_dataset(configs[0].data.dataset)
    train, test = to_tensors(dataset)
    data = {"source": dataset.name, "checksums": dict(dataset.checksums)}
    gathered: list[Inputs] = []
    clients: dict[tuple[int, DataConfig], Clients] = {}
    for config in configs:
        stream = SimStream(config.seed)
        key = (config.seed, config.data)
        if key not in clients:
            rows = _deal_out(dataset, config, stream.child("partition"))
            held = None if clients else train
            clients[key] = Clients([len(each) for each in rows], held, torch.from_numpy(np.concatenate(rows)))
        if model is not None:
            module = _own_module(model, stream.child("model"))
            try_model(module, FlatLayout.of(module), {"the training data": train, "the test data": test})
        else:
            module = build_model(
                config.model.name,
                samples=sample_spec(dataset),
                classes=dataset.classes,
                stream=stream.child("model"),
                **_sizes(config),
            )
        gathered.append(Inputs(clients[key], test, module, dict(data)))
    return gathered


def to_tensors(dataset: Dataset) -> tuple[Examples, Examples]:
    """Training and test examples as models take them: pixels normalised, tokens as they are."""

    def examples(inputs: NDArray[Any], labels: NDArray[np.int64]) -> Examples:
        if dataset.kind == "images":
            pixels = inputs.astype(np.uint8, copy=False)
            return to_tensor(pixels, dataset.mean, dataset.std), torch.from_numpy(labels)
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    return (
        examples(dataset.train_inputs, dataset.train_labels),
        examples(dataset.test_inputs, dataset.test_labels),
    )


def _sizes(config: Config) -> dict[str, Any]:
    return {name: value for name, value in vars(config.model).items() if name != "name"}


def sample_spec(dataset: Dataset | DatasetSpec) -> Samples:
    """What a model has to know of a sample of this dataset."""
    if dataset.kind == "images":
        return ImageSamples(dataset.image_shape)
    return TokenSamples(dataset.shape[0], len(dataset.vocabulary))


def _deal_out(dataset: Dataset, config: Config, stream: SimStream) -> list[NDArray[np.int64]]:
    """The rows of each client: those it owns, or those it is dealt."""
    labelled = dataset.train_labels.ndim == 1
    check_split(config.split, dataset.name, owned=dataset.owners is not None, labelled=labelled)
    if dataset.owners is None or config.split != "natural":
        # The settings of the section are the arguments of `partition`, name by name.
        settings = vars(config.data) | {"split": config.split, "clients": config.clients}
        del settings["dataset"], settings["silos"]
        return partition(dataset.train_labels, stream=stream, **settings)
    return partition_by_owner(
        dataset.owners, clients=config.clients, stream=stream, most=config.data.samples_per_client
    )


def _own_module(model: ModelSource, stream: SimStream) -> nn.Module:
    """A copy of the user's module, or what their function makes with torch seeded from `stream`."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    with seeded_torch(stream):
        return model()


def make_manifest(kind: str, config: Config, inputs: Inputs, engine: str) -> dict[str, Any]:
    """What is written before anything else: enough to repeat the run, or to go on with it.

    `kind` is "run" or "comparison"; `engine` says in one line how the clients are trained.
    """
    return {
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": to_values(config),
        "seed": config.seed,
        "data": inputs.data,
        "model": type(inputs.module).__name__,
        "model_parameters": inputs.layout.size,
        "precision": str(inputs.start.dtype).removeprefix("torch."),
        "engine": engine,
        "versions": {
            "niss": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
        },
        "machine": platform.machine(),
    }
