"""`niss new` writes an app that Flower accepts and `niss up` takes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from cli.terminals import run_python
from niss.cli.up import check_app, new_app
from niss.errors import ConfigError

KINDS = {"clients": "flower_app", "silos": "silos_images"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_app_has_its_name_everywhere(tmp_path: Path, kind: str) -> None:
    app = new_app(tmp_path / "My-first.app", kind)
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["project"]["name"] == "My-first.app"
    assert project["tool"]["flwr"]["app"]["components"]["serverapp"] == "my_first_app.server_app:app"
    left = [path for path in app.rglob("*") if path.is_file() and KINDS[kind] in path.read_text()]
    assert left == []
    assert (app / "my_first_app" / "task.py").is_file()
    assert "../.." not in (app / "README.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_niss_up_takes_it_and_its_parts_can_be_loaded(tmp_path: Path, kind: str) -> None:
    app = new_app(tmp_path / "digits", kind)
    check_app(app, ["collusion"], tracker=True)
    code = "import digits.client_app, digits.server_app; print(digits.client_app.app, digits.server_app.app)"
    done = run_python(code, cwd=app)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("App object") == 2


@pytest.mark.parametrize("name", ["1st", "class", "---", "ünï", "my app", "app-"])
def test_names_that_python_cannot_take_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        new_app(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        new_app(tmp_path / "app")
    assert list((tmp_path / "app").iterdir()) == []
