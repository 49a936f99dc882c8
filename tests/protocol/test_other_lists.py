"""What comes out in one list is of no use in another, though both have the same keys.

A server lists a victim without telling it, calls it dropped, and has an honest committee take out its shares with all
others. Then it lists the same identities and prekeys once more, to the victim alone, which can only see that its own
key is fresh. If anything that came out gave a share of the second list, the victim would have paid for noise that the
server knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from niss.errors import RemoteProtocolError
from niss.protocol.agreement import Agreed, agree
from niss.protocol.messages import RoundOpen, Terms
from support.protocol_round import CarriedFederation, Federation, repairing, resigned
from support.what_left import Pool, known_edges

SIZE, VICTIM = 7, 2


def called_dropped(federation: Federation) -> tuple[RoundOpen, Pool]:
    """A round of which the victim was never told, repaired without it; and all that came out."""
    opened = federation.open(federation.terms(mode="repair", neighbours=6.0))
    federation.upload(opened, federation.updates(), absent=(VICTIM,))
    federation.repair()
    pool = Pool()
    pool.take_round(federation.server._round)
    assert federation.server.finish().exact
    assert known_edges(pool, agree(opened), federation.seats[VICTIM].privates, VICTIM) == set(range(SIZE)) - {
        VICTIM
    }
    return opened, pool


def listed_again(federation: Federation, opened: RoundOpen, terms: Terms) -> RoundOpen:
    """The same people with the same prekeys, in another list."""
    again = replace(opened, terms=terms, beacon=federation.beacon(opened.participants, terms))
    signed: RoundOpen = resigned(federation.server, again, "open")
    return signed


@pytest.mark.parametrize(
    "changes",
    [
        {"round": 2},
        {"round": 2, "mode": "tolerate", "committee": 0, "threshold": 0, "self_variance": 0.0},
        {"run": b"another run"},
        {"attempt": 1},
        {"residual_variance": 0.125},
    ],
    ids=["another round", "a round that tolerates", "another run", "another attempt", "another version"],
)
def test_what_is_revealed_for_one_list_is_of_no_use_in_another(changes: dict[str, Any]) -> None:
    federation = Federation(SIZE, "other lists")
    opened, pool = called_dropped(federation)
    again = listed_again(federation, opened, replace(opened.terms, **changes))
    victim = federation.clients[VICTIM]
    victim.policy = replace(victim.policy, run=again.terms.run)
    victim.upload(again, federation.updates()[VICTIM], federation.entropy)
    assert known_edges(pool, agree(again), federation.seats[VICTIM].privates, VICTIM) == set()


def test_a_scheduled_run_has_one_attempt_at_a_round() -> None:
    """What is carried is bound to both lists and not to the attempt, but each attempt has a committee of its own.

    One could be told that a client survived whom the other called dropped: its mask and its shares would come out.
    """
    federation = CarriedFederation(repairing(), attempts=2)
    federation.play_round(0)
    opened = federation.upload_round(1, (VICTIM,))
    federation.repair_round(1)
    assert federation.server.finish().survivors == tuple(seat for seat in range(5) if seat != VICTIM)
    again = federation.forged(opened, terms=replace(opened.terms, attempt=1))
    victim = federation.cohort(1)[VICTIM]
    with pytest.raises(RemoteProtocolError, match="attempt"):
        federation.answer(victim, again)
    federation.answer(victim, opened)


def test_an_edge_key_is_that_of_one_context() -> None:
    federation = Federation(SIZE, "contexts")
    opened = federation.open(federation.terms(mode="repair", neighbours=6.0))
    agreed = agree(opened)
    other: Agreed = agree(listed_again(federation, opened, replace(opened.terms, clip=1.5)))
    privates = federation.seats[VICTIM].privates
    pool, elsewhere = Pool(), Pool()
    pool.take_client(agreed, VICTIM, privates)
    elsewhere.take_client(other, VICTIM, privates)
    assert not pool.edges.keys() & elsewhere.edges.keys()
    assert len(pool.edges) == SIZE - 1
