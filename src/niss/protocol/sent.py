"""The paper's explicit form: a client draws each share's seed itself and sends it, sealed, to its neighbour.

Any relay may carry the sealed seeds; only the neighbour can open them. Derived seeds (`niss.protocol.noise`) need no
such message. Both forms add the same kind of noise, and this one is here to be compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from niss.errors import RemoteProtocolError
from niss.protocol.agreement import Agreed
from niss.protocol.derive import pair_secret
from niss.protocol.messages import SealedPiece
from niss.protocol.seal import open_sealed, seal
from niss.protocol.secret import Entropy, SecretBytes, draw

Seeds = Mapping[tuple[int, int], SecretBytes]


def seal_shares(
    agreed: Agreed, seat: int, private: SecretBytes, entropy: Entropy
) -> tuple[Seeds, tuple[SealedPiece, ...]]:
    """Fresh seeds for every share this client sends, and the same, sealed to their receivers."""
    people = agreed.participants
    seeds: dict[tuple[int, int], SecretBytes] = {}
    letters = []
    for sender, receiver, _ in agreed.edges_of(seat):
        if sender != seat:
            continue
        seeds[sender, receiver] = draw(entropy, 32)
        shared = pair_secret(private, people[receiver].prekey.public)
        ends = people[sender].identity, people[receiver].identity
        text = seal(shared, agreed.context, *ends, "seal", seeds[sender, receiver], entropy=entropy)
        letters.append(SealedPiece(receiver, text))
    return seeds, tuple(letters)


def open_shares(agreed: Agreed, seat: int, private: SecretBytes, letters: Mapping[int, SealedPiece]) -> Seeds:
    """The seeds of the shares this client receives; `letters` maps each sender to what it sealed."""
    people = agreed.participants
    seeds: dict[tuple[int, int], SecretBytes] = {}
    for sender, receiver, _ in agreed.edges_of(seat):
        if receiver != seat:
            continue
        if sender not in letters:
            raise RemoteProtocolError(f"the share of seat {sender} has not arrived")
        shared = pair_secret(private, people[sender].prekey.public)
        ends = people[sender].identity, people[receiver].identity
        seeds[sender, receiver] = open_sealed(
            shared, agreed.context, *ends, "seal", letters[sender].ciphertext
        )
    return seeds
