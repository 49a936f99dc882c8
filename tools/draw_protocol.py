"""Draw the protocol's state machines, from their one table, into docs/concepts/protocol-states.md.

Usage: python tools/draw_protocol.py [--check]
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path

from niss.protocol.states import CLIENT_TABLE, SERVER_TABLE

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "protocol-states.md"


def diagram(table: dict[tuple[Enum, str], Enum]) -> str:
    """A mermaid state diagram; GitHub and most documentation tools draw it."""
    start = next(iter(table))[0]
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {start.value}"]
    lines += [
        f"    {state.value} --> {following.value}: {event}" for (state, event), following in table.items()
    ]
    return "\n".join([*lines, "```"])


def rows(table: dict[tuple[Enum, str], Enum]) -> str:
    lines = ["| state | what happens | next state |", "|---|---|---|"]
    lines += [
        f"| {state.value} | {event} | {following.value} |" for (state, event), following in table.items()
    ]
    return "\n".join(lines)


def page() -> str:
    return f"""# The states of a round

Made from `src/niss/protocol/table.py` by `tools/draw_protocol.py`. Anything that is not in a table is refused.

## Client

What arrives from the server moves a client. Said again after a lost reply, it repeats its answer and gives no other.

{diagram(CLIENT_TABLE)}

{rows(CLIENT_TABLE)}

## Server

Capitalised events are messages of clients; the others are decided by whoever drives the server, for example when a
deadline has passed. In mode `tolerate` a round goes from collecting straight to closed.

{diagram(SERVER_TABLE)}

{rows(SERVER_TABLE)}
"""


def main() -> None:
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
