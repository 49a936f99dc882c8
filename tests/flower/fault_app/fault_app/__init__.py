"""Nodes that misbehave as they are told."""

import numpy as np

SIZE = 40


def step(partition: int, server_round: int) -> "np.ndarray":
    """The update a node makes in a round, the same whoever asks."""
    return np.random.default_rng([partition, server_round]).normal(size=SIZE) * 0.05
