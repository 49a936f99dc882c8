"""What the real protocol cannot do, refused before any work starts.

It hides whole clients of equal weight behind one target for all, draws a balanced graph, and adds its residual noise
instead of multiplying. A setting that asks for something else is never run as if it had not been made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from niss.simulation.config import Config, MethodConfig

_INSTEAD = "or exchange = 'simulated'"


def check_protocol(config: Config) -> None:
    """Raise a ValueError "field: fault; fix" for the first setting that `exchange = "protocol"` would ignore."""
    privacy, training = config.privacy, config.training
    if privacy.unit != "client":
        raise ValueError(
            f"privacy.unit: the protocol hides whole clients, not {privacy.unit!r}; use unit = 'client', {_INSTEAD}"
        )
    if training.weights != "equal":
        raise ValueError(
            f"training.weights: in the protocol all clients weigh the same; use weights = 'equal', {_INSTEAD}"
        )
    shared = [method for method in config.methods if method.name == "niss"]
    if shared and isinstance(privacy.epsilon, tuple):
        raise ValueError(
            f"privacy.epsilon: the protocol has one target for all clients; give one number, {_INSTEAD}"
        )
    for method in shared:
        _check_method(method, training.participants)


def _check_method(method: MethodConfig, participants: int) -> None:
    if method.graph in ("random", "coalition"):
        raise ValueError(
            f"methods.graph: the protocol draws regular or complete graphs, not {method.graph!r}; "
            f"use graph = 'regular', {_INSTEAD}"
        )
    if method.graph == "complete" and method.neighbours < participants - 1:
        raise ValueError(
            f"methods.neighbours: {method.neighbours:g} shares of each of {participants} clients make no complete "
            f"graph in the protocol; use neighbours = {participants - 1}, graph = 'regular', {_INSTEAD}"
        )
    if isinstance(method.tau2, tuple):
        raise ValueError(
            f"methods.tau2: the protocol has one tau2 for all clients; give one number, 'calibrated', {_INSTEAD}"
        )
    # Where tau2 is 0 there is nothing to distort.
    if method.distortion != "additive" and method.tau2 != 0.0:
        raise ValueError(
            f"methods.distortion: the protocol adds its residual noise, {method.distortion!r} would multiply; use "
            f"distortion = 'additive', {_INSTEAD}"
        )
