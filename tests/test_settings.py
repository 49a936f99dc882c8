"""Settings are declared once; every view of them says the same, and faults are named as they were written."""

from __future__ import annotations

import copy
import dataclasses
from typing import Annotated, Literal

import pytest
from typing_extensions import Doc

from niss.cli.options import Flags
from niss.errors import ConfigError
from niss.settings import (
    Count,
    OneOf,
    Planned,
    Positive,
    check,
    check_json,
    described,
    settings,
    to_values,
)
from support.refusals import refuses


@settings
class Part:
    clip: Annotated[Positive, Doc("L2 bound. On updates.")] = 0.5
    kappa: Annotated[Positive | Planned, Doc("Strength.")] = "planned"
    mode: Annotated[Literal["tolerate", "repair"], Doc("What is done.")] = "tolerate"
    graph: Annotated[str, OneOf(lambda: ("regular", "complete")), Doc("Who with whom.")] = "regular"
    sizes: Annotated[tuple[Count, ...] | None, Doc("Sizes; none: all.")] = None

    def __post_init__(self) -> None:
        if self.clip > 100:
            raise ConfigError("is too large", field="clip", hint="take less")


@settings
class Whole:
    rounds: Annotated[Count, Doc("Rounds.")] = 3
    part: Part = dataclasses.field(default_factory=Part)


def test_values_survive_every_way_there_and_back() -> None:
    whole = Whole(rounds=7, part=Part(clip=2, kappa=4, sizes=(1, 2)))
    assert check(Whole, to_values(whole)) == whole
    assert copy.deepcopy(whole) == whole
    assert hash(whole) == hash(check(Whole, to_values(whole)))
    assert dataclasses.replace(whole, rounds=8).part is whole.part


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"part": {"clip": 0}}, "part.clip", "greater than 0"),
        ({"part": {"clip": float("nan")}}, "part.clip", "finite"),
        ({"part": {"clip": 101}}, "part.clip", "is too large\nhint: take less"),
        ({"part": {"clp": 1}}, "part.clp", "did you mean 'clip'?"),
        ({"part": {"kappa": "much"}}, "part.kappa", "must be number > 0 or planned"),
        ({"part": {"kappa": -1}}, "part.kappa", "greater than 0"),
        ({"part": {"mode": "repare"}}, "part.mode", "did you mean 'repair'?"),
        ({"part": {"graph": "complet"}}, "part.graph", "did you mean 'complete'?"),
        ({"part": {"sizes": [1, 0]}}, "part.sizes.1", "greater than or equal to 1"),
        ({"rouns": 1}, "rouns", "did you mean 'rounds'?"),
        ({"rounds": 0, "part": {"clip": -1}}, "rounds", "part.clip"),
    ],
)
def test_a_fault_is_named_with_its_key_and_the_fix(values, field, words) -> None:
    with refuses(field) as caught:
        check(Whole, values)
    assert words in str(caught.value)


def test_python_is_checked_like_a_file() -> None:
    for make in (lambda: Part(clip=-1), lambda: dataclasses.replace(Part(), clip=-1), lambda: Part(clop=1)):
        with pytest.raises(ConfigError, match=r"^cl.p"):
            make()


@pytest.mark.parametrize("text", [b'{"rounds": "3"}', b'{"rounds": true}', b'{"rounds": 3.0, "x": 1}', b"{"])
def test_nothing_of_a_stranger_is_converted(text) -> None:
    assert check_json(Whole, b'{"rounds": 4, "part": {"sizes": [2]}}').part.sizes == (2,)
    with pytest.raises(ConfigError):
        check_json(Whole, text)


def test_a_field_describes_itself() -> None:
    found = {setting.name: setting for setting in described(Part)}
    assert [setting.in_words for setting in found.values()] == [
        "number > 0",
        "number > 0 or `planned`",
        "`tolerate`, `repair`",
        "`regular`, `complete`",
        "list of whole number ≥ 1",
    ]
    assert found["graph"].choices == ("regular", "complete")
    assert found["kappa"].default == "planned"


def test_a_flag_is_made_from_the_field() -> None:
    flags = Flags(Whole, {"--rounds": "rounds", "--limit": "part.clip", "--kappa": "part.kappa"})
    rounds, limit, kappa = flags.parameters()
    assert (rounds.hint, limit.hint, kappa.hint) == (int | None, float | None, str | None)
    assert limit.settings["help"] == "L2 bound (default: 0.5)."
    assert (limit.name, limit.keyword) == ("part.clip", "limit")
    assert flags.typed({"part.clip": 2.0}) == ["--limit"]
