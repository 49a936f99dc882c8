"""The site builds, its checks find what they should, formulas and figures; and its pages in a browser, from disk."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mkdocs.exceptions import PluginError

from docs.snippets import ROOT
from ui.browser import axe_findings, chromium, luminance, open_tab


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does, with the settings of the repository and other pages. (With --quiet nothing would fail.)"""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    config = config.replace("docs_dir: docs", f"docs_dir: {docs}").replace("build/site", str(site))
    config = config.replace("tools/site_hooks.py", str(ROOT / "tools" / "site_hooks.py"))
    path = site.parent / "mkdocs.yml"
    path.write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_documentation_builds_without_a_fault(site):
    for page in ("index.html", "404.html"):
        assert 'role="dialog" aria-label="Search"' in (site / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("[gone](nowhere.md)", "nowhere.md"),
        ("[gone](other.md#no-such-heading)", "no-such-heading"),
        ("[gone](#not-here)", "not-here"),
        ("![gone](images/gone.png)", "gone.png"),
    ],
)
def test_broken_links_and_anchors_fail_the_build(tmp_path, link, found):
    docs = tmp_path / "docs"
    for name in ("stylesheets/site.css", "javascripts/iframe-worker.js", "images/icon.svg"):
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text("", encoding="utf-8")
    (docs / "index.md").write_text(f"# Home\n\n[other](other.md#a-heading)\n\n{link}\n", encoding="utf-8")
    (docs / "other.md").write_text("# Other\n\n## A heading\n", encoding="utf-8")
    done = build(docs, tmp_path / "site")
    assert done.returncode != 0
    assert found in done.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("index.html", '<script async src="https://cdn.example.org/x.js"></script>'),
        ("index.html", '<link rel="stylesheet" href="//fonts.example.org/css">'),
        ("index.html", '<link href="http://example.org/icon.svg" rel="icon">'),
        ("index.html", '<p style="background: url(http://example.org/x.png)">'),
        ("site.css", '@import "https://fonts.example.org/css";'),
    ],
)
def test_nothing_may_be_loaded_from_elsewhere(hooks, tmp_path, name, text):
    page, config = tmp_path / name, SimpleNamespace(site_dir=tmp_path)
    page.write_text('<p id="here"><a href="https://example.org">a link may</a> <img src="x.png"></p>')
    hooks.on_post_build(config)
    page.write_text(page.read_text() + text)
    with pytest.raises(PluginError, match="from elsewhere"):
        hooks.on_post_build(config)


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    return tool("site_hooks")


def shown(hooks: ModuleType, text: str) -> str:
    return hooks.on_page_markdown(text)


class TestFormulas:
    def test_between_dollars_they_become_mathml(self, hooks):
        text = shown(hooks, "so $x^2$ and\n\n$$\n\\frac{1}{2}\n$$\n")
        assert text.count("<math") == 2
        assert '<div class="formula" tabindex="0"><math' in text
        assert "<mfrac>" in text
        assert "$" not in text

    def test_symbols_in_sentences_too_but_not_words(self, hooks):
        text = shown(hooks, "a small tau^2, W_j of them, and kappa")
        assert text.count("<math") == 2
        assert text.endswith("and kappa")

    @pytest.mark.parametrize(
        "text",
        [
            "`tau^2` and `$x$`",
            "```bash\necho $PATH $HOME tau^2\n```",
            "    SERVER=$(niss keys) tau^2 $X$\n",
            "<!-- result: mu_k -->",
            "[words](paper.md#sigma_k)",
            "it costs $5 and then $6 more",
            "## The role of tau^2",
        ],
    )
    def test_code_links_headings_and_prices_stay(self, hooks, text):
        assert shown(hooks, text) == text


def test_a_picture_with_a_dark_variant_is_shown_in_both(hooks, tmp_path):
    (tmp_path / "x-dark.png").touch()
    where = {
        "page": SimpleNamespace(file=SimpleNamespace(src_uri="a.md")),
        "config": SimpleNamespace(docs_dir=tmp_path),
    }
    both = hooks.on_page_content('<p><img alt="words" src="x.png" /></p>', **where)
    assert both.count('alt="words"') == 2
    assert 'class="for-light"' in both
    assert 'src="x-dark.png"' in both
    assert hooks.on_page_content('<img alt="" src="y.png" />', **where) == '<img alt="" src="y.png" />'


def test_a_picture_with_a_variant_for_phones_is_whole_there(hooks, tmp_path):
    wide = (ROOT / "docs" / "images" / "demo-accuracy.png").read_bytes()
    for name in ("x.png", "x-dark.png", "y.png"):
        (tmp_path / name).write_bytes(wide)
    for name in ("x-narrow.png", "x-narrow-dark.png"):
        (tmp_path / name).touch()
    where = {
        "page": SimpleNamespace(file=SimpleNamespace(src_uri="a.md")),
        "config": SimpleNamespace(docs_dir=tmp_path),
    }
    shown = hooks.on_page_content('<p><img alt="words" src="x.png" /></p>', **where)
    assert [f'srcset="x-narrow{dark}.png"' in shown for dark in ("", "-dark")] == [True, True]
    assert "tabindex" not in shown
    assert 'class="picture" tabindex="0"' in hooks.on_page_content(
        '<p><img alt="" src="y.png" /></p>', **where
    )


def test_figures_of_the_documentation_have_dark_variants():
    """Photographs of pages do not."""
    images = ROOT / "docs" / "images"
    drawn = [path for path in images.glob("*.png") if not path.stem.endswith("-dark")]
    bright = {path.stem for path in drawn if not (images / f"{path.stem}-dark.png").exists()}
    assert {name for name in bright if not name.startswith(("ui-", "report-"))} == set()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


PAGES = ("index.html", "concepts/how-niss-works.html", "concepts/paper.html", "reference/cli.html")
OTHERS = sorted(
    page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
    for page in (ROOT / "docs").rglob("*.md")
    if page.parent.name != "decisions"
)
# What sticks out of the window, other than what scrolls by itself.
_STICKING_OUT = """() => [...document.querySelectorAll('.md-content *')].filter((one) => {
  const box = one.getBoundingClientRect();
  const scrolls = one.closest('.scrolls, .picture, .formula, .highlight, pre');
  return box.width > 0 && box.right > innerWidth + 1 && !scrolls;
}).map((one) => one.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", [*PAGES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS if name not in PAGES)]
)
def test_pages_fit_and_are_accessible(browser, site, name, width, scheme):
    with open_tab(browser, (site / name).as_uri(), width=width, scheme=scheme) as tab:
        tab.page.wait_for_selector(".md-content")
        tab.check(clipping=False)
        assert (luminance(tab) > 200) == (scheme == "light")
        assert tab.page.evaluate(_STICKING_OUT) == []
        assert axe_findings(tab) == []


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("carried shares", "concepts/carried-shares"),
        ("epsilon", "index"),
        ("hospital", "guides/silos"),
        ("flower", "guides/flower"),
    ],
)
def test_search_finds_the_right_page_first_from_disk(browser, site, words, page):
    with open_tab(browser, (site / "index.html").as_uri()) as tab:
        tab.page.keyboard.press("/")
        tab.page.keyboard.type(words)
        found = tab.page.locator(".md-search-result__link").first
        found.wait_for(timeout=30_000)
        assert f"/{page}.html" in found.get_attribute("href")
        tab.check(clipping=False)
