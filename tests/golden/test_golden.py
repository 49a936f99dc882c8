"""The code computes what it did before it was rebuilt: the words, and the numbers as far as processors agree."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from golden.cases import CASES, VALUES, found

KNOWN: dict[str, Any] = json.loads(VALUES.read_text())
# Searches stop at 1e-11, and linear algebra differs in its last bits from one processor to the next.
CLOSE = 1e-10


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-14)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_no_case_is_missing() -> None:
    assert set(KNOWN) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_as_before(name: str) -> None:
    now, before = found(name), KNOWN[name]
    assert now.keys() == before.keys()
    apart = {key: (now[key], before[key]) for key in now if not same(now[key], before[key])}
    assert not apart
