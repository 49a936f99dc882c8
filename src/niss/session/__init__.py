"""A run of the protocol in two halves that send nothing themselves, for whatever transport carries their messages.

    ports     what passes between them, and who hands out keys: the server itself, or a tracker
    server    `Session`, the server's half: begin, requests, take, finish; and the loop `drive`
    members   who joined, who is left out, and whose turn it is
    books     what was charged and what happened; the statement
    node      `Node`, the client's half: charged before anything is trained
    store     what a client keeps of its runs
    limits    what the owner of a node insists on, and what all runs may cost it
    proposal  how a run begins, on both sides
    metrics   metrics inside the upload, on both sides
    parties   many nodes in one process, and a session with them

A new transport is an adapter: it gives nodes their requests and brings back replies (`Deliver`), keeps what `save` and
`Store` are told to keep, and nothing else. `niss.flower` is one; the simulator and the tests drive both halves in one
process.
"""

from __future__ import annotations
