"""What `mkdocs build` does beyond MkDocs: state diagrams as pictures instead of Mermaid source.

GitHub draws Mermaid itself; a site without scripts does not, so each diagram is replaced by the SVG that
`tools/draw_states.py` drew of the same table.
"""

from __future__ import annotations

import re
from typing import Any

_DIAGRAM = re.compile(r"## (?P<side>\w+)\n(?P<text>.*?)```mermaid\n.*?```", re.DOTALL)
_PAGE = "concepts/protocol-states.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri != _PAGE:
        return markdown

    def picture(found: re.Match[str]) -> str:
        side = found["side"]
        return f"## {side}\n{found['text']}![The states of the {side.lower()}](../images/states-{side.lower()}.svg)"

    return _DIAGRAM.sub(picture, markdown)
