"""The client's side of a round. It trusts nobody: every claim is checked, everything given away is remembered.

Guarantees, as long as the driver keeps what `persist` is given and `charge` is durable:
- nothing is uploaded before its worst case is charged, and no attempt of a round is answered twice;
- a member of the committee gives its part of a repair for one survivor set a round, and so for each client what takes
  out its mask, or its shares, never both;
- the seeds of a round follow from one-time keys that are erased when the client is done with it.

Whatever server, tracker or another client got wrong is a `RemoteProtocolError`, and leaves the client as it was. The
driver keeps a client's `Memory` on durable storage; it is handed over before any message goes. A client that lost
it must not take part under the same identity again: it could answer a round twice, and the difference of two uploads
with the same shares is free of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from niss.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from niss.mechanism.blocks import Blocks
from niss.mechanism.clipping import clipped
from niss.protocol import committee
from niss.protocol.agreement import Agreed, agree, commitment_of, pack, survivors_hash
from niss.protocol.keys import Entropy, Identity, PrekeyStore, check_prekey, link_of, verify
from niss.protocol.messages import (
    Prekey,
    Reveal,
    RevealRequest,
    RoundOpen,
    Upload,
    decode,
    encode,
    signed_part,
    signed_parts,
)
from niss.protocol.repair import dropped_after, dropped_before, vote
from niss.protocol.schedule import Policy
from niss.protocol.shares import EdgeKeys, Steps, masked_upload, round_batch, round_update, step_type
from niss.redaction import Secret, SecretBytes


class ClientStage(Enum):
    """Where a client stands in its current round; part of what it must not forget.

    IDLE        has not answered a round yet
    UPLOADED    has sent its noisy update; whatever comes later can only be a repair, or the next round
    REVEALED    has given its part of the repair for one survivor set, and gives it for no other in this round
    """

    IDLE = "idle"
    UPLOADED = "uploaded"
    REVEALED = "revealed"


# (state, what arrives) -> next state. A client answers a new round from any state: the old one is over for it.
CLIENT_TABLE: dict[tuple[ClientStage, str], ClientStage] = {
    (ClientStage.IDLE, "RoundOpen"): ClientStage.UPLOADED,
    (ClientStage.UPLOADED, "RoundOpen"): ClientStage.UPLOADED,
    (ClientStage.REVEALED, "RoundOpen"): ClientStage.UPLOADED,
    (ClientStage.UPLOADED, "RevealRequest"): ClientStage.REVEALED,
    # Said again after a lost reply or a restart, or about shares that were carried on: for the same survivor set alone.
    (ClientStage.REVEALED, "RevealRequest"): ClientStage.REVEALED,
}


def client_step(state: ClientStage, message: str) -> ClientStage:
    """The client's state after `message` (a message's class name), or `RemoteProtocolError`: it is out of turn."""
    following = CLIENT_TABLE.get((state, message))
    if following is None:
        raise RemoteProtocolError(
            f"{message} is not allowed while this client is in state {state.value!r}",
            hint="the server is out of step; wait for the next round",
        )
    return following


_STRICT = ConfigDict(extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64")


@dataclass
class CurrentRound:
    """The round a client is in.

    opened      the encoded `RoundOpen` it answered
    seat        where it sits
    prekey      the number of the prekey it is listed with
    verdict     hash of the survivor set for which it gave its part of the repair, once it has
    """

    opened: bytes
    seat: int
    prekey: int
    verdict: bytes | None = None

    __pydantic_config__ = _STRICT


@dataclass
class Memory:
    """What a client knows of one run.

    last        the (round, attempt) that was answered last: no earlier one is answered again, nor is its link accepted
    state       where it stands in the current round
    current     that round, until it is closed
    carried     all rounds charged where shares are carried: the cost of the next one depends on them
    """

    last: tuple[int, int] | None = None
    state: ClientStage = ClientStage.IDLE
    current: CurrentRound | None = None
    carried: list[int] = field(default_factory=list)

    __pydantic_config__ = _STRICT


@dataclass(repr=False)
class _Kept(Secret):
    """Memory of a run and the prekeys made for it as one piece, to be kept or replaced together."""

    memory: Memory
    next_prekey: int
    prekeys: Mapping[int, bytes]
    version: Literal[2] = 2

    __pydantic_config__ = _STRICT


_KEPT = TypeAdapter(_Kept)


def dump(memory: Memory, prekeys: PrekeyStore) -> SecretBytes:
    """Both as JSON. Hidden: it holds private keys."""
    return SecretBytes(_KEPT.dump_json(_Kept(memory, prekeys.next_number, prekeys.privates)))


def restore(kept: bytes) -> tuple[Memory, PrekeyStore]:
    """The memory and the prekeys of an earlier `dump`; anything else is a `LocalProtocolError`."""
    kept = SecretBytes(kept)
    found = _read(kept)
    if found is None:  # Raised here, where no traceback finds the keys among the locals.
        raise LocalProtocolError(
            "this client's memory is damaged, or was written by another version of niss",
            hint="enrol with a new identity; an old one without its memory could answer a round twice",
        )
    return found.memory, PrekeyStore(found.next_prekey, found.prekeys)


def _read(kept: SecretBytes) -> _Kept | None:
    with suppress(ValidationError):
        return _KEPT.validate_json(bytes(kept))
    return None


def rounds_answered(kept: bytes | None) -> tuple[int, ...]:
    """The rounds of a run with carried shares that the client of this memory was charged for, and so may have answered.

    It is written after the charge and before the upload leaves: a round that is not here has shown nothing.
    """
    kept = None if kept is None else SecretBytes(kept)
    return () if kept is None else tuple(restore(kept)[0].carried)


def move_prekey(number: int, giver: bytes, taker: bytes) -> tuple[bytes, bytes]:
    """What two runs keep, after an unused prekey with that number, if there is one, went over to the second."""
    (memory, keys), (other, more) = restore(giver), restore(taker)
    if number in keys and (memory.current is None or memory.current.prekey != number):
        more.privates[number] = keys.private(number)
        more.next_number = max(more.next_number, number + 1)
        keys.erase(number)
    return dump(memory, keys), dump(other, more)


Answer = TypeVar("Answer", Upload, Reveal)
Update = NDArray[np.floating[Any]] | Blocks | Iterable[tuple[NDArray[np.floating[Any]], int]]


class Client:
    """One client of one run, over all its rounds: of what it does in other runs it knows nothing.

    identity    signs what it sends
    policy      what it insists on
    assess      the worst-case mu of a round, given that many colluders
    charge      books that mu, durably, before the upload leaves; raises if the budget does not allow it
    persist     writes the client's memory, durably, before any message leaves; the bytes are secret
    kept        what `persist` was given last, to go on after a restart
    next_prekey no prekey made here has a lower number: an identity counts those of all its runs together
    """

    def __init__(
        self,
        identity: Identity,
        policy: Policy,
        *,
        assess: Callable[[Agreed, int], float],
        charge: Callable[[Agreed, float], None],
        persist: Callable[[bytes], None],
        kept: bytes | None = None,
        next_prekey: int = 0,
    ) -> None:
        self._identity, self.policy = identity, policy
        self._assess, self._charge, self._persist = assess, charge, persist
        self._memory, self._prekeys = Memory(), PrekeyStore()
        # Edge keys of a round that is charged and still to be answered, and the prekey for a later one.
        self._accepted: tuple[EdgeKeys, tuple[Prekey, ...]] | None = None
        if kept is not None:
            kept = SecretBytes(kept)  # Not left for a traceback to show.
            self._memory, self._prekeys = restore(kept)
        self._prekeys.next_number = max(self._prekeys.next_number, next_prekey)

    @property
    def public(self) -> bytes:
        """The public half of the identity."""
        return self._identity.public

    @property
    def next_prekey(self) -> int:
        """The number that the next prekey to be made will have."""
        return self._prekeys.next_number

    @property
    def last(self) -> tuple[int, int] | None:
        """The (round, attempt) that was answered last, or used up."""
        return self._memory.last

    def enrol(self, count: int, entropy: Entropy) -> tuple[Prekey, ...]:
        """`count` fresh signed prekeys to hand to the tracker or the server; of older ones the newest are kept."""
        fresh = self._prekeys.batch(count, self._identity, entropy)
        current = self._memory.current
        self._prekeys.keep_newest(count, besides=None if current is None else current.prekey)
        self._remember()
        return fresh

    def accept(self, opened: RoundOpen, entropy: Entropy) -> None:
        """Check a round, and charge its worst case; `answer` then hides an update and sends it.

        opened      what the server sent; nothing in it is believed
        entropy     gives a fresh prekey

        In this order, so that a refusal costs nothing and a crash never lets a context be answered twice:

        1. check the round against policy and memory, and that its sum fits the grid;
        2. ask `assess` what it costs at worst, and refuse if that is too much;
        3. agree with every neighbour, which refuses a degenerate prekey;
        4. persist that this attempt is answered, with the last round's prekey erased and a fresh one made;
        5. charge, and persist that it was charged where later charges depend on it; from 4 on the attempt is used up,
           even if this fails.

        A crash before `answer` costs the round and leaves it unanswered: what that needs is in this process alone.
        """
        self._accepted = None
        agreed, seat = self._check_round(opened)
        terms, memory = agreed.terms, self._memory
        mu = self._assess(agreed, self.policy.colluders(len(agreed.participants)))
        if not mu <= self.policy.mu:
            raise RemoteProtocolError(
                f"these terms would cost mu = {mu:.4g} in the worst case, more than this client's {self.policy.mu:.4g}",
                hint="more residual noise, more participants, or a larger allowance of this client",
            )
        following = client_step(memory.state, "RoundOpen")
        own = agreed.participants[seat].prekey.number
        keys = EdgeKeys(agreed, seat, self._prekeys.private(own))
        keys.agree_with_all()
        memory.last = (terms.round, terms.attempt)
        self._forget_prekey()
        if terms.carrying is not None:
            # Prekeys are used up in turn: older ones were announced for rounds that this client missed.
            self._prekeys.erase_before(own)
        memory.state, memory.current = following, CurrentRound(encode(opened), seat, own)
        fresh = self._prekeys.batch(1, self._identity, entropy)
        self._remember()
        self._charge(agreed, mu)
        if (
            terms.carrying is not None
        ):  # What the next round costs depends on those paid for, and on no others.
            memory.carried.append(terms.round)
            self._remember()
        self._accepted = keys, fresh

    def answer(self, update: Update, entropy: Entropy) -> Upload:
        """The upload of the round that was accepted last, once: rounded, with shares, residual noise, self-mask.

        update      x_k, one number a coordinate; clipped here, and blocks released once they are rounded. Where records
                    are hidden, what each record of the batch adds to it, in matrices of a row for each, with how many
                    of them count (`round_records`); an upload shows nothing of how many there are
        entropy     gives the coins of rounding, the residual noise and, in mode `repair`, the self-mask
        """
        if self._accepted is None:
            raise LocalProtocolError("no round has been accepted that is still to be answered")
        keys, fresh = self._accepted
        agreed = keys.agreed
        steps = self._rounded(agreed, update, entropy)
        self._accepted = None
        commitment, pieces, mask = b"", b"", None
        if agreed.terms.mode == "repair":
            mask, pieces = committee.deal(keys, entropy)
            commitment = committee.commit_mask(agreed, keys.seat, mask)
        vector = pack(masked_upload(keys, steps, mask, entropy), agreed.terms.modulus_bits)
        del steps
        return self._signed("upload", Upload(agreed.digest, keys.seat, vector, fresh, commitment, pieces))

    def _rounded(self, agreed: Agreed, update: Update, entropy: Entropy) -> Steps:
        """The update, clipped and rounded to the round's grid; nothing in a round that takes no updates."""
        terms, schedule = agreed.terms, self.policy.schedule
        if terms.records is not None:
            assert not isinstance(update, np.ndarray | Blocks)
            return round_batch(agreed, update, entropy)
        assert isinstance(update, np.ndarray | Blocks)
        if (isinstance(update, np.ndarray) and update.ndim != 1) or update.size != terms.coordinates:
            shape = update.size if isinstance(update, Blocks) else update.shape
            raise LocalProtocolError(
                f"the update has shape {shape}, but the round has {terms.coordinates} coordinates"
            )
        if schedule is not None and terms.round >= schedule.horizon:
            return np.zeros(terms.coordinates, dtype=step_type(terms))
        blocks, divisor = Blocks.of(update), terms.divisor(len(agreed.participants))
        exact = blocks
        if blocks.dtype != np.float64:
            exact = blocks.map(lambda block: block.astype(np.float64), np.float64)
        steps = round_update(agreed, clipped(exact, terms.clip).map(lambda block: block / divisor), entropy)
        blocks.release()
        return steps

    @property
    def awaits_repair(self) -> bool:
        """Whether this client is in the committee of the round under way, and so may be asked about it once more.

        If not, the round is over for it as soon as it has uploaded, and `close_round` erases its keys. A member of a
        round that carries noise on may be asked until the repair of the next round is over.
        """
        current = self._memory.current
        return current is not None and current.seat in self._opened(current).committee

    def reveal(self, request: RevealRequest) -> Reveal:
        """A member's part of the repair, for one survivor set a round: what takes out masks and shares.

        The set must have this client in it (who else would know that it uploaded?), and stay within the losses that
        were charged. It is remembered before anything is computed. Another set is refused in this round, the same one
        gets the same answer. As the threshold is more than (n + c) / 2 of n members, c of whom may collude, of all
        sets that a server tells of one can gather it, and nobody's mask and shares come out together.

        Shares that were to be carried to this round by clients dropped in the one before come out too, if the verdict
        of that round is shown; and, when the next round is repaired, those that were carried to its dropped clients,
        against its verdict (`niss.protocol.committee`).
        """
        agreed, current = self._current(request.context)
        verify(self.policy.server, "request", signed_part(request), request.signature)
        following = client_step(self._memory.state, "RevealRequest")
        if current.seat not in agreed.committee:
            raise RemoteProtocolError("this client is not in the committee of the round")
        committee.check_survivors(agreed, current.seat, request.survivors)
        asked = survivors_hash(agreed.digest, request.survivors)
        if current.verdict not in (None, asked):
            raise RemoteProtocolError("this client gave its part for another survivor set in this round")
        private = self._prekeys.private(current.prekey)
        if request.context != agreed.digest:
            return self._reveal_carried(agreed, current, request, private)
        before = dropped_before(agreed, request.verdict)
        lost = committee.lost_edges(agreed, request.survivors, before=before)
        given = committee.take_apart(agreed, current.seat, request.survivors, request.pieces)
        current.verdict = asked
        self._memory.state = following
        self._remember()
        partials = committee.answer(agreed, current.seat, private, lost, given)
        voted = vote(agreed, request.survivors, self._identity)
        return self._signed("reveal", Reveal(agreed.digest, current.seat, partials, vote=voted))

    def _reveal_carried(
        self, agreed: Agreed, current: CurrentRound, request: RevealRequest, private: SecretBytes
    ) -> Reveal:
        """Asked once more, after the next round: what takes out the shares carried to those who dropped out of it."""
        if current.verdict is None:
            raise RemoteProtocolError("this client has given no part for its own round yet")
        gone = dropped_after(agreed, request.verdict, self.policy)
        lost = committee.lost_edges(agreed, request.survivors, after=gone)
        given = committee.take_apart(agreed, current.seat, list(lost), request.pieces)
        partials = committee.answer(agreed, current.seat, private, lost, given, masks=False)
        return self._signed("reveal", Reveal(request.context, current.seat, partials))

    def close_round(self) -> None:
        """Nothing will be asked about the round any more: erase its prekey, and nobody can derive its seeds again."""
        self._forget_prekey()
        self._memory.current = None
        self._remember()

    def _check_round(self, opened: RoundOpen) -> tuple[Agreed, int]:
        """Everything a lying server, tracker or relay could have got wrong; the agreed round and this client's seat.

        Signature, run, replay of an attempt, terms that its policy does not allow, number of participants, the list of
        them, the beacon, terms that cannot be carried out, a grid on which the sum wraps; with carried shares also the
        schedule, and the rounds before and after.
        """
        policy, terms, last = self.policy, opened.terms, self.last
        verify(policy.server, "open", signed_part(opened), opened.signature)
        if terms.run != policy.run:
            raise RemoteProtocolError("the round belongs to another run than its message says")
        if last is not None and (terms.round, terms.attempt) <= last:
            raise RemoteProtocolError(f"round {terms.round}, attempt {terms.attempt} was answered before")
        policy.check_terms(terms)
        size, cohorts = len(opened.participants), None
        if policy.schedule is not None:
            cohorts = policy.schedule.check_round(opened, None if last is None else last[0])
        elif terms.carrying is not None or opened.cohorts is not None:
            raise RemoteProtocolError(
                "the round carries noise, but this client has agreed to no schedule for it"
            )
        policy.check_shares(terms, size)
        if size < policy.participants:
            raise RemoteProtocolError(
                f"the round has {size} participants; this client requires at least {policy.participants}"
            )
        seat = self._find_seat(opened)
        commitment = commitment_of(terms, opened.participants, () if cohorts is None else cohorts.following)
        seen = 0 if last is None else link_of(*last)
        policy.check_link(opened.beacon, commitment, terms.round, terms.attempt, after=seen)
        if cohorts is not None:
            policy.check_cohorts(opened, cohorts)
        agreed = agree(opened)
        for one in agreed.relied_on(seat):
            check_prekey(one.prekey, one.identity)
        try:
            agreed.check_fits()
        except ConfigError as error:
            raise RemoteProtocolError(
                f"the sum would not fit the grid: {error.message}", hint=error.hint
            ) from None
        return agreed, seat

    def _find_seat(self, opened: RoundOpen) -> int:
        """Where this client sits, in a list without strangers and with a prekey of its own that is still unused."""
        if self.public not in self.policy.check_list(opened.participants):
            raise RemoteProtocolError("this client is not among the participants")
        seat = [one.identity for one in opened.participants].index(self.public)
        number, current = opened.participants[seat].prekey.number, self._memory.current
        if number not in self._prekeys or (current is not None and current.prekey == number):
            raise RemoteProtocolError("this client is listed with a prekey that it does not hold (any more)")
        return seat

    def _current(self, context: bytes) -> tuple[Agreed, CurrentRound]:
        """The round under way, of mode `repair`; the context must be its own, or that of what it carries on."""
        if (current := self._memory.current) is None:
            raise RemoteProtocolError("this client is not in a round")
        agreed = self._opened(current)
        if context not in (agreed.digest, agreed.after and agreed.after.context.digest()):
            raise RemoteProtocolError("the message belongs to another round than the one under way")
        if agreed.terms.mode != "repair":  # Nothing was charged for reveals.
            raise RemoteProtocolError(f"a round of mode {agreed.terms.mode!r} is not repaired")
        return agreed, current

    def _opened(self, current: CurrentRound) -> Agreed:
        opened = decode(current.opened)
        if not isinstance(opened, RoundOpen):
            raise LocalProtocolError("this client's memory is damaged: it does not contain an opened round")
        return agree(opened)

    def _forget_prekey(self) -> None:
        """Erase the prekey of the round that is over: from here on its seeds cannot be derived again."""
        if (current := self._memory.current) is not None and current.prekey in self._prekeys:
            self._prekeys.erase(current.prekey)

    def _remember(self) -> None:
        """Hand memory and prekeys to the driver, who has them on durable storage when this returns."""
        self._persist(dump(self._memory, self._prekeys))

    def _signed(self, purpose: str, message: Answer) -> Answer:
        return replace(message, signature=self._identity.sign(purpose, signed_parts(message)))
