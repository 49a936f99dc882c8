"""A server and its nodes in one process, without a transport: killed, deaf or lied to as a test likes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from niss.accounting import Plan
from niss.accounting.assumed import fewest_participants
from niss.protocol.client import rounds_answered
from niss.protocol.keys import Identity
from niss.protocol.messages import Refusal, RoundOpen, decode
from niss.runs import RoundRecord
from niss.session import Parties
from niss.session.books import RunState
from niss.session.limits import Limits
from niss.session.metrics import NO_METRICS, NoisyMetrics
from niss.session.node import Training
from niss.session.ports import NO_REPLY, Relay, Reply, Request, Stage
from niss.session.proposal import ENROLMENT_PREFIX, Setup
from niss.session.server import Session, drive
from niss.settings import check_json, to_values
from support.protocol_round import seeded_entropy

COORDINATES, MOVED = 6, 5000
ORDINARY = Plan(tau2=0.0, clip=5.0, neighbours=3, graph="complete")
CARRIED = replace(ORDINARY, method="niss-carried", kappa=4.0, separation=2)


class Killed(BaseException):
    """Stands for kill -9: nothing in the server may run after it."""


def refused(reply: object) -> str | None:
    """Why a reply declines; None for one that does not."""
    assert isinstance(reply, Reply)
    if reply.body.startswith(ENROLMENT_PREFIX):
        return None
    message = decode(reply.body)
    return message.reason if isinstance(message, Refusal) else None


def signed_proposal(identity: Identity, values: object) -> bytes:
    """A proposal of any content, signed as a server signs its own."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    return identity.sign("flower proposal", text) + text


def update_of(node: int, number: int) -> np.ndarray:
    """What a node learns in a round, counted from 0: the same whoever asks."""
    return 0.02 * np.random.default_rng([node, number]).normal(size=COORDINATES)


def stays(rounds: list[RoundRecord]) -> list[float]:
    """By round, the deviation of the noise that it left in a coordinate of the model for good."""
    sums = [0.0, *((one.model_noise_variance or 0.0) - one.carried_variance for one in rounds)]
    gained = [after - before for before, after in itertools.pairwise(sums)]
    # What was carried is added and taken off again: that rounds.
    least = 1e-12 * max(one.carried_variance for one in rounds)
    return [math.sqrt(one) if one > least else 0.0 for one in gained]


@dataclass
class Scene:
    """Nodes that outlive their server, and what the server saved.

    deaf    (stage, round, seat) -> whether that request is lost
    heard   told of each reply before the server has it; may raise
    late    (node, round) -> whether it uploads a blank in that round
    """

    plan: Plan
    nodes: int
    rounds: int
    kept: bool = True
    label: str = "scene"
    fewest: int = 2
    deaf: Callable[[Stage, int, int], bool] = lambda _stage, _round, _seat: False
    heard: Callable[[Stage], None] = lambda _stage: None
    saving: Callable[[int], None] = lambda _saves: None
    saved_last: Callable[[int], None] = lambda _saves: None
    late: Callable[[int, int], bool] = lambda _node, _round: False
    metrics: NoisyMetrics = NO_METRICS
    away: set[int] = field(default_factory=set)
    offset: int = 0
    saves: list[dict[str, Any]] = field(default_factory=list)
    opened: dict[int, bytes] = field(default_factory=dict)
    asked: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = seeded_entropy(self.label)
        self.identity = Identity.generate(draw)
        # Nodes with a folder of their own are those that may come back.
        limits = Limits(state=Path("folder") if self.kept else None, uncalibrated=True)
        self.parties = Parties(limits, draw)
        self.draw = draw

    @classmethod
    def of(
        cls, carried: bool, *, rounds: int = 3, repair: bool = False, private: bool = False, **more: Any
    ) -> Scene:
        """Four nodes in every round, or eight that take turns in rounds of four."""
        plan = CARRIED if carried else ORDINARY
        if repair:
            plan = replace(plan, mode="repair")
        if private:
            plan = replace(plan, tau2=None, clip=0.5, epsilon=8.0)
        if carried:
            horizon = rounds - plan.closing
            plan = replace(plan, horizon=horizon, participations=math.ceil(horizon / 2), participants=4)
        else:
            plan = replace(plan, participations=rounds, chain_rounds=rounds)
        nodes = more.pop("nodes", 8 if carried else 4)
        return cls(plan, nodes, rounds, **more)

    @property
    def carried(self) -> bool:
        return self.plan.kind.carries

    def start(self) -> Session:
        """A server, which goes on with what was saved last."""
        setup = Setup(
            plan=self.plan,
            rounds=self.rounds,
            participants=4 if self.carried else max(self.fewest, fewest_participants(self.plan)),
            coordinates=COORDINATES,
            metrics=self.metrics,
        )
        state = self.saves[-1] if self.saves else {"session": None, "done": 0, "model": [0.0] * COORDINATES}
        self.done, self.model = state["done"], np.array(state["model"])
        self.session = Session(
            setup,
            identity=self.identity,
            coordinator=Relay(entropy=self.draw),
            save=self.save,
            saved=state["session"] and check_json(RunState, json.dumps(state["session"])),
            entropy=self.draw,
        )
        if self.session.books.rounds:
            self.done = max(self.done, self.session.books.rounds[-1].round)
        self.session.save()
        return self.session

    def save(self, session: RunState) -> None:
        self.saving(len(self.saves))
        state = {"session": to_values(session), "done": self.done, "model": self.model.tolist()}
        self.saves.append(json.loads(json.dumps(state)))
        self.saved_last(len(self.saves))

    def present(self) -> list[int]:
        return [node + self.offset for node in range(self.nodes) if node not in self.away]

    def play(self) -> Scene:
        """All rounds that are left."""
        session = self.start()
        while self.done < self.rounds:
            self.play_round(session)
        return self

    def play_round(self, session: Session) -> None:
        here = self.present()
        session.begin(self.done, here, connected=here, coordinates=COORDINATES)
        drive(session, self.deliver)
        if session.refused is None:
            total, _ = session.finish()
            if total is not None:
                self.model = self.model + session.mean(total)[0]
        self.done += 1
        session.save()

    def deliver(self, requests: Mapping[int, Request]) -> dict[int, Reply | str]:
        replies: dict[int, Reply | str] = {}
        for node, request in requests.items():
            number, current = node % MOVED, self.session.round
            seat = current.nodes.index(node) if current is not None and node in current.nodes else -1
            if request.stage is Stage.ROUND:
                opened = decode(request.body)
                assert isinstance(opened, RoundOpen)
                known = self.opened.setdefault(opened.terms.round, request.body)
                assert known == request.body, "a round was opened in two ways"
                self.asked.setdefault(opened.terms.round, set()).add(number)
            if number in self.away or self.deaf(request.stage, self.done, seat):
                replies[node] = NO_REPLY
                continue
            send = self.parties.with_updates(self.update, COORDINATES)
            replies[node] = send({number: request})[number]
            self.heard(request.stage)
        return replies

    def update(self, node: int, _training: Training) -> np.ndarray | None:
        return None if self.late(node, self.done) else update_of(node, self.done)

    def summed(self) -> dict[int, set[int]]:
        """By round, counted from 0, the nodes whose uploads are in its sum."""
        return {
            one.round - 1: {
                node
                for node in self.asked[one.round - 1]
                if str(node) not in one.lost and str(node + MOVED) not in one.lost
            }
            for one in self.records
            if one.survivors
        }

    def bare(self) -> np.ndarray:
        """The model that the uploads in the sums make without noise."""
        moved = np.zeros(COORDINATES)
        for number, nodes in self.summed().items():
            size = 4 if self.carried else len(nodes)
            moved += sum(update_of(node, number) for node in nodes if not self.late(node, number)) / size
        return moved

    @property
    def records(self) -> list[RoundRecord]:
        return self.session.books.rounds

    def answered(self, nodes: Iterable[int] | None = None) -> dict[int, list[int]]:
        """By node, how many rounds it was charged for."""
        chosen = range(self.nodes) if nodes is None else nodes
        return {node: self.parties.store(node).charged.participations.tolist() for node in chosen}

    def memory_of(self, node: int) -> bytes | None:
        """What a node's client of the protocol remembers of this run."""
        return self.parties.store(node).state.runs[self.session.proposal.run.hex()].memory

    def check(self) -> None:
        """The model is that of the uploads that were summed, and the server's books cover those of the nodes."""
        np.testing.assert_allclose(self.model, self.bare(), rtol=0, atol=1e-5)
        for client, member in zip(
            self.session.books.statement.clients,
            sorted(self.session.members.by_node.values(), key=lambda one: one.number),
            strict=True,
        ):
            store = self.parties.store(member.node % MOVED)
            assert store.charged.participations[0] <= client.participations
            if self.carried:
                taken = rounds_answered(self.memory_of(member.node % MOVED))
                assert list(taken) == sorted(set(taken)), "a round was answered twice"
