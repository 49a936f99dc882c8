"""The protocol: who may say what to whom, and the keys, seals and pieces it rests on.

A round of `Client` and `Server` machines, joined by whatever carries bytes. Top to bottom, what rests on what:

    client, server          the two machines; `states` has the table of their steps, and what a client remembers
    repair                  what a server makes of a committee's answers
    committee               an upload's secret, shared among the members who repair the round: pieces, partials, proofs
    shares                  keys and seeds that both ends of an edge derive, the noise of an upload
    carrying                what binds a round that carries noise over to those next to it: checks, and verdicts
    agreement               beacon, graph and context that follow from an opened round
    carried                 what a run with carried shares commits to; who carries noise to whom
    wire, wire_fields       messages and vectors as bytes; the kinds of fields
    messages                what is said: RoundOpen, Upload, RevealRequest, Reveal, Refusal
    keyfile                 a client's keys and the identities it trusts, on disk
    keys                    identities and prekeys
    curve, secrets          points and scalars; bytes that do not show themselves

No sockets, no clock, no hidden randomness: entropy comes in as an argument, and of these files only `keyfile` touches
the disk.

The names below are the face of this room. Each is imported on first use, so that a command that only reads a key file
does not load numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niss.protocol.agreement import LINKS_PER_ROUND as LINKS_PER_ROUND
    from niss.protocol.agreement import Agreed as Agreed
    from niss.protocol.agreement import BeaconChain as BeaconChain
    from niss.protocol.agreement import agree as agree
    from niss.protocol.agreement import commitment_of as commitment_of
    from niss.protocol.agreement import draw_graph as draw_graph
    from niss.protocol.agreement import link_of as link_of
    from niss.protocol.agreement import participants_hash as participants_hash
    from niss.protocol.agreement import terms_hash as terms_hash
    from niss.protocol.carried import Schedule as Schedule
    from niss.protocol.carrying import previous_of as previous_of
    from niss.protocol.client import Client as Client
    from niss.protocol.client import Policy as Policy
    from niss.protocol.keyfile import Coalition as Coalition
    from niss.protocol.keyfile import create_keyfile as create_keyfile
    from niss.protocol.keyfile import default_keyfile as default_keyfile
    from niss.protocol.keyfile import load_coalition as load_coalition
    from niss.protocol.keyfile import load_identity as load_identity
    from niss.protocol.keys import PUBLIC_BYTES as PUBLIC_BYTES
    from niss.protocol.keys import SIGNATURE_BYTES as SIGNATURE_BYTES
    from niss.protocol.keys import Identity as Identity
    from niss.protocol.keys import PrekeyStore as PrekeyStore
    from niss.protocol.keys import check_prekey as check_prekey
    from niss.protocol.keys import check_public as check_public
    from niss.protocol.keys import decode_prekey as decode_prekey
    from niss.protocol.keys import encode_prekey as encode_prekey
    from niss.protocol.keys import fingerprint as fingerprint
    from niss.protocol.keys import verify as verify
    from niss.protocol.messages import MODES as MODES
    from niss.protocol.messages import Beacon as Beacon
    from niss.protocol.messages import Message as Message
    from niss.protocol.messages import Participant as Participant
    from niss.protocol.messages import Prekey as Prekey
    from niss.protocol.messages import PreviousRound as PreviousRound
    from niss.protocol.messages import Refusal as Refusal
    from niss.protocol.messages import Reveal as Reveal
    from niss.protocol.messages import RevealRequest as RevealRequest
    from niss.protocol.messages import RoundOpen as RoundOpen
    from niss.protocol.messages import Terms as Terms
    from niss.protocol.messages import Upload as Upload
    from niss.protocol.secrets import LARGEST_UINT64 as LARGEST_UINT64
    from niss.protocol.secrets import Entropy as Entropy
    from niss.protocol.secrets import SecretBytes as SecretBytes
    from niss.protocol.secrets import draw as draw
    from niss.protocol.secrets import length_prefixed as length_prefixed
    from niss.protocol.secrets import uint64 as uint64
    from niss.protocol.server import Outcome as Outcome
    from niss.protocol.server import Server as Server
    from niss.protocol.states import rounds_answered as rounds_answered
    from niss.protocol.wire import decode as decode
    from niss.protocol.wire import encode as encode
    from niss.protocol.wire import signed_part as signed_part
    from niss.protocol.wire import unpack as unpack
    from niss.protocol.wire_fields import WireLimits as WireLimits

_NAMES = {
    "agreement": "LINKS_PER_ROUND Agreed BeaconChain agree commitment_of draw_graph link_of participants_hash "
    "terms_hash",
    "carried": "Schedule",
    "carrying": "previous_of",
    "client": "Client Policy",
    "keyfile": "Coalition create_keyfile default_keyfile load_coalition load_identity",
    "keys": "PUBLIC_BYTES SIGNATURE_BYTES Identity PrekeyStore check_prekey check_public decode_prekey "
    "encode_prekey fingerprint verify",
    "messages": "MODES Beacon Message Participant Prekey PreviousRound Refusal Reveal RevealRequest RoundOpen Terms "
    "Upload",
    "secrets": "LARGEST_UINT64 Entropy SecretBytes draw length_prefixed uint64",
    "server": "Outcome Server",
    "states": "rounds_answered",
    "wire": "decode encode signed_part unpack",
    "wire_fields": "WireLimits",
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
