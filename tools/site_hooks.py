"""What `mkdocs build` does beyond MkDocs: formulas, figures for dark pages, and the version.

Formulas stand between dollars, as GitHub takes them, and become MathML, which browsers draw without a script; tau^2 and
the like in a sentence do too. A picture with a variant for dark pages (`x-dark.png` for `x.png`) is shown in both, and
the style sheet hides one; with one for phones (`x-narrow.png`) phones get that. Tables, formulas and figures that are
too wide scroll, by keyboard too. A page that would load anything from elsewhere fails the build; broken links and
anchors do by the settings of MkDocs.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]

# Code, comments, links and tags, in which nothing is a formula.
_VERBATIM = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^ {0,3}(?P=fence)[ ]*$"
    r"|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)|<!--.*?-->"
    r"|\]\([^)]*\)|<[a-zA-Z/][^>]*>|^(?: {4}[^\n]*\n)+|^#[^\n]*$",
    re.DOTALL | re.MULTILINE,
)
_DISPLAY = re.compile(r"^\$\$\n?(?P<tex>.+?)\n?\$\$$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<![\\$\w])\$(?P<tex>[^$\n]+?)\$(?![\w$])")
_GREEK = "tau|sigma|eta|mu|kappa|rho|lambda|Sigma|Delta|Gamma"
_SYMBOL = re.compile(
    rf"(?<![\w\\$`./-])(?P<name>{_GREEK}|[A-Za-z](?=_))(?P<low>_(?:[a-z0-9]|min))?(?P<high>\^2)?(?![\w(`^-])"
)

# What a browser would fetch from another site: scripts, pictures and frames, style sheets and icons, parts of styles.
_FROM_ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\ssrc=["']?(?:https?:)?//"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|(?:shortcut )?icon|preload|preconnect|dns-prefetch|manifest))"""
    r"""[^>]*\shref=["']?(?:https?:)?//|(?:url\(\s*|@import\s+)["']?(?:https?:)?//""",
    re.IGNORECASE,
)
_ALONE = re.compile(r'<p><img(?= [^>]*src="(?P<path>[^"]+)")')
_PICTURE = re.compile(r'<img (?P<before>[^>]*)src="(?P<path>[^"]+)\.png"(?P<after>[^>]*)/?>')


def on_config(config: Any) -> Any:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.copyright = f"niss {project['version']} · {project['license']} · research software, not audited"
    return config


def on_page_markdown(markdown: str, *, page: Any = None, **_: Any) -> str:
    if page is not None and page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.2}  # A guide comes first.
    return _outside_code(_DISPLAY.sub(_display, markdown), _formulas)


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for found in _VERBATIM.finditer(text):
        parts += [change(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, change(text[end:])])


def _display(found: re.Match[str]) -> str:
    return f'<div class="formula" tabindex="0">{_mathml(found["tex"], "block")}</div>'


def _formulas(text: str) -> str:
    text = _INLINE.sub(lambda found: _inline(found["tex"]), text)
    # Not in the MathML that was just made.
    return "".join(
        part if part.startswith("<math") else _SYMBOL.sub(_symbol, part)
        for part in re.split(r"(<math.*?</math>)", text, flags=re.DOTALL)
    )


def _symbol(found: re.Match[str]) -> str:
    if not (found["low"] or found["high"]):
        return found[0]  # A word in a sentence.
    name = found["name"] if len(found["name"]) == 1 else f"\\{found['name']}"
    low = f"_{{{found['low'][1:]}}}" if found["low"] else ""
    return _inline(f"{name}{low}{found['high'] or ''}")


def _inline(tex: str) -> str:
    # Markdown takes a line that begins with <math> for a block of its own.
    return f"<span>{_mathml(tex, 'inline')}</span>"


def _mathml(tex: str, display: str) -> str:
    return " ".join(convert(tex.strip(), display=display).split())


def on_page_content(html: str, *, page: Any, config: Any, **_: Any) -> str:
    def there(name: str) -> bool:
        return (Path(config.docs_dir, page.file.src_uri).parent / name).exists()

    def both(found: re.Match[str]) -> str:
        name, rest = found["path"], f"{found['before']}{found['after']}".rstrip("/ ")
        if not there(f"{name}-dark.png"):
            return found[0]
        shown = ""
        for kind, dark in (("light", ""), ("dark", "-dark")):
            image = f'<img class="for-{kind}" {rest} src="{name}{dark}.png" loading="lazy">'
            small = f"{name}-narrow{dark}.png"
            source = f'<source media="(max-width: 44.98em)" srcset="{small}">'
            shown += f"<picture>{source}{image}</picture>" if there(small) else image
        return shown

    def wide(found: re.Match[str]) -> str:
        path = Path(config.docs_dir, page.file.src_uri).parent / found["path"]
        for_phones = there(f"{found['path'].rpartition('.')[0]}-narrow.png")
        return '<p class="picture" tabindex="0"><img' if _is_wide(path) and not for_phones else found[0]

    html = html.replace("<table>", '<div class="scrolls" tabindex="0"><table class="data">')
    html = _ALONE.sub(wide, html.replace("</table>", "</table></div>"))
    return _PICTURE.sub(both, html)


def _is_wide(path: Path) -> bool:
    """Whether the words of a figure would be too small to read on a phone."""
    head = path.read_bytes()[:2000] if path.exists() else b""
    if path.suffix == ".png":
        return int.from_bytes(head[16:20]) > 1000
    drawn = re.search(rb'<svg [^>]*?width="([\d.]+)pt"', head, re.DOTALL)
    return drawn is not None and float(drawn[1]) > 460


def on_post_page(output: str, **_: Any) -> str:
    # The theme's dialog has no name of its own. (It is on the page for what is not found, too.)
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def on_post_template(output_content: str, **_: Any) -> str:
    return on_post_page(output_content)


def on_post_build(config: Any, **_: Any) -> None:
    for path in sorted(path for kind in ("html", "css") for path in Path(config.site_dir).rglob(f"*.{kind}")):
        if found := _FROM_ELSEWHERE.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.name} loads something from elsewhere: {found[0]}")
