"""Refusals shared by this folder: each names the argument that cannot be used, and what to do."""

from __future__ import annotations

import math

from torch import Tensor
from torch import long as int64

from niss.errors import ConfigError


def require_whole(value: object, *, field: str, at_least: int) -> None:
    """Refuse anything but an int >= `at_least`; a bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"must be a whole number of at least {at_least}, not {value!r}", field=field)


def require_real(
    value: object, *, field: str, low: float = 0.0, high: float = math.inf, low_allowed: bool = True
) -> None:
    """Refuse anything but a finite number in [low, high), or in (low, high) without `low_allowed`."""
    fits = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and low <= value < high
        and (low_allowed or value > low)
    )
    if not fits:
        limits = f"{'at least' if low_allowed else 'above'} {low:g}"
        if high < math.inf:
            limits += f" and below {high:g}"
        raise ConfigError(f"must be a finite number {limits}, not {value!r}", field=field)


def require_samples(images: Tensor, labels: Tensor) -> int:
    """Refuse an empty or mismatched set of samples; returns the highest label."""
    if labels.ndim != 1 or labels.dtype != int64:
        raise ConfigError(
            f"must be a 1-D int64 tensor, not {labels.dtype} of shape {tuple(labels.shape)}",
            field="labels",
            hint="labels.to(torch.int64) converts class numbers",
        )
    if images.ndim < 1 or images.shape[0] != labels.shape[0]:
        raise ConfigError(
            f"shape {tuple(images.shape)} does not hold one sample for each of {labels.shape[0]} labels",
            field="images",
            hint="the first dimension must be the sample",
        )
    if labels.shape[0] == 0:
        raise ConfigError(
            "no samples", field="images", hint="leave clients without data out before training or evaluation"
        )
    lowest, highest = labels.aminmax()
    # -100 in particular: cross_entropy would silently skip it (its ignore_index).
    if int(lowest) < 0:
        raise ConfigError(f"class numbers start at 0, found {int(lowest)}", field="labels")
    return int(highest)


def require_logits(logits: object, *, rows: int, highest_label: int) -> Tensor:
    """Refuse a forward result that is not one row of class scores per sample, covering every label."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[0] != rows:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"forward must return logits of shape [{rows}, classes] for {rows} samples, not {found}",
            field="model",
        )
    if logits.shape[1] <= highest_label:
        raise ConfigError(
            f"label {highest_label} is beyond the {logits.shape[1]} classes of the model",
            field="labels",
            hint="build the model with as many classes as the data has",
        )
    return logits
