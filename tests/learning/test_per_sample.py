from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from niss.learning import ClippedStep, FlatLayout, build_model, clipped_gradient_step
from support.small_images import CLASSES, SHAPE, STREAM, samples, small_mlp, with_dropout


def small_cnn() -> nn.Module:
    return build_model("cnn", samples=SHAPE, classes=CLASSES, stream=STREAM).double()


def group_norm_with_a_frozen_layer() -> nn.Module:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)
    ).double()
    module[4].bias.requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()
    module[3].weight = module[1].weight
    return module


def naive_step(
    module: nn.Module, images: Tensor, labels: Tensor, clip: float, learning_rate: float
) -> Tensor:
    """The formula by backward() and a loop over the samples."""
    layout = FlatLayout.of(module)
    total = torch.zeros(layout.size, dtype=torch.float64)
    for image, label in zip(images, labels, strict=True):
        module.zero_grad()
        functional.cross_entropy(module(image[None]), label[None]).backward()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        total += torch.cat([gradient.reshape(-1) for gradient in gradients]) * min(1.0, clip / norm)
    return -learning_rate / len(labels) * total


def step(
    module: nn.Module, images: Tensor, labels: Tensor, clip: float, learning_rate: float = 1.0, **options: int
) -> Tensor:
    """`clipped_gradient_step` from the weights that the module has."""
    layout, work = FlatLayout.of(module), ClippedStep(clip, learning_rate)
    return clipped_gradient_step(module, layout, layout.flatten(module), images, labels, work, **options)


@pytest.mark.parametrize("clip", [0.3, 2.0, 1e6])
@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize("build", [small_mlp, group_norm_with_a_frozen_layer, tied])
def test_equals_the_naive_loop(build: Callable[[], nn.Module], chunk: int, clip: float) -> None:
    images, labels = samples(11)
    module = build()
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    update = step(module, images, labels, clip, 0.7, chunk=chunk)
    expected = naive_step(module, images, labels, clip, 0.7)
    assert float(expected.abs().max()) > 1e-3
    assert float((update - expected).abs().max()) <= 1e-12
    assert torch.equal(layout.flatten(module), start)
    assert not bool(update[~layout.trainable_mask()].any())


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, CLASSES)).double()


def test_a_cnn_and_an_embedding_equal_the_naive_loop() -> None:
    tokens = torch.randint(7, (6, 3), generator=torch.Generator().manual_seed(2))
    for module, images, labels in (
        (small_cnn(), *samples(3)),
        (embedding(), tokens, tokens[:, 0] % CLASSES),
    ):
        update = step(module, images, labels, 0.3, chunk=2)
        assert float((update - naive_step(module, images, labels, 0.3, 1.0)).abs().max()) <= 1e-12


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 6),
    position=st.integers(0, 5),
    clip=st.sampled_from([1e-3, 0.1, 1.0, 50.0]),
    learning_rate=st.sampled_from([0.01, 1.0]),
    magnitude=st.sampled_from([0.0, 1.0, 1e3, 1e8, float("inf"), float("nan")]),
    label=st.integers(0, CLASSES - 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_replacing_one_sample_moves_the_update_within_the_bound(
    count: int, position: int, clip: float, learning_rate: float, magnitude: float, label: int, seed: int
) -> None:
    images, labels = samples(count, seed)
    other_images, other_labels = images.clone(), labels.clone()
    swapped = position % count
    other_images[swapped] = other_images[swapped].flip(-1).neg() * magnitude
    other_labels[swapped] = label
    module = small_mlp()
    update = step(module, images, labels, clip, learning_rate)
    other = step(module, other_images, other_labels, clip, learning_rate)
    share = learning_rate * clip / count
    assert float((update - other).norm()) <= 2 * share * (1 + 1e-9)
    # The sample alone, at fixed d: what adding or removing it moves.
    own = slice(swapped, swapped + 1)
    alone = step(module, images[own], labels[own], clip, learning_rate) / count
    assert float(alone.norm()) <= share * (1 + 1e-9)


def flat_linear() -> nn.Linear:
    """A single weight for each of two classes, both zero."""
    module = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(module.weight)
    return module


def test_the_bound_is_reached() -> None:
    images = torch.full((1, 1), 100.0, dtype=torch.float64)
    steps = [step(flat_linear().double(), images, torch.tensor([label]), 0.5, 0.1) for label in (0, 1)]
    assert float((steps[0] - steps[1]).norm()) == pytest.approx(2 * 0.1 * 0.5, rel=1e-12)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("chunk", [2, 256])
def test_a_sample_without_finite_gradient_contributes_zero(poison: float, chunk: int) -> None:
    images, labels = samples(5)
    module = small_mlp()
    images[2] = poison
    update = step(module, images, labels, 0.5, chunk=chunk)
    others = torch.tensor([0, 1, 3, 4])
    expected = naive_step(module, images[others], labels[others], 0.5, 1.0) * 4 / 5
    assert float((update - expected).abs().max()) <= 1e-12


def test_float32_norms_that_overflow_or_underflow_are_still_clipped() -> None:
    for magnitude, clip in ((1e25, 1.0), (1e-25, 1e-30)):
        update = step(flat_linear(), torch.full((1, 1), magnitude), torch.tensor([0]), clip)
        assert update.dtype == torch.float32
        assert float(update.double().norm()) == pytest.approx(clip, rel=1e-6)


def test_nothing_is_drawn_and_dropout_is_off() -> None:
    images, labels = samples(6)
    module = with_dropout()
    before = torch.random.get_rng_state()
    update = step(module, images, labels, 1.0)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(part.training for part in module.modules())
    module.eval()
    assert float((update - naive_step(module, images, labels, 1.0, 1.0)).abs().max()) <= 1e-12


def test_a_layer_with_two_names_is_left_as_it_was() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.again = self.first
            self.last = nn.Linear(4, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(self.again(torch.relu(self.first(inputs))))
            return result

    module = Twice().double()
    images, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    update = step(module, images, labels, 1e9)
    assert isinstance(module.first.weight, nn.Parameter)
    loss = nn.functional.cross_entropy(module(images), labels)
    slopes = torch.autograd.grad(loss, list(module.parameters()))
    torch.testing.assert_close(update, -torch.cat([slope.reshape(-1) for slope in slopes]))
