"""Commands from dataclasses: types, defaults, help, names, lists with commas, inheritance, and notes of other rooms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner
from typing_extensions import Doc

from cli.terminals import run_python
from niss.cli.options import argument, flag_of, from_options, lazy_app, option, register
from niss.cli.terminal import is_quiet
from niss.settings import described
from support.refusals import refuses


@dataclass(frozen=True)
class Base:
    """What is shared."""

    rate: Annotated[float, Doc("The learning rate, which is explained in two lines.")] = option(0.5, "--lr")
    quickly: Annotated[bool, Doc("Be quick.")] = False


@dataclass(frozen=True)
class Settings(Base):
    """What this command takes."""

    folder: Annotated[Path, Doc("Where.")] = argument(Path(), metavar="[FOLDER]")
    xs: Annotated[tuple[float, ...], Doc("Numbers.")] = (0.0, 0.25)
    names: Annotated[tuple[str, ...] | None, Doc("Names, or none.")] = None
    tls: Annotated[bool, Doc("Encrypt.")] = True
    more: Annotated[list[str] | None, Doc("Anything.")] = option(None, "--set", key="kept")


@dataclass(frozen=True)
class Noted:
    """An attack, say."""

    rho: Annotated[tuple[float, ...], Doc("Parts.")] = (0.0, 1.0)
    points: int = 13  # Not described, hence no option.


def made(*kinds: type[Any]) -> tuple[list[Any], typer.Typer]:
    """What a command of these dataclasses was called with, and an app with that command."""
    seen: list[Any] = []
    app = typer.Typer()

    @register(app, "work")
    @from_options(*kinds, quiet=True)
    def work(*values: Any) -> None:
        """Do it.

        Examples:
        niss work
        niss work --lr 1      faster

        And a remark.
        """
        seen.extend([*values, is_quiet()])

    return seen, app


def called(arguments: list[str], *kinds: type[Any]) -> list[Any]:
    seen, app = made(*kinds)
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen


def test_defaults_are_those_of_the_dataclass() -> None:
    assert called([], Settings) == [Settings(), False]
    assert called([], Settings, Noted) == [Settings(), Noted(), False]


def test_values_have_the_types_of_the_fields() -> None:
    line = ["runs", "--lr", "2", "--quickly", "--xs", "1, 2,", "--names", "two,one", "--no-tls", "-q"]
    (settings, quiet) = called([*line, "--set", "a=1", "--set", "b"], Settings)
    assert settings == Settings(2.0, True, Path("runs"), (1.0, 2.0), ("two", "one"), False, ["a=1", "b"])
    assert quiet


def test_only_noted_fields_of_another_room_are_options() -> None:
    assert called(["--rho", "0.5"], Noted) == [Noted(rho=(0.5,)), False]
    names = [one.name for one in typer.main.get_command(made(Noted)[1]).params]
    assert "rho" in names
    assert "points" not in names


@pytest.mark.parametrize(("kind", "flag"), [(Settings, "--xs"), (Noted, "--rho")])
def test_a_list_of_something_else_is_refused_by_the_name_of_its_option(kind: type[Any], flag: str) -> None:
    with refuses(flag, "expected numbers separated by commas, got '0,x'"):
        called([flag, "0,x"], kind)


def test_help_comes_from_the_docstrings() -> None:
    command = typer.main.get_command(made(Settings)[1])
    texts = {one.name: getattr(one, "help", None) for one in command.params}
    assert texts["rate"] == "The learning rate, which is explained in two lines."
    assert (texts["quickly"], texts["folder"]) == ("Be quick.", "Where.")
    assert command.help == "Do it."
    assert (command.epilog or "").split("\n\n") == [
        "Examples:",
        "  niss work",
        "  niss work --lr 1      faster",
        "And a remark.\n",
    ]


def test_names_and_metadata() -> None:
    fields = Settings.__dataclass_fields__
    assert [flag_of(fields[name]) for name in ("rate", "quickly", "folder", "more")] == [
        *("--lr", "--quickly", "FOLDER", "--set")
    ]
    assert fields["more"].metadata["key"] == "kept"
    options = {one.name: one for one in typer.main.get_command(made(Settings)[1]).params}
    assert options["tls"].secondary_opts == ["--no-tls"]
    assert options["quickly"].secondary_opts == []


def test_a_command_can_be_called_from_python() -> None:
    seen: list[Any] = []
    from_options(Settings)(seen.append)(rate=1.0)
    assert seen == [Settings(rate=1.0)]


def test_a_lazy_app_loads_its_commands_when_one_is_asked_for() -> None:
    loads: list[int] = []

    def load() -> typer.Typer:
        loads.append(1)
        inner = typer.Typer()
        inner.command("a")(lambda: typer.echo("a was called"))
        inner.command("b")(lambda: None)
        return inner

    app = typer.Typer()
    app.add_typer(lazy_app(load, help="Lazy."), name="group")
    app.command("other")(lambda: None)
    assert "Lazy." in CliRunner().invoke(app, ["--help"]).stdout
    assert not loads
    assert CliRunner().invoke(app, ["group", "a"]).stdout == "a was called\n"
    assert len(loads) == 1


def test_the_help_of_run_names_every_method() -> None:
    from niss.methods import METHODS
    from niss.simulation.sections import MethodConfig

    (setting,) = (one for one in described(MethodConfig) if one.name == "name")
    assert set(re.findall(r"[a-z-]+", setting.help)) >= set(METHODS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_typer_has_a_completion_script_for_each_shell(shell: str) -> None:
    code, quietly = "from niss.cli import main; main()", {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = run_python(code, "--show-completion", shell, **quietly)
    assert done.returncode == 0, done.stderr
    assert "_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(["rum"], "run"), (["attack", "jont"], "joint"), (["keys", "nw"], "new"), (["data", "lst"], "list")],
)
def test_the_command_that_was_meant_is_named_once(typed: list[str], meant: str) -> None:
    from niss.cli import app as niss

    result = CliRunner().invoke(niss, typed)
    assert result.exit_code == 2
    assert result.output.count(f"'{meant}'") == 1
