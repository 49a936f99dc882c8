"""README and docs as texts: links lead somewhere, settings are valid, numbers have a source, threats have tests."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest
import yaml

from docs.snippets import ROOT, blocks, pages
from niss.simulation import make_config

_LINK = re.compile(r"(?<!`)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?: ?%| ms| s\b)")


def headings(path):
    """The anchors of a page, as GitHub and MkDocs make them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in found}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    wrong = []
    for hit in _LINK.finditer(text):
        target, _, anchor = hit["target"].partition("#")
        if target.startswith(("http://", "https://")):
            continue
        path = page.parent / target if target else page
        if not path.exists() or (anchor and anchor not in headings(path)):
            wrong.append(hit["target"])
    assert wrong == []
    assert not re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE), "left over from a merge"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_files_are_valid(page):
    for block in blocks(page):
        if block.language == "toml":
            assert make_config(tomllib.loads(block.text)).methods, str(block)


def written_words(page: Path) -> int:
    """Words of a page with its code; tables, and comments that mark something, are not read like a text."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return len(re.sub(r"^\s*\|.*$", "", text, flags=re.MULTILINE).split())


def test_the_documentation_can_be_read_in_an_evening():
    """README and docs without the reference: two hours and a half at 200 words a minute."""
    read = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    counted = {page: written_words(page) for page in read if page.parent.name != "reference"}
    assert len(counted) > 30
    assert min(counted.values()) > 10
    assert sum(counted.values()) < 28_700


def _text(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def _section(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def _demo_table() -> str:
    return _section(_text("results", "paper", "tables.md"), "demo") + _section(
        _text("results", "paper", "tables.md"), "demo-noise"
    )


def test_the_comparison_has_its_numbers_from_the_demo_and_the_benchmarks():
    section = _section(_text("docs", "concepts", "comparison-tables.md"), "Compared with the alternatives")
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    sources = (_demo_table() + _text("benchmarks", "README.md")).replace(" %", "%")
    numbers = [hit.replace(" %", "%") for hit in _NUMBER.findall(table)]
    numbers += re.findall(r"\d\.\d+e-\d+|0\.0\d+(?= \|)", table)
    assert len(numbers) >= 9
    assert [number for number in numbers if number not in sources] == []


def test_accuracies_of_the_readme_are_those_of_the_demo():
    table = _text("README.md").split("## Try it", 1)[0]
    taken = re.findall(r"<!-- result: demo\.\S+ -->\d+\.\d %<!-- end -->", table)
    assert len(taken) >= 10
    assert len(re.findall(r"\d+\.\d %", table)) == len(taken), "a number that is not taken from a result file"


def test_accuracies_in_sentences_about_results_are_taken_from_the_files():
    for heading in ("The same epsilon, in the joint view", "What a reviewer would say"):
        section = _section(_text("docs", "concepts", "paper.md"), heading)
        sentences = re.sub(r"<!-- result: .*?<!-- end -->", "", section, flags=re.DOTALL)
        assert re.findall(r"\d+\.\d(?= %)", sentences) == []


def test_the_citation_names_this_version_and_the_paper():
    citation = yaml.safe_load(_text("CITATION.cff"))
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    assert (citation["title"], str(citation["version"])) == (project["name"], project["version"])
    (paper,) = citation["references"]
    cited = _section(_text("docs", "concepts", "paper.md"), "Citing")
    for part in (
        paper["title"],
        paper["journal"],
        paper["url"],
        *(one["family-names"] for one in paper["authors"]),
    ):
        assert part in " ".join(cited.split()), part


COLUMNS = ["Who sends what", "What could go wrong", "What stops it", "Checked by"]
ADVERSARIES = [
    "An honest-but-curious server",
    "A server with colluding clients",
    "A malicious server",
    "A client",
    "The tracker",
    "A network eavesdropper",
    "The client's own app",
    "A node's owner",
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+(?:::\w+)?)`")


def rows() -> list[tuple[str, list[str]]]:
    """The section and the cells of every row of a table with these columns."""
    found, section, inside = [], "", False
    for line in _text("docs", "threat-model.md").splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        inside = bool(cells) and (inside or cells == COLUMNS)
        if inside and cells != COLUMNS and set(cells[0]) != {"-"}:
            found.append((section, cells))
    return found


@lru_cache
def names_in(path: Path) -> frozenset[str]:
    """The functions and classes of a file that pytest collects, as `test_x`, `TestY` and `TestY::test_z`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            names.add(node.name)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            inner = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            names |= {node.name, *(f"{node.name}::{name}" for name in inner if name.startswith("test_"))}
    return frozenset(names)


@pytest.mark.parametrize(
    ("section", "cells"), rows(), ids=lambda given: given if isinstance(given, str) else given[0]
)
def test_every_row_is_whole_and_names_tests(section: str, cells: list[str]) -> None:
    assert section in ADVERSARIES
    assert len(cells) == len(COLUMNS)
    assert all(cells)
    named = NAMED.findall(cells[-1])
    assert named
    # Nothing else stands there: a name that the pattern does not read would be checked by nobody.
    assert NAMED.sub("", cells[-1]).strip(" ,") == ""


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_named_on_a_page_exist(page: Path) -> None:
    gone = []
    for file, name in re.findall(
        r"\b(tests/[\w/]+\.py)(?:::(\w+(?:::\w+)?))?", page.read_text(encoding="utf-8")
    ):
        if not (ROOT / file).is_file() or (name and name not in names_in(ROOT / file)):
            gone.append(f"{file}::{name}")
    assert gone == []


def test_every_adversary_has_rows() -> None:
    assert list(dict.fromkeys(section for section, _ in rows())) == ADVERSARIES
