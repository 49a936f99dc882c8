"""The reference pages of the command line, made from the typer app and from the error classes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click
import typer

from niss import errors
from niss.cli import app
from niss.cli.errors import EXIT_CODES


def cli_page() -> str:
    root = typer.main.get_command(app)
    parts = [
        "# Command line",
        "Made from the program itself by `tools/write_reference.py`; `niss COMMAND --help` shows the same.",
        "Results go to stdout, progress and messages to stderr. See also [exit codes](exit-codes.md) and "
        "[environment variables](environment.md).",
        _index(root),
    ]
    parts += _options_of_root(root)
    for path, command in _commands(root, "niss"):
        parts += _section(path, command)
    return "\n\n".join(parts) + "\n"


def exit_codes_page() -> str:
    rows = ["| Code | Name | Meaning |", "| ---: | --- | --- |"]
    rows += [f"| {one.code} | {one.name} | {_cell(one.meaning)} |" for one in EXIT_CODES]
    raised = ["| In Python | Code | Meaning |", "| --- | ---: | --- |"]
    for kind in (errors.NissError, *errors.NissError.__subclasses__()):
        if kind.__module__ == errors.__name__:
            raised.append(f"| `niss.{kind.__name__}` | {kind.exit_code} | {_sentence(kind.__doc__)} |")
    return (
        "\n\n".join(
            [
                "# Exit codes",
                "Made from `niss.cli.errors` and `niss.errors` by `tools/write_reference.py`.",
                "\n".join(rows),
                "In Python the same errors are exceptions; the command line turns them into codes:",
                "\n".join(raised),
                "Every intended error is two lines on stderr: `error:` names the field and what is wrong, `hint:` says "
                "what to do. Anything else is a defect of ours: then the two lines name the file that holds the "
                "traceback, and `niss --debug` shows it at once.",
            ]
        )
        + "\n"
    )


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            if not child.hidden:
                yield f"{path} {name}", child
                yield from _commands(child, f"{path} {name}")


def _index(root: click.Command) -> str:
    rows = ["| Command | What it does |", "| --- | --- |"]
    for path, command in _commands(root, "niss"):
        if not isinstance(command, click.Group):
            rows.append(f"| [`{path}`](#{path.replace(' ', '-')}) | {_sentence(command.help)} |")
    return "\n".join(rows)


def _options_of_root(root: click.Command) -> list[str]:
    return ["## Options before any command", _options(root)]


def _section(path: str, command: click.Command) -> list[str]:
    parts = [f"## {path}", _plain(command.help or "")]
    if isinstance(command, click.Group):
        shown = sorted(name for name, inner in command.commands.items() if not inner.hidden)
        names = ", ".join(f"`{name}`" for name in shown)
        parts.append(f"Subcommands: {names}.")
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    if arguments:
        rows = ["| Argument | Meaning |", "| --- | --- |"]
        rows += [f"| `{_metavar(one)}` | {_cell(getattr(one, 'help', '') or '')} |" for one in arguments]
        parts.append("\n".join(rows))
    if any(isinstance(one, click.Option) for one in command.params):
        parts.append(_options(command))
    if examples := _examples(command.epilog or ""):
        parts.append("<!-- not run: examples of the help text, checked against the options -->")
        parts.append("```console\n" + "\n".join(examples) + "\n```")
    return [part for part in parts if part]


def _options(command: click.Command) -> str:
    rows = ["| Option | Default | Meaning |", "| --- | --- | --- |"]
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            value = "" if option.is_flag else f" `{_metavar(option)}`"
            rows.append(f"| {names}{value} | {_default(option)} | {_cell(option.help or '')} |")
    return "\n".join(rows)


def _metavar(parameter: click.Parameter) -> str:
    given = parameter.metavar
    if given is None:
        given = (
            parameter.human_readable_name if isinstance(parameter, click.Argument) else parameter.type.name
        )
        given = given.upper()
    return given.strip("[]").removesuffix("...") + ("..." if parameter.nargs == -1 else "")


def _default(option: click.Option) -> str:
    default: Any = option.default
    if default is None or default == () or callable(default):
        return ""
    if option.is_flag:
        return "" if not default else f"`{option.opts[0]}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _examples(epilog: str) -> list[str]:
    found = []
    for line in epilog.replace("Example:", "").replace("Examples:", "").splitlines():
        if line.strip().startswith("niss "):
            # A remark stands behind the command, after several spaces.
            command, *remark = re.split(r"\s{3,}", line.strip(), maxsplit=1)
            found.append(f"$ {command}" + (f"   # {remark[0]}" if remark else ""))
    return found


def _sentence(text: str | None) -> str:
    return _cell((text or "").strip().split("\n\n")[0])


def _plain(text: str) -> str:
    return re.sub(r"[ \t]*\n[ \t]*(?=\S)", "\n", text.strip())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
