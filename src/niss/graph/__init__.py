"""Who shares noise with whom: within a round (`ShareGraph`) and from one round to a later one (`CarriedGraph`).

Both are drawn from a public beacon, so that whoever knows it and the participants can check what it is told.
"""

from niss.graph.carried import CarriedGraph
from niss.graph.shares import GRAPHS, ShareGraph

__all__ = ["GRAPHS", "CarriedGraph", "ShareGraph"]
