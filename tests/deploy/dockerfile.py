"""A Dockerfile, read: its stages, and the instructions of each with everything they inherit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_CONTINUED = re.compile(r"\\\n")


@dataclass
class Stage:
    """One stage: what it is built from, and its own instructions as (word, rest)."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [rest for found, rest in self.instructions if found == word]

    def last(self, word: str) -> str | None:
        return (self.all(word) or [None])[-1]


def stages(path: Path) -> dict[str, Stage]:
    """The stages by name, in order. Instructions before the first FROM (ARG) are left out."""
    text = _CONTINUED.sub(" ", path.read_text(encoding="utf-8"))
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, _, rest = line.strip().partition(" ")
        word, rest = word.upper(), " ".join(rest.split())
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif current is not None:
            current.instructions.append((word, rest))
    return found


def lineage(name: str, found: dict[str, Stage]) -> list[Stage]:
    """A stage and those it is built from, the first one first."""
    stage = found[name]
    return [*(lineage(stage.base, found) if stage.base in found else []), stage]
