"""Who sits in which round of a run that carries noise from round to round.

Such a run is planned for rounds of one size m, and for clients that stay out for b rounds after each of theirs (the
separation). With pattern `cyclic` every client belongs to one of b groups, which take turns: all its rounds are a
multiple of b apart. With `any` it may come back at any time from the b-th round on.

A cohort is chosen one round ahead, and then fixed. Those who are there come first, and of them those with the fewest
seats so far. Where too few are left that keep the separation, the places of those who are gone are kept: the round has
its size, and their noise stays in the sum, as it does when somebody does not come. A separation is never broken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Self

from niss.errors import ConfigError, ProtocolError


@dataclass
class Cohorts:
    """The seats of a run, by the numbers under which its members joined.

    participants         m, in every round
    separation, pattern  of two rounds of the same member, as in `Plan`
    """

    participants: int
    separation: int
    pattern: str
    _seats: dict[int, int] = field(default_factory=dict, init=False)
    _last: dict[int, int] = field(default_factory=dict, init=False)
    _group: dict[int, int] = field(default_factory=dict, init=False)

    @property
    def needed(self) -> int:
        """How many members fill all rounds."""
        return self.participants * self.separation

    def require(self, members: int) -> None:
        """Refuse (`ProtocolError`) to begin with so few members that nobody could be seated in some round."""
        if members >= self.needed:
            return
        fits = members // self.separation
        fewer = f"plan rounds of at most {fits} participants, or " if fits > 1 else ""
        raise ProtocolError(
            f"rounds of {self.participants} participants, each of whom stays out for {self.separation - 1} rounds "
            f"afterwards, need {self.needed} nodes, and {members} are there",
            hint=f"{fewer}wait for more nodes, or plan a separation of at most {members // self.participants}",
        )

    def choose(self, number: int, present: Collection[int], away: Collection[int] = ()) -> tuple[int, ...]:
        """The members to sit in round `number`, none of whom is seated by this yet; see `commit`.

        present  members that are there
        away     members that are not, but could be seated in their absence

        Raises `ProtocolError` where even with those who are away too few keep the separation.
        """
        self._assign(number, present, away)
        able = [one for one in present if self.may_sit(one, number)]
        gone = [one for one in away if one not in present and self.may_sit(one, number)]
        chosen = [*sorted(able, key=self._turn), *sorted(gone, key=self._turn)][: self.participants]
        if len(chosen) < self.participants:
            raise ProtocolError(
                f"of {len(present) + len(gone)} members {len(chosen)} can sit in round {number + 1} without coming "
                f"back within {self.separation} rounds, and {self.participants} are needed",
                hint="plan rounds of fewer participants, or have more nodes",
            )
        return tuple(sorted(chosen))

    def commit(self, number: int, cohort: Collection[int]) -> None:
        """Fix the cohort of round `number`, which was announced; `ConfigError` for one that breaks the separation."""
        for one in cohort:
            if not self.may_sit(one, number):
                raise ConfigError(
                    f"member {one} would come back to round {number + 1} too early", field="separation"
                )
        for one in cohort:
            self._group.setdefault(one, number % self.separation)
            self._seats[one], self._last[one] = self._seats.get(one, 0) + 1, number

    def may_sit(self, member: int, number: int) -> bool:
        """Whether a seat in round `number` keeps the separation, and the member's group where there are groups."""
        if self.pattern == "cyclic" and self._group.get(member, number) % self.separation != (
            number % self.separation
        ):
            return False
        last = self._last.get(member)
        return last is None or number - last >= self.separation

    def to_json(self) -> dict[str, Any]:
        """Seats, last rounds and groups as JSON, for a server that goes on with the run."""
        return {
            name: [[member, value] for member, value in sorted(values.items())]
            for name, values in (("seats", self._seats), ("last", self._last), ("group", self._group))
        }

    def restore(self, values: dict[str, Any]) -> Self:
        """These cohorts with what `to_json` gave."""
        self._seats, self._last, self._group = (
            {int(member): int(value) for member, value in values[name]} for name in ("seats", "last", "group")
        )
        return self

    def _turn(self, member: int) -> tuple[int, int, int]:
        """What members are seated by: fewest seats, then longest away, then as they joined."""
        return self._seats.get(member, 0), self._last.get(member, -1), member

    def _assign(self, number: int, present: Collection[int], away: Collection[int]) -> None:
        """Put newcomers into the smallest groups, and members that never sat where this round's group lacks some."""
        if self.pattern != "cyclic":
            return
        here, current = set(present), number % self.separation
        everyone = here | set(away)
        # Of each group: all of it, and those who are there.
        sizes = [[0, 0] for _ in range(self.separation)]

        def count(one: int, change: int) -> None:
            sizes[self._group[one]][0] += change
            sizes[self._group[one]][1] += change * (one in here)

        for one in everyone & self._group.keys():
            count(one, 1)
        # Among groups of one size, the one whose turn comes first.
        turns = sorted(range(self.separation), key=lambda group: (group - number) % self.separation)
        for one in sorted(everyone - self._group.keys()):
            self._group[one] = min(turns, key=lambda group: sizes[group])
            count(one, 1)
        free = sorted(one for one in here if one not in self._last and self._group[one] != current)
        while sizes[current][1] < self.participants and free:
            moved = max(free, key=lambda one: sizes[self._group[one]][1])
            if sizes[self._group[moved]][1] <= self.participants:
                break  # No group has anyone to spare.
            free.remove(moved)
            count(moved, -1)
            self._group[moved] = current
            count(moved, 1)
