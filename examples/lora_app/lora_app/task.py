"""The task: to which desk does a message go? A transformer that knows public text, and adapters that learn the rest.

The base is trained here, on public text, to guess words that were left out: two seconds in each process. An app of your
own would load it from a file that every node has. It is frozen then; what is trained on private text, and exchanged, is
beside it (LoRA, Hu et al. 2021, 2106.09685): in place of `W x` a layer computes

    W x + B A x,   A [rank, in] from the seed, B [out, rank] from zero

and a linear head on the first word names the desk.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_app.text import DESKS, LENGTH, WORDS, messages

WIDTH, HEADS, LAYERS = 32, 4, 2
TESTS = 2_000


class Adapted(nn.Module):
    """A frozen linear layer and what is learned beside it."""

    def __init__(self, layer: nn.Linear, rank: int, source: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        scale = layer.in_features**-0.5
        self.down = nn.Parameter(scale * torch.randn(rank, layer.in_features, generator=source))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        beside: Tensor = self.layer(inputs) + inputs @ self.down.T @ self.up.T
        return beside


class Block(nn.Module):
    """Attention and two layers, each on normalised inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        normal = self.first(inputs)
        parts = (
            part(normal).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        inputs = inputs + self.out(seen)
        moved: Tensor = inputs + self.down(functional.gelu(self.up(self.second(inputs))))
        return moved


class Transformer(nn.Module):
    """Words to vectors, with a head for words (public) and one for desks (private)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS) + 1, WIDTH)  # The last is for a word that was left out.
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.guess = nn.Linear(WIDTH, len(WORDS))
        self.desk = nn.Linear(WIDTH, len(DESKS))
        nn.init.zeros_(self.desk.weight)
        nn.init.zeros_(self.desk.bias)

    def features(self, text: Tensor) -> Tensor:
        found = self.words(text) + self.places
        for block in self.blocks:
            found = block(found)
        return self.norm(found)  # type: ignore[no-any-return]

    def forward(self, text: Tensor) -> Tensor:
        return self.desk(self.features(text).mean(dim=1))  # type: ignore[no-any-return]


@cache
def _base(steps: int = 200) -> dict[str, Tensor]:
    """Weights of a transformer that has learned to guess words of public text; the same on every node."""
    source = torch.Generator().manual_seed(7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Transformer()
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        text, _ = messages(64, source)
        hidden = torch.rand(text.shape, generator=source) < 0.3
        guessed = model.guess(model.features(text.masked_fill(hidden, len(WORDS))))
        optimiser.zero_grad()
        functional.cross_entropy(guessed[hidden], text[hidden]).backward()
        optimiser.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def make_model(*, adapters: bool = True, rank: int = 2) -> nn.Module:
    """The base with adapters on its queries and values, all else frozen but the head; or the base alone, all free."""
    model = Transformer()
    model.load_state_dict(_base())
    model.guess.requires_grad_(False)
    if not adapters:
        return model
    model.requires_grad_(False)
    model.desk.requires_grad_(True)
    source = torch.Generator().manual_seed(11)
    for block in model.blocks:
        for name in ("query", "value"):
            setattr(block, name, Adapted(getattr(block, name), rank, source))
    return model


def trained_part(model: nn.Module) -> dict[str, Tensor]:
    """What is learned and exchanged, by name."""
    return {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


def load_trained_part(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put back what `trained_part` gave; anything else under such names is an error."""
    wanted = trained_part(model)
    if set(tensors) != set(wanted):
        raise ValueError(f"expected {sorted(wanted)}, got {sorted(tensors)}")
    model.load_state_dict(tensors, strict=False)


def client_data(number: int, count: int) -> tuple[Tensor, Tensor]:
    """The messages of one client, and their desks."""
    return messages(count, torch.Generator().manual_seed(1_000 + number))


def train(
    model: nn.Module, data: tuple[Tensor, Tensor], *, epochs: int, rate: float, batch: int, seed: int
) -> None:
    """A few epochs of SGD on what is not frozen."""
    text, desks = data
    order = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(desks), generator=order).split(batch):
            optimiser.zero_grad()
            functional.cross_entropy(model(text[chosen]), desks[chosen]).backward()
            optimiser.step()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of messages of nobody's that go to the right desk."""
    text, desks = messages(TESTS, torch.Generator().manual_seed(99))
    return float((model(text).argmax(dim=1) == desks).float().mean())
