"""Check a built site: every link and anchor leads somewhere, and no page loads anything from elsewhere.

Usage: python tools/check_site.py [build/site]
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
_LOADED_LINKS = {"stylesheet", "icon", "shortcut icon", "preload", "preconnect", "dns-prefetch", "manifest"}
_CSS_ADDRESS = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s]+)""")
_ELSEWHERE = re.compile(r"^(?:https?:)?//", re.IGNORECASE)


@dataclass
class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    path: Path
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in _LOADING and _LOADING[tag] in values:
            self.loads.append(values[_LOADING[tag]])
        if tag == "link" and values.get("rel", "").lower() in _LOADED_LINKS and "href" in values:
            self.loads.append(values["href"])
        self.loads += _CSS_ADDRESS.findall(values.get("style", ""))


def problems(site: Path) -> list[str]:
    """One line for each link, anchor or asset that is wrong."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site}: no pages"]
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [
            f"{name}: loads {address} from elsewhere" for address in page.loads if _from_elsewhere(address)
        ]
        for address in (*page.links, *(one for one in page.loads if not _from_elsewhere(one))):
            if why := _wrong(address, page, pages, site):
                found.append(f"{name}: {address}: {why}")
    for sheet in sorted(site.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8")
        found += [
            f"{sheet.relative_to(site)}: loads {address} from elsewhere"
            for address in _CSS_ADDRESS.findall(text)
            if _from_elsewhere(address)
        ]
    return found


def _from_elsewhere(address: str) -> bool:
    return _ELSEWHERE.match(address) is not None


def _wrong(address: str, page: Page, pages: dict[Path, Page], site: Path) -> str | None:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None  # Leads to another site; nothing is loaded from there.
    if page.path.name == "404.html" and parts.path.startswith("/"):
        target = site / parts.path.lstrip(
            "/"
        )  # A server shows it for any address, so its links are absolute.
    else:
        target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    if target.is_dir():
        target = target / "index.html"
    if not target.is_file():
        return "there is no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "there is no such place on that page"
    return None


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "build/site").resolve()
    found = problems(site)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        sys.exit(f"{len(found)} faults in {site.name}")
    print(f"{len(list(site.rglob('*.html')))} pages, every link leads somewhere")


if __name__ == "__main__":
    main()
