"""Who shares noise with whom, within a round and from one round to the next: one class, `ShareGraph`.

Graphs are drawn from a public beacon, so that whoever knows it and the participants can check what it is told.
"""

from niss.graph.shares import GRAPHS, ShareGraph

__all__ = ["GRAPHS", "ShareGraph"]
