"""The share graph of a round: who sends how many unit shares to whom."""

from niss.graph.share_graph import GRAPHS, ShareGraph

__all__ = ["GRAPHS", "ShareGraph"]
