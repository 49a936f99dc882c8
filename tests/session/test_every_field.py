"""Every field of a proposal, of its plan and of a round's terms: refused, or paid for.

The node pins what an owner pins and knows nothing else. The server sets one field to whatever it likes, signs it, and
shows a round. What that truly costs is computed from the covariance of what leaves the clients (`support.what_left`).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import fields, replace
from typing import Any

import pytest

from niss.accounting import Plan
from niss.errors import NissError
from niss.mechanism import gdp_mu
from niss.protocol.agreement import agree
from niss.protocol.keys import SIGNATURE_BYTES
from niss.protocol.messages import Terms, encode
from niss.session.proposal import _ALWAYS, Proposal, read_proposal
from session.lone_server import COORDINATES, LoneServer
from session.scene import signed_proposal
from support.what_left import COLLUDERS, SIZE, spoilt, true_mu

PLAN = Plan(
    clip=0.5,
    epsilon=4.0,
    participations=2,
    neighbours=float(SIZE - 1),
    kappa=2.0,
    graph="complete",
    collusion=COLLUDERS / SIZE,
    attempts=2,
    chain_rounds=8,
)
PINS = {
    "niss-epsilon": 5.0,
    "niss-delta": 1e-5,
    "niss-clip": 0.5,
    "niss-collusion": COLLUDERS / SIZE,
    "niss-relation": "zero-out",
    "niss-participants": 3,
}
ALLOWED = gdp_mu(5.0, 1e-5)
NOTHING = [None, True, "", "x", [], {}, [1], "NaN"]
NUMBERS = [0, -1, 1, 2, 3, 1e-300, 1e-9, 0.5, 1e9, 2**31, 2**63, 2**64, 10**400, 1e300, -0.5]
NUMBERS += [math.nan, math.inf, -math.inf]
WORDS = [
    "niss",
    "regular",
    "complete",
    "random",
    "coalition",
    "tolerate",
    "repair",
    "replace-one",
    "zero-out",
]
BYTES = ["00" * 16, "00" * 32, "ff" * 32, "0" * 63, "01" + "00" * 31]
ADDRESSES = ["http://127.0.0.1:9", "https://", "file:///etc/passwd", "\x00"]


class Hostile(LoneServer):
    """A server whose victim is new again after each upload: refusals leave no trace, answers do."""

    def __init__(self, label: str) -> None:
        super().__init__(PLAN, SIZE, label=label, links=40, **PINS)
        self.honest = json.loads(self.proposal.signed(self.identity)[SIGNATURE_BYTES:])

    def propose(self, values: dict[str, Any]) -> str | None:
        """Have the victim join on a proposal of any content, correctly signed; why it does not, or None."""
        signed = signed_proposal(self.identity, values)
        try:
            self.proposal = read_proposal(signed)
        except NissError:
            self.proposal = replace(self.proposal, run=bytes.fromhex(self.honest["run"]))
        return self.enrol(signed)


def check(server: Hostile, terms: Terms, about: object) -> bool:
    """Show a round; whether it was answered, at a charge that covers it and that the owner allows."""
    try:
        opened = server.opened(terms)
        encode(opened)
        message = agree(opened)
    except (NissError, OverflowError, TypeError, ValueError, struct.error):
        return False  # No such round can be put on the wire.
    if server.show(opened) is not None:
        assert server.charged == 0.0, about
        return False
    assert true_mu(message) <= server.charged * (1.0 + 1e-9), about
    assert server.charged <= ALLOWED * (1.0 + 1e-9), about
    return True


def spoil(name: str, place: dict[str, Any]) -> list[Any]:
    neighbours = [value for other, value in place.items() if other != name]
    return [*NOTHING, *NUMBERS, *WORDS, *BYTES, *ADDRESSES, *neighbours]


def test_what_an_honest_server_proposes_is_accepted() -> None:
    server = Hostile("honest")
    assert server.propose(server.honest) is None
    assert check(server, server.terms(), "honest")


@pytest.mark.parametrize("name", [field.name for field in fields(Proposal) if field.name != "plan"])
def test_every_field_of_a_proposal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niss.tracker.client._LONGEST_PAUSE", 0.0)  # Nobody is there who could come back.
    server = Hostile(name)
    for value in spoil(name, {k: v for k, v in server.honest.items() if k != "plan"}):
        # An honest proposal without metrics does not have that field.
        if name in server.honest and value == server.honest[name]:
            continue
        if server.propose({**server.honest, name: value}) is None:
            check(server, server.terms(), (name, value))
            server = Hostile(name)


@pytest.mark.parametrize("name", [field.name for field in fields(Plan)])
def test_every_field_of_a_plan(name: str) -> None:
    server, honest_terms = Hostile(name), Hostile(name).terms()
    for value in spoil(name, server.honest["plan"]):
        if value == server.honest["plan"].get(name, math.nan):
            continue
        plan = {**server.honest["plan"], name: value}
        if server.propose({**server.honest, "plan": plan}) is not None:
            continue
        assert name in (*_ALWAYS, "chain_rounds")
        try:
            made = server.terms()
        except (NissError, OverflowError, ValueError):
            made = honest_terms
        for terms in (replace(honest_terms, run=server.proposal.run), made):
            check(server, terms, (name, value))
            server = Hostile(name)
            server.propose({**server.honest, "plan": plan})
        server = Hostile(name)


@pytest.mark.parametrize("name", [field.name for field in fields(Terms)])
def test_every_term(name: str) -> None:
    server = Hostile(name)
    assert server.propose(server.honest) is None
    base = server.terms()
    assert base.coordinates == COORDINATES
    for value in spoilt(base, name):
        if check(server, replace(base, **{name: value}), (name, value)):
            server = Hostile(name)
            server.propose(server.honest)
