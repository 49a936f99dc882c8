"""What the benchmarks have in common: the machine they ran on, medians, and where the numbers go."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine(*packages: str) -> dict[str, Any]:
    """Where this was measured, and with which versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    installed = [name for name in ("niss", "numpy", *packages) if importlib.util.find_spec(name)]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in installed},
    }


def one_line(values: dict[str, Any]) -> str:
    """The machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def write_json(path: Path | None, values: dict[str, Any]) -> None:
    """Keep the numbers, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(values, indent=2) + "\n")
