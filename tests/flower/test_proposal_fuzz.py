"""A short slice of the fuzzer of proposals in `tests/fuzz`, and what it found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fuzz.driver import run_chunk
from fuzz.fuzz_proposal import SERVER, TARGET, join, originals
from niss.errors import RemoteProtocolError
from niss.session.limits import Limits
from niss.session.proposal import read_proposal


@pytest.mark.parametrize("number", [None, "0.3", True, 10**400, 1e300, 1e-300])
@pytest.mark.parametrize(
    "name", ["clip", "epsilon", "delta", "participations", "kappa", "neighbours", "collusion"]
)
def test_a_plan_with_something_else_than_a_number_is_not_read(name: str, number: Any) -> None:
    """A plan without a clip passed, and there was nothing that the clip of a round could be compared with.

    Others ended in a TypeError or an OverflowError where the limits were compared with them.
    """
    values = originals()[3]
    values["plan"][name] = number
    text = json.dumps(values).encode()
    signed = SERVER.sign("flower proposal", text) + text
    with pytest.raises(RemoteProtocolError):
        read_proposal(signed)
    assert join(signed, bytes(16)) == "declined"


def test_the_fuzzer_notices_limits_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "check", lambda _self, _proposal: None)
    assert run_chunk(TARGET, seed=40_000, chunk=0, count=300).findings
