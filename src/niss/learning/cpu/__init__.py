"""The engine of the processor: groups of clients in worker processes, each with one torch thread.

`engine` chooses how a group is trained and who trains it; `steps`, `mlp`, `cnn` and `vmap` are the ways; `pool`
is the worker processes, seen from both sides.
"""
