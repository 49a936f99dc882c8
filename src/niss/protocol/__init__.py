"""The protocol: who may say what to whom, and the keys, seals and pieces it rests on.

A round of `Client` and `Server` machines, joined by whatever carries bytes. Top to bottom, what rests on what:

    client, server          the two machines, the tables of their steps, and what a client remembers
    repair                  verdicts on who survived, recovery of what the lost left in the sum
    committee               an upload's secret, shared among members, and what they give of it
    schedule                what a run that carries noise commits to, and what a client insists on
    shares                  keys, seeds and noise of the edges of a round
    agreement               graph, committee, edges and contexts of an opened round
    messages                what is said: RoundOpen, Upload, RevealRequest, Reveal, Refusal
    wire                    kinds of fields, as bytes
    keyfile                 a client's keys and the identities it trusts, on disk
    points                  sums of public points
    keys                    identities, prekeys, the beacon's chain; points and scalars of the curve

No sockets, no clock, no hidden randomness: entropy comes in as an argument, and of these files only `keyfile` touches
the disk.

The names below are the face of this room. Each is imported on first use, so that a command that only reads a key file
does not load numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niss.protocol.agreement import Agreed as Agreed
    from niss.protocol.agreement import agree as agree
    from niss.protocol.agreement import participants_hash as participants_hash
    from niss.protocol.agreement import previous_of as previous_of
    from niss.protocol.agreement import terms_hash as terms_hash
    from niss.protocol.client import Client as Client
    from niss.protocol.client import move_prekey as move_prekey
    from niss.protocol.client import rounds_answered as rounds_answered
    from niss.protocol.keyfile import Coalition as Coalition
    from niss.protocol.keyfile import create_keyfile as create_keyfile
    from niss.protocol.keyfile import load_coalition as load_coalition
    from niss.protocol.keyfile import load_identity as load_identity
    from niss.protocol.keys import LINKS_PER_ROUND as LINKS_PER_ROUND
    from niss.protocol.keys import PUBLIC_BYTES as PUBLIC_BYTES
    from niss.protocol.keys import SIGNATURE_BYTES as SIGNATURE_BYTES
    from niss.protocol.keys import BeaconChain as BeaconChain
    from niss.protocol.keys import Entropy as Entropy
    from niss.protocol.keys import Identity as Identity
    from niss.protocol.keys import PrekeyStore as PrekeyStore
    from niss.protocol.keys import check_prekey as check_prekey
    from niss.protocol.keys import decode_prekey as decode_prekey
    from niss.protocol.keys import encode_prekey as encode_prekey
    from niss.protocol.keys import fingerprint as fingerprint
    from niss.protocol.keys import verify as verify
    from niss.protocol.messages import MODES as MODES
    from niss.protocol.messages import Beacon as Beacon
    from niss.protocol.messages import Message as Message
    from niss.protocol.messages import Participant as Participant
    from niss.protocol.messages import Prekey as Prekey
    from niss.protocol.messages import Refusal as Refusal
    from niss.protocol.messages import Reveal as Reveal
    from niss.protocol.messages import RevealRequest as RevealRequest
    from niss.protocol.messages import RoundOpen as RoundOpen
    from niss.protocol.messages import Terms as Terms
    from niss.protocol.messages import Upload as Upload
    from niss.protocol.messages import decode as decode
    from niss.protocol.messages import encode as encode
    from niss.protocol.messages import signed_part as signed_part
    from niss.protocol.schedule import Policy as Policy
    from niss.protocol.schedule import Schedule as Schedule
    from niss.protocol.server import Outcome as Outcome
    from niss.protocol.server import Server as Server
    from niss.protocol.wire import MAX_REASON_BYTES as MAX_REASON_BYTES
    from niss.protocol.wire import length_prefixed as length_prefixed

_NAMES = {
    "agreement": "Agreed agree participants_hash previous_of terms_hash",
    "client": "Client move_prekey rounds_answered",
    "keyfile": "Coalition create_keyfile load_coalition load_identity",
    "keys": "LINKS_PER_ROUND PUBLIC_BYTES SIGNATURE_BYTES BeaconChain Entropy Identity PrekeyStore check_prekey "
    "decode_prekey encode_prekey fingerprint verify",
    "messages": "MODES Beacon Message Participant Prekey Refusal Reveal RevealRequest RoundOpen Terms Upload "
    "decode encode signed_part",
    "wire": "MAX_REASON_BYTES length_prefixed",
    "schedule": "Policy Schedule",
    "server": "Outcome Server",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # For a type checker an unknown name stays an error.

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'niss.protocol' has no attribute {name!r}")
        value = getattr(import_module(f"niss.protocol.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(_HOME)
