from __future__ import annotations

from collections.abc import Iterator

import pytest

from niss.learning import seeded_torch
from niss.randomness import SimStream


@pytest.fixture(autouse=True)
def _same_initial_weights_every_time() -> Iterator[None]:
    """Modules built in a test by torch's default init do not depend on which tests ran before."""
    with seeded_torch(SimStream(0)):
        yield
