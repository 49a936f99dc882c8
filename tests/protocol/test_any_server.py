"""Against a server that sends any well-formed messages in any order, the charge covers what truly left the client.

The server holds the beacon, has one of the clients on its side, tells everyone different survivor sets and asks each
for any reveal. What it then knows is counted from the seeds and pieces that were given; what that is worth is computed
from the covariance of the uploads, with nothing of the package's accountant.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from niss.errors import NissError
from niss.protocol.agreement import Agreed, agree, survivors_hash
from niss.protocol.messages import RevealRequest, SealedPiece, SurvivorClaim, Terms, Upload, Verdict
from niss.protocol.wire import signed_part
from support.hostile import (
    COLLUDERS,
    COORDINATES,
    SIZE,
    assessing,
    honest_terms,
    opened_with,
    rounded_variance,
    spoilt,
)
from support.protocol_round import Federation, opened_pieces, resigned

COLLUDER = SIZE - 1
HONEST = range(COLLUDER)
BASES = {mode: honest_terms(mode) for mode in ("tolerate", "repair")}
NAMES = [field.name for field in fields(Terms) if field.name not in ("run", "round", "mode")]

# Survivors: all but up to three.
sets = st.frozensets(st.sampled_from(range(SIZE)), max_size=3).map(
    lambda lost: tuple(seat for seat in range(SIZE) if seat not in lost)
)


@st.composite
def any_terms(draw: st.DrawFn) -> Terms:
    """Those of an honest server with up to two numbers from the ends of their ranges."""
    base = terms = BASES[draw(st.sampled_from(["tolerate", "repair", "repair"]))]
    spoil = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
    for name in draw(st.one_of(st.just([]), spoil)):
        terms = replace(terms, **{name: draw(st.sampled_from(spoilt(base, name)))})
    return terms


class HostileServer:
    """What the server has been given so far: uploads, verdicts, edges, pieces."""

    def __init__(self, federation: Federation, opened: Any) -> None:
        self.federation, self.opened, self.agreed = federation, opened, agree(opened)
        self.uploads: dict[int, Upload] = {}
        self.verdicts: dict[tuple[int, tuple[int, ...]], Verdict] = {}
        self.edges: set[frozenset[int]] = set()
        self.pieces: dict[int, set[int]] = {seat: set() for seat in range(SIZE)}

    def collect(self) -> None:
        for seat in range(SIZE):
            try:
                update = np.ones(COORDINATES)
                self.uploads[seat] = self.federation.clients[seat].upload(
                    self.opened, update, self.federation.entropy
                )
            except NissError:
                continue
        if COLLUDER in self.uploads:
            known = opened_pieces(self.federation, self.opened, COLLUDER, self.uploads)
            for owner, piece in known.items():
                self.pieces[owner].add(piece.index)
        for seat in HONEST:
            if seat in self.agreed.neighbours(COLLUDER):
                self.edges.add(frozenset((seat, COLLUDER)))

    def claim(self, seat: int, survivors: tuple[int, ...]) -> None:
        claim = resigned(self.federation.server, SurvivorClaim(self.agreed.digest, survivors), "claim")
        try:
            self.verdicts[seat, survivors] = self.federation.clients[seat].judge(claim)
        except NissError:
            return

    def request(self, seat: int, survivors: tuple[int, ...]) -> None:
        signed = [verdict for (_, about), verdict in self.verdicts.items() if about == survivors]
        lie = Verdict(self.agreed.digest, COLLUDER, survivors_hash(self.agreed.digest, survivors))
        signature = self.federation.seats[COLLUDER].identity.sign("verdict", signed_part(lie))
        verdicts = [one for one in signed if one.seat != COLLUDER] + [replace(lie, signature=signature)]
        sealed = [
            SealedPiece(owner, piece.ciphertext)
            for owner, upload in sorted(self.uploads.items())
            for piece in upload.pieces
            if piece.seat == seat
        ]
        verdicts.sort(key=lambda verdict: verdict.seat)
        try:
            request = RevealRequest(self.agreed.digest, survivors, tuple(verdicts), tuple(sealed))
            given = self.federation.clients[seat].reveal(resigned(self.federation.server, request, "request"))
        except NissError:
            return
        self.edges |= {frozenset((edge.sender, edge.receiver)) for edge in given.edges}
        for piece in given.pieces:
            self.pieces[piece.seat].add(piece.index)


def known_mu(server: HostileServer) -> dict[int, float]:
    """For each honest upload: `Delta / sqrt(1 / (Sigma^-1)_kk)` given every edge and mask the server has."""
    agreed: Agreed = server.agreed
    terms, step = agreed.terms, 2.0**-agreed.terms.grid_bits
    seen = [seat for seat in HONEST if seat in server.uploads]
    place = {seat: row for row, seat in enumerate(seen)}
    covariance = np.zeros((len(seen), len(seen)))
    graph = agreed.graph
    for one, other, weight in zip(
        graph.senders.tolist(), graph.receivers.tolist(), graph.weights.tolist(), strict=True
    ):
        if frozenset((one, other)) in server.edges:
            continue
        variance = rounded_variance(math.sqrt(weight * terms.unit_variance) / step)
        ends = [(place[seat], sign) for seat, sign in ((one, 1.0), (other, -1.0)) if seat in place]
        for row, sign in ends:
            for column, opposite in ends:
                covariance[row, column] += sign * opposite * variance
    for seat, row in place.items():
        covariance[row, row] += rounded_variance(math.sqrt(terms.residual_variance) / step)
        if terms.mode == "repair" and len(server.pieces[seat]) < agreed.threshold(seat):
            covariance[row, row] += rounded_variance(math.sqrt(terms.self_variance) / step)
    precision = np.diag(np.linalg.inv(covariance)) if seen else ()
    moved = terms.clip / SIZE / step
    return {seat: moved * math.sqrt(value) for seat, value in zip(seen, precision, strict=True)}


@settings(max_examples=60, deadline=None)
@given(
    terms=any_terms(),
    stories=st.lists(sets, min_size=1, max_size=2, unique=True),
    steps=st.lists(
        st.tuples(st.sampled_from(["claim", "request"]), st.sampled_from(HONEST), st.integers(0, 1)),
        max_size=30,
    ),
    eager=st.booleans(),
)
@example(terms=BASES["repair"], stories=[(0, 1, 3, 4, 5, 6)], steps=[], eager=True)
@example(
    terms=replace(BASES["repair"], self_variance=1.0), stories=[(0, 1, 3, 4, 5, 6)], steps=[], eager=True
)
def test_the_charge_covers_what_left_the_client(
    terms: Terms, stories: list[tuple[int, ...]], steps: list[tuple[str, int, int]], eager: bool
) -> None:
    federation = assessing(SIZE, "any server", colluders=COLLUDERS)
    opened = opened_with(federation, terms)
    if opened is None:
        return
    try:
        server = HostileServer(federation, opened)
    except NissError:
        for seat in federation.seats:
            assert seat.charges == []
        return
    server.collect()
    for what, seat, number in steps:
        getattr(server, what)(seat, stories[number % len(stories)])
    if eager:
        # The most that honest answers can give away: everyone is told one story, then asked for everything.
        for what in (server.claim, server.request):
            for seat in HONEST:
                what(seat, stories[0])
    for seat, mu in known_mu(server).items():
        ((_, _, charged),) = federation.seats[seat].charges
        assert mu <= charged * (1.0 + 1e-9)
    # What was answered is not answered again.
    before = [len(seat.charges) for seat in federation.seats]
    server.collect()
    assert [len(seat.charges) for seat in federation.seats] == before
