"""Settings, declared once: a frozen dataclass whose fields carry type, default, range and help.

    @settings
    class Target:
        \"\"\"What every client is promised.\"\"\"

        clip: Annotated[Positive, Doc("L2 bound on a client's update.")] = 0.5

Whatever shows or reads settings is a view of that one field: a flag of the command line, a key of TOML, JSON or
Flower's `run_config`, a row of the reference, a control of the planner's page. `described` is what the views are made
from. Values are checked by pydantic when one is made; faults are a `ConfigError` that names the key and the fix.

Nothing heavy is imported before a first value is made, so that `niss --help` can show the flags at once.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

from niss.claims import digits
from niss.errors import ConfigError, all_faults, meant

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import CoreSchema, ErrorDetails

T = TypeVar("T")

Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Probability = Annotated[float, Gt(0), Lt(1)]
Share = Annotated[float, Ge(0), Lt(1)]
Planned = Literal["planned"]
"""The planner chooses. TOML and `run_config` have no null, so that it is a word, and the same one everywhere."""


@dataclasses.dataclass(frozen=True)
class OneOf:
    """In an annotation of text: one of the names that are registered by the time a value is checked."""

    names: Callable[[], Iterable[str]]

    def check(self, value: str) -> str:
        """The value itself, if it is one of the names."""
        allowed = tuple(self.names())
        if value not in allowed:
            hint = meant(value, allowed) or "use one of: " + ", ".join(allowed)
            raise ValueError(f"unknown name {value!r}; {hint}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def settings(kind: type[T]) -> type[T]:
    """A frozen dataclass of keywords whose values are checked against their annotations; unknown names are refused.

    `dataclasses.replace` checks again. A `__post_init__` sees checked values and may refuse what they are together.
    """
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
    made.__pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}

    def __init__(self: Any, **values: Any) -> None:
        # With what its `__post_init__` noted beside the fields.
        vars(self).update(vars(check(made, values)))

    made.__init__ = __init__
    return typing.cast("type[T]", made)


def option(default: Any = dataclasses.MISSING, *names: str, **more: Any) -> Any:
    """A field of which a command line wants to know more (`niss.cli.options`); without a default it must be given."""
    return dataclasses.field(default=default, metadata={"names": names, **more})


def argument(default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """A field that is a positional argument."""
    return option(default, argument=True, **more)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of settings, as its views need it.

    name     of the field
    hint     its type, with the ranges in it
    default  what it is unless it is given; `dataclasses.MISSING`: it must be
    help     what it means
    """

    name: str
    hint: Any
    default: Any
    help: str

    @property
    def members(self) -> tuple[Any, ...]:
        """The types of which it may be, None left out."""
        hint = get_args(self.hint)[0] if get_origin(self.hint) is Annotated else self.hint
        union = get_origin(hint) in (Union, types.UnionType)
        return tuple(one for one in (get_args(hint) if union else (self.hint,)) if one is not type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be, where there are any."""
        return tuple(str(word) for one in self.members for word in _words(one))

    @property
    def in_words(self) -> str:
        """Its type, as the reference says it."""
        return " or ".join(_in_words(one) for one in self.members)


def described(kind: type[Any]) -> Iterator[Setting]:
    """The fields of settings that have a help text, in their order; a field without one is no setting."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        text = next((note.documentation for note in notes if isinstance(note, Doc)), None)
        if text is None:
            continue
        rest = tuple(note for note in notes if not isinstance(note, Doc))
        bare = Annotated[(get_args(hint)[0], *rest)] if rest else get_args(hint)[0]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        yield Setting(field.name, bare, default, text)


def check(kind: type[T], values: Mapping[str, Any]) -> T:
    """Settings of that kind from nested dictionaries, as they stand in a TOML file.

    Raises a `ConfigError` that names every wrong key, what is wrong with it and the nearest valid name.
    """
    return typing.cast("T", _checked(kind, lambda adapter: adapter.validate_python(dict(values))))


def check_json(kind: type[T], text: bytes | str) -> T:
    """Settings of that kind from the JSON of a stranger: nothing is converted, a number is no text and no switch.

    Raises a `ConfigError`, as `check` does.
    """
    return typing.cast("T", _checked(kind, lambda adapter: adapter.validate_json(text, strict=True)))


def _checked(kind: type[Any], read: Callable[[TypeAdapter[Any]], Any]) -> Any:
    from pydantic import ValidationError

    try:
        return read(_adapter(kind))
    except ValidationError as error:
        raise explain(error, kind) from None


def to_values(value: Any) -> dict[str, Any]:
    """Settings as dictionaries of what JSON and TOML can hold, without what is None; `check` reads them again."""
    values: dict[str, Any] = _adapter(type(value)).dump_python(value, mode="json", exclude_none=True)
    return values


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
# More are not looked at: JSON of a stranger may have any number of them.
_MOST_FAULTS = 100
# Digits or letters of a wrong value that are repeated to its author.
_MOST_SHOWN = 200


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """What reads and writes settings of that kind; made once."""
    from pydantic import TypeAdapter

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def explain(error: ValidationError, root: type[Any]) -> ConfigError:
    """All faults of settings of the kind `root`, by the names that the user wrote."""
    by_field: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors()[:_MOST_FAULTS]:
        by_field.setdefault(_field_name(problem["loc"]), []).append(problem)
    # A list that lost an item to a fault is then found too short: only the fault is told.
    inner = [field for field in by_field if not any(other.startswith(f"{field}.") for other in by_field)]
    return all_faults([_fault(field, by_field[field], root) for field in inner])


def _fault(field: str, problems: list[ErrorDetails], root: type[Any]) -> ConfigError:
    """What is wrong with one setting, and what may have been meant."""
    # Each choice that a union offers reports a fault of its own: a number out of range is the one to tell.
    first = next(
        (one for one in problems if one["type"].startswith(("greater", "less", "finite"))), problems[0]
    )
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return ConfigError("unknown key", field=field, hint=_nearest(first["loc"], root))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # what a `__post_init__` refused, by the names of its own section
        inner = cause.message if cause.field is None else cause.message.removeprefix(f"{cause.field}: ")
        names = [name for name in (field, cause.field) if name]
        return ConfigError(inner, field=".".join(names) or None, hint=cause.hint)
    message, hint = str(first["msg"]).removeprefix("Value error, "), None
    setting = _setting(first["loc"], root)
    if len(problems) > 1 and "than" not in first["type"] and setting:  # of a union no member fits
        message = "must be " + setting.in_words.replace("`", "")
    value = first.get("input")
    if first["type"] == "literal_error" and isinstance(value, str):
        allowed = [part for part in first["ctx"]["expected"].split("'") if part.strip(" ,or")]
        hint = meant(value, allowed)
    if first["type"] == "missing":
        return ConfigError("is missing", field=field)
    if isinstance(value, str | int | float | bool):
        message += f" (got {_shown(value)})"
    return ConfigError(message, field=field or None, hint=hint)


def _shown(value: str | float) -> str:
    """A value as the user wrote it, as far as it is not too long to be read; Python writes no number of any length."""
    if isinstance(value, int) and value.bit_length() > 4 * _MOST_SHOWN:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _field_name(location: tuple[int | str, ...]) -> str:
    # pydantic appends the tried type of a union in brackets or by name; the user never wrote those.
    return ".".join(str(part) for part in location if not (isinstance(part, str) and _is_type_tag(part)))


def _is_type_tag(part: str) -> bool:
    return "[" in part or part.startswith("constrained") or part in ("float", "int", "str", "bool")


def _section(location: tuple[int | str, ...], kind: type[Any]) -> type[Any]:
    """The section that a location lies in: that of the last part which is none itself."""
    for part in location:
        hint = typing.get_type_hints(kind).get(str(part))
        # A section, or a list of them.
        inner = [one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one)]
        if inner:
            kind = typing.cast("type[Any]", inner[0])
    return kind


def _setting(location: tuple[int | str, ...], root: type[Any]) -> Setting | None:
    """The setting at a location; None where the field there is none."""
    known = {setting.name: setting for setting in described(_section(location, root))}
    return next((known[str(part)] for part in reversed(location) if part in known), None)


def _nearest(location: tuple[int | str, ...], root: type[Any]) -> str:
    """The valid key that an unknown one may have meant, or all keys of its section."""
    names = sorted(field.name for field in dataclasses.fields(_section(location[:-1], root)))
    return meant(location[-1], names) or "valid keys here: " + ", ".join(names)


_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_SIGNS = {Gt: ("gt", ">"), Ge: ("ge", "≥"), Lt: ("lt", "<"), Le: ("le", "≤")}


def _words(hint: Any) -> tuple[Any, ...]:
    """The words of a literal, or of the names that are registered."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((tuple(note.names()) for note in notes if isinstance(note, OneOf)), ())


def _in_words(hint: Any) -> str:
    if words := _words(hint):
        return ", ".join(f"`{word}`" for word in words)
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        ranges = [_SIGNS[type(note)] + (note,) for note in notes if type(note) in _SIGNS]
        bounds = ", ".join(f"{sign} {_number(getattr(note, name))}" for name, sign, note in ranges)
        return f"{_in_words(inner)} {bounds}".strip()
    if get_origin(hint) is tuple:
        return f"list of {_in_words(get_args(hint)[0])}"
    return _KINDS.get(hint, f"`{hint.__name__}`")


def _number(value: float) -> str:
    return "2^63" if value == 2**63 else digits(value)
