"""Finding a setting by its name in result.json, privacy.json and manifest.json, whatever section holds it."""

from __future__ import annotations

import math
from typing import Any

from niss.report.files import JsonObject


def _candidates(settings: list[JsonObject], key: str) -> list[Any]:
    """Every value of `key`, the outer levels first: a manifest keeps its settings in nested sections."""
    found: list[Any] = []
    level: list[Any] = list(settings)
    while level:
        found += [section[key] for section in level if key in section]
        level = [value for section in level for value in section.values() if isinstance(value, dict)]
    return found


def found_number(settings: list[JsonObject], key: str) -> float | None:
    for value in _candidates(settings, key):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def found_whole(settings: list[JsonObject], key: str) -> int | None:
    value = found_number(settings, key)
    return None if value is None else int(value)


def found_text(settings: list[JsonObject], key: str) -> str | None:
    for value in _candidates(settings, key):
        named = value.get("name") if isinstance(value, dict) else value
        if isinstance(named, str) and named:
            return named
    return None
