"""The templates of the page, filled in by jinja2.

Whatever is put into one is escaped, unless it is `Markup`, and only our own code makes that: drawings, whose texts are
escaped one by one, and templates that were filled in before.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment(room: str, folder: str = "templates") -> Environment:
    """Templates of a folder; it escapes in every one, whatever its name, and refuses names that are not defined."""
    # Takes as long to load as the rest of this room together.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(room, folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": _prose}
    return environment


def _prose(text: str) -> str:
    """`text` with no line break between a number and its percent sign."""
    return text.replace(" %", "\u00a0%")


def render(template: str, **values: Any) -> Markup:
    """Fill in a template of this folder; a name that it uses and `values` lacks is an error."""
    return Markup(environment("niss.report").get_template(template).render(values))
