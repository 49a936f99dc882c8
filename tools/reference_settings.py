"""The reference page of the settings: types and defaults from the models, meanings from their docstrings.

A key without a meaning, or a meaning without a key, stops the build.
"""

from __future__ import annotations

from typing import Any

from reference_python import rows_of

from niss.simulation.config import PRESETS, Config

_SECTIONS = ("data", "model", "training", "privacy", "protocol", "methods")


def settings_page() -> str:
    schema = Config.model_json_schema()
    parts = [
        "# Settings",
        "Made from the models in `niss.simulation.sections` by `tools/write_reference.py`. All keys of a TOML file, of "
        "`niss run --set KEY=VALUE` and of `niss.make_config`. Every key has a default. Unknown keys are refused "
        "with the nearest valid name.",
        f"Presets shipped with the package (`--preset`): {', '.join(f'`{name}`' for name in PRESETS)}.",
        "## Top level",
        _table(
            {key: value for key, value in schema["properties"].items() if key not in _SECTIONS},
            schema["description"],
            schema,
        ),
    ]
    for section in _SECTIONS:
        target = schema["properties"][section]
        reference = target["items"]["$ref"] if section == "methods" else target["$ref"]
        part = schema["$defs"][reference.rsplit("/", 1)[-1]]
        title = "[[methods]]" if section == "methods" else f"[{section}]"
        words = (
            part["description"].split("\n\n")[0].replace("One contestant.", "A table for each contestant.")
        )
        parts += [f"## {title}", words, _table(part["properties"], part["description"], schema)]
    return "\n\n".join(parts) + "\n"


def _table(properties: dict[str, Any], docstring: str, schema: dict[str, Any]) -> str:
    rows = ["| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    meanings = rows_of(docstring.split("\n\n")[1].splitlines())
    if different := set(properties) ^ set(meanings):
        raise SystemExit(
            f"niss.simulation.config: docstrings and keys differ in {', '.join(sorted(different))}"
        )
    for key, value in properties.items():
        rows.append(f"| `{key}` | {_type(value, schema)} | {_default(value)} | {meanings[key]} |")
    return "\n".join(rows)


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    if default is None:
        return "none"
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"


def _type(value: dict[str, Any], schema: dict[str, Any]) -> str:
    if "anyOf" in value:
        return " or ".join(_type(one, schema) for one in value["anyOf"] if one.get("type") != "null")
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"])
    if value.get("type") == "array":
        return f"list of {_type(value['items'], schema)}"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    return words[value["type"]] + _bounds(value)


def _bounds(value: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {_short(value[key])}" for key, sign in signs.items() if key in value]
    return f" {', '.join(found)}" if found else ""


def _short(number: float) -> str:
    return "2^63" if number == 2**63 else f"{number:g}"
