"""The models compute what their docstrings say: against torch's own layers, or written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from niss.learning import ImageSamples, TokenSamples, build_model
from niss.learning.models import Recurrent, ResidualBlock, ResNet, Transformer, one_hot
from niss.randomness import SimStream

TOKENS = TokenSamples(length=6, vocabulary=9)
STREAM = SimStream(3)


def some_tokens(count: int = 4) -> Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randint(0, TOKENS.vocabulary, (count, TOKENS.length), generator=source)


def test_a_one_hot_product_looks_up() -> None:
    table = torch.arange(12.0).reshape(4, 3)
    rows = torch.tensor([[3, 0], [1, 1]])
    assert torch.equal(one_hot(rows, 4, table.dtype) @ table, table[rows])


@pytest.mark.parametrize(("name", "torchs"), [("gru", nn.GRU), ("lstm", nn.LSTM)])
def test_recurrent_layers_equal_those_of_torch(name: str, torchs: type[nn.GRU] | type[nn.LSTM]) -> None:
    sizes = {"width": 5, "embedding": 3, "layers": 2}
    module = build_model(name, samples=TOKENS, classes=4, stream=STREAM, **sizes).double()
    assert isinstance(module, Recurrent)
    other = torchs(3, 5, num_layers=2, batch_first=True).double()
    with torch.no_grad():
        for depth, layer in enumerate(module.layers):
            for kind, part in (("ih", layer.arriving), ("hh", layer.recurrent)):
                assert isinstance(part, nn.Linear)
                getattr(other, f"weight_{kind}_l{depth}").copy_(part.weight)
                getattr(other, f"bias_{kind}_l{depth}").copy_(part.bias)
    tokens = some_tokens()
    states, _ = other(module.embedding.weight.t()[tokens])
    torch.testing.assert_close(module(tokens), module.output(states), rtol=1e-12, atol=1e-12)


def test_an_lstm_remembers_at_first() -> None:
    module = build_model("lstm", samples=TOKENS, classes=4, stream=STREAM, width=5)
    assert isinstance(module, Recurrent)
    arriving = module.layers[0].arriving
    assert isinstance(arriving, nn.Linear)
    bias = arriving.bias
    assert torch.equal(bias[5:10], torch.ones(5))
    assert float(bias[:5].detach().abs().max()) < 1


def test_a_transformer_equals_one_of_torchs_layers() -> None:
    sizes = {"width": 8, "heads": 2, "layers": 1}
    module = build_model("transformer", samples=TOKENS, classes=4, stream=STREAM, **sizes).double()
    assert isinstance(module, Transformer)
    (layer,) = module.layers
    other = nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    pairs = {
        "norm1": layer.attention_norm,
        "self_attn.in_proj_": layer.queries_keys_values,
        "self_attn.out_proj": layer.attended,
        "norm2": layer.perceptron[0],
        "linear1": layer.perceptron[1],
        "linear2": layer.perceptron[3],
    }
    with torch.no_grad():
        for name, part in pairs.items():
            for kind in ("weight", "bias"):
                joint = f"{name}{kind}" if name.endswith("_") else f"{name}.{kind}"
                other.get_parameter(joint).copy_(getattr(part, kind))
    tokens = some_tokens()
    values = module.embedding.weight.t()[tokens] + module.positions
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS.length, dtype=torch.float64)
    expected = module.output(module.norm(other(values, src_mask=mask)))
    torch.testing.assert_close(module(tokens), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gru", "lstm", "transformer"])
def test_a_position_sees_nothing_that_comes_after_it(name: str) -> None:
    module = build_model(name, samples=TOKENS, classes=4, stream=STREAM).double()
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 3] = (tokens[:, 3] + 1) % TOKENS.vocabulary
    before, after = module(tokens), module(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert bool((before[:, 3:] != after[:, 3:]).any(-1).all()), "later positions see the change"
    torch.testing.assert_close(module(tokens[:, :3]), before[:, :3], rtol=1e-12, atol=1e-12)


def test_a_residual_block_is_shortcut_and_branch() -> None:
    module = build_model("resnet", samples=ImageSamples((3, 9, 8)), classes=4, stream=STREAM).double()
    assert isinstance(module, ResNet)
    images = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    blocks = [layer for layer in module.layers if isinstance(layer, ResidualBlock)]
    assert [type(block.shortcut) is nn.Identity for block in blocks] == [True, True, False, True, False, True]
    values = functional.relu(module.layers[1](module.layers[0](images)))
    for block in blocks:
        first, norm, _, second, last_norm = block.branch
        inner = functional.relu(norm(first(values)))
        values = functional.relu(last_norm(second(inner)) + block.shortcut(values))
    assert values.shape == (2, 64, 3, 2)
    # Of three rows the first is the upper half, of two columns the first is the left one.
    quarters = (
        values[:, :, 0, 0],
        values[:, :, 0, 1],
        values[:, :, 1:, 0].mean(2),
        values[:, :, 1:, 1].mean(2),
    )
    torch.testing.assert_close(module(images), module.output(torch.cat(quarters, dim=1)))
    # Each sample on its own: norms mix none.
    torch.testing.assert_close(module(images)[1:], module(images[1:]), rtol=1e-12, atol=1e-12)
