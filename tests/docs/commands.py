"""Commands as they stand in the text, checked against the program: names, options, values, without running them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import lru_cache

import click
import typer

from niss.cli import app

_SEPARATORS = {"|", "||", "&&", ";", "&", "do", "then", "(", ")", ">", ">>", "<", "$("}
_ENDED_BY_SHELL = re.compile(r"^\d?[<>]")


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
