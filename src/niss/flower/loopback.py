"""Ports of this machine, and settings as Flower's command line reads them."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def toml_pairs(values: Mapping[str, Any]) -> str:
    """`key=value` pairs as Flower's command line reads them: TOML values, separated by spaces."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None)
