"""Write docs/reference/ from the code: commands, exit codes, Python names and settings.

Usage: python tools/write_reference.py [--check]

The page of environment variables is written by hand; a test compares it with what the source reads.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import typer

import niss
from niss import errors
from niss.cli import app
from niss.cli.errors import EXIT_CODES
from niss.settings import described
from niss.simulation import PRESETS, Config

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
GROUPS = {
    "Simulate": ("run", "compare", "resume", "RunResult", "Comparison", "write_report"),
    "Settings": ("Config", "make_config", "load_config", "preset"),
    "Plan and account": ("plan", "Plan", "ShareGraph", "effective_variance", "assess", "Statement"),
    "Hide single records": ("records",),
    "Errors": ("NissError", "errors"),
}
_ROW = re.compile(r"^(?P<name>\S.*?)\s{2,}(?P<text>\S.*)$")
# Of these classes the methods are part of the interface, of the others the fields.
_WITH_METHODS = ("Config", "Plan", "ShareGraph", "Statement")


def cli_page() -> Iterator[str]:
    """Every command with its arguments, options and examples."""
    root = typer.main.get_command(app)
    yield "# Command line"
    yield "Made from the program itself by `tools/write_reference.py`; `niss COMMAND --help` shows the same."
    yield (
        "Results go to stdout, progress and messages to stderr. See also [exit codes](exit-codes.md) and "
        "[environment variables](environment.md)."
    )
    commands = list(_commands(root, "niss"))
    yield _table(
        "Command | What it does",
        (
            (f"[`{path}`](#{path.replace(' ', '-')})", _sentence(command.help))
            for path, command in commands
            if not isinstance(command, click.Group)
        ),
    )
    yield "## Options before any command"
    yield _options(root)
    for path, command in commands:
        yield from _command(path, command)


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            if not child.hidden:
                yield f"{path} {name}", child
                yield from _commands(child, f"{path} {name}")


def _command(path: str, command: click.Command) -> Iterator[str]:
    yield f"## {path}"
    yield re.sub(r"[ \t]*\n[ \t]*(?=\S)", "\n", (command.help or "").strip())
    if isinstance(command, click.Group):
        shown = sorted(name for name, inner in command.commands.items() if not inner.hidden)
        yield f"Subcommands: {', '.join(f'`{name}`' for name in shown)}."
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    if arguments:
        cells = ((f"`{_metavar(one)}`", _cell(getattr(one, "help", ""))) for one in arguments)
        yield _table("Argument | Meaning", cells)
    if any(isinstance(one, click.Option) for one in command.params):
        yield _options(command)
    lines = re.findall(r"^[ \t]*(niss .*?)(?: {3,}(.*?))?[ \t]*$", command.epilog or "", re.MULTILINE)
    if lines:
        yield "<!-- not run: examples of the help text, checked against the options -->"
        # A remark stands behind the command, after several spaces.
        examples = [f"$ {command}" + (f"   # {remark}" if remark else "") for command, remark in lines]
        yield "```console\n" + "\n".join(examples) + "\n```"


def _options(command: click.Command) -> str:
    rows = []
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            value = "" if option.is_flag else f" `{_metavar(option)}`"
            default: Any = option.default
            if default is None or default == () or callable(default) or (option.is_flag and not default):
                shown = ""
            else:
                shown = _value(option.opts[0] if option.is_flag else default)
            rows.append((f"{names}{value}", shown, _cell(option.help)))
    return _table("Option | Default | Meaning", rows)


def _metavar(parameter: click.Parameter) -> str:
    name = parameter.human_readable_name if isinstance(parameter, click.Argument) else parameter.type.name
    given = parameter.metavar or (name or "").upper()
    return given.strip("[]").removesuffix("...") + ("..." if parameter.nargs == -1 else "")


def exit_codes_page() -> Iterator[str]:
    """Of the command line, and the exceptions that it makes them from."""
    yield "# Exit codes"
    yield "Made from `niss.cli.errors` and `niss.errors` by `tools/write_reference.py`."
    yield _table(
        "Code | Name | Meaning", ((str(code), name, _cell(meaning)) for code, name, meaning in EXIT_CODES)
    )
    yield "In Python the same errors are exceptions; the command line turns them into codes:"
    kinds = (errors.NissError, *errors.NissError.__subclasses__())
    yield _table(
        "In Python | Code | Meaning",
        (
            (f"`niss.{kind.__name__}`", str(kind.exit_code), _sentence(kind.__doc__))
            for kind in kinds
            if kind.__module__ == errors.__name__
        ),
    )
    yield (
        "Every intended error is two lines on stderr: `error:` names the field and what is wrong, `hint:` says "
        "what to do. Anything else is a defect of ours: then the two lines name the file that holds the "
        "traceback, and `niss --debug` shows it at once."
    )


def settings_page() -> Iterator[str]:
    """Everything on it is said on the fields themselves."""
    yield "# Settings"
    yield (
        "Made from `niss.simulation` by `tools/write_reference.py`. All keys of a TOML file, of "
        "`niss run --set KEY=VALUE` and of `niss.make_config`. Every key has a default. Unknown keys are refused "
        "with the nearest valid name."
    )
    yield f"Presets shipped with the package (`--preset`): {', '.join(f'`{name}`' for name in PRESETS)}."
    yield "## Top level"
    yield settings_table(Config)
    hints = get_type_hints(Config)
    for section in ("data", "model", "training", "privacy", "protocol", "methods"):
        several = section == "methods"
        kind = get_args(hints[section])[0] if several else hints[section]
        yield "## [[methods]]" if several else f"## [{section}]"
        yield str(kind.__doc__).partition("\n\n")[0]
        yield settings_table(kind)


def settings_table(kind: type[Any]) -> str:
    """A row for each setting."""
    rows = ((f"`{one.name}`", one.in_words, _value(one.default), one.help) for one in described(kind))
    return _table("Key | Type | Default | Meaning", rows)


def _value(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def python_page() -> Iterator[str]:
    """The names in `niss.__all__`, from signatures and docstrings."""
    grouped = {name for names in GROUPS.values() for name in names}
    if ungrouped := set(niss.__all__) - grouped - {"__version__"}:
        raise SystemExit(f"tools/write_reference.py: give these a group: {', '.join(sorted(ungrouped))}")
    yield "# Python"
    yield (
        "Made from `niss.__all__` by `tools/write_reference.py`. `import niss` is quick: each name is loaded when "
        "it is first used. Rooms below these names (`niss.protocol`, `niss.flower`, `niss.tracker`, `niss.attacks`) "
        "have docstrings of their own; [the guides](../tutorial.md#where-next) show how to use them."
    )
    for title, names in GROUPS.items():
        yield f"## {title}"
        for name in names:
            yield f"### niss.{name}"
            yield from _entry(name, getattr(niss, name))


def _entry(name: str, found: Any) -> Iterator[str]:
    if inspect.ismodule(found):
        yield markdown(found.__doc__)
        for inner in getattr(found, "__all__", ()):
            yield f"#### niss.{name}.{inner}"
            yield from _entry(f"{name}.{inner}", getattr(found, inner))
        kinds = [one for one in vars(found).values() if inspect.isclass(one) and issubclass(one, Exception)]
        rows = ((f"`{one.__name__}`", str(one.exit_code), _lines(one.__doc__ or "")) for one in kinds)
        if kinds:
            yield _table("Error | Exit code | Meaning", rows)
        return
    if name == "Config":
        yield "Its keys are on the page of [settings](settings.md)."
    elif name == "Plan":
        yield settings_table(found)
    elif not inspect.isclass(found) or not (dataclasses.is_dataclass(found) or issubclass(found, Exception)):
        yield _signature(name, found)
    yield markdown(found.__doc__)
    fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
    if name == "Statement":
        yield "Fields: " + ", ".join(f"`{one.name}`" for one in fields) + "."
    if name in _WITH_METHODS:
        yield from _members(name, found)
    elif fields:
        kinds = [f"`{_type(one.type)}`".replace(" | None`", "` or `None`") for one in fields]
        yield _table(
            "Field | Type", ((f"`{one.name}`", kind) for one, kind in zip(fields, kinds, strict=True))
        )


def _members(name: str, found: type) -> Iterator[str]:
    for member, value in vars(found).items():
        doc = inspect.getdoc(value)
        if member.startswith("_") or not doc:
            continue
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            yield f"`{name}.{member}`: {_lines(doc)}"
        elif inspect.isfunction(value) or isinstance(value, classmethod):
            yield _signature(f"{name}.{member}", getattr(found, member))
            yield markdown(doc)


def _signature(name: str, found: Any) -> str:
    signature = inspect.signature(found)
    lines: list[str] = []
    for one in signature.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        text = ("*" if one.kind is inspect.Parameter.VAR_POSITIONAL else "") + one.name
        text += "" if one.annotation is one.empty else f": {_type(one.annotation)}"
        lines.append(text if one.default is one.empty else f"{text} = {one.default!r}")
    back = signature.return_annotation
    arrow = "" if back is signature.empty or back in (None, "None") else f" -> {_type(back)}"
    written = f"niss.{name}({', '.join(lines)}){arrow}"
    if len(written) > 100:
        written = f"niss.{name}(\n" + "".join(f"    {line},\n" for line in lines) + f"){arrow}"
    return f"<!-- not run: a signature -->\n```python\n{written}\n```"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.replace("NDArray[np.floating[Any]]", "NDArray")


def markdown(doc: str | None) -> str:
    """A docstring as Markdown: columns of names and meanings become a table, the rest stays."""
    blocks = []
    for paragraph in inspect.cleandoc(doc or "").split("\n\n"):
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines) or paragraph.startswith((">>>", "- ")):
            blocks.append(
                f"```text\n{inspect.cleandoc(paragraph)}\n```" if paragraph[0] in " >" else paragraph
            )
        elif _ROW.match(lines[0]) and not lines[0].startswith(" "):
            blocks.append(_columns(lines))
        else:
            blocks.append(_lines(paragraph))
    return "\n\n".join(blocks)


def _columns(lines: list[str]) -> str:
    """Names and meanings from a docstring's paragraph; a longer meaning goes on in the next line."""
    rows: dict[str, str] = {}
    name = ""
    for line in lines:
        found = _ROW.match(line)
        if found and not line.startswith(" "):
            name = found["name"]
            rows[name] = found["text"]
        else:
            rows[name] += " " + line.strip()
    return _table("Name | Meaning", ((name, text.replace("|", "\\|")) for name, text in rows.items()))


def _table(header: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Columns of codes stand at the right."""
    rules = ["---:" if "code" in name.lower() else "---" for name in header.split(" | ")]
    lines = [f"| {header} |", f"| {' | '.join(rules)} |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _sentence(text: str | None) -> str:
    return _cell((text or "").strip().split("\n\n")[0])


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


PAGES = {"cli": cli_page, "exit-codes": exit_codes_page, "python": python_page, "settings": settings_page}


def main() -> None:
    stale = []
    for name, parts in PAGES.items():
        path, text = FOLDER / f"{name}.md", "\n\n".join(part for part in parts() if part) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(FOLDER.parents[1]))
    if stale and "--check" in sys.argv:
        sys.exit(f"docs/reference is out of date ({', '.join(stale)}); run: make docs")


if __name__ == "__main__":
    main()
