"""What a node does not agree to in the schedule of a run that carries noise from round to round."""

from __future__ import annotations

import json
from typing import Any

import pytest

from niss.errors import RemoteProtocolError
from niss.session.limits import Limits
from niss.session.ports import Request, Stage
from niss.session.proposal import read_proposal
from session.scene import Scene, refused, signed_proposal


def joined(said: Any, values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return said | {name: joined(said.get(name), value) for name, value in values.items()}


def changed(scene: Scene, **values: Any) -> bytes:
    """The proposal of the run with other values, signed again by its server; those of parts are joined."""
    return signed_proposal(scene.identity, joined(json.loads(scene.session.state.proposal[64:]), values))


def proposed(*, carried: bool = True, repair: bool = False) -> Scene:
    scene = Scene.of(carried, private=True, repair=repair)
    scene.start()
    return scene


def test_the_schedule_travels_in_the_proposal() -> None:
    scene = proposed()
    assert read_proposal(scene.session.state.proposal) == scene.session.proposal
    assert json.loads(scene.session.state.proposal[64:])["schedule"]
    assert "schedule" not in json.loads(proposed(carried=False).session.state.proposal[64:])


UNREPAIRED = {"committee": 0, "threshold": 0, "self_mask": 0.0, "dropped": 0, "revealed": 0}


@pytest.mark.parametrize(
    ("repair", "change"),
    [
        *((False, name) for name in ("residual", "carried", "unit", "clip")),
        *((False, name) for name in ("rounds", "participants")),
        (True, {"plan": {"mode": "tolerate"}}),
        (True, {"schedule": {"noise": UNREPAIRED}}),
        *((False, {"schedule": more}) for more in ({"more": 1}, {"noise": {"more": 1}})),
    ],
)
def test_a_schedule_that_does_not_keep_the_promise_is_declined(
    repair: bool, change: str | dict[str, Any]
) -> None:
    """A name alone: a tenth less of it, or one more."""
    scene = proposed(repair=repair)
    Limits().check(read_proposal(scene.session.state.proposal))
    if isinstance(change, str):
        said = json.loads(scene.session.state.proposal[64:])["schedule"]
        value = (said if change in said else said["noise"])[change]
        other = {change: value + 1 if isinstance(value, int) else 0.9 * value}
        other |= {"neighbours": float(value)} if change == "participants" else {}
        change = {"schedule": other if change in said else {"noise": other}}
    with pytest.raises(RemoteProtocolError):
        Limits().check(read_proposal(changed(scene, **change)))


def test_a_node_does_not_join_a_run_whose_committee_its_colluders_outvote() -> None:
    scene = proposed(repair=True)
    weak = changed(scene, schedule={"noise": {"threshold": 1}}, run="ab" * 16)
    asked = Request(Stage.ENROL, weak, 0, bytes.fromhex("ab" * 16))
    assert "threshold" in refused(scene.parties.node(0).answer(asked))
