from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from niss.learning import FlatLayout, LocalTraining, train_client
from support.small_images import CLASSES, COUNT, STREAM, samples, small_mlp, with_batchnorm, with_dropout


@pytest.mark.parametrize("build", [small_mlp, with_dropout, with_batchnorm])
def test_result_depends_on_the_arguments_alone(build: Callable[[], nn.Module]) -> None:
    images, labels = samples()
    settings = LocalTraining(epochs=2, batch_size=5, momentum=0.5)
    module = build()
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    before = torch.random.get_rng_state()
    first = train_client(module, layout, start, images, labels, settings, stream=STREAM)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(11)
    module.eval()
    with torch.no_grad():
        again = train_client(module, layout, start, images, labels, settings, stream=STREAM)
    other = train_client(module, layout, start, images, labels, settings, stream=STREAM.child(1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not any(part.training for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_dropout_is_active_and_follows_its_own_stream() -> None:
    images, labels = samples()
    module = with_dropout()
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    settings = LocalTraining(epochs=1, batch_size=COUNT)
    update = train_client(module, layout, start, images, labels, settings, stream=STREAM)
    module[2].p = 0.0
    without = train_client(module, layout, start, images, labels, settings, stream=STREAM)
    assert not torch.allclose(update, without)


def test_batchnorm_statistics_are_sent_and_the_counter_is_restored() -> None:
    images, labels = samples()
    module = with_batchnorm()
    norm = module[2]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.num_batches_tracked.fill_(41)
    layout = FlatLayout.of(module)
    settings = LocalTraining(epochs=1, batch_size=5)
    update = train_client(module, layout, layout.flatten(module), images, labels, settings, stream=STREAM)
    assert int(norm.num_batches_tracked) == 41
    assert bool(layout.split(update)["2.running_mean"].any())
    assert bool(layout.split(update)["2.running_var"].any())


def test_buffers_outside_the_vector_do_not_reach_the_next_client() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_mlp()
            self.register_buffer("calls", torch.tensor(0))
            self.register_buffer("warmth", torch.zeros((), dtype=torch.float64), persistent=False)

        def forward(self, images: Tensor) -> Tensor:
            self.calls = self.calls + 1
            self.warmth += 0.1
            logits: Tensor = self.inner(images) * (1.0 + self.warmth)
            return logits

    module = Counting()
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    updates = [
        train_client(module, layout, start, *samples(), LocalTraining(epochs=1), stream=STREAM)
        for _ in range(2)
    ]
    assert torch.equal(updates[0], updates[1])
    assert int(module.calls) == 0
    assert float(module.warmth) == 0.0


def test_embedding_inputs_and_float32() -> None:
    module = nn.Sequential(nn.EmbeddingBag(9, 3), nn.Linear(3, CLASSES))
    layout = FlatLayout.of(module)
    tokens = torch.randint(9, (COUNT, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 0] % CLASSES
    update = train_client(
        module,
        layout,
        layout.flatten(module),
        tokens,
        labels,
        LocalTraining(learning_rate=0.5),
        stream=STREAM,
    )
    assert update.dtype == torch.float32
    assert bool(layout.split(update)["0.weight"].any())


def test_divergence_is_returned_not_raised() -> None:
    module = small_mlp()
    layout = FlatLayout.of(module)
    images, labels = samples()
    images[0, 0, 0, 0] = float("nan")
    update = train_client(
        module, layout, layout.flatten(module), images, labels, LocalTraining(), stream=STREAM
    )
    assert not bool(update.isfinite().all())
