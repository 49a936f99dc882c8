"""Who is to blame when clients decline a round: they themselves, or somebody they all sit beside.

A client declines for reasons of its own (its budget is spent, its state is old), or because of a neighbour that it
cannot share noise with. The server cannot see which, so it tries: where two or more clients declined and they are more
than half of the neighbours of somebody who did not, that one is set aside, and those who declined are asked again.
If at least half of them take part without it, it is left out for good; if they decline again and nobody else is
suspected, they are left out themselves and everyone set aside comes back.

So a client that spoils rounds spoils one, and another for each that looks as suspicious, before it is out. It cannot
have others put out unless it and its helpers are most of the neighbours of their victim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

_FEWEST = 2
SPOILED = "its neighbours declined while it took part, and no longer without it"


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
