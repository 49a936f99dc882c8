"""Models of sequences: logits for every position, from the tokens up to it.

The recurrent layers compute what `torch.nn.GRU` and `torch.nn.LSTM` do, step by step in plain operations, because
torch's own cannot be stacked over clients. The product with the inputs depends on no earlier step: it is one product
for all positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Of the positions at the start, smaller than the embedding of a token: what stands somewhere says more than where.
_POSITIONS = 0.1


def one_hot(categories: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[...] to [..., size]: 1 at the category, else 0; all 0 for a category beyond `size`.

    A product with it is a table look-up whose gradient is a product too: its sums have one order on every
    device, many clients can be stacked, and nothing waits for the values. `torch.nn.functional.one_hot` looks at them.
    """
    return (categories.unsqueeze(-1) == torch.arange(size, device=categories.device)).to(dtype)


class GruLayer(nn.Module):
    """A gated recurrent unit (Cho et al. 2014), as in `torch.nn.GRU`, with h_0 = 0:

    r = sigmoid(U_r x + W_r h),  z = sigmoid(U_z x + W_z h),  n = tanh(U_n x + r * (W_n h)),  h <- (1 - z) n + z h

    with a bias in every product.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.arriving = nn.Linear(inputs, 3 * width)
        self.recurrent = nn.Linear(width, 3 * width)
        _uniform(self, width)

    def forward(self, sequences: Tensor) -> Tensor:
        """States [N, T, width] of sequences [N, T, inputs]."""
        state = sequences.new_zeros(sequences.shape[0], self.width)
        states = []
        for arriving in self.arriving(sequences).unbind(1):
            recurrent = self.recurrent(state)
            gates = torch.sigmoid(arriving[:, : 2 * self.width] + recurrent[:, : 2 * self.width])
            reset, update = gates.chunk(2, dim=1)
            new = torch.tanh(arriving[:, 2 * self.width :] + reset * recurrent[:, 2 * self.width :])
            state = new + update * (state - new)
            states.append(state)
        return torch.stack(states, dim=1)


class LstmLayer(nn.Module):
    """Long short-term memory (Hochreiter and Schmidhuber 1997), as in `torch.nn.LSTM`, with h_0 = c_0 = 0:

    i, f, o = sigmoid(U x + W h),  g = tanh(U_g x + W_g h),  c <- f c + i g,  h <- o tanh(c)

    with a bias in every product; that of f starts at 1, so that it remembers (Jozefowicz et al. 2015).
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.arriving = nn.Linear(inputs, 4 * width)
        self.recurrent = nn.Linear(width, 4 * width)
        _uniform(self, width)
        with torch.no_grad():
            self.arriving.bias[width : 2 * width] = 1.0

    def forward(self, sequences: Tensor) -> Tensor:
        """States [N, T, width] of sequences [N, T, inputs]."""
        state = memory = sequences.new_zeros(sequences.shape[0], self.width)
        states = []
        for arriving in self.arriving(sequences).unbind(1):
            admit, keep, candidate, show = (arriving + self.recurrent(state)).chunk(4, dim=1)
            memory = torch.sigmoid(keep) * memory + torch.sigmoid(admit) * torch.tanh(candidate)
            state = torch.sigmoid(show) * torch.tanh(memory)
            states.append(state)
        return torch.stack(states, dim=1)


class Recurrent(nn.Module):
    """An embedding of the tokens, recurrent layers (`GruLayer` or `LstmLayer`), a linear output.

    For 80 tokens and classes, with one layer of 128 and an embedding of 16: 67,664 parameters with the GRU,
    86,352 with the LSTM.
    """

    def __init__(
        self,
        layer: type[GruLayer] | type[LstmLayer],
        vocabulary: int,
        classes: int,
        *,
        embedding: int,
        width: int,
        layers: int,
    ) -> None:
        super().__init__()
        self.embedding = _embedding(vocabulary, embedding)
        inputs = [embedding] + [width] * (layers - 1)
        self.layers = nn.Sequential(*(layer(count, width) for count in inputs))
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [N, T, classes] of tokens [N, T]."""
        weight = self.embedding.weight
        values = self.embedding(one_hot(tokens, self.embedding.in_features, weight.dtype))
        logits: Tensor = self.output(self.layers(values))
        return logits


class TransformerLayer(nn.Module):
    """Attention and a perceptron of four times the width, each added to what came in (Vaswani et al. 2017).

    x <- x + Attention(LayerNorm(x)),  x <- x + Linear(GELU(Linear(LayerNorm(x)))). A position attends to itself and to
    those before it.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, values: Tensor) -> Tensor:
        """[N, T, width] to the same."""
        values = values + self._attend(self.attention_norm(values))
        result: Tensor = values + self.perceptron(values)
        return result

    def _attend(self, values: Tensor) -> Tensor:
        count, length, width = values.shape
        # [N, T, 3 width] to three times [N, heads, T, width / heads].
        joint = self.queries_keys_values(values).view(count, length, 3, self.heads, width // self.heads)
        queries, keys, contents = joint.permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(width // self.heads)
        places = torch.arange(length, device=values.device)
        scores = scores.masked_fill(places[None, :] > places[:, None], -torch.inf)
        mixed = (scores.softmax(-1) @ contents).transpose(1, 2).reshape(count, length, width)
        attended: Tensor = self.attended(mixed)
        return attended


class Transformer(nn.Module):
    """A causal transformer: embedded tokens plus learned positions, layers, a last LayerNorm, a linear output.

    115,536 parameters for 80 positions, tokens and classes, with two layers of 64.
    """

    def __init__(
        self, vocabulary: int, length: int, classes: int, *, width: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.embedding = _embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.positions, std=_POSITIONS)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [N, T, classes] of tokens [N, T], T at most `length`."""
        embedded = self.embedding(one_hot(tokens, self.embedding.in_features, self.positions.dtype))
        values = embedded + self.positions[: tokens.shape[1]]
        logits: Tensor = self.output(self.norm(self.layers(values)))
        return logits


def _embedding(vocabulary: int, width: int) -> nn.Linear:
    """A table as the linear layer that `one_hot` tokens go through; standard normal, as in `torch.nn.Embedding`."""
    table = nn.Linear(vocabulary, width, bias=False)
    nn.init.normal_(table.weight)
    return table


def _uniform(layer: nn.Module, width: int) -> None:
    """All weights uniform within 1 / sqrt(width), as torch draws them for recurrent layers."""
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1 / math.sqrt(width), 1 / math.sqrt(width))
