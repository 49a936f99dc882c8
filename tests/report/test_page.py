from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from niss.errors import RunFolderError
from niss.report import write_report

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Collects tags, their attributes and the text, and refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_the_page_is_structured_for_all_readers(demo: Path) -> None:
    page = page_of(demo)
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(page.all("caption")) == len(page.all("table")) == 3
    # Promises: 5 columns; results: 8 columns, 6 methods; values: a column for each method and the round, 24 rounds.
    assert Counter(cell.get("scope") for cell in page.all("th")) == {"col": 5 + 8 + 7, "row": 6 + 6 + 24}
    # Two charts, each for a window and for a phone.
    assert [svg["role"] for svg in page.all("svg") if "x" not in svg] == ["img"] * 4
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_loads_nothing_from_anywhere(demo: Path) -> None:
    text = write_report(demo).read_text(encoding="utf-8")
    assert not re.search("https?://", text)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_the_page_says_what_was_measured_and_where_it_comes_from(demo: Path) -> None:
    text = page_of(demo).text
    for said in (
        "niss-kappa-4 comes closest to fedavg",
        "no guarantee",
        "not private",
        "The server sees all uploads of a round",
        "This is what the paper counts",
        "Against: those who see the released models; the server is trusted",
        "the shares cancel exactly",
        "mnist-mini",
        "zero-out",
        "versions.torch",
        "sha256:ab12",
        "seed",
        "The ε of central-dp assumes a trusted server",
    ):
        assert said in text, said
    assert "Unfinished" not in text


def test_everything_from_the_folder_is_escaped(compare: Callable[..., Path]) -> None:
    nasty = '<script>alert("x")</script>'
    texts = {"label": nasty, "adversary": nasty, "guarantee": nasty}
    settings = dict.fromkeys(("title", "name", "dataset", "split", "unit", "relation", "created"), nasty)
    folder = compare({"niss-kappa-4": texts}, **settings, niss_version=nasty)
    path = folder / "niss-kappa-4" / "manifest.json"
    path.write_text(json.dumps({nasty: nasty, "config": {nasty: nasty}}), encoding="utf-8")
    text = write_report(folder).read_text(encoding="utf-8")
    assert "<script" not in text
    page = Page(text)
    assert not page.all("script")
    assert page.text.count(nasty) >= 14


def test_characters_that_no_page_may_carry_become_question_marks(compare: Callable[..., Path]) -> None:
    text = page_of(compare({"dp-fedavg": {"label": "dp\x00\x1b\ud800\ufffeend"}})).text
    assert "dp????end" in text


def test_an_unfinished_run_says_so_and_shows_its_curve(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"round": 31, "accu')
    page = page_of(run_folder)
    assert "This run is unfinished" in page.text
    assert "there is no result.json" in page.text
    assert "cut off" in page.text
    assert "(Round 30)" in (page.all("svg")[0]["aria-label"] or "")


def test_a_run_that_has_only_begun_still_gets_a_page(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    text = page_of(run_folder).text
    assert "No evaluation yet" in text
    assert "not measured yet" in text


def test_a_comparison_that_has_only_begun_still_gets_a_page(demo: Path) -> None:
    (demo / "summary.json").unlink()
    for folder in [path for path in demo.iterdir() if path.is_dir()]:
        shutil.rmtree(folder)
    assert "This comparison is unfinished: 0 methods have begun" in page_of(demo).text


def test_long_lists_in_the_manifest_are_cut_short(run_folder: Path) -> None:
    path = run_folder / "manifest.json"
    path.write_text(json.dumps({"data": {"sizes": list(range(1000))}}), encoding="utf-8")
    text = page_of(run_folder).text
    assert "(1000 in all)" in text
    assert "999" not in text


def test_the_page_goes_where_it_is_told_and_leaves_nothing_else(demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    assert write_report(demo, out) == out
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    assert not (demo / "report.html").exists()
    assert write_report(demo) == demo / "report.html"


def test_a_failed_write_keeps_the_old_page_and_no_leftovers(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(demo)
    before = (demo / "report.html").read_bytes()
    names = sorted(path.name for path in demo.iterdir())

    def full(_self: Path, _target: Path) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunFolderError, match="No space left"):
        write_report(demo)
    assert (demo / "report.html").read_bytes() == before
    assert sorted(path.name for path in demo.iterdir()) == names


def test_importing_the_room_loads_neither_matplotlib_nor_torch() -> None:
    heavy = ("matplotlib", "torch", "niss.simulation")
    code = f"import sys, niss.report; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
