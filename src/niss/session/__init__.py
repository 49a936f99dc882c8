"""A run of the protocol in two halves that send nothing themselves, for whatever transport carries their messages.

    requests     what passes between them, and the loop `drive`
    server       `Session`, the server's half: begin, requests, take, finish
    members      who joined, who is left out, and who is to blame for a refusal
    turns        whose turn it is where noise is carried from round to round
    books        what was charged and what happened; the statement
    coordinator  who hands out keys and holds the beacon: the server itself, or a tracker
    node         `Node`, the client's half: charged before anything is trained
    limits       what the owner of a node insists on
    store        what a client keeps between requests
    proposal     how a run begins, on both sides
    metrics      metrics inside the upload, on both sides
    parties      many nodes in one process, and a session with them

A new transport is an adapter: it gives nodes their requests and brings back replies (`Deliver`), keeps what `save` and
`Store` are told to keep, and nothing else. `niss.flower` is one; the simulator and the tests drive both halves in one
process.
"""

from __future__ import annotations
