"""Shares that are carried from one round to the next: what a run commits to, who carries to whom, under which seeds.

A client of round t adds a share that a client of round t + 1 subtracts; in the model that noise lives for one round.
What this hides depends on the whole run, so the whole run is fixed before its first round: a `Schedule`, whose hash is
part of every round's terms and of every seed's context. Whoever was told of another schedule derives other seeds.

Everyone shares with everyone, within a round and with the next cohort, which is committed to before the beacon of a
round is let out (`agreement.commitment_of`). A client has one prekey for all shares of an upload.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from niss.errors import ConfigError, RemoteProtocolError
from niss.graph import ShareGraph
from niss.mechanism.grid import MAX_BITS
from niss.protocol.keys import length_prefixed, uint64
from niss.protocol.messages import CarryTerms, Participant, Terms

MOST_ROUNDS = 2_000
"""What a run costs is computed from a matrix of its rounds: longer ones are refused before that."""
MOST_PARTICIPANTS = 2_000
"""Everyone shares with everyone, so that a round has their square of shares, and there are as many to the next."""
_LAYOUT = struct.Struct("<QQQ??QQQdddd")
_REPAIR_LAYOUT = struct.Struct("<QQQd")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a run with carried shares commits to before its first round. Variances are those of uploads, an entry.

    participants        of every round
    rounds              T, the closing one included; the last one carries nothing on
    separation, cyclic  from one participation of a client to the next: at least that many rounds, or multiples of it
    closing             the last round takes no updates: it takes out what the one before carried
    coordinates, grid_bits, modulus_bits, clip
                        as in `Terms`, in all rounds alike: on another grid a share would not cancel to the last bit
    unit_variance       of the share that a client sends to each other one of its round
    carried_variance    of the share that it carries to each client of the next round
    residual_variance   of the fresh noise of an upload
    dropped             most clients of a round that repairs may call dropped: all their shares may come out
    committee, threshold, self_variance
                        of the repair of every round, as in `Terms`; all 0: dropouts are tolerated

    Numbers that cannot be a run are a `ConfigError`. They come from the server: a client believes none of them, but
    computes what they are worth (`niss.accounting.CommittedAccount`), with work that these bounds keep small.
    """

    participants: int
    rounds: int
    separation: int
    cyclic: bool
    closing: bool
    coordinates: int
    grid_bits: int
    modulus_bits: int
    clip: float
    unit_variance: float
    carried_variance: float
    residual_variance: float
    dropped: int = 0
    committee: int = 0
    threshold: int = 0
    self_variance: float = 0.0

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[float, float]] = {
            "participants": (2, MOST_PARTICIPANTS),
            "rounds": (1 + self.closing, MOST_ROUNDS),
            "separation": (2, MOST_ROUNDS),
            "coordinates": (1, 2**32),
            "grid_bits": (0, MAX_BITS),
            "modulus_bits": (16, 64),
            "dropped": (0, self.participants - 2 if self.committee else 0),
            "committee": (0, self.participants),
            "threshold": (max(2, self.committee // 2 + 1) if self.committee else 0, self.committee),
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"must lie between {low:g} and {high:g}", field=name)
        for name in ("clip", "unit_variance", "carried_variance", "residual_variance", "self_variance"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError("must be finite and not negative", field=name)
        if self.self_variance and not self.committee:
            raise ConfigError("is for rounds that are repaired", field="self_variance")

    @property
    def neighbours(self) -> float:
        """Unit shares that a client sends within a round."""
        return self.participants - 1.0

    @property
    def mode(self) -> str:
        """What happens after dropouts, as in `Terms`."""
        return "repair" if self.committee else "tolerate"

    @property
    def horizon(self) -> int:
        """Rounds that take updates."""
        return self.rounds - self.closing

    @cached_property
    def digest(self) -> bytes:
        """What the terms of every round name the schedule by: SHA-256 of all its numbers."""
        *plain, dropped, committee, threshold, self_variance = astuple(self)
        repair = b""
        if self.committee:
            repair = _REPAIR_LAYOUT.pack(dropped, committee, threshold, self_variance)
        return hashlib.sha256(b"niss.schedule.v1" + _LAYOUT.pack(*plain) + repair).digest()

    def terms(self, run: bytes, number: int) -> Terms:
        """The terms of round `number`, from 0: there is no choice in them, and one attempt."""
        return Terms(
            run=run,
            round=number,
            attempt=0,
            mode=self.mode,
            coordinates=self.coordinates,
            grid_bits=self.grid_bits,
            modulus_bits=self.modulus_bits,
            clip=self.clip,
            neighbours=self.neighbours,
            unit_variance=self.unit_variance,
            residual_variance=self.residual_variance,
            self_variance=self.self_variance,
            committee=self.committee,
            revealed=self.dropped,
            dropped=self.dropped,
            threshold=self.threshold,
            carrying=CarryTerms(self.digest, self.carried_variance),
        )

    def check_terms(self, terms: Terms) -> None:
        """Refuse (`RemoteProtocolError`) a round past the end, a second attempt, and terms that are not the round's."""
        if not 0 <= terms.round < self.rounds:
            raise RemoteProtocolError(
                f"round {terms.round} lies past the committed end of {self.rounds} rounds",
                hint="going on is a new run, with its own budget",
            )
        if terms.attempt:
            raise RemoteProtocolError(
                "a round of a run with carried shares has one attempt",
                hint="what is carried to it would be known from the other",
            )
        if terms != self.terms(terms.run, terms.round):
            raise RemoteProtocolError("the terms are not those of the schedule that was committed to")

    def check_return(self, number: int, last: int | None) -> None:
        """Refuse a participation in round `number` that comes too soon after the last one, or out of turn."""
        if last is None:
            return
        gap = number - last
        if gap < self.separation or (self.cyclic and gap % self.separation):
            wanted = "a multiple of" if self.cyclic else "at least"
            raise RemoteProtocolError(
                f"round {number} comes {gap} after round {last}, but the schedule promises {wanted} {self.separation}",
                hint="leave this round out",
            )

    def to_json(self) -> dict[str, Any]:
        """All numbers by name; floats come back the same from JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: object) -> Schedule:
        """What `to_json` gave, from someone who is not believed; anything else is a `RemoteProtocolError`."""
        kinds = {"int": int, "float": float, "bool": bool}
        if not isinstance(values, Mapping) or values.keys() != {field.name for field in fields(cls)}:
            raise RemoteProtocolError("a schedule must have all its numbers and nothing else")
        for field in fields(cls):
            if type(values[field.name]) is not kinds[str(field.type)]:
                raise RemoteProtocolError(f"schedule: {field.name} must be of type {field.type}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise RemoteProtocolError(f"schedule: {error.message}") from None


@dataclass(frozen=True, slots=True)
class CarriedContext:
    """What the seeds of all shares carried from one round to the next are bound to. Nothing in it is secret.

    run                 name of the run
    plan                hash of its schedule
    round               t, of those who add the shares; those who subtract them are of round t + 1
    beacon, terms       the beacon's value in round t, and the hash of that round's terms
    senders, receivers  hashes of both lists of participants
    """

    run: bytes
    plan: bytes
    round: int
    beacon: bytes
    terms: bytes
    senders: bytes
    receivers: bytes

    def fields(self) -> tuple[bytes, ...]:
        """All fields as bytes, in order, with both rounds."""
        rounds = uint64(self.round), uint64(self.round + 1)
        return (self.run, self.plan, *rounds, self.beacon, self.terms, self.senders, self.receivers)

    def digest(self) -> bytes:
        """SHA-256 of all fields."""
        return hashlib.sha256(length_prefixed(b"niss.carried-context.v1", *self.fields())).digest()


@lru_cache(maxsize=2)
def _complete(sizes: tuple[int, int]) -> ShareGraph:
    """The same for every round, and for both sides of one: made once."""
    return ShareGraph.complete(sizes)


@dataclass(frozen=True)
class CarriedLink:
    """What is carried from one round to the next, as both see it. Seats are places in the two lists.

    senders, receivers  the participants of both rounds
    graph               who carries a share to whom
    unit_variance       of a share of weight 1
    context             what every seed is bound to
    """

    senders: tuple[Participant, ...]
    receivers: tuple[Participant, ...]
    graph: ShareGraph
    unit_variance: float
    context: CarriedContext

    @classmethod
    def between(
        cls,
        senders: tuple[Participant, ...],
        receivers: tuple[Participant, ...],
        carrying: CarryTerms,
        context: CarriedContext,
    ) -> CarriedLink:
        """The gap over which everyone of the first round carries a share to everyone of the second."""
        return cls(
            senders, receivers, _complete((len(senders), len(receivers))), carrying.unit_variance, context
        )

    def edges_from(self, seat: int) -> list[tuple[int, float]]:
        """(receiver, variance) of the shares that a seat of the first round adds."""
        return self._edges(self.graph.senders == seat, self.graph.receivers)

    def edges_to(self, seat: int) -> list[tuple[int, float]]:
        """(sender, variance) of the shares that a seat of the second round subtracts."""
        return self._edges(self.graph.receivers == seat, self.graph.senders)

    def _edges(self, touching: Any, others: Any) -> list[tuple[int, float]]:
        if not self.unit_variance:
            return []
        variances = self.graph.weights[touching] * self.unit_variance
        return list(zip(others[touching].tolist(), variances.tolist(), strict=True))

    def between_seats(
        self, senders: Collection[int], receivers: Collection[int]
    ) -> list[tuple[int, int, float]]:
        """(sender, receiver, variance) of every share from one of these seats to one of those."""
        graph = self.graph
        chosen = np.isin(graph.senders, list(senders)) & np.isin(graph.receivers, list(receivers))
        if not self.unit_variance:
            return []
        columns = graph.senders[chosen], graph.receivers[chosen], graph.weights[chosen] * self.unit_variance
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def left(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[int, float]:
        """Shares of which only one end was uploaded, and the variance that they leave in each coordinate."""
        added = np.isin(self.graph.senders, senders)
        taken = np.isin(self.graph.receivers, receivers)
        weights = self.graph.weights[added != taken] if self.unit_variance else np.empty(0)
        return weights.size, float(weights.sum()) * self.unit_variance

    def added(self, senders: tuple[int, ...]) -> float:
        """Variance that these seats of the first round carry on."""
        return float(self.graph.weights[np.isin(self.graph.senders, senders)].sum()) * self.unit_variance

    def taken(self, receivers: tuple[int, ...]) -> float:
        """Variance of all that these seats of the second round subtract."""
        return float(self.graph.weights[np.isin(self.graph.receivers, receivers)].sum()) * self.unit_variance
