"""The graded attack on repair: the server tells the committee different survivor sets and keeps all it hears.

Everything is counted from what was really revealed: secrets and self-masks that really come out of the partials given,
with all that colluders make of their own pieces. What is left to protect an honest client must be at least what
`assess` charged it for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from niss import effective_variance
from niss.accounting import DrawnAccount
from niss.accounting.assumed import committee_threshold
from niss.errors import RemoteProtocolError
from niss.protocol.agreement import Agreed, agree
from niss.protocol.client import Client, ClientStage
from niss.protocol.messages import RevealRequest
from niss.protocol.shares import EdgeKeys
from support.protocol_round import Federation, carried, resigned
from support.what_left import Held

Survivors = tuple[int, ...]
Story = Callable[[int], list[Survivors]]


class Scene:
    """All clients uploaded; every attack starts from there with restarted clients."""

    def __init__(
        self,
        size: int,
        neighbours: float,
        colluders: int,
        *,
        members: int | None = None,
        label: str = "graded",
        **changes: Any,
    ) -> None:
        rng = random.Random(f"{label} {size} {neighbours} {colluders}")
        self.federation = Federation(size, f"{label} {size} {neighbours} {colluders}", colluders=colluders)
        members = members or size
        values: dict[str, Any] = {
            "mode": "repair",
            "coordinates": 1,
            "neighbours": neighbours,
            "unit_variance": 1.0 / neighbours,
            "residual_variance": 0.2,
            "self_variance": 2.0,
            "revealed": 1,
            "dropped": 1,
            "committee": members,
            "threshold": committee_threshold(size, members, colluders, 0.0),
        }
        self.opened = self.federation.open(self.federation.terms(**{**values, **changes}))
        self.agreed: Agreed = agree(self.opened)
        self.size = size
        self.uploads = {
            seat: client.upload(self.opened, np.zeros(1), self.federation.entropy)
            for seat, client in enumerate(self.federation.clients)
        }
        self.after_upload = [seat.kept[-1] for seat in self.federation.seats]
        # The worst that can be: as many of them as there are sit in the committee.
        self.colluders = frozenset(rng.sample(self.agreed.committee, colluders))
        mu = DrawnAccount()(self.agreed, colluders)
        self.charged = (self.agreed.terms.clip / size / mu) ** 2

    def attack(self, story: Story, *, forgetful: bool = False) -> Held:
        """Tell every honest member its survivor sets, one after the other; what came out, with what colluders know."""
        seats = self.federation.seats
        held = Held(self.opened, self.colluders, self.agreed, privates=lambda seat: seats[seat].privates)
        for upload in self.uploads.values():
            held.take_upload(upload)
        for member in self.agreed.committee:
            if member in self.colluders:
                continue
            client = seats[member].start(self.after_upload[member])
            for survivors in story(member):
                if forgetful:
                    _forget(client)
                request = RevealRequest(self.agreed.digest, survivors, held.pieces_for(member, survivors))
                with suppress(RemoteProtocolError):
                    reveal = client.reveal(resigned(self.federation.server, request, "request"))
                    held.take_reveal(carried(reveal), survivors)
        for seat, other in held.combined:
            if other is None:
                assert held.is_bare(seat)
            else:
                private = seats[seat].privates[self.opened.participants[seat].prekey.number]
                assert bytes(EdgeKeys(self.agreed, seat, private).key(other)) in held.pool.edges
        return held

    def edges(self, held: Held) -> set[tuple[int, int]]:
        """The shares that the server knows."""
        graph = self.agreed.graph
        known = {frozenset(pair) for pair in held.combined}
        present = zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True)
        return {ends for ends in present if frozenset(ends) in known}

    def masks(self, held: Held) -> set[int]:
        return {seat for seat, other in held.combined if other is None}

    def left(self, held: Held) -> np.ndarray:
        """The effective variance of each honest client, given what came out."""
        terms, masks = self.agreed.terms, self.masks(held)
        bare = np.array([seat in masks for seat in range(self.size)])
        return effective_variance(
            self.agreed.graph,
            unit_variance=terms.unit_variance,
            residual_variance=terms.residual_variance + np.where(bare, 0.0, terms.self_variance),
            colluders=self.colluders,
            revealed=self.edges(held),
        )

    def without(self, *lost: int) -> Survivors:
        return tuple(seat for seat in range(self.size) if seat not in lost)


def _forget(client: Client) -> None:
    """What the rule of one answer a round forbids: the member answers as if it had not before."""
    current = client._memory.current
    assert current is not None
    current.verdict = None
    client._memory.state = ClientStage.UPLOADED


def graded(scene: Scene, victim: int, rng: random.Random) -> Story:
    """Just enough members hear that the victim lives, the others that it dropped out; then each the other story."""
    honest = [seat for seat in scene.agreed.committee if seat not in scene.colluders]
    rng.shuffle(honest)
    honest.sort(key=lambda seat: seat != victim)  # The victim itself believes nothing else.
    believers = set(honest[: scene.agreed.terms.threshold - len(scene.colluders)])

    def story(seat: int) -> list[Survivors]:
        alive, gone = scene.without(), scene.without(victim)
        return [alive, gone] if seat in believers else [gone, alive]

    return story


SCENES: list[tuple[int, float, int, dict[str, Any]]] = [
    (8, 7.0, 0, {}),
    (10, 9.0, 2, {}),
    (10, 9.0, 1, {"revealed": 3, "dropped": 3}),
    (12, 3.0, 0, {"revealed": 2, "dropped": 3}),
    (14, 4.0, 1, {"members": 7}),
    (14, 4.0, 2, {"members": 9, "revealed": 2, "dropped": 2}),
]


@pytest.mark.parametrize("label", ["a", pytest.param("b", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("size", "neighbours", "colluders", "changes"), SCENES)
def test_no_story_strips_a_client_below_what_it_was_charged(
    size: int, neighbours: float, colluders: int, changes: dict[str, Any], label: str
) -> None:
    """Stories without a plan, and more than two of them, are told in `test_any_server`."""
    scene, rng = Scene(size, neighbours, colluders, label=label, **changes), random.Random(label)
    honest = sorted(set(range(size)) - scene.colluders)
    got = [scene.attack(graded(scene, victim, rng)) for victim in rng.sample(honest, 6)]
    assert min(float(scene.left(held).min()) for held in got) >= scene.charged * (1.0 - 1e-9)
    # The strategy does get something, or this would show nothing.
    assert any(held.combined for held in got)


def test_a_true_repair_reaches_what_was_charged() -> None:
    """The bound is no idle one: on a complete graph, one real drop and its repair leave just that much."""
    scene = Scene(8, 7.0, 0)
    held = scene.attack(lambda _: [scene.without(0)])
    terms = scene.agreed.terms
    seen = effective_variance(
        scene.agreed.graph,
        unit_variance=terms.unit_variance,
        residual_variance=terms.residual_variance,
        colluders=[0],
    )
    assert all(0 in edge for edge in scene.edges(held))
    assert len(scene.edges(held)) == 14
    assert seen.min() == pytest.approx(scene.charged)


@pytest.mark.parametrize("members", [10, 6])
def test_below_the_threshold_that_a_client_insists_on_the_graded_attack_succeeds(
    members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two colluders in the committee, and a threshold that is safe with none: two stories gather it."""
    safe = Scene(10, 9.0, 2, members=members)
    victim = next(seat for seat in range(10) if seat not in safe.colluders)
    assert safe.left(safe.attack(graded(safe, victim, random.Random(1)))).min() >= safe.charged
    weak = members // 2 + 1
    with pytest.raises(RemoteProtocolError, match=f"{weak} of the {members} members of the committee"):
        Scene(10, 9.0, 2, members=members, threshold=weak)
    monkeypatch.setattr("niss.accounting.account.check_committee", lambda *_: None)
    scene = Scene(10, 9.0, 2, members=members, threshold=weak)
    victim = next(seat for seat in range(10) if seat not in scene.colluders)
    stripped = scene.left(scene.attack(graded(scene, victim, random.Random(1))))
    assert stripped[victim] < 0.8 * scene.charged


def test_without_the_rule_of_one_answer_it_succeeds_too() -> None:
    """Members that answer every story give mask and edges of one client."""
    scene = Scene(10, 9.0, 0)
    alive, gone = scene.without(), scene.without(3)

    def story(seat: int) -> list[Survivors]:
        return [alive] if seat == 3 else [alive, gone]

    assert scene.left(scene.attack(story)).min() >= scene.charged
    stripped = scene.left(scene.attack(story, forgetful=True))
    assert stripped.min() < 0.8 * scene.charged
    assert int(stripped.argmin()) == 3
