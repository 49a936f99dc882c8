"""Write docs/reference/ from the code: commands, Python names, settings, exit codes, environment.

Usage: python tools/write_reference.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from reference_cli import cli_page, exit_codes_page
from reference_environment import environment_page
from reference_python import python_page
from reference_settings import settings_page

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


def pages() -> dict[str, str]:
    """File name -> content of every generated page."""
    return {
        "cli.md": cli_page(),
        "exit-codes.md": exit_codes_page(),
        "environment.md": environment_page(),
        "python.md": python_page(),
        "settings.md": settings_page(),
    }


def main() -> None:
    stale = []
    for name, text in pages().items():
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(FOLDER.parents[1]))
    if stale and "--check" in sys.argv:
        sys.exit(f"docs/reference is out of date ({', '.join(stale)}); run: make docs")


if __name__ == "__main__":
    main()
