"""The site builds, and its checks find what they are there to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from docs.snippets import ROOT

CHECK = ROOT / "tools" / "check_site.py"


def check(site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK), str(site)], capture_output=True, text=True, check=False, timeout=60
    )


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does, with the settings of the repository and other pages. (With --quiet nothing would fail.)"""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    config = config.replace("docs_dir: docs", f"docs_dir: {docs}").replace("build/site", str(site))
    config = config.replace("tools/site_hooks.py", str(ROOT / "tools" / "site_hooks.py"))
    path = site.parent / "mkdocs.yml"
    path.write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_documentation_builds_without_a_fault(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    checked = check(tmp_path / "site")
    assert checked.returncode == 0, checked.stderr


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
    ("html", "found"),
    [
        ('<a href="gone.html">x</a>', "no such file"),
        ('<a href="#gone">x</a>', "no such place"),
        ('<img src="gone.png">', "no such file"),
        ('<script src="https://cdn.example.org/x.js"></script>', "from elsewhere"),
        ('<link rel="stylesheet" href="//fonts.example.org/css">', "from elsewhere"),
        ('<p style="background: url(http://example.org/x.png)">', "from elsewhere"),
    ],
)
def test_the_check_of_a_site(tmp_path, html, found):
    page = tmp_path / "index.html"
    page.write_text('<p id="here"><a href="#here">x</a> <a href="https://example.org">a link may</a></p>')
    assert check(tmp_path).returncode == 0
    page.write_text(page.read_text() + html)
    done = check(tmp_path)
    assert done.returncode != 0
    assert found in done.stderr


def test_a_stylesheet_may_load_nothing_from_elsewhere(tmp_path):
    (tmp_path / "index.html").write_text("<p>x</p>")
    (tmp_path / "site.css").write_text('@import "https://fonts.example.org/css";')
    assert "from elsewhere" in check(tmp_path).stderr
