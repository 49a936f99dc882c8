"""Every row of the threat model names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "threat-model.md"
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
    for line in PAGE.read_text(encoding="utf-8").splitlines():
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
def test_every_row_is_whole_and_its_tests_exist(section: str, cells: list[str]) -> None:
    assert section in ADVERSARIES
    assert len(cells) == len(COLUMNS)
    assert all(cells)
    named = NAMED.findall(cells[-1])
    assert named
    # Nothing else stands there: a name that the pattern does not read would be checked by nobody.
    assert NAMED.sub("", cells[-1]).strip(" ,") == ""
    for file, name in named:
        assert (ROOT / file).is_file(), file
        assert name in names_in(ROOT / file), f"{file}::{name}"


def test_every_adversary_has_rows() -> None:
    assert list(dict.fromkeys(section for section, _ in rows())) == ADVERSARIES
