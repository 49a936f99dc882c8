"""Waiting for processes of their own to do something."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    happens: Callable[[], object],
    seconds: float = 240.0,
    step: float = 0.5,
    what: str = "it did not happen in time",
) -> None:
    """Look again and again until it happens."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, what
        time.sleep(step)
