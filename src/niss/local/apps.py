"""Flower apps: the built-in one, the settings of any, and a new one to begin with."""

from __future__ import annotations

import keyword
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from niss.errors import ConfigError
from niss.files import SHARED, write_atomically

RESUME = "resume"
"""The setting that names the folder in which the ServerApp saves the run."""
# What every app must have among its settings; those of trackers where there is one.
_NEEDED = ("server-key", "coalition", "report", "min-nodes", "rounds")
_FOR_TRACKERS = ("tracker", "tracker-ca")
# By kind of app: its folder among the examples and where a wheel has it, its package and its project.
_BUILT_IN = {
    "clients": ("flower_app", "app", "flower_app", "niss-flower-app"),
    "silos": ("silos-images", "silos_app", "silos_images", "niss-silos-images"),
}
# What a project may be called, beginning with a letter, as its package has to.
_NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_INSTALL = "pip install '../..[flower]' 'flwr[simulation]'"


def built_in_app(kind: str = "clients") -> Path:
    """The app that learns digits and hides `clients` or the records of `silos`; a wheel has both beside this file."""
    example, inside, *_ = _BUILT_IN[kind]
    packaged = Path(__file__).parent / inside
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "examples" / example


def app_settings(app: Path) -> dict[str, Any]:
    """The settings of a Flower app, `[tool.flwr.app.config]`, with names as `--run-config` has them."""
    try:
        project = tomllib.loads((app / "pyproject.toml").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{app} is not a Flower app: {error}", field="--app") from None
    return _flat(project.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {}))


def check_app(app: Path, more: Iterable[str], *, tracker: bool) -> None:
    """Refuse an app that does not know the settings it would be given, those in `more` and those of the federation.

    Flower would call that an invalid configuration. `tracker` says whether there is one.
    """
    known = app_settings(app)
    wanted = [*_NEEDED, *(_FOR_TRACKERS if tracker else ()), *more]
    if missing := [name for name in dict.fromkeys(wanted) if name not in known]:
        raise ConfigError(
            f"{app} has no setting {', '.join(map(repr, missing))}",
            field="--app",
            hint="add what is missing to [tool.flwr.app.config] in its pyproject.toml, for example "
            f'{missing[0]} = "", and use it as the ServerApp of the built-in app does',
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def new_app(folder: Path, kind: str = "clients") -> Path:
    """Write the built-in app of that kind into `folder`, which must not exist, named like it; returns the folder.

    Its package is the name as Python takes it, so `my-app` has the package `my_app`.
    """
    name = folder.name
    package = re.sub(r"[._-]+", "_", name.lower())
    if not _NAME.fullmatch(name) or keyword.iskeyword(package):
        raise ConfigError(
            f"{name!r} cannot be the name of an app",
            field="NAME",
            hint="take letters, digits and hyphens, such as my-app",
        )
    if folder.exists():
        raise ConfigError(f"{folder} already exists", field="NAME", hint="choose another name")
    template, (*_, old, project) = built_in_app(kind), _BUILT_IN[kind]
    for path in sorted(template.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        target = folder / Path(
            *(package if part == old else part for part in path.relative_to(template).parts)
        )
        text = path.read_text(encoding="utf-8").replace(old, package).replace(project, name)
        text = text.replace(_INSTALL, "pip install 'niss[flower,train]' 'flwr[simulation]'")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text.encode("utf-8"), mode=SHARED)
    return folder
