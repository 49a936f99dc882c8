"""What the methods of a comparison have in common: clients, test data, model, initial weights.

Everything that can fail for lack of data or for a wrong model fails here, before any work starts.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from niss.data import Dataset, load_dataset
from niss.errors import ConfigError
from niss.learning import FlatLayout, build_model, seeded_torch, to_tensor
from niss.randomness import SimStream
from niss.simulation.clients import Clients, examples
from niss.simulation.config import Config, with_overrides
from niss.version import __version__

Datasets = Sequence[tuple[Any, Any]]
ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Materials:
    """Clients, test data, model and initial weights; `data` says where they come from."""

    clients: Clients
    test: tuple[Tensor, Tensor]
    module: nn.Module
    layout: FlatLayout
    start: Tensor
    data: dict[str, Any]


def gather(
    config: Config,
    model: ModelSource | None,
    datasets: Datasets | None,
    test: tuple[Any, Any] | None,
) -> Materials:
    """Load the data, deal it out, build the model: all that can fail, before any work starts."""
    stream = SimStream(config.seed)
    if datasets is not None:
        if test is None:
            raise ConfigError("is missing", field="test", hint="give (inputs, labels) to evaluate on")
        clients, test_pair = Clients.given(datasets), examples(test, "test")
        data: dict[str, Any] = {"source": "given", "sizes": clients.sizes.tolist()}
        if model is None:
            raise ConfigError("is missing", field="model", hint="your own data needs your own model")
        if len(clients) != config.data.clients:
            raise ConfigError(
                f"{len(clients)} datasets for data.clients = {config.data.clients}", field="clients"
            )
    else:
        dataset = load_dataset(config.data.dataset)
        clients = Clients.deal(dataset, config.data, stream.child("partition"))
        test_pair = _test_examples(dataset)
        data = {"source": dataset.name, "checksums": dict(dataset.checksums)}
    module = _make_module(config, model, None if datasets is not None else dataset, stream.child("model"))
    layout = FlatLayout.of(module)
    return Materials(clients, test_pair, module, layout, layout.flatten(module), data)


def gather_together(configs: Sequence[Config], dataset: Dataset | None = None) -> list[Materials]:
    """What each config needs, over one copy of the data: only partition and initial weights differ.

    The first holds the training examples for all. `dataset` stands in for the one the configs name.
    """
    dataset = load_dataset(configs[0].data.dataset) if dataset is None else dataset
    test = _test_examples(dataset)
    gathered = []
    dealt: dict[tuple[int, str], Clients] = {}
    for config in configs:
        stream = SimStream(config.seed)
        key = (config.seed, config.data.model_dump_json())
        if key not in dealt:
            deal = Clients.deal_again if dealt else Clients.deal
            dealt[key] = deal(dataset, config.data, stream.child("partition"))
        clients = dealt[key]
        module = _make_module(config, None, dataset, stream.child("model"))
        layout = FlatLayout.of(module)
        data = {"source": dataset.name, "checksums": dict(dataset.checksums)}
        gathered.append(Materials(clients, test, module, layout, layout.flatten(module), data))
    return gathered


def _make_module(
    config: Config, model: ModelSource | None, dataset: Dataset | None, stream: SimStream
) -> nn.Module:
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if model is not None:
        with seeded_torch(stream):
            return model()
    assert dataset is not None
    return build_model(
        config.model.name,
        image_shape=dataset.image_shape,
        classes=dataset.classes,
        stream=stream,
        hidden=config.model.hidden,
    )


def _test_examples(dataset: Dataset) -> tuple[Tensor, Tensor]:
    return to_tensor(dataset.test_images, dataset.mean, dataset.std), torch.from_numpy(dataset.test_labels)


def fit_to_datasets(config: Config, datasets: Datasets | None) -> Config:
    """With the user's own datasets, their number is the number of clients."""
    if datasets is None or len(datasets) in (0, 1, config.data.clients):
        return config
    participants = min(config.training.participants, len(datasets))
    return with_overrides(config, {"data.clients": len(datasets), "training.participants": participants})


def make_manifest(kind: str, config: Config, materials: Materials, engine: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config.model_dump(mode="json", exclude_none=True),
        "seed": config.seed,
        "data": materials.data,
        "model": type(materials.module).__name__,
        "model_parameters": materials.layout.size,
        "precision": str(materials.start.dtype).removeprefix("torch."),
        "engine": engine,
        "versions": {
            "niss": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
        },
        "machine": platform.machine(),
    }
