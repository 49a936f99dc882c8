"""From stored bytes to what a model reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from niss.errors import ConfigError

_NUMPY_DTYPES: dict[torch.dtype, type[np.floating]] = {torch.float32: np.float32, torch.float64: np.float64}


def to_tensor(
    images: npt.NDArray[np.uint8],
    mean: float | Sequence[float],
    std: float | Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(images / 255 - mean) / std as a new tensor, from uint8 [N, C, H, W].

    `mean` and `std` are one number for all channels or one per channel, on the scale where white is 1.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        found = images.dtype if isinstance(images, np.ndarray) else type(images).__name__
        raise ConfigError(f"must be a uint8 array, not {found}", field="images")
    if images.ndim != 4:
        raise ConfigError(
            f"must have the shape [N, C, H, W], not {images.shape}",
            field="images",
            hint="images[:, None] adds the channel of grey images",
        )
    if dtype not in _NUMPY_DTYPES:
        raise ConfigError(f"must be torch.float32 or torch.float64, not {dtype}", field="dtype")
    channels = images.shape[1]
    shift = _per_channel(mean, channels, dtype, field="mean")
    scale = _per_channel(std, channels, dtype, field="std")
    if not bool((scale > 0).all()):
        raise ConfigError(f"must be above 0, not {std!r}", field="std")
    # astype copies: the tensor never shares memory with a read-only or memory-mapped array.
    pixels = torch.from_numpy(images.astype(_NUMPY_DTYPES[dtype], order="C"))
    return pixels.div_(255.0).sub_(shift).div_(scale)


def _per_channel(value: float | Sequence[float], channels: int, dtype: torch.dtype, *, field: str) -> Tensor:
    try:
        numbers = torch.from_numpy(np.array(value, dtype=np.float64)).to(dtype)
    except (TypeError, ValueError):
        raise ConfigError(f"must be a number or one per channel, not {value!r}", field=field) from None
    if numbers.ndim > 1 or (numbers.ndim == 1 and numbers.shape[0] != channels):
        raise ConfigError(f"must be one number or {channels} (one per channel), not {value!r}", field=field)
    if not bool(numbers.isfinite().all()):
        raise ConfigError(f"must be finite, not {value!r}", field=field)
    return numbers.reshape(-1, 1, 1)
