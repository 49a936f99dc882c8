"""One-time keys that nobody can use, or that are somebody else's, cost nobody else anything."""

from __future__ import annotations

import pytest

from niss.protocol import keys
from niss.protocol.messages import Prekey
from niss.session.ports import Relay
from support.protocol_round import seeded_entropy

ORDER_8 = 0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F
LOW_ORDER = [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18, 2**255, 2**255 + 1, ORDER_8, ORDER_8 + 2**255]


def degenerate(identity: keys.Identity, public: int) -> Prekey:
    """A one-time key of small order, correctly signed."""
    point = public.to_bytes(32, "little")
    return Prekey(0, point, identity.sign("prekey", keys._prekey_statement(identity.public, 0, point)))


@pytest.mark.parametrize("public", LOW_ORDER)
def test_every_spelling_of_a_point_of_small_order_is_refused(public: int) -> None:
    identity = keys.Identity.generate(seeded_entropy("keys 1"))
    with pytest.raises(keys.RemoteProtocolError, match="degenerate"):
        keys.check_prekey(degenerate(identity, public), identity.public)


def test_a_copy_of_another_clients_key_costs_that_one_nothing() -> None:
    """Whoever sits beside a copy of its own key declines."""
    relay = Relay()
    relay.start_run(b"run", 4)
    victim, copier = (keys.Identity.generate(seeded_entropy(f"keys {number}")) for number in (1, 2))
    stores = {one: keys.PrekeyStore() for one in (victim, copier)}
    first, second = stores[victim].batch(2, victim, seeded_entropy("keys 3"))
    own = stores[copier].batch(2, copier, seeded_entropy("keys 4"))

    def copy_of(public: bytes, number: int) -> Prekey:
        statement = keys._prekey_statement(copier.public, number, public)
        return Prekey(number, public, copier.sign("prekey", statement))

    relay.enrolled(victim.public, (first, second))
    relay.enrolled(copier.public, (copy_of(first.public, 7), own[0], copy_of(second.public, 8), own[1]))
    for number, (mine, theirs) in enumerate(zip((first, second), own, strict=True)):
        seated = relay.seat(number, 0, (copier.public, victim.public), 2)
        assert [one.prekey for one in seated] == [theirs, mine]
        # Nor while the other one sits in a round with it.
        relay.replenish(copier.public, (copy_of(mine.public, 9 + number),))
        assert relay.ready(copier.public) == (number == 0)


def test_nobody_fills_the_servers_memory_with_keys() -> None:
    relay, identity, store = Relay(), keys.Identity.generate(seeded_entropy("keys 5")), keys.PrekeyStore()
    for number in range(10):
        relay.enrolled(identity.public, store.batch(64, identity, seeded_entropy(f"keys {100 + number}")))
    assert len(relay._prekeys[identity.public]) == len(relay._publics) == 256
    assert relay._prekeys[identity.public][-1].number == 639
