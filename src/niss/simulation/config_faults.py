"""What pydantic finds wrong with settings, in the words of whoever wrote them."""

from __future__ import annotations

import difflib
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from niss.errors import ConfigError, all_faults


def explain(error: ValidationError, root: type[BaseModel]) -> ConfigError:
    """All faults of settings of the kind `root`, by the names the user wrote."""
    by_field: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors():
        by_field.setdefault(_field_name(problem["loc"]), []).append(problem)
    # A list that lost an item to a fault is then found too short: only the fault is told.
    inner = [field for field in by_field if not any(other.startswith(f"{field}.") for other in by_field)]
    return all_faults([_fault(field, by_field[field], root) for field in inner])


def _fault(field: str, problems: list[ErrorDetails], root: type[BaseModel]) -> ConfigError:
    """What is wrong with one setting, and what may have been meant."""
    # Each choice a union offers reports a fault of its own: a number out of range is the one to tell.
    first = next(
        (one for one in problems if one["type"].startswith(("greater", "less", "finite"))), problems[0]
    )
    if first["type"] == "extra_forbidden":
        return ConfigError("unknown key", field=field, hint=_nearest(first["loc"], root))
    message, hint = str(first["msg"]).removeprefix("Value error, "), None
    if not field and ": " in message:
        field, message = message.split(": ", 1)
    value = first.get("input")
    if first["type"] == "literal_error" and isinstance(value, str):
        allowed = [part for part in first["ctx"]["expected"].split("'") if part.strip(" ,or")]
        close = difflib.get_close_matches(value, allowed, n=1)
        hint = f"did you mean {close[0]!r}?" if close else None
    if isinstance(value, str | int | float | bool):
        message += f" (got {value!r})"
    return ConfigError(message, field=field or None, hint=hint)


def _field_name(location: tuple[int | str, ...]) -> str:
    # pydantic appends the tried type of a union in brackets or by name; the user never wrote those.
    return ".".join(str(part) for part in location if not (isinstance(part, str) and _is_type_tag(part)))


def _is_type_tag(part: str) -> bool:
    return "[" in part or part.startswith("constrained")


def _nearest(location: tuple[int | str, ...], section: type[BaseModel]) -> str:
    """The valid key that an unknown one may have meant, or all keys of its section."""
    for part in location[:-1]:
        if part in section.model_fields:
            kind = section.model_fields[str(part)].annotation
            # A section, or a list of them.
            section = next(
                one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)
            )
    names = sorted(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {close[0]!r}?" if close else "valid keys here: " + ", ".join(names)
