"""What the owner of a node insists on, whatever a server proposes.

Each limit that is set is checked against the proposal of a run, and again in every round. What is not set is taken
from the first proposal of a run and then held fixed: trust on first use. The run's configuration is not asked: in
Flower it comes from the side of the server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from niss.accounting import RELATIONS
from niss.errors import ConfigError, RemoteProtocolError
from niss.flower.proposal import Proposal
from niss.mechanism import gdp_mu
from niss.protocol.client import Policy
from niss.protocol.coalition_file import load_coalition
from niss.protocol.messages import MODES

PREFIX = "niss-"


@dataclass(frozen=True)
class Budget:
    """What a client may spend in all: B in mu, and the part of delta that pays for bounds that may fail."""

    mu: float | None
    delta: float
    delta_failure: float


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one node; in its node configuration they are written `niss-state`, `niss-server` and so on.

    state            folder for identity, memory and ledger; without it they live in Flower's Context, for one run
    server, holder   public keys of the server and of the beacon's holder (the tracker)
    coalition        file with the identities to share noise with
    participants     fewest participants of a round
    colluders        how many of them are assumed, at least, to help the server
    clip             largest clip
    epsilon, delta   most to be spent by all runs together
    relation         what must be hidden: `zero-out` or `replace-one`
    modes            how dropouts may be handled
    tracker_ca       certificate of the authority that signed the tracker's
    """

    state: Path | None = None
    server: bytes | None = None
    holder: bytes | None = None
    coalition: Path | None = None
    participants: int | None = None
    colluders: int | None = None
    clip: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    relation: str | None = None
    modes: tuple[str, ...] | None = None
    tracker_ca: Path | None = None

    def __post_init__(self) -> None:
        if self.relation not in (None, *RELATIONS):
            raise ConfigError(
                f"unknown value {self.relation!r}",
                field="relation",
                hint="use one of: " + ", ".join(RELATIONS),
            )
        if self.modes is not None and not set(self.modes) <= set(MODES):
            raise ConfigError("unknown mode", field="modes", hint="use some of: " + ", ".join(MODES))
        if (self.epsilon is None) != (self.delta is None):
            raise ConfigError("go together", field="epsilon and delta", hint="give both or none")
        if self.epsilon is not None and self.delta is not None:
            gdp_mu(self.epsilon, self.delta)  # Refuses what is no target.
        for field in ("participants", "colluders", "clip"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"must be finite and not negative, not {value!r}", field=field)

    def of_node(self, node_config: Mapping[str, Any]) -> Limits:
        """These limits, with those of the node's own configuration in their place where it has any."""
        given: dict[str, Any] = {}
        known = {field.name for field in fields(self)}
        for key, value in node_config.items():
            if not key.startswith(PREFIX):
                continue
            name = key.removeprefix(PREFIX).replace("-", "_")
            if name not in known:
                raise ConfigError(
                    "there is no such limit", field=key, hint="known: " + ", ".join(sorted(known))
                )
            given[name] = _read(name, value, key)
        return replace(self, **given)

    @property
    def pinned(self) -> tuple[str, ...]:
        """The names of what is not taken on trust."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def check(self, proposal: Proposal) -> None:
        """Refuse a run that would not keep these limits."""
        plan = proposal.plan
        for name, wanted, given in (
            ("server", self.server, proposal.server),
            ("holder", self.holder, proposal.holder),
        ):
            if wanted is not None and wanted != given:
                raise RemoteProtocolError(
                    f"the {name} of this run is not the one this node expects",
                    hint=f"compare its key with the node's {PREFIX}{name}",
                )
        asked: float
        for name, most in (("clip", self.clip), ("epsilon", self.epsilon), ("delta", self.delta)):
            asked = getattr(plan, name)
            if most is not None and not asked <= most:
                raise RemoteProtocolError(
                    f"{name} = {asked:g} is proposed, this node allows at most {most:g}"
                )
        if self.epsilon is not None and not plan.calibrated:
            raise RemoteProtocolError(
                "a plan with its own tau2 promises nothing, but this node asks for epsilon"
            )
        if self.colluders is not None and plan.colluders < self.colluders:
            raise RemoteProtocolError(
                f"{plan.colluders} colluders are planned for, this node assumes {self.colluders}"
            )
        if self.relation is not None and plan.relation != self.relation:
            raise RemoteProtocolError(f"relation {plan.relation!r} is planned, not {self.relation!r}")
        if self.modes is not None and proposal.mode not in self.modes:
            raise RemoteProtocolError(f"mode {proposal.mode!r} is not accepted by this node")

    def policy(self, proposal: Proposal) -> Policy:
        """What the protocol's client enforces in each round of the run."""
        self.check(proposal)
        trusted = None
        if self.coalition is not None:
            trusted = frozenset(load_coalition(self.coalition).members.values())
        return Policy(
            participants=max(self.participants or 2, proposal.participants),
            colluders=proposal.plan.colluders,
            mu=proposal.round_mu,
            clip=proposal.plan.clip,
            server=proposal.server,
            holder=proposal.holder,
            anchor=proposal.anchor,
            attempts=proposal.plan.attempts,
            modes=(proposal.mode,),
            trusted=trusted,
        )

    def budget(self, proposal: Proposal) -> Budget:
        """The owner's own target where it is set, else that of the proposal."""
        plan = proposal.plan
        if not plan.calibrated:
            return Budget(None, plan.delta, 0.0)
        failing = 1.0 - plan.gaussian_delta / plan.delta
        if self.epsilon is None or self.delta is None:
            return Budget(float(plan.budget(1)[0]), plan.delta, failing * plan.delta)
        return Budget(gdp_mu(self.epsilon, self.delta * (1.0 - failing)), self.delta, failing * self.delta)


def _read(name: str, value: Any, key: str) -> Any:
    """A value of a node configuration: texts, numbers, and public keys in hex."""
    try:
        if name in ("state", "coalition", "tracker_ca"):
            return Path(str(value)).expanduser()
        if name in ("server", "holder"):
            public = bytes.fromhex(str(value))
            if len(public) != 32:
                raise ValueError("length")
            return public
        if name in ("participants", "colluders"):
            return int(value)
        if name == "modes":
            return tuple(part.strip() for part in str(value).split(","))
        return str(value) if name == "relation" else float(value)
    except ValueError:
        raise ConfigError(f"cannot be read: {value!r}", field=key, hint="a key is 64 hex digits") from None
