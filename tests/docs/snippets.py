"""The code blocks of README and docs: found, told apart, and run.

```python, ```bash      run, in the order of the page, in one folder and with one set of Python names
```console, ```, and    shown, not run; every `niss` and `make` command in them is checked against the
indented lines          program
<!-- not run: WHY -->   before a block that would be run: shown only, and says why
<!-- slow -->           run by `make test-all` only
<!-- output -->         before a ```text block: exactly what the block before it prints
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNNABLE = ("python", "bash")
_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_MARK = re.compile(r"^<!-- (?P<text>.*?) -->$")


@dataclass(frozen=True)
class Block:
    """A code block: where it stands, its language, its text, and the marks before it."""

    page: Path
    line: int
    language: str
    text: str
    marks: tuple[str, ...] = ()

    @property
    def not_run(self) -> str | None:
        """Why it is not run, where the page says so."""
        return next(
            (mark.partition(":")[2].strip() for mark in self.marks if mark.startswith("not run:")), None
        )

    @property
    def slow(self) -> bool:
        return "slow" in self.marks

    @property
    def is_output(self) -> bool:
        return "output" in self.marks

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and self.not_run is None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README, the other texts at the top, and everything below docs/."""
    top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").rglob("README.md"))]
    return [*top, ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """All code blocks of a page, fenced and indented, in order."""
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    number, marks, indented, start = 0, [], [], 0
    while number < len(lines):
        line = lines[number]
        fence = _FENCE.match(line)
        if indented and (fence or (line.strip() and not line.startswith("    "))):
            yield Block(page, start, "", "\n".join(indented).rstrip(), tuple(marks))
            indented, marks = [], []
        if fence:
            end = number + 1
            while not lines[end].strip().startswith(fence["fence"]):
                end += 1
            cut = len(fence["indent"])
            body = "\n".join(text[cut:] for text in lines[number + 1 : end])
            yield Block(page, number + 1, fence["info"].strip().split(" ")[0], body, tuple(marks))
            marks, number = [], end
        elif mark := _MARK.match(line.strip()):
            marks.append(mark["text"])
        elif line.startswith("    ") and (indented or (number and not lines[number - 1].strip())):
            start = start if indented else number + 1
            indented.append(line[4:])
        elif indented and not line.strip():
            indented.append("")
        elif line.strip():
            marks = []
        number += 1
    if indented:
        yield Block(page, start, "", "\n".join(indented).rstrip(), tuple(marks))
