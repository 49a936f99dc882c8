"""How examples stand in the help of a command; a test reads and parses each."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """An epilog with one command line a paragraph, as the help keeps them apart."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)]) + "\n"
