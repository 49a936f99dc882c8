"""Every command has examples in its help, and every example is a command line that parses."""

from __future__ import annotations

import re
import shlex

import click
import pytest
import typer

from niss.cli import app

ROOT = typer.main.get_command(app)


def commands(command: click.Command, *path: str) -> dict[tuple[str, ...], click.Command]:
    found = {path: command}
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            found |= commands(inner, *path, name)
    return found


COMMANDS = commands(ROOT)


def examples(command: click.Command) -> list[str]:
    """The lines that begin with `niss `, less the remark behind three spaces or more."""
    lines = [line.strip() for line in (command.epilog or "").splitlines()]
    return [re.split(r"\s{3,}", line)[0] for line in lines if line.startswith("niss ")]


def parsed(line: str) -> tuple[str, ...]:
    """The names of the command that `line` leads to; click refuses what it does not know."""
    command, names, words = ROOT, ("niss",), shlex.split(line)[1:]
    context = command.make_context("niss", words)
    while isinstance(command, click.Group):
        name, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert name is not None
        assert inner is not None
        command, names = inner, (*names, name)
        context = command.make_context(name, rest, parent=context)
    return names[1:]


def test_the_walk_finds_the_commands() -> None:
    assert {("run",), ("attack", "joint"), ("reproduce", "figure-3"), ("data", "get"), ("export",)} <= set(
        COMMANDS
    )


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(("niss", *path)))
def test_each_command_has_examples_that_parse(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    lines = examples(command)
    assert lines, "no example in the epilog"
    assert (command.epilog or "").startswith("Examples:")
    for line in lines:
        assert parsed(line)[: len(path)] == path, line


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(("niss", *path)))
def test_each_command_and_option_says_what_it_does(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert command.help
    for one in command.params:
        assert getattr(one, "help", None), one.name


@pytest.mark.parametrize("line", ["niss run --roundz 3", "niss attack jointly", "niss keys new north.key"])
def test_a_wrong_example_would_be_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        parsed(line)
