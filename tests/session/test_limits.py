"""What a node pins and what it takes on first use, against the proposal of a run; and what a proposal is."""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from niss.accounting import Plan
from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.mechanism import Slots
from niss.protocol import messages as wire
from niss.session.limits import Limits
from niss.session.node import Node
from niss.session.ports import Request, Stage
from niss.session.proposal import Proposal, Setup, read_proposal
from niss.session.store import MemoryStore
from niss.tracker.coordinator import NodesTracker
from session.scene import Scene, refused, signed_proposal

PLAN = Plan(
    clip=0.5, epsilon=8.0, participations=4, neighbours=3, kappa=2.0, graph="complete", chain_rounds=4
)


def proposed(plan: Plan = PLAN) -> tuple[Scene, Proposal]:
    scene = Scene(plan, 4, 4)
    return scene, scene.start().proposal


@pytest.mark.parametrize(
    ("pin", "why"),
    [
        ({"niss-server": "ab" * 32}, "server of this run is not the one"),
        ({"niss-holder": "ab" * 32}, "holder of this run is not the one"),
        ({"niss-clip": 0.1}, "clip = 0.5 is proposed, but this node allows at most 0.1"),
        ({"niss-epsilon": 1.0, "niss-delta": 1e-5}, "epsilon = 8 is proposed"),
        ({"niss-epsilon": 9.0, "niss-delta": 1e-6}, "delta = 1e-5 is proposed"),
        (
            {"niss-collusion": 0.1},
            "the plan allows for a share of 0 that colludes, but this node assumes 0.1",
        ),
        (
            {"niss-relation": "replace-one"},
            "the plan is for 'zero-out', but this node requires 'replace-one'",
        ),
        ({"niss-modes": "repair"}, "mode 'tolerate' is not accepted"),
    ],
)
def test_a_run_beyond_a_nodes_limits_is_declined(pin: dict[str, Any], why: str) -> None:
    _, proposal = proposed()
    with pytest.raises(RemoteProtocolError, match=why):
        Limits().of_node(pin).check(proposal)


def test_delta_pays_for_the_graphs_of_every_round_that_a_run_may_have() -> None:
    plan = Plan(clip=0.5, epsilon=8.0, participations=3, neighbours=3, graph="complete")
    with pytest.raises(ConfigError, match="a run of 120 rounds needs a plan for all of them, not for 3"):
        Setup(plan=plan, rounds=120, participants=4)
    _, proposal = proposed(replace(plan, horizon=120))
    assert proposal.plan.possible_rounds == Limits().policy(proposal).rounds == 120
    # Nor does a node answer more rounds than those that a plan which names none has paid for.
    assert Limits().policy(replace(proposal, plan=replace(plan, participations=4))).rounds == 4


PROMISES_NOTHING = "promises nothing"


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (replace(PLAN, epsilon=10.5), "epsilon = 10.5 is proposed"),
        (replace(PLAN, epsilon=1e6), r"epsilon = 1e6 is proposed"),
        (replace(PLAN, delta=0.5), "delta = 0.5 is proposed"),
        (replace(PLAN, tau2=0.0), PROMISES_NOTHING),
        (replace(PLAN, tau2=1e-3), PROMISES_NOTHING),
    ],
)
def test_a_client_without_an_epsilon_of_its_own_joins_no_such_run(plan: Plan, why: str) -> None:
    _, proposal = proposed(plan)
    with pytest.raises(RemoteProtocolError, match=why):
        Limits().check(proposal)
    Limits().check(proposed(replace(PLAN, epsilon=10.0))[1])


def test_an_address_that_the_owner_did_not_name_is_not_even_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is there, and whether there is such a name, shows neither in the reason nor in the time it takes."""

    def look_up(*_asked: object, **_named: object) -> None:
        raise AssertionError("the server's address was looked up")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, look_up)
    scene, proposal = proposed()
    reasons = set()
    for pin in (None, "https://tracker.example:8443"):
        for address in ("http://127.0.0.1:22", "http://printer.local", "https://10.0.0.1", "ftp://x", "x"):
            store = MemoryStore()
            tracker = NodesTracker(store.identity, None, lambda _error: None)
            body = replace(proposal, tracker=address).signed(scene.identity)
            node = Node(store, Limits(tracker=pin), tracker)
            reasons.add(refused(node.answer(Request(Stage.ENROL, body, run=proposal.run))))
    assert reasons == {"the tracker of this run is not the one this node expects"}


def test_an_owner_can_agree_to_a_plan_that_promises_nothing_by_name() -> None:
    _, proposal = proposed(replace(PLAN, tau2=0.0))
    for spelt in (True, "true"):
        Limits().of_node({"niss-uncalibrated": spelt}).check(proposal)
    for limits in ({"niss-uncalibrated": "false"}, {"niss-epsilon": 8.0, "niss-delta": 1e-5}):
        with pytest.raises(RemoteProtocolError, match=PROMISES_NOTHING):
            Limits().of_node(limits).check(proposal)
    assert Limits(uncalibrated=True, wasted_rounds=5).pinned == ()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"niss-epsilom": 1.0}, "niss-epsilom"),
        ({"niss-server": "abc"}, "niss-server"),
        ({"niss-uncalibrated": "perhaps"}, "niss-uncalibrated"),
        ({"niss-epsilon": 1.0}, "must be set together"),
        ({"niss-modes": "planned"}, "niss-modes"),
        ({"niss-tracker": "http://a.tracker", "niss-tracker-ca": "ca.crt"}, "must be an address of https"),
    ],
)
def test_a_misspelt_limit_is_no_limit_and_is_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Limits().of_node(config)


def test_a_proposal_is_what_its_server_signed() -> None:
    scene, proposal = proposed()
    data = scene.session.state.proposal
    assert read_proposal(data) == proposal
    with pytest.raises(RemoteProtocolError, match="signature"):
        read_proposal(data.replace(b'"epsilon":8.0', b'"epsilon":9.0'))
    for damaged in (b"", data[:70], data[:64] + b"{}", data[:64] + b"[" * 100_000):
        with pytest.raises(RemoteProtocolError):
            read_proposal(damaged)


def test_a_second_proposal_for_the_same_run_is_refused() -> None:
    scene, proposal = proposed()
    node = scene.parties.node(0)
    asked = Request(Stage.ENROL, scene.session.state.proposal, 0, proposal.run)
    assert node.answer(asked).note.startswith("joined")
    worse = replace(proposal, plan=replace(proposal.plan, epsilon=9.0)).signed(scene.identity)
    assert "another plan" in refused(node.answer(replace(asked, body=worse)))
    assert node.answer(asked).note.startswith("joined")


@pytest.mark.parametrize("version", ["9" * 400, 10**30, -1, [1], None, True, 2.5])
def test_a_version_that_is_none_is_not_repeated(version: Any) -> None:
    scene, _ = proposed()
    with pytest.raises(RemoteProtocolError, match="the proposal") as caught:
        read_proposal(signed_proposal(scene.identity, {"version": version}))
    assert len(caught.value.message) < 200


def test_a_proposal_says_of_which_version_its_rounds_are() -> None:
    scene, proposal = proposed()
    assert b'"wire":%d' % wire.VERSION in scene.session.state.proposal
    newer = replace(proposal, wire=7)
    assert read_proposal(newer.signed(scene.identity)) == newer
    with pytest.raises(RemoteProtocolError, match=r"has version 7, .*: upgrade niss on this node"):
        Limits().check(newer)


class TestRecords:
    """A run that hides records has a budget in slots: the plan's, or as many like them as the owner's target holds."""

    PLAN = Plan(unit="record", batch=0.05, records=6000, epsilon=1.0, participations=20, neighbours=3.0)

    def test_the_plan_or_the_owner_sets_how_many_slots(self) -> None:
        proposal = SimpleNamespace(plan=self.PLAN)
        ((q, z, count),) = Limits().budget(proposal).most.rounds  # type: ignore[arg-type, union-attr]
        assert (q, count) == (0.05, 20)
        for epsilon, more in ((3.0, True), (0.5, False)):
            owners = Limits(epsilon=epsilon, delta=1e-5).budget(proposal)  # type: ignore[arg-type]
            assert owners.unit == "record"
            ((_, same, most),) = owners.most.rounds  # type: ignore[union-attr]
            assert same == z
            assert (most > 20) == more
            left = owners.delta - owners.delta_failure
            assert Slots.of((q, z, most)).epsilon(left) <= epsilon < Slots.of((q, z, most + 1)).epsilon(left)

    def test_a_round_above_the_owners_target_is_refused(self) -> None:
        proposal = SimpleNamespace(plan=replace(self.PLAN, epsilon=8.0, participations=1))
        with pytest.raises(PrivacyError, match="one round with q ="):
            Limits(epsilon=0.01, delta=1e-5).budget(proposal)  # type: ignore[arg-type]
