"""A Flower app of one's own, to begin with: the built-in one under another name."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from niss.errors import ConfigError
from niss.files import SHARED, write_atomically
from niss.local.deployment import built_in_app

_PACKAGE, _PROJECT = "flower_app", "niss-flower-app"
# What a project may be called, beginning with a letter, as its package has to.
_NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_INSTALL = "pip install '../..[flower]' 'flwr[simulation]'"


def new_app(folder: Path) -> Path:
    """Write the app into `folder`, which must not exist, named like it; returns the folder.

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
    template = built_in_app()
    for path in sorted(template.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        target = folder / Path(
            *(package if part == _PACKAGE else part for part in path.relative_to(template).parts)
        )
        text = path.read_text(encoding="utf-8").replace(_PACKAGE, package).replace(_PROJECT, name)
        text = text.replace(_INSTALL, "pip install 'niss[flower,train]' 'flwr[simulation]'")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text.encode("utf-8"), mode=SHARED)
    return folder
