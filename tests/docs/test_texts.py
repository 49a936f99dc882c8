"""README and docs as texts: links lead somewhere, settings are valid, numbers have a source."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from docs.snippets import ROOT, blocks, pages
from niss.simulation.config import make_config

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


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_files_are_valid(page):
    for block in blocks(page):
        if block.language == "toml":
            assert make_config(tomllib.loads(block.text)).methods, str(block)


def test_the_comparison_has_its_numbers_from_the_demo_and_the_benchmarks():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Compared with the alternatives", 1)[1].split("\n## ", 1)[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    demo = readme.split("<!-- table: demo -->", 1)[1].split("<!-- end -->", 1)[0]
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    sources = (demo + benchmarks).replace(" %", "%")
    numbers = [hit.replace(" %", "%") for hit in _NUMBER.findall(table)]
    numbers += re.findall(r"\d\.\d+e-\d+|0\.0\d+(?= \|)", table)
    assert len(numbers) >= 9
    assert [number for number in numbers if number not in sources] == []


def test_the_shakespeare_table_repeats_rows_of_the_page_that_is_made_from_the_results():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("<!-- table: shakespeare -->\n", 1)[1].split("<!-- end -->", 1)[0]
    source = (ROOT / "docs" / "concepts" / "datasets.md").read_text(encoding="utf-8")
    rows = table.splitlines()[2:]
    assert len(rows) >= 5
    assert [row for row in rows if f"\n| Shakespeare, GRU {row}" not in source] == []


def test_the_citation_names_this_version_and_the_paper_of_the_readme():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["title"], str(citation["version"])) == (project["name"], project["version"])
    (paper,) = citation["references"]
    cited = (ROOT / "README.md").read_text(encoding="utf-8").split("## Citing", 1)[1]
    for part in (
        paper["title"],
        paper["journal"],
        paper["url"],
        *(one["family-names"] for one in paper["authors"]),
    ):
        assert part in " ".join(cited.split()), part


def test_the_marks_of_the_tools_are_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("<!-- table: demo -->\n") == 1
    assert re.search(r"<!-- result: \S+ -->.*?<!-- end -->", readme, re.DOTALL)
