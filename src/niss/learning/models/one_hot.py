"""Categories as vectors of zeros and a one."""

from __future__ import annotations

import torch
from torch import Tensor


def one_hot(categories: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[...] to [..., size]: 1 at the category, else 0; all 0 for a category beyond `size`.

    A product with it is a table look-up whose gradient is a product too: its sums have one order on every
    device, many clients can be stacked, and nothing waits for the values. `torch.nn.functional.one_hot` looks at them.
    """
    return (categories.unsqueeze(-1) == torch.arange(size, device=categories.device)).to(dtype)
