"""Where the numbers come from: versions, seeds, checksums and the full configuration of each method."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from niss.report.sections import pairs
from niss.report.source import MethodResult, ReportInput

# The sizes of a thousand clients' datasets say no more than the first few.
MOST_LISTED = 12


def provenance_section(report: ReportInput) -> str:
    facts = [_facts(method.manifest) for method in report.methods]
    shared = {
        name: value
        for name, value in (facts[0] if facts else {}).items()
        if all(one.get(name) == value for one in facts)
    }
    general: dict[str, str | None] = {"folder": report.folder.resolve().name}
    if report.niss_version:
        general["niss_version"] = report.niss_version
    if report.created:
        general["created"] = report.created
    general |= shared
    own = "\n".join(
        _own_part(method, {name: value for name, value in one.items() if name not in shared})
        for method, one in zip(report.methods, facts, strict=True)
        if method.manifest
    )
    return f"""<section>
<h2>Provenance</h2>
<details>
<summary>Versions, seeds, data checksums and configuration</summary>
{pairs(general)}
{own}
</details>
</section>"""


def _own_part(method: MethodResult, facts: dict[str, str]) -> str:
    listed = pairs(dict(facts)) if facts else ""
    config = method.manifest.get("config")
    shown = f"<pre>{escape(json.dumps(config, indent=2, ensure_ascii=False))}</pre>" if config else ""
    return f"<h3>{escape(method.label)}</h3>\n{listed}\n{shown}" if listed or shown else ""


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) > MOST_LISTED:
        return f"{json.dumps(value[:MOST_LISTED], ensure_ascii=False)[:-1]}, … ({len(value)} in all)"
    return json.dumps(value, ensure_ascii=False)


def _facts(manifest: Mapping[str, Any], under: str = "") -> dict[str, str]:
    """The manifest without its configuration, flattened to dotted names."""
    facts: dict[str, str] = {}
    for key, value in manifest.items():
        if not under and key == "config":
            continue
        name = f"{under}{key}"
        if isinstance(value, dict):
            facts |= _facts(value, under=f"{name}.")
        elif value is not None:
            facts[name] = _shown(value)
    return facts
