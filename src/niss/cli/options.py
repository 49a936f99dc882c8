"""Commands made from dataclasses: each field of a frozen dataclass is an option or an argument of the command.

The field has the type and the default; its metadata, made by `option` or `argument`, has the help, the names and what
the shell may complete. A dataclass elsewhere, such as that of an attack, writes the same metadata as a plain dict:

    help        what the option means; required
    names       the names of the option, `("--lr",)`; by default `--` and the name of the field
    choices     the values that the shell offers on TAB, or a function that finds them; after a comma too where the
                field is a tuple
    complete    instead of `choices`, a function from what is typed so far to what is offered
    argument    True for a positional argument
    metavar, min, max, envvar     as in typer

Types are those of typer. Beyond them, `tuple[str, ...]` and `tuple[float, ...]` are one option with commas, while
`list[str]` may be given several times; a `bool` that is False by default has no `--no-...`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
import typer
from typer.core import TyperGroup

from niss.cli.completion import one_of, several_of
from niss.cli.terminal import be_quiet
from niss.errors import ConfigError

Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=be_quiet, help="No progress and no remarks; results and errors."),
]
"""The `--quiet` of a command, which is also an option of `niss` itself; `terminal.is_quiet` asks for both."""

Command = Callable[..., None]

_TYPER = ("help", "metavar", "min", "max", "envvar")
"""The metadata that typer takes as it is; what else a field says is for the command itself."""


def examples(*lines: str, more: str = "") -> str:
    """The epilog of a command: a command line a paragraph, then `more`. Tests parse and check each line."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines), *([more] if more else [])]) + "\n"


def option(default: Any = dataclasses.MISSING, *names: str, help: str, **settings: Any) -> Any:
    """A field that is an option. Without a default it must be given; see above for the settings."""
    return dataclasses.field(default=default, metadata={"help": help, "names": names, **settings})


def argument(default: Any = dataclasses.MISSING, *, help: str, **settings: Any) -> Any:
    """A field that is a positional argument."""
    return option(default, help=help, argument=True, **settings)


def json_option(help: str = "Print the result as JSON.") -> Any:
    """The field `as_json`, which is `--json` in every command that has it."""
    return option(False, "--json", help=help)


def from_options(*kinds: type[Any], quiet: bool = False) -> Callable[[Callable[..., None]], Command]:
    """Turn a function of one instance of each of `kinds` into a function of all their fields, by name.

    That is what typer makes a command of; it can be called from Python too, where fields left out have their defaults.

    With `quiet` the command takes `--quiet` behind its name too, which works through `terminal.is_quiet`.
    """

    def decorate(run: Callable[..., None]) -> Command:
        def command(**values: Any) -> None:
            values.pop("quiet", None)
            run(*(_instance(kind, values) for kind in kinds))

        parameters = [_parameter(field, hint) for kind in kinds for field, hint in _fields(kind)]
        if quiet:
            parameters.append(_keyword("quiet", Quiet, False))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__name__, command.__doc__, command.__module__ = run.__name__, run.__doc__, run.__module__
        return command

    return decorate


def flag_of(field: dataclasses.Field[Any]) -> str:
    """How the field is written on the command line, for messages about it."""
    names = field.metadata.get("names")
    if field.metadata.get("argument"):
        return str(field.metadata.get("metavar", field.name.upper())).strip("[]")
    return str(names[0]) if names else "--" + field.name.replace("_", "-")


def lazy_group(load: Callable[[], typer.Typer]) -> type[TyperGroup]:
    """A group whose commands are made when the first of them is asked for, so that `niss --help` need not load them."""

    class LazyGroup(TyperGroup):
        _loaded: dict[str, click.Command] | None = None

        @property
        def commands(self) -> dict[str, click.Command]:  # type: ignore[override]
            if self._loaded is None:
                self._loaded = dict(typer.main.get_group(load()).commands)
            return self._loaded

        @commands.setter
        def commands(self, _: object) -> None:
            """Click sets the commands it was given, which are none."""

    return LazyGroup


def _fields(kind: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind) if "help" in field.metadata]


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    metadata = field.metadata
    names, choices, complete = (metadata.get(key) for key in ("names", "choices", "complete"))
    default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
    item = _listed(hint)
    if choices:
        complete = one_of(choices) if item is None else several_of(choices)
    if item is not None:
        hint = str if default is not None else str | None
        if isinstance(default, tuple):
            default = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in default)
    if default is False and not names:
        names = (flag_of(field),)
    settings = {key: metadata[key] for key in _TYPER if key in metadata}
    kind = typer.Argument if metadata.get("argument") else typer.Option
    info = kind(*(names or ()), autocompletion=complete, **settings)
    return _keyword(field.name, Annotated[hint, info], default)


def _keyword(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)


def _listed(hint: Any) -> type[Any] | None:
    """The type of the items of `tuple[item, ...]`, also where it may be None; None for any other type."""
    for one in (hint, *get_args(hint)):
        if get_origin(one) is tuple:
            return get_args(one)[0]  # type: ignore[no-any-return]
    return None


def _instance(kind: type[Any], values: dict[str, Any]) -> Any:
    chosen = {field.name: values[field.name] for field, _ in _fields(kind) if field.name in values}
    for field, hint in _fields(kind):
        item, value = _listed(hint), chosen.get(field.name)
        if item is not None and isinstance(value, str):
            chosen[field.name] = split_list(value, item, flag_of(field))
    return kind(**chosen)


def split_list(text: str, item: type[Any], flag: str) -> tuple[Any, ...]:
    """The items of a list with commas. `ConfigError` where one of them is not a number and should be."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tuple(item(part) for part in parts)
    except ValueError:
        raise ConfigError(
            f"expected numbers separated by commas, got {text!r}", field=flag, hint="for example 0,0.5,1"
        ) from None
