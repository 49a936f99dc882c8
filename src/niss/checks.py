"""What types cannot say: refusals that many places make, and every tolerance with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from niss.errors import ConfigError, meant

BOOKS = 1e-9
"""Charges against a budget, a cost against a claim: one quantity in float64, added up in another order."""
LIMITS = 1e-8
"""A limit that a node has pinned, against what it works out of the server's numbers: both went through decimals."""
PLANNED = 1e-6
"""What a committed schedule says of a round, against what the client finds: roots are found to less than that."""


def require_whole(value: object, *, field: str, at_least: int) -> None:
    """Refuse anything but an int >= `at_least`; a bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"must be a whole number of at least {at_least}, not {value!r}", field=field)


def require_real(
    value: Any, *, field: str, below: float = math.inf, zero_allowed: bool = True, hint: str | None = None
) -> None:
    """Refuse anything but a finite number in [0, below), or in (0, below) without `zero_allowed`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0.0 <= value < below and (zero_allowed or value > 0.0)):
        limits = "at least 0" if zero_allowed else "above 0"
        if below < math.inf:
            limits += f" and below {below:g}"
        raise ConfigError(f"must be a finite number {limits}, not {value!r}", field=field, hint=hint)


def require_one_of(value: object, allowed: Iterable[str], *, field: str) -> None:
    """Refuse a value that is none of those names, and name them, the nearest first."""
    names = tuple(allowed)
    if value not in names:
        hint = " ".join(filter(None, (meant(value, names), f"use one of: {', '.join(names)}")))
        raise ConfigError(f"unknown value {value!r}", field=field, hint=hint)
