"""A round from its record to its line and back."""

from __future__ import annotations

import json
import math

import pytest

from niss.errors import RunFolderError
from niss.runs import RoundRecord, SumNoise

FULL = RoundRecord(
    round=3,
    participants=5,
    survivors=4,
    lost={"7": "it went away"},
    problems=("a share was missing",),
    exact=False,
    noise=SumNoise(2.0, (-0.5,)),
    mu_joint=math.inf,
    mu_marginal=0.25,
    balance={"least_received": 0.5, "most_received": 2.0, "kept": None},
    accuracy=0.75,
    public={"beacon": "ab"},
)


@pytest.mark.parametrize("record", [RoundRecord(round=1), FULL])
def test_what_is_written_is_read_back(record: RoundRecord) -> None:
    line = json.dumps(record.to_json(), allow_nan=False)
    assert RoundRecord.from_json(json.loads(line)) == record


def test_what_follows_from_the_fields() -> None:
    assert (FULL.dropped, FULL.unguaranteed) == (1, True)
    assert not RoundRecord(round=1).unguaranteed
    assert FULL.to_json()["mu_joint"] is None, "JSON has no infinity"


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({}, "round"),
        ({"round": "1"}, "round"),
        ({"round": True}, "round"),
        ({"round": 1.5}, "round"),
        ({"round": 1, "accuracy": "high"}, "accuracy"),
        ({"round": 1, "accuracy": 10**400}, "accuracy"),
        ({"round": 1, "tau2": [0.1]}, "tau2"),
        ({"round": 1, "lost": {"7": 1}}, "lost.7"),
        ({"round": 1, "noise": {"variance": "large"}}, "noise.variance"),
    ],
)
def test_a_value_of_another_type_is_named(line: dict[str, object], field: str) -> None:
    with pytest.raises(RunFolderError, match=f"metrics.jsonl: {field}: "):
        RoundRecord.from_json(line, "metrics.jsonl")


def test_a_line_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert RoundRecord.from_json({"round": 2, "colour": "blue"}) == RoundRecord(round=2)
