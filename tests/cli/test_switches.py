"""`--quiet` reaches a command from the root, from its own flag, and never from an earlier command."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from niss.cli import app
from niss.cli.terminal import is_quiet

KEY = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"


@pytest.mark.parametrize(
    ("arguments", "quiet"),
    [
        (["--quiet", "data", "get", "mnist"], True),
        (["-q", "data", "get", "mnist"], True),
        (["data", "get", "mnist", "--quiet"], True),
        (["data", "get", "mnist"], False),
    ],
)
def test_either_place_makes_a_command_quiet(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], quiet: bool
) -> None:
    seen: list[bool] = []

    def fetch(name: str, *, progress: Any) -> str:
        seen.append(is_quiet())
        progress("a-file", 1, 2)
        return name

    monkeypatch.setattr("niss.data.fetch_dataset", fetch)
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (0, "mnist\n")
    assert seen == [quiet]
    assert done.stderr == ("" if quiet else "fetching a-file\n")
    assert not is_quiet()


@pytest.mark.parametrize(
    ("before", "level", "expected"),
    [([], "info", "info"), (["--quiet"], "info", "warning"), (["--quiet"], "debug", "debug")],
)
def test_a_quiet_tracker_logs_only_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, before: list[str], level: str, expected: str
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("niss.tracker.serve.serve", served.append)
    done = CliRunner().invoke(app, [*before, "tracker", "--server-key", KEY, "--log-level", level])
    assert done.exit_code == 0, done.exception
    assert served[0].log_level == expected
