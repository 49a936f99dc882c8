"""Modules as users write them, for `simulation.py`: worker processes import them by name."""

from __future__ import annotations

from torch import Tensor, nn

RANK = 4


class TorchGru(nn.Module):
    """An embedding, `torch.nn.GRU` and a linear output."""

    def __init__(self, vocabulary: int, embedding: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, embedding)
        self.layer = nn.GRU(embedding, width, batch_first=True)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.layer(self.table(tokens))[0])
        return logits


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of rank `RANK` beside it (LoRA: Hu et al. 2021)."""

    def __init__(self, fixed: nn.Linear) -> None:
        super().__init__()
        self.fixed = fixed
        self.down = nn.Linear(fixed.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, fixed.out_features, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.fixed(values) + self.up(self.down(values))
        return result


def adapted(module: nn.Module) -> nn.Module:
    """`module` frozen, with `LowRank` in place of the linear layers inside its `layers`."""
    module.requires_grad_(False)
    inside = module.get_submodule("layers")
    for part in list(inside.modules()):
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear:
                setattr(part, name, LowRank(child))
    return module
