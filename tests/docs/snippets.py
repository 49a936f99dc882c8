"""The code blocks of README and docs, found and told apart, and their commands, checked without running them.

```python, ```bash      run, in the order of the page, in one folder and with one set of Python names
```console, ```, and    shown, not run; every `niss` and `make` command in them is checked against the
indented lines          program
<!-- not run: WHY -->   before a block that would be run: shown only, and says why
<!-- slow -->           run by `make test-all` only
<!-- output -->         before a ```text block: exactly what the block before it prints
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import click
import typer

from niss.cli import app

ROOT = Path(__file__).parents[2]
RUNNABLE = ("python", "bash")
_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_SEPARATORS = {"|", "||", "&&", ";", "&", "do", "then", "(", ")", ">", ">>", "<", "$("}
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


def command_lines(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell or console block that begin with `niss` or `make`, split into words."""
    text = re.sub(r"\\\n\s*", " ", text)
    console = any(line.startswith("$ ") for line in text.splitlines())
    for raw in text.splitlines():
        line = raw.strip()
        if console:
            if not line.startswith("$ "):
                continue
            line = line[2:]
        yield from _simple_commands(line)


def _simple_commands(line: str) -> Iterator[list[str]]:
    if not re.search(r"\b(niss|make)\b", line):
        return
    for inner in re.findall(r"\$\(((?:niss|make) [^()]*)", line):
        yield from _simple_commands(inner)
    line = re.sub(r"\$\([^()]*\)", "VALUE", line)
    splitter = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    splitter.whitespace_split = True
    try:
        words = list(splitter)
    except ValueError:
        return  # A quotation that goes on in the next line: no command of ours.
    command: list[str] = []
    for word in [*words, ";"]:
        if word in _SEPARATORS or set(word) <= set(";&|()<>"):
            if command and _program(command[0]) in ("niss", "make"):
                yield [_program(command[0]), *command[1:]]
            command = []
        else:
            command.append(word)


def _program(word: str) -> str:
    return word.rsplit("/", 1)[-1]


def fault(words: list[str], targets: set[str]) -> str | None:
    """What is wrong with a command, or None."""
    if words[0] == "make":
        wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        unknown = [word for word in wanted if word not in targets]
        return f"make has no target {unknown[0]}" if unknown else None
    return _niss_fault(_root(), words[1:], "niss")


@lru_cache(maxsize=1)
def _root() -> click.Command:
    return typer.main.get_command(app)


def _niss_fault(command: click.Command, words: list[str], path: str) -> str | None:
    if isinstance(command, click.Group):
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
        while words and words[0].startswith("-"):
            if words[0] not in known:
                return f"{path} has no option {words[0]}"
            words = words[1:]
        if not words or words[0].isupper():
            return None  # `niss` alone, or with a placeholder: the help.
        if words[0] not in command.commands:
            return f"{path} has no command {words[0]}"
        return _niss_fault(command.commands[words[0]], words[1:], f"{path} {words[0]}")
    try:
        command.make_context(path, list(words), resilient_parsing="--help" in words)
    except click.UsageError as error:
        # A value in capitals is a placeholder; what is asked for is that the option exists.
        placeholder = isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter)
        if placeholder and any(word.isupper() or "$" in word for word in words):
            return None
        return f"{path}: {error.format_message()}"
    except click.exceptions.Exit:
        return None
    return None
