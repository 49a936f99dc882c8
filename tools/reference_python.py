"""The reference page of the public Python names, made from `niss.__all__`, signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from reference_settings import settings_table

import niss

_ROW = re.compile(r"^(?P<name>\S.*?)\s{2,}(?P<text>\S.*)$")
# Of these classes the methods are part of the interface, of the others the fields.
_WITH_METHODS = ("Config", "Plan", "ShareGraph", "Statement")

GROUPS = {
    "Simulate": ("run", "compare", "resume", "RunResult", "Comparison", "write_report"),
    "Settings": ("Config", "make_config", "load_config", "preset"),
    "Plan and account": ("plan", "Plan", "ShareGraph", "effective_variance", "assess", "Statement"),
    "Errors": ("NissError", "errors"),
}


def python_page() -> str:
    grouped = {name for names in GROUPS.values() for name in names}
    if ungrouped := set(niss.__all__) - grouped - {"__version__"}:
        raise SystemExit(f"tools/reference_python.py: give these a group: {', '.join(sorted(ungrouped))}")
    parts = [
        "# Python",
        "Made from `niss.__all__` by `tools/write_reference.py`. `import niss` is quick: each name is loaded when "
        "it is first used. Rooms below these names (`niss.protocol`, `niss.flower`, `niss.tracker`, `niss.attacks`) "
        "have docstrings of their own; [the guides](../tutorial.md#where-next) show how to use them.",
    ]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        for name in names:
            parts += _entry(name)
    return "\n\n".join(parts) + "\n"


def _entry(name: str) -> list[str]:
    found = getattr(niss, name)
    if inspect.ismodule(found):
        kinds = [one for one in vars(found).values() if inspect.isclass(one) and issubclass(one, Exception)]
        rows = [f"| `{one.__name__}` | {one.exit_code} | {_lines(one.__doc__)} |" for one in kinds]
        head = ["| Error | Exit code | Meaning |", "| --- | ---: | --- |"]
        return [f"### niss.{name}", markdown(found.__doc__), "\n".join([*head, *rows])]
    if not inspect.isclass(found):
        return [f"### niss.{name}", _signature(name, found), markdown(found.__doc__)]
    parts = [f"### niss.{name}"]
    if not issubclass(found, Exception):
        parts.append(_class_signature(name, found))
    parts.append(markdown(found.__doc__))
    if name in _WITH_METHODS:
        parts += _members(name, found)
    elif dataclasses.is_dataclass(found):
        rows = [
            f"| `{one.name}` | `{_type(one.type)}` |".replace(" | None`", "` or `None`")
            for one in dataclasses.fields(found)
        ]
        parts.append("\n".join(["| Field | Type |", "| --- | --- |", *rows]))
    return [part for part in parts if part]


def _class_signature(name: str, found: type) -> str:
    if name == "Config":
        return "Its keys are on the page of [settings](settings.md)."
    if name == "Plan":
        return settings_table(found)
    if dataclasses.is_dataclass(found):
        return ""
    return _signature(name, found)


def _members(name: str, found: type) -> list[str]:
    parts = []
    for member, value in vars(found).items():
        doc = inspect.getdoc(value)
        if member.startswith("_") or not doc or member.startswith("model_"):
            continue
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            parts.append(f"`{name}.{member}`: {_lines(doc)}")
        elif inspect.isfunction(value) or isinstance(value, classmethod):
            parts.append(_signature(f"{name}.{member}", getattr(found, member)))
            parts.append(markdown(doc))
    if name == "Statement":
        fields = [f"`{one.name}`" for one in dataclasses.fields(found)]
        parts.insert(0, "Fields: " + ", ".join(fields) + ".")
    return parts


def _signature(name: str, found: Any) -> str:
    signature = inspect.signature(found)
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    lines, starred = [], False
    for one in parameters:
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        name_shown = ("*" if one.kind is inspect.Parameter.VAR_POSITIONAL else "") + one.name
        text = name_shown if one.annotation is one.empty else f"{name_shown}: {_type(one.annotation)}"
        if one.default is not one.empty:
            text += f" = {one.default!r}"
        lines.append(f"    {text},")
    back = signature.return_annotation
    arrow = "" if back is signature.empty or back in (None, "None") else f" -> {_type(back)}"
    short = f"niss.{name}({', '.join(line.strip().rstrip(',') for line in lines)}){arrow}"
    if len(short) <= 100:
        return f"<!-- not run: a signature -->\n```python\n{short}\n```"
    body = "\n".join(lines)
    return f"<!-- not run: a signature -->\n```python\nniss.{name}(\n{body}\n){arrow}\n```"


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
            blocks.append(_table(lines))
        else:
            blocks.append(_lines(paragraph))
    return "\n\n".join(blocks)


def rows_of(lines: list[str]) -> dict[str, str]:
    """Names and meanings from the columns of a docstring's paragraph; a longer meaning goes on in the next line."""
    rows: dict[str, str] = {}
    name = ""
    for line in lines:
        found = _ROW.match(line)
        if found and not line.startswith(" "):
            name = found["name"]
            rows[name] = found["text"]
        else:
            rows[name] += " " + line.strip()
    return rows


def _table(lines: list[str]) -> str:
    cells = [f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows_of(lines).items()]
    return "\n".join(["| Name | Meaning |", "| --- | --- |", *cells])


def _lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())
