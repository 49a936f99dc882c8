"""Commands made from dataclasses: each described field of a frozen dataclass is an option of the command.

    @dataclass(frozen=True)
    class Work:
        rounds: Annotated[int, Doc("How many rounds.")] = 3
        names: Annotated[tuple[str, ...], Doc("Some names, separated by commas.")] = ("a", "b")

    @from_options(Work)
    def command(work: Work) -> None: ...

Fields are described as those of all settings are (`niss.settings`); one without `Doc` is no option. `option` and
`argument` say what else a command line wants to know:

    names       the names of the option, if not `--` and the name of the field
    metavar, min, max, envvar     as in typer

Types are those of typer. Beyond them, `tuple[str, ...]`, `tuple[int, ...]` and `tuple[float, ...]` are one option with
commas, while `list[str]` may be given several times. A `bool` that is False by default has no `--no-...`.

Flags that change settings are some fields of those settings (`Flags`); their help names the default there.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from keyword import iskeyword
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click
import typer
from typer.core import TyperGroup

from niss.claims import digits
from niss.cli.terminal import be_quiet
from niss.errors import ConfigError
from niss.settings import argument as argument
from niss.settings import check, described
from niss.settings import option as option

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", callback=be_quiet, help="Print only results and errors.")
]
"""The `--quiet` of a command, which is also an option of `niss` itself; `terminal.is_quiet` asks for both."""

Command = Callable[..., None]
_TYPER = ("help", "metavar", "min", "max", "envvar")


def examples(*lines: str, more: str = "") -> str:
    """The epilog of a command: a command line a paragraph, then `more`. Tests parse and check each line."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines), *([more] if more else [])]) + "\n"


class Commands(TyperGroup):
    """A group that says once which command may have been meant: click and typer would both say it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return click.Group.resolve_command(self, ctx, args)


def register(app: typer.Typer, name: str) -> Callable[[Command], Command]:
    """Make a function a command of `app`. Its docstring is the help; what follows a line `Examples:` is the epilog."""

    def decorate(command: Command) -> Command:
        text, _, rest = inspect.cleandoc(command.__doc__ or "").partition("\nExamples:\n")
        lines = [line for line in rest.splitlines() if line.startswith("niss ")]
        more = " ".join(line for line in rest.splitlines() if not line.startswith("niss "))
        app.command(name, help=text.strip(), epilog=examples(*lines, more=more.strip()))(command)
        return command

    return decorate


@dataclasses.dataclass(frozen=True)
class Flags:
    """Some settings as flags of a command, which is given a dictionary of those that were typed, by their keys.

    root  the settings (`niss.settings`)
    keys  of each flag the dotted key of its setting in `root`
    """

    root: type[Any]
    keys: Mapping[str, str]

    @classmethod
    def all_of(cls, root: type[Any]) -> Flags:
        """A flag for every setting, by its name."""
        return cls(root, {_flag(one.name, {}): one.name for one in described(root)})

    def parameters(self) -> list[_Parameter]:
        """An option for each flag: absent unless it is typed; its help names the default of the setting."""
        return [self._parameter(flag, key) for flag, key in self.keys.items()]

    def _parameter(self, flag: str, key: str) -> _Parameter:
        *path, last = key.split(".")
        kind = self.root
        for step in path:
            kind = get_type_hints(kind)[step]
        setting = next(one for one in described(kind) if one.name == last)
        kinds = {_bare(one) for one in setting.members}
        # A number or a word is text until the settings are checked.
        number = next((one for one in (int, float) if one in kinds), str)
        words = get_args(setting.members[0]) if get_origin(setting.members[0]) is Literal else ()
        text, usual = setting.help.partition(". ")[0].removesuffix(".").replace("`", ""), setting.default
        if not all(word in text for word in words):
            text += ": " + ", ".join(words)
        if bool in kinds:
            return _Parameter(key, bool, None, False, {"help": text + ".", "names": (flag,), "flag": flag})
        if usual is not None and usual is not dataclasses.MISSING:
            text += f" (default: {digits(usual) if isinstance(usual, float) else usual})"
        settings = {"help": text + ".", "names": (flag,), "flag": flag}
        hint = str if any(get_origin(one) is Literal for one in kinds) else number
        return _Parameter(key, hint | None, None, None, settings)

    def check(self, given: Mapping[str, Any]) -> Any:
        """The settings with these values; a `ConfigError` names the flags."""
        try:
            return check(self.root, given)
        except ConfigError as error:
            message = error.message
            for flag, key in self.keys.items():
                message = re.sub(rf"^{re.escape(key)}: ", f"{flag}: ", message, flags=re.MULTILINE)
            raise ConfigError(message, hint=error.hint) from None

    def typed(self, given: Mapping[str, Any]) -> list[str]:
        """The flags behind those values."""
        return [flag for flag, key in self.keys.items() if key in given]


def _bare(hint: Any) -> Any:
    """A type without what is noted at it."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def from_options(*kinds: type[Any] | Flags, quiet: bool = False) -> Callable[[Callable[..., None]], Command]:
    """Turn a function of one instance of each of `kinds` into a function of all their fields, by name.

    That is what typer makes a command of; it can be called from Python too, where fields left out have their defaults.
    With `quiet` the command takes `--quiet` behind its name too, which works through `terminal.is_quiet`.
    """
    groups = [(kind, kind.parameters() if isinstance(kind, Flags) else _describe(kind)) for kind in kinds]

    def decorate(run: Callable[..., None]) -> Command:
        def command(**values: Any) -> None:
            run(*(_made(kind, parameters, values) for kind, parameters in groups))

        parameters = [one.for_typer() for _, parameters in groups for one in parameters]
        if quiet:
            parameters.append(_keyword("quiet", Quiet, False))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__name__, command.__doc__, command.__module__ = run.__name__, run.__doc__, run.__module__
        return command

    return decorate


def flag_of(field: dataclasses.Field[Any]) -> str:
    """How a field is written on the command line, for messages about it."""
    return _flag(field.name, field.metadata)


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """The KEY=VALUE pairs of `--set`; a value is written as in TOML, and a bare word is a string."""
    values: dict[str, Any] = {}
    for setting in settings or []:
        key, separator, text = (part.strip() for part in setting.partition("="))
        if not separator:
            hint = "for example --set privacy.epsilon=8"
            raise ConfigError(f"expected KEY=VALUE, got {setting!r}", field="--set", hint=hint)
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = text
    return values


def lazy_app(load: Callable[[], typer.Typer], **settings: Any) -> typer.Typer:
    """A group whose commands are made when the first of them is asked for, so that `niss --help` need not load them.

    settings   its help and epilog, as in typer
    """

    class LazyGroup(Commands):
        _loaded: dict[str, click.Command] | None = None

        @property
        def commands(self) -> dict[str, click.Command]:
            if self._loaded is None:
                self._loaded = dict(typer.main.get_group(load()).commands)
            return self._loaded

        @commands.setter
        def commands(self, _: object) -> None:
            """Click sets the commands it was given; there are none."""

    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode="rich", **settings)
    # Typer makes a group of an app without commands of its own only if it has a callback.
    app.callback()(lambda: None)
    return app


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A field as a command line needs it.

    hint       its type; of a list with commas, that of the list
    item       of a list with commas, the type of its items
    default    its default, or `inspect.Parameter.empty`
    settings   help, names and the like, as in `option`
    """

    name: str
    hint: Any
    item: type[Any] | None
    default: Any
    settings: dict[str, Any]

    @property
    def keyword(self) -> str:
        """Its name as an argument in Python; that of a dotted key is the name of the flag."""
        name = self.settings.get("flag", self.name).lstrip("-").replace("-", "_")
        return str(name + "_" * iskeyword(name))

    def for_typer(self) -> inspect.Parameter:
        """What typer reads: a type annotated with an option or argument, and a default."""
        hint, default = self.hint, self.default
        if self.item is not None:
            hint = str | None if default is None else str
            if isinstance(default, tuple):
                default = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in default)
        names = self.settings.get("names") or ((_flag(self.name, {}),) if default is False else ())
        make = typer.Argument if self.settings.get("argument") else typer.Option
        more = {key: self.settings[key] for key in _TYPER if self.settings.get(key) is not None}
        return _keyword(self.keyword, Annotated[hint, make(*names, **more)], default)

    def parse(self, value: Any) -> Any:
        """The value of the field from what was typed. `ConfigError` where a list should hold numbers and does not."""
        if self.item is None or not isinstance(value, str):
            return value
        try:
            return tuple(self.item(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            raise ConfigError(
                f"expected numbers separated by commas, got {value!r}",
                field=_flag(self.name, self.settings),
                hint="for example 0,0.5,1",
            ) from None


def _describe(kind: type[Any]) -> list[_Parameter]:
    """The fields of a dataclass that are options: its own first, then those it inherits."""
    hints, fields = get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    order = [name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})]
    parameters = []
    for setting in sorted(described(kind), key=lambda setting: order.index(setting.name)):
        # A word is text until the settings are checked.
        hint = str if get_origin(hints[setting.name]) is Literal else hints[setting.name]
        default = inspect.Parameter.empty if setting.default is dataclasses.MISSING else setting.default
        items = [get_args(one)[0] for one in (hint, *get_args(hint)) if get_origin(one) is tuple]
        settings = {"help": setting.help, **fields[setting.name].metadata}
        parameters.append(_Parameter(setting.name, hint, items[0] if items else None, default, settings))
    return parameters


def _made(kind: type[Any] | Flags, parameters: list[_Parameter], values: dict[str, Any]) -> Any:
    """One dataclass out of the values of all; of flags the values that were typed."""
    chosen = {one.name: one.parse(values[one.keyword]) for one in parameters if one.keyword in values}
    if isinstance(kind, Flags):
        return {key: value for key, value in chosen.items() if value is not None and value is not False}
    return kind(**chosen)


def _flag(name: str, settings: Any) -> str:
    if settings.get("argument"):
        return str(settings.get("metavar", name.upper())).strip("[]")
    return str(settings["names"][0]) if settings.get("names") else "--" + name.rstrip("_").replace("_", "-")


def _keyword(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
