"""Keep a built site as that of its version, and write the page that lists all versions.

Usage: python tools/keep_site.py [build/site [build/versions]]

`build/versions` can be served as it is: each version is a whole site, and its index leads to the newest release.
"""

from __future__ import annotations

import html
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>niss: all versions</title>
<style>
:root{{color-scheme:light dark}}
body{{font:1rem/1.6 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem}}
</style>
<h1>niss: documentation by version</h1>
<ul>
{items}
</ul>
</html>
"""


def order(version: str) -> tuple[list[int], bool]:
    """Numbers as numbers, and a release after what came before it (`1.0.0rc1`)."""
    numbers = re.match(r"[0-9.]*", version)
    release = numbers[0] if numbers else ""
    return [int(part) for part in release.split(".") if part], release == version


def keep(site: Path, versions: Path, version: str) -> Path:
    """Copy the site into its folder, replacing an earlier build of the same version; returns that folder."""
    target = versions / version
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(site, target)
    found = sorted((path.name for path in versions.iterdir() if (path / "index.html").is_file()), key=order)
    items = [
        f'<li><a href="{name}/index.html">{name}</a>{" (newest)" if place == 0 else ""}</li>'
        for place, name in enumerate(html.escape(one) for one in reversed(found))
    ]
    (versions / "index.html").write_text(_PAGE.format(items="\n".join(items)), encoding="utf-8")
    return target


def main() -> None:
    given = [Path(one) for one in sys.argv[1:]]
    site, versions = [*given, *(ROOT / "build" / "site", ROOT / "build" / "versions")[len(given) :]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(keep(site, versions, project["version"]))


if __name__ == "__main__":
    main()
