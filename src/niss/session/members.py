"""Who takes part in a run: nodes that joined, those that are left out and why, and who is to blame for a refusal.

A client declines for reasons of its own (its budget is spent, its state is old), or because of a neighbour that it
cannot share noise with. The server cannot see which, so it tries: where two or more clients declined and they
are more than half of the neighbours of somebody who did not, that one is set aside, and those who declined are asked
again. If at least half of them take part without it, it is left out for good; if they decline again and nobody else is
suspected, they are left out themselves and everyone set aside comes back.

So a client that spoils rounds spoils one, and another for each that looks as suspicious, before it is out. It cannot
have others put out unless it and its helpers are most of the neighbours of their victim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from niss.errors import RemoteProtocolError
from niss.protocol import fingerprint
from niss.redaction import printable

_FEWEST = 2
_MOST_FAILED_ENROLMENTS = 2
SPOILED = "its neighbours declined while it took part, and no longer without it"


@dataclass
class Member:
    """A node that joined.

    node      the transport's id of it
    number    counts members in the order they came
    identity  its public key
    pinned    names of the limits it has set, in its own word
    step      the last of its steps that the server has seen
    """

    node: int
    number: int
    identity: bytes
    pinned: tuple[str, ...]
    step: int = 0


class Members:
    """The nodes of a run.

    by_node   those who joined
    left_out  by node: why it takes no part in the rest of the run
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        """`saved` is what `to_json` gave of a run that is gone on with: its members are away until they come back."""
        self.by_node: dict[int, Member] = {}
        self.left_out: dict[int, str] = {}
        self._declines = Declines()
        self._declined_before: set[int] = set()
        self._to_ask_again: set[int] = set()
        self._failed: dict[int, int] = {}
        # Members of a run that was resumed, by identity, that have not enrolled again.
        self._away: set[bytes] = set()
        self._resumed = saved is not None
        if saved is not None:
            self._restore(saved)

    def to_json(self) -> dict[str, Any]:
        """All that is known of them, as JSON."""
        return {
            "members": [
                asdict(member) | {"identity": member.identity.hex()}
                for member in sorted(self.by_node.values(), key=lambda member: member.number)
            ],
            "left_out": {str(node): why for node, why in self.left_out.items()},
            "declined": sorted(self._declined_before),
            "ask_again": sorted(self._to_ask_again),
            "declines": self._declines.to_json(),
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        for values in saved["members"]:
            identity, pinned = bytes.fromhex(values["identity"]), tuple(values["pinned"])
            self.by_node[values["node"]] = Member(**values | {"identity": identity, "pinned": pinned})
        self._away = {member.identity for member in self.by_node.values()}
        self.left_out = {int(node): why for node, why in saved["left_out"].items()}
        self._declined_before, self._to_ask_again = set(saved["declined"]), set(saved["ask_again"])
        self._declines = Declines.from_json(saved["declines"])

    @property
    def gathered(self) -> bool:
        """Whether anyone has joined yet; after the run was resumed, whether anyone has come back."""
        return len(self.by_node) > len(self._away)

    def admit(self, node: int, identity: bytes, pinned: tuple[str, ...], step: int) -> Member:
        """The member with this identity, known as that node from here on.

        Raises `RemoteProtocolError` for an identity that is another's, and after the run was resumed for a client that
        has forgotten what it answered before, or may have: what it spent then is not in its books.
        """
        known = next((member for member in self.by_node.values() if member.identity == identity), None)
        if node in self.by_node and known is not self.by_node[node]:
            raise RemoteProtocolError("it came back with another identity")
        if known is None:
            if self._resumed and "state" not in pinned:
                raise RemoteProtocolError(
                    "it is new to a run that was resumed and has no niss-state: it may not know what it spent"
                )
            known = self.by_node[node] = Member(node, len(self.by_node), identity, pinned)
        elif identity in self._away:
            if step <= known.step:
                raise RemoteProtocolError(
                    f"its state is at step {step}, but the run has seen step {known.step} of it"
                )
            self._move(known, node)
        elif known.node != node:
            raise RemoteProtocolError(f"identity {fingerprint(identity)} has already joined as another node")
        self._away.discard(identity)
        known.step = max(known.step, step)
        return known

    def _move(self, member: Member, node: int) -> None:
        """Know a member under another of the transport's ids, with all that is held against it."""
        before = member.node
        if before == node:
            return
        self.by_node[node] = self.by_node.pop(before)
        member.node = node
        if before in self.left_out:
            self.left_out[node] = self.left_out.pop(before)
        for nodes in (self._declined_before, self._to_ask_again):
            if before in nodes:
                nodes.remove(before)
                nodes.add(node)
        self._declines.rename(before, node)

    def leave_out(self, node: int, reason: str) -> None:
        """Go on without a node; the first reason stands."""
        self.left_out.setdefault(node, printable(reason))

    def failed(self, node: int, reason: str) -> None:
        """A node did not answer when it was asked to join: the second time it is left out."""
        self._failed[node] = self._failed.get(node, 0) + 1
        if self._failed[node] >= _MOST_FAILED_ENROLMENTS:
            self.leave_out(node, f"did not join: {reason}")

    def declined(self, node: int, reason: str) -> None:
        """A node declined to join or to repair: the first time it is left out only until the next round begins."""
        if node not in self._declined_before:
            self._to_ask_again.add(node)
        self._declined_before.add(node)
        self.leave_out(node, reason)

    def ask_again(self) -> None:
        """A round begins: whoever declined once, since this was last called, is asked again."""
        for node in self._to_ask_again:
            self.left_out.pop(node, None)
        self._to_ask_again.clear()

    def judge(
        self, refused: dict[int, str], took_part: Iterable[int], neighbours: Callable[[int], Iterable[int]]
    ) -> None:
        """After the uploads of a round: leave out those who declined, some of them until the next; see `Declines`."""
        blamed = self._declines.judge(refused, took_part, neighbours)
        for node, reason in (refused | blamed).items():
            self.leave_out(node, reason)
        self._to_ask_again |= refused.keys() - blamed.keys()

    def may_be_asked(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes that may be asked in the next round, whether they have joined or not."""
        out = (self.left_out.keys() - self._to_ask_again) | self._declines.set_aside
        return [node for node in nodes if node not in out]

    def seatable(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes that joined and may take part now."""
        out = self.left_out.keys() | self._declines.set_aside
        return [node for node in nodes if node in self.by_node and node not in out]


class Declines:
    """What is known of those who declined, and of those suspected to be the reason."""

    def __init__(self) -> None:
        # Those who declined and have not taken part since.
        self._before: set[int] = set()
        # In the order they were suspected, each with those who declined beside it.
        self._aside: dict[int, frozenset[int]] = {}

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON holds it, the suspects in their order."""
        return {
            "before": sorted(self._before),
            "aside": [[node, sorted(beside)] for node, beside in self._aside.items()],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """What `to_json` gave."""
        known = cls()
        known._before = set(values["before"])
        known._aside = {node: frozenset(beside) for node, beside in values["aside"]}
        return known

    def rename(self, before: int, after: int) -> None:
        """Know a node by another id."""

        def named(node: int) -> int:
            return after if node == before else node

        self._before = set(map(named, self._before))
        self._aside = {named(node): frozenset(map(named, beside)) for node, beside in self._aside.items()}

    @property
    def set_aside(self) -> frozenset[int]:
        """Nodes that are not to be seated for now."""
        return frozenset(self._aside)

    def judge(
        self, declined: dict[int, str], took_part: Iterable[int], neighbours: Callable[[int], Iterable[int]]
    ) -> dict[int, str]:
        """After a round: the nodes to be left out for good, with the reasons; sets others aside or brings them back.

        declined    by node: why it declined
        took_part   nodes whose upload is in the sum
        neighbours  the neighbours of a node in this round, for every node that had a seat in it
        """
        present = set(took_part)
        out: dict[int, str] = {}
        if self._aside:
            last, beside = next(reversed(self._aside.items()))
            if 2 * len(beside & present) >= len(beside):
                # It made the difference; whoever was suspected before it did not.
                out[last] = SPOILED
                self._aside.clear()
        again = [node for node in declined if node in self._before]
        self._before = (self._before - present) | set(declined)
        suspect = self._suspect(frozenset(declined), neighbours)
        if suspect is not None:
            node, beside = suspect
            self._aside[node] = beside
        elif again:
            out |= {node: declined[node] for node in again}
            self._aside.clear()
        return out

    @staticmethod
    def _suspect(
        declined: frozenset[int], neighbours: Callable[[int], Iterable[int]]
    ) -> tuple[int, frozenset[int]] | None:
        """Who did not decline though most of its neighbours did, the largest part of them first; None: nobody."""
        candidates = dict.fromkeys(
            other for node in sorted(declined) for other in neighbours(node) if other not in declined
        )
        best: tuple[float, int, frozenset[int]] | None = None
        for node in candidates:
            around = frozenset(neighbours(node))
            beside = around & declined
            part = len(beside) / len(around)
            if len(beside) >= _FEWEST and part > 0.5 and (best is None or part > best[0]):
                best = (part, node, beside)
        return None if best is None else best[1:]
