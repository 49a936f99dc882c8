"""What a server that lies about dropouts gathers, and what it makes of it.

Against the self-mask it needs a threshold of pieces, against the shares the seeds of edges. A neighbour gives either,
never both. The graded attack asks some neighbours for pieces and the others for edges; it works on clients that
agree to two survivor sets in one round, which the one-verdict rule and the quorum forbid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from niss.accounting import effective_variance
from niss.attacks.estimates import best_weights
from niss.attacks.parties import Parties, carried, vector_of
from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import Agreed
from niss.protocol.client import Client
from niss.protocol.messages import RevealRequest, RoundOpen, SealedPiece, SurvivorClaim, Upload, Verdict
from niss.protocol.secret import SecretBytes
from niss.protocol.shamir import Piece, check_commitment, combine
from niss.randomness import SecretStream

FloatArray = NDArray[np.float64]
Survivors = tuple[int, ...]


@dataclass
class Loot:
    """Seeds of edges by their ends, and pieces of self-masks by their owner."""

    edges: dict[tuple[int, int], bytes] = field(default_factory=dict)
    pieces: dict[int, dict[int, Piece]] = field(default_factory=dict)


@dataclass(frozen=True)
class Uploaded:
    """A round after all uploads: what the server holds, and what each client has stored."""

    opened: RoundOpen
    agreed: Agreed
    uploads: Mapping[int, Upload]
    stored: tuple[bytes, ...]


def tell(
    parties: Parties, round_: Uploaded, stories: Mapping[int, Iterable[Survivors]], *, remembers: bool
) -> Loot:
    """Tell each client its survivor sets, gather verdicts, then ask everyone to reveal for its first story.

    With `remembers` off, each client is put back to its state after the upload before it hears the next story,
    and to the state after its first verdict before it is asked to reveal: it has forgotten what it signed since.
    """
    told = {seat: list(sets) for seat, sets in stories.items()}
    verdicts: dict[Survivors, dict[int, Verdict]] = {}
    judged: dict[int, bytes] = {}
    for seat, sets in told.items():
        party = parties.parties[seat]
        client = party.put_back(round_.stored[seat])
        for number, survivors in enumerate(sets):
            if not remembers:
                client = party.put_back(round_.stored[seat])
            verdict = _verdict(parties, client, round_, survivors)
            if verdict is not None:
                verdicts.setdefault(survivors, {})[seat] = verdict
            if number == 0:
                judged[seat] = round_.stored[seat] if verdict is None else party.stored[-1]
    loot = Loot()
    for seat, sets in told.items():
        client = parties.parties[seat].put_back(judged[seat])
        _ask(parties, client, seat, round_, sets[0], verdicts.get(sets[0], {}), loot)
    return loot


def _verdict(parties: Parties, client: Client, round_: Uploaded, survivors: Survivors) -> Verdict | None:
    claim = parties.signed(SurvivorClaim(round_.agreed.digest, survivors))
    try:
        given: Verdict = carried(client.judge(claim))
    except RemoteProtocolError:
        return None
    return given


def _ask(
    parties: Parties,
    client: Client,
    seat: int,
    round_: Uploaded,
    survivors: Survivors,
    verdicts: Mapping[int, Verdict],
    loot: Loot,
) -> None:
    pieces = tuple(
        SealedPiece(owner, piece.ciphertext)
        for owner, upload in sorted(round_.uploads.items())
        for piece in upload.pieces
        if piece.seat == seat
    )
    listed = tuple(verdicts[one] for one in sorted(verdicts))
    request = RevealRequest(round_.agreed.digest, survivors, listed, pieces)
    try:
        reveal = carried(client.reveal(parties.signed(request)))
    except RemoteProtocolError:
        return
    loot.edges.update({(edge.sender, edge.receiver): edge.seed for edge in reveal.edges})
    for piece in reveal.pieces:
        loot.pieces.setdefault(piece.seat, {})[piece.index] = Piece(piece.index, SecretBytes(piece.value))


def rebuilt_masks(round_: Uploaded, loot: Loot) -> dict[int, SecretBytes]:
    """The seeds of the self-masks that the pieces suffice for, each checked against its commitment."""
    agreed, found = round_.agreed, {}
    for seat, upload in round_.uploads.items():
        held = list(loot.pieces.get(seat, {}).values())
        try:
            seed = combine(held, agreed.threshold(seat))
            check_commitment(upload.commitment, seed, agreed.mask_context(seat))
        except (LocalProtocolError, RemoteProtocolError):
            continue
        found[seat] = seed
    return found


def residual_left(round_: Uploaded, masks: Mapping[int, SecretBytes]) -> FloatArray:
    """Per client, the variance of residual noise and of a self-mask that was not rebuilt."""
    terms = round_.agreed.terms
    size = len(round_.agreed.participants)
    bare = np.array([seat in masks for seat in range(size)])
    return np.asarray(terms.residual_variance + np.where(bare, 0.0, terms.self_variance))


def variance_left(round_: Uploaded, loot: Loot, victim: int) -> float:
    """The accountant's effective variance of the victim's upload, given the loot."""
    agreed = round_.agreed
    left = effective_variance(
        agreed.graph,
        unit_variance=agreed.terms.unit_variance,
        residual_variance=residual_left(round_, rebuilt_masks(round_, loot)),
        revealed=set(loot.edges),
    )
    return float(left[victim])


def strip(round_: Uploaded, loot: Loot, known: Mapping[int, FloatArray], victim: int) -> FloatArray:
    """The best linear estimate of the victim's update from all uploads, the loot and the known updates."""
    agreed = round_.agreed
    size = len(agreed.participants)
    masks = rebuilt_masks(round_, loot)
    rows = np.stack([vector_of(round_.uploads[seat], agreed) for seat in range(size)])
    for seat, update in known.items():
        rows[seat] -= update / size
    for (sender, receiver), seed in loot.edges.items():
        share = _noise(seed, rows.shape[1], agreed, agreed.steps_between(sender, receiver))
        rows[sender] -= share
        rows[receiver] += share
    mask_steps = agreed.grid.deviation_steps(agreed.terms.self_variance)
    for seat, seed in masks.items():
        rows[seat] -= _noise(seed, rows.shape[1], agreed, mask_steps)
    covariance = np.diag(residual_left(round_, masks)) + agreed.terms.unit_variance * _hidden(agreed, loot)
    weights = best_weights(covariance, victim)
    return np.asarray(size * (weights @ rows) / weights[victim])


def _noise(seed: bytes, count: int, agreed: Agreed, steps: float) -> FloatArray:
    drawn = np.zeros(count, dtype=np.int64)
    SecretStream(bytes(seed)).add_gaussian(drawn, steps)
    return agreed.grid.to_float(drawn)


def _hidden(agreed: Agreed, loot: Loot) -> FloatArray:
    """The Laplacian of the edges that were not revealed."""
    graph = agreed.graph
    matrix = np.zeros((graph.size, graph.size))
    for sender, receiver, weight in zip(graph.senders, graph.receivers, graph.weights, strict=True):
        if (int(sender), int(receiver)) in loot.edges:
            continue
        step = np.zeros(graph.size)
        step[sender], step[receiver] = 1.0, -1.0
        matrix += weight * np.outer(step, step)
    return matrix
