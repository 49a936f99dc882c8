"""Uploads of silos with a record that fails; the attacks on them are run in tests/cli/test_attack.py."""

from __future__ import annotations

import numpy as np
import pytest

from niss.accounting import Plan
from niss.attacks import lying
from niss.attacks.federation import FailingSilo, weights_of
from niss.protocol.messages import encode
from niss.randomness import SimStream

CLIP, SILOS = 0.5, 5
PLAN = Plan(
    unit="record", batch=1.0, records=100, clip=CLIP, neighbours=SILOS - 1.0, graph="complete", epsilon=8.0
)


def moved(failure: str, length: int, *, blank: bool) -> float:
    """In clips, by a record that fails."""
    weights = weights_of(failure)
    without, present = (FailingSilo(length, CLIP, one, blank=blank) for one in (None, failure))
    return float(np.linalg.norm(present.added(weights, CLIP) - without.added(weights, CLIP))) / CLIP


@pytest.mark.parametrize("failure", ["overflows", "raises an exception"])
def test_a_record_that_fails_moves_the_sum_by_less_than_its_clip(failure: str) -> None:
    """A blank instead, which a silo that fails as a whole would send, moves it by all that the others add."""
    for length in (3, 30):
        assert moved(failure, length, blank=False) <= 1e-5
        assert moved(failure, length, blank=True) == pytest.approx(length, rel=1e-5)


def test_weights_at_which_one_record_overflows_change_neither_the_form_of_the_upload_nor_the_work() -> None:
    weights, seen = weights_of("overflows"), []
    for failure in (None, "overflows"):
        silo = FailingSilo(10, CLIP, failure, blank=False)
        server = lying.LyingServer(PLAN, SILOS, coordinates=weights.size, stream=SimStream(1))
        uploaded = server.upload(0, (silo.records, weights))
        seen.append((silo.calls, len(encode(server.uploads[0]))))
        assert np.isfinite(uploaded).all()
    assert seen[0] == seen[1]
    assert seen[0][0] == 1
