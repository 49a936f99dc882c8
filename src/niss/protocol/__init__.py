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
"""
