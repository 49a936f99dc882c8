"""What stands for the reader's own things in a page: `my_module`, `my_clients`. A page not named here needs none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def own_model_and_data() -> dict[str, Any]:
    """A small module, twenty clients of eight samples each, and a test set."""
    import torch

    torch.manual_seed(1)

    def samples(count: int) -> tuple[Any, Any]:
        inputs = torch.randn(count, 6)
        return inputs, (inputs.sum(dim=1) > 0).long()

    return {
        "my_module": torch.nn.Sequential(torch.nn.Linear(6, 2)),
        "my_clients": [samples(8) for _ in range(20)],
        "my_test": samples(50),
    }


PLACEHOLDERS: dict[str, Callable[[], dict[str, Any]]] = {"README.md": own_model_and_data}
