"""Groups that trust each other inside and distrust everyone outside: the paper's IoT case.

Shares stay within a group, so only colluders inside it matter to its members, and each group has its own
collusion share, kappa and tau^2. The noises of the groups add up in the sum: with g groups a trusted server's 1
becomes at least g, which pays where the flat population would have to assume many more colluders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from niss.accounting.planner import Planned, make_plan
from niss.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """`size` clients, of whom at most the share `collusion` tell the server what they know."""

    size: int
    collusion: float = 0.0


@dataclass(frozen=True)
class CoalitionPlan:
    """One plan per group, the plan of the same clients as one flat population, and the gain.

    All ratios are variances of the whole sum in units of what a trusted server would add.
    """

    groups: tuple[Planned, ...]
    flat: Planned
    aggregate_variance_ratio_to_central: float
    gain: float

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": [group.to_json() for group in self.groups],
            "flat": self.flat.to_json(),
            "aggregate_variance_ratio_to_central": self.aggregate_variance_ratio_to_central,
            "gain": self.gain,
        }


def plan_coalitions(
    groups: Sequence[Group],
    *,
    flat_collusion: float,
    neighbours: float | None = None,
    **target: Any,
) -> CoalitionPlan:
    """Plan every group by itself, and all clients together at the collusion they must fear from strangers.

    `target` takes the arguments of `make_plan` other than participants, neighbours and collusion.
    """
    if not groups:
        raise ConfigError(
            "names no group", field="groups", hint="for example groups=[Group(10), Group(20, 0.1)]"
        )
    everyone = sum(group.size for group in groups)
    flat = make_plan(participants=everyone, neighbours=neighbours, collusion=flat_collusion, **target)
    planned = []
    for number, group in enumerate(groups):
        if group.size < 2:
            raise ConfigError(f"group {number} has {group.size} clients", field="groups", hint="two or more")
        within = None if neighbours is None else min(neighbours, group.size - 1)
        planned.append(
            make_plan(participants=group.size, neighbours=within, collusion=group.collusion, **target)
        )
    # Each group's ratio is in units of one client's own noise, which is the same in every group.
    total = sum(plan.aggregate_variance_ratio_to_central for plan in planned)
    return CoalitionPlan(tuple(planned), flat, total, flat.aggregate_variance_ratio_to_central / total)
