"""The command line for the tests of the pages."""

from __future__ import annotations

import json
import shlex
from typing import Any

import typer
from typer.testing import CliRunner

from niss.cli import app as command_line
from niss.cli.services import ui_command

__all__ = ["CliRunner", "cli_plan", "typer", "ui_command"]


def cli_plan(line: str) -> dict[str, Any]:
    """What the command in `line` prints, which must be a `niss plan ... --json`."""
    words = shlex.split(line)
    assert words[:2] == ["niss", "plan"]
    done = CliRunner().invoke(command_line, words[1:])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]
