from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from niss.learning import FlatLayout, LocalTraining, batch_order, seeded_torch, train_client
from niss.randomness import SimStream
from support.small_images import CLASSES, COUNT, STREAM, samples, small_mlp, with_batchnorm, with_dropout


def with_equal_gradients() -> nn.Module:
    """Two biases that are added: autograd returns one and the same tensor as the gradient of both."""

    class TwoBiases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_mlp()
            self.left = nn.Parameter(torch.zeros(23, CLASSES, dtype=torch.float64))
            self.right = nn.Parameter(torch.zeros(23, CLASSES, dtype=torch.float64))

        def forward(self, images: Tensor) -> Tensor:
            both = self.left + self.right
            logits: Tensor = self.inner(images) + both[: images.shape[0]]
            return logits

    return TwoBiases()


def train(
    module: nn.Module,
    work: LocalTraining,
    data: tuple[Tensor, Tensor] | None = None,
    stream: SimStream = STREAM,
) -> Tensor:
    """`train_client` from the weights that the module has, which it gets back."""
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    kept = start.clone()
    update = train_client(module, layout, start, *(data or samples()), work, stream=stream)
    assert torch.equal(start, kept)
    layout.load(module, start)
    return update


def optim_reference(
    module: nn.Module, images: Tensor, labels: Tensor, settings: LocalTraining, stream: SimStream
) -> None:
    """The same training by torch.optim.SGD, with the permutations taken straight from the stream."""
    optimiser = torch.optim.SGD(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    module.train()
    for epoch in range(settings.epochs):
        order = stream.child("epoch", epoch).generator().permutation(len(labels))
        for first in range(0, len(labels), settings.batch_size):
            batch = torch.as_tensor(order[first : first + settings.batch_size])
            optimiser.zero_grad()
            functional.cross_entropy(module(images[batch]), labels[batch]).backward()
            optimiser.step()


def tied() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).double()
    module[3].weight = module[1].weight
    return module


def with_spare_layer() -> nn.Module:
    """One layer does not reach the loss: torch leaves it alone, also its decay."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = small_mlp()
            self.spare = nn.Linear(2, 2).double()

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.used(images)
            return logits

    return Spare()


def partly_frozen() -> nn.Module:
    module = small_mlp()
    module.get_parameter("layers.1.weight").requires_grad_(False)
    return module


BUILDS = [small_mlp, with_batchnorm, with_equal_gradients, tied, with_spare_layer, partly_frozen]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("build", BUILDS)
def test_equals_torch_sgd(build: Callable[[], nn.Module], momentum: float, weight_decay: float) -> None:
    settings = LocalTraining(
        epochs=3, batch_size=5, learning_rate=0.1, momentum=momentum, weight_decay=weight_decay
    )
    assert COUNT % settings.batch_size not in (0, 1)
    module = build()
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    update = train(module, settings)
    optim_reference(module, *samples(), settings, STREAM)
    expected = layout.flatten(module) - start
    assert float(expected.abs().max()) > 1e-2
    assert float((update - expected).abs().max()) <= 1e-12
    assert update.dtype == torch.float64
    assert not update.requires_grad
    assert not bool(update[~layout.trainable_mask()].any()) or build is with_batchnorm
    assert build is not tied or module[3].weight is module[1].weight


def test_batch_order_is_one_permutation_per_epoch() -> None:
    settings = LocalTraining(epochs=3, batch_size=5)
    batches = list(batch_order(12, settings, STREAM))
    assert [len(batch) for batch in batches] == [5, 5, 2] * 3
    epochs = [torch.cat(batches[first : first + 3]) for first in (0, 3, 6)]
    for number, epoch in enumerate(epochs):
        assert epoch.dtype == torch.int64
        assert epoch.tolist() == STREAM.child("epoch", number).generator().permutation(12).tolist()
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("build", [small_mlp, with_dropout, with_batchnorm])
def test_result_depends_on_the_arguments_alone(build: Callable[[], nn.Module]) -> None:
    settings = LocalTraining(epochs=2, batch_size=5, momentum=0.5)
    module = build()
    before = torch.random.get_rng_state()
    first = train(module, settings)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(11)
    module.eval()
    with torch.no_grad():
        again = train(module, settings)
    assert torch.equal(first, again)
    assert not torch.equal(first, train(module, settings, stream=STREAM.child(1)))
    assert not any(part.training for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_dropout_is_active_and_follows_its_own_stream() -> None:
    module, settings = with_dropout(), LocalTraining(epochs=1, batch_size=COUNT)
    update = train(module, settings)
    module[2].p = 0.0
    assert not torch.allclose(update, train(module, settings))


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
    updates = [train(module, LocalTraining(epochs=1)) for _ in range(2)]
    assert torch.equal(updates[0], updates[1])
    assert int(module.calls) == 0
    assert float(module.warmth) == 0.0


def test_embedding_inputs_and_float32() -> None:
    module = nn.Sequential(nn.EmbeddingBag(9, 3), nn.Linear(3, CLASSES))
    tokens = torch.randint(9, (COUNT, 6), generator=torch.Generator().manual_seed(1))
    update = train(module, LocalTraining(learning_rate=0.5), (tokens, tokens[:, 0] % CLASSES))
    assert update.dtype == torch.float32
    assert bool(FlatLayout.of(module).split(update)["0.weight"].any())


def test_divergence_is_returned_not_raised() -> None:
    images, labels = samples()
    images[0, 0, 0, 0] = float("nan")
    assert not bool(train(small_mlp(), LocalTraining(), (images, labels)).isfinite().all())


def test_seeded_draws_depend_on_the_stream_alone_and_blocks_nest() -> None:
    with seeded_torch(SimStream(1)):
        plain = torch.rand(4)
    torch.rand(5)
    with seeded_torch(SimStream(1)):
        head = torch.rand(2)
        with seeded_torch(SimStream(2)):
            other = torch.rand(4)
        tail = torch.rand(2)
    assert torch.equal(plain, torch.cat([head, tail]))
    assert not torch.equal(plain, other)


def test_the_global_generator_is_restored_after_an_error_too() -> None:
    before = torch.random.get_rng_state()
    with seeded_torch(SimStream(1)):
        torch.rand(3)
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(KeyError), seeded_torch(SimStream(1)):
        raise KeyError(float(torch.rand(1)))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_generators_are_seeded_and_restored() -> None:
    torch.zeros(1, device="cuda")
    before = torch.cuda.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded_torch(SimStream(1)):
            draws.append(torch.rand(3, device="cuda"))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(before, torch.cuda.get_rng_state())
