"""The tracker, as clients and the server of a federation use it.

What the tracker says is checked against its keys: the anchor of a run, participant lists and every prekey in them.
Whether a beacon is the right link is checked where it is used, by `niss.protocol.client`. Every call may be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from niss.errors import RemoteProtocolError
from niss.protocol.agreement import participants_hash
from niss.protocol.beacon import link_of
from niss.protocol.directory import check_prekey
from niss.protocol.keys import Identity, fingerprint, verify
from niss.protocol.messages import Beacon, Participant, Prekey
from niss.protocol.prekeys import SignedPrekey
from niss.tracker.beacons import check_anchor
from niss.tracker.connection import Connection, TrackerRefused, TrackerUnavailable
from niss.tracker.records import Stock
from niss.tracker.rounds import LIST_PURPOSE, list_message

__all__ = ["Description", "Supply", "TrackerClient", "TrackerRefused", "TrackerUnavailable"]


@dataclass(frozen=True)
class Description:
    """Whose signatures to expect, and what the chain of a run ends in.

    tracker     signs participant lists; requests are signed for it
    holder      signs beacons: for `Policy.holder`
    server      the one who may open rounds here
    anchor      of the run asked about, for `Policy.anchor`; None where no run was named
    rounds      for how many rounds its chain is
    signature   the holder's, under the two
    """

    tracker: bytes
    holder: bytes
    server: bytes
    anchor: bytes | None = None
    rounds: int | None = None
    signature: bytes | None = None


@dataclass(frozen=True)
class Supply(Stock):
    """The stock of this client's prekeys; `wanted` says how many more to send, 0 if there are enough."""

    wanted: int = 0
    ttl_seconds: float = 0.0


class TrackerClient:
    """One identity's line to a tracker."""

    def __init__(
        self,
        url: str,
        identity: Identity,
        *,
        ca: Path | None = None,
        tracker: bytes | None = None,
        timeout: float = 10.0,
        retries: int = 6,
    ) -> None:
        """`ca` verifies the tracker's certificate, if no authority of this machine does; `tracker` pins its key.

        With 6 retries a tracker may be away for about a quarter of a minute.
        """
        self._identity, self._pinned = identity, tracker
        self._connection = Connection(url, ca=ca, timeout=timeout, retries=retries)
        self._described: Description | None = None

    def describe(self, run: bytes | None = None) -> Description:
        """The tracker's keys and, for a run, the anchor its holder committed to."""
        if self._described is None:
            shown = self._connection.ask("GET", "/v1/tracker")
            tracker, holder, server = (_hex(shown, name, 32) for name in ("tracker", "holder", "server"))
            found = Description(tracker, holder, server)
            if self._pinned not in (None, found.tracker):
                raise RemoteProtocolError(
                    f"this tracker is {fingerprint(found.tracker)}, not the one expected",
                    hint="compare its key with its owner",
                )
            self._described = found
        known = self._described
        if run is None:
            return known
        shown = self._connection.ask("GET", f"/v1/runs/{run.hex()}")
        anchor = self._anchor(run, shown)
        return replace(
            known, anchor=anchor, rounds=_whole(shown, "rounds"), signature=_hex(shown, "signature", 64)
        )

    # As a client.

    def register(self, prekeys: Sequence[Prekey | SignedPrekey], coalition: str | None = None) -> Supply:
        """Become live with these prekeys; again to send more. Save their private halves first."""
        body: dict[str, object] = {"prekeys": [_shown_prekey(one) for one in prekeys]}
        if coalition is not None:
            body["coalition"] = coalition
        return _supply(self._ask("PUT", "/v1/clients/me", body))

    def heartbeat(self) -> Supply:
        """Stay live; send `wanted` prekeys with `register` if that is not 0."""
        return _supply(self._ask("POST", "/v1/clients/me/heartbeat"))

    def leave(self) -> None:
        """Be forgotten. Leaving twice is no error."""
        try:
            self._ask("DELETE", "/v1/clients/me")
        except TrackerRefused as refused:
            if refused.status != 404:
                raise

    def join(self, coalition: str | None) -> None:
        """Belong to this coalition, or to none."""
        self._ask("PUT", "/v1/clients/me/coalition", {"coalition": coalition})

    def participants(self, run: bytes, round: int, attempt: int) -> tuple[Participant, ...]:
        """Everyone in an attempt, in order; verified."""
        return self._list(
            run, round, attempt, self._ask("GET", _attempt(run, round, attempt) + "/participants")
        )

    def neighbours(self, run: bytes, round: int, attempt: int) -> dict[int, Participant]:
        """Those who share noise with this client, by seat; their prekeys are verified.

        That these are the right ones follows only from the whole list, the terms and the beacon.
        """
        shown = self._ask("GET", _attempt(run, round, attempt) + "/neighbours")
        return {int(one["seat"]): _participant(one) for one in _entries(shown, "neighbours")}

    # As the server.

    def start_run(self, run: bytes, rounds: int) -> bytes:
        """The anchor of a chain for that many rounds, each of which can be tried four times."""
        return self._anchor(run, self._ask("PUT", f"/v1/runs/{run.hex()}", {"rounds": rounds}))

    def seat(
        self,
        run: bytes,
        round: int,
        attempt: int,
        members: Sequence[bytes] | None = None,
        *,
        count: int | None = None,
        coalition: str | None = None,
        at_least: int = 2,
    ) -> tuple[Participant, ...]:
        """Who takes part in an attempt, for good, each with a prekey of its own.

        Of `members`, those who are live and have a prekey left, in that order; or `count` live clients at random, of
        one coalition if it is named. Fewer than `at_least` are refused, and nothing is used up.
        """
        body: dict[str, object] = {"at_least": at_least}
        if members is not None:
            body["members"] = [one.hex() for one in members]
        if count is not None:
            body["count"] = count
        if coalition is not None:
            body["coalition"] = coalition
        return self._list(
            run, round, attempt, self._ask("PUT", _attempt(run, round, attempt) + "/seats", body)
        )

    def beacon(
        self, run: bytes, round: int, attempt: int, commitment: bytes, *, neighbours: float | None = None
    ) -> Beacon:
        """The link of an attempt, for `participants_hash + terms_hash`: given out for one commitment only.

        With `neighbours` (as in the terms) the tracker can also tell each client who its neighbours are.
        """
        body = {"commitment": commitment.hex(), "neighbours": neighbours}
        shown = self._ask("PUT", _attempt(run, round, attempt) + "/beacon", body)
        beacon = Beacon(_whole(shown, "index"), _hex(shown, "value", 32), _hex(shown, "signature", 64))
        if beacon.index != link_of(round, attempt):
            raise RemoteProtocolError("the tracker gave the link of another attempt")
        return beacon

    def deposit(self, identity: bytes, prekeys: Sequence[Prekey | SignedPrekey]) -> Supply:
        """Pass on fresh prekeys that a registered client sent along with its upload."""
        body = {"prekeys": [_shown_prekey(one) for one in prekeys]}
        return _supply(self._ask("POST", f"/v1/clients/{identity.hex()}/prekeys", body))

    # Both.

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, target: str, body: object = None) -> Any:
        return self._connection.ask(method, target, body, signer=(self._identity, self.describe().tracker))

    def _anchor(self, run: bytes, shown: Any) -> bytes:
        anchor, rounds = _hex(shown, "anchor", 32), _whole(shown, "rounds")
        check_anchor(self.describe().holder, run, rounds, anchor, _hex(shown, "signature", 64))
        return anchor

    def _list(self, run: bytes, round: int, attempt: int, shown: Any) -> tuple[Participant, ...]:
        found = tuple(_participant(one) for one in _entries(shown, "participants"))
        message = list_message(run, link_of(round, attempt), participants_hash(found))
        verify(self.describe().tracker, LIST_PURPOSE, message, _hex(shown, "signature", 64))
        return found


def _attempt(run: bytes, round_number: int, attempt: int) -> str:
    return f"/v1/runs/{run.hex()}/rounds/{round_number}/attempts/{attempt}"


def _shown_prekey(prekey: Prekey | SignedPrekey) -> dict[str, object]:
    number = prekey.number if isinstance(prekey, Prekey) else prekey.id
    return {"number": number, "public": prekey.public.hex(), "signature": prekey.signature.hex()}


def _participant(shown: Any) -> Participant:
    inner = shown.get("prekey") if isinstance(shown, dict) else None
    prekey = Prekey(_whole(inner, "number"), _hex(inner, "public", 32), _hex(inner, "signature", 64))
    identity = _hex(shown, "identity", 32)
    check_prekey(prekey, identity)
    return Participant(identity, prekey)


def _supply(shown: Any) -> Supply:
    numbers = {name: _whole(shown, name) for name in ("held", "accepted", "known", "stale", "wanted")}
    return Supply(**numbers, ttl_seconds=float(shown.get("ttl_seconds", 0.0)))


def _entries(shown: Any, name: str) -> list[Any]:
    found = shown.get(name) if isinstance(shown, dict) else None
    if not isinstance(found, list):
        raise _odd(name)
    return found


def _whole(shown: Any, name: str) -> int:
    found = shown.get(name) if isinstance(shown, dict) else None
    if type(found) is not int:
        raise _odd(name)
    return found


def _hex(shown: Any, name: str, length: int) -> bytes:
    found = shown.get(name) if isinstance(shown, dict) else None
    try:
        value = bytes.fromhex(found) if isinstance(found, str) else b""
    except ValueError:
        value = b""
    if len(value) != length:
        raise _odd(name)
    return value


def _odd(name: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the tracker's answer has no valid {name!r}",
        hint="is this the address of a tracker of this version?",
    )
