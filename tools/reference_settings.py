"""The reference page of the settings: types and defaults from the models, meanings from the table here.

A key without a meaning, or a meaning without a key, stops the build.
"""

from __future__ import annotations

from typing import Any

from settings_meanings import MEANINGS

from niss.simulation.config import PRESETS, Config

_SECTIONS = ("data", "model", "training", "privacy", "protocol", "methods")


def settings_page() -> str:
    schema = Config.model_json_schema()
    parts = [
        "# Settings",
        "Made from the models in `niss.simulation.config` by `tools/write_reference.py`. All keys of a TOML file, of "
        "`niss run --set KEY=VALUE` and of `niss.make_config`. Every key has a default. Unknown keys are refused "
        "with the nearest valid name.",
        f"Presets shipped with the package (`--preset`): {', '.join(f'`{name}`' for name in PRESETS)}.",
        "## Top level",
        _table(
            "", {key: value for key, value in schema["properties"].items() if key not in _SECTIONS}, schema
        ),
    ]
    known = {key for key in schema["properties"] if key not in _SECTIONS}
    for section in _SECTIONS:
        target = schema["properties"][section]
        reference = target["items"]["$ref"] if section == "methods" else target["$ref"]
        part = schema["$defs"][reference.rsplit("/", 1)[-1]]
        title = "[[methods]]" if section == "methods" else f"[{section}]"
        words = part["description"].replace("One contestant.", "A table for each contestant.")
        parts += [f"## {title}", words, _table(section, part["properties"], schema)]
        known |= {f"{section}.{key}" for key in part["properties"]}
    if missing := known ^ set(MEANINGS):
        raise SystemExit(
            f"tools/settings_meanings.py does not fit the settings: {', '.join(sorted(missing))}"
        )
    return "\n\n".join(parts) + "\n"


def _table(section: str, properties: dict[str, Any], schema: dict[str, Any]) -> str:
    rows = ["| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for key, value in properties.items():
        name = f"{section}.{key}" if section else key
        meaning = value.get("description") or MEANINGS.get(name, "")
        rows.append(f"| `{key}` | {_type(value, schema)} | {_default(value)} | {meaning} |")
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
