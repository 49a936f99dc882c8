from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from niss.errors import ConfigError
from niss.learning import FlatLayout


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.embed(tokens).mean(dim=1))
        return logits


@st.composite
def little_modules(draw: st.DrawFn) -> nn.Module:
    makers = {
        "linear": lambda: nn.Linear(
            draw(st.integers(1, 4)), draw(st.integers(1, 4)), bias=draw(st.booleans())
        ),
        "conv": lambda: nn.Conv2d(draw(st.integers(1, 2)), 2, kernel_size=draw(st.integers(1, 3))),
        "batchnorm": lambda: nn.BatchNorm1d(draw(st.integers(1, 4)), affine=draw(st.booleans())),
        "embedding": lambda: nn.Embedding(draw(st.integers(1, 4)), 2),
        "relu": nn.ReLU,
        "nested": lambda: nn.Sequential(nn.Linear(1, 2), nn.BatchNorm2d(2)),
    }
    kinds = draw(st.lists(st.sampled_from(sorted(makers)), min_size=0, max_size=5))
    module = nn.Sequential(nn.Linear(2, 1), *(makers[kind]() for kind in kinds))
    for parameter in module.parameters():
        parameter.requires_grad_(draw(st.booleans()))
    return module.double() if draw(st.booleans()) else module


@settings(deadline=None, max_examples=60)
@given(module=little_modules(), seed=st.integers(0, 2**32 - 1))
def test_round_trip(module: nn.Module, seed: int) -> None:
    layout = FlatLayout.of(module)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    floating = {name: value for name, value in state.items() if value.is_floating_point()}
    assert layout.names == tuple(floating)
    assert layout.shapes == tuple(tuple(value.shape) for value in floating.values())
    assert all(value.dtype == layout.dtype for value in floating.values())
    assert layout.size == sum(value.numel() for value in floating.values())

    before = layout.flatten(module)
    assert before.dtype == layout.dtype
    assert torch.equal(before, torch.cat([value.reshape(-1) for value in floating.values()]))

    fresh = torch.randn(layout.size, dtype=layout.dtype, generator=torch.Generator().manual_seed(seed))
    layout.load(module, fresh)
    assert torch.equal(layout.flatten(module), fresh)
    for name, value in module.state_dict().items():
        expected = layout.split(fresh)[name] if value.is_floating_point() else state[name]
        assert torch.equal(value, expected)

    layout.load(module, before)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert FlatLayout.of(module) == layout


@settings(deadline=None, max_examples=60)
@given(module=little_modules())
def test_trainable_mask_marks_parameters_requiring_grad(module: nn.Module) -> None:
    layout = FlatLayout.of(module)
    mask = layout.trainable_mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (layout.size,)
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, piece in layout.split(mask).items():
        assert bool((piece == (name in trainable)).all())


def test_flatten_copies_and_split_views() -> None:
    module = nn.Linear(2, 1)
    layout = FlatLayout.of(module)
    vector = layout.flatten(module)
    with torch.no_grad():
        module.weight.fill_(9.0)
    assert not bool((vector == 9.0).any())
    layout.split(vector)["bias"].fill_(4.0)
    assert vector.tolist()[2] == 4.0
    stack = torch.zeros(2, 3)
    layout.split(stack)["weight"].copy_(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]))
    assert stack.tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]]
    assert not vector.requires_grad


def test_load_copies_in() -> None:
    module = nn.Linear(2, 1)
    layout = FlatLayout.of(module)
    vector = torch.tensor([1.0, 2.0, 3.0])
    layout.load(module, vector)
    vector.zero_()
    assert layout.flatten(module).tolist() == [1.0, 2.0, 3.0]
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in module.parameters())


def test_tied_parameters_are_counted_once() -> None:
    module = Tied()
    layout = FlatLayout.of(module)
    assert layout.names == ("embed.weight", "out.bias")
    assert layout.size == 15 + 5
    layout.load(module, torch.arange(20.0))
    assert module.out.weight is module.embed.weight
    assert torch.equal(module.out.weight.detach().reshape(-1), torch.arange(15.0))


def test_scalar_entries_have_one_place() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(2.0))
    layout = FlatLayout.of(module)
    assert layout.flatten(module).tolist() == [2.0]
    assert math.prod(layout.split(torch.ones(1))["scale"].shape) == 1


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (torch.zeros(4), "length 3"),
        (torch.zeros(2), "length 3"),
        (torch.zeros(3, 1), "length 3"),
        (torch.zeros(3, dtype=torch.float64), "float64"),
    ],
)
def test_vectors_of_another_model_are_refused(vector: torch.Tensor, message: str) -> None:
    module = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=message) as caught:
        FlatLayout.of(module).load(module, vector)
    assert caught.value.field == "vector"


def test_another_module_is_refused() -> None:
    layout = FlatLayout.of(nn.Linear(2, 1))
    for other in (nn.Linear(1, 2), nn.Linear(2, 1, bias=False), nn.Linear(2, 1).double()):
        with pytest.raises(ConfigError, match="layout expects"):
            layout.flatten(other)
        with pytest.raises(ConfigError, match="layout expects"):
            layout.load(other, torch.zeros(3))


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())


def complex_parameter() -> nn.Module:
    module = nn.Linear(1, 1)
    module.phase = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    return module


def hidden_parameter() -> nn.Module:
    module = nn.Linear(1, 1)

    def hide(_module: nn.Module, state: dict[str, torch.Tensor], _prefix: str, _metadata: object) -> None:
        del state["weight"]

    module.register_state_dict_post_hook(hide)
    return module


def replaced_buffer() -> nn.Module:
    module = nn.BatchNorm1d(2)

    def copy(_module: nn.Module, state: dict[str, torch.Tensor], _prefix: str, _metadata: object) -> None:
        state["running_mean"] = state["running_mean"].clone()

    module.register_state_dict_post_hook(copy)
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (mixed(), "mixes floating dtypes: '0.weight' is torch.float32, '1.weight' is torch.float64"),
        (nn.Linear(1, 1).half(), "not float32 or float64"),
        (complex_parameter(), "'phase' is complex"),
        (nn.ReLU(), "no floating-point entries"),
        (nn.LazyLinear(2), "has no shape yet"),
        (hidden_parameter(), "own tensors: weight"),
        (replaced_buffer(), "own tensors: running_mean"),
    ],
)
def test_unusable_modules_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        FlatLayout.of(module)
    assert caught.value.field == "model"
