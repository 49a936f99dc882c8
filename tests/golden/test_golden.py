"""The code computes what it did before it was rebuilt: numbers of `values.json` to 1e-12, words and bytes alike."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from golden.cases import CASES, VALUES, found

KNOWN: dict[str, Any] = json.loads(VALUES.read_text())
CLOSE = 1e-12


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE * CLOSE)
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
