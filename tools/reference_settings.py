"""The reference page of the settings: everything on it is said on the fields themselves."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from niss.settings import Setting, described
from niss.simulation.config import PRESETS, Config

_SECTIONS = ("data", "model", "training", "privacy", "protocol", "methods")


def settings_page() -> str:
    parts = [
        "# Settings",
        "Made from `niss.simulation.config` by `tools/write_reference.py`. All keys of a TOML file, of "
        "`niss run --set KEY=VALUE` and of `niss.make_config`. Every key has a default. Unknown keys are refused "
        "with the nearest valid name.",
        f"Presets shipped with the package (`--preset`): {', '.join(f'`{name}`' for name in PRESETS)}.",
        "## Top level",
        settings_table(Config),
    ]
    hints = get_type_hints(Config)
    for section in _SECTIONS:
        several = section == "methods"
        kind = get_args(hints[section])[0] if several else hints[section]
        title = "[[methods]]" if several else f"[{section}]"
        parts += [f"## {title}", str(kind.__doc__).partition("\n\n")[0], settings_table(kind)]
    return "\n\n".join(parts) + "\n"


def settings_table(kind: type[Any]) -> str:
    """A row for each setting."""
    rows = ["| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{one.name}` | {one.in_words} | {_default(one)} | {one.help} |" for one in described(kind)]
    return "\n".join(rows)


def _default(setting: Setting) -> str:
    default = setting.default
    if default is None:
        return "none"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
