"""The examples in docstrings run as they stand."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "niss.methods",
        "niss.methods.fedavg",
        "niss.accounting.planner",
        "niss.accounting.plans",
        "niss.accounting.statement",
    ],
)
def test_examples_give_what_they_say(module: str) -> None:
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted
    assert not outcome.failed
