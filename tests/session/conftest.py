"""Rounds that stand alone, and rounds that carry noise to the next: what holds for both is tested with both."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", params=[False, True], ids=["ordinary", "carried"])
def carried(request: pytest.FixtureRequest) -> bool:
    """Whether noise is carried from each round to the next."""
    return bool(request.param)
