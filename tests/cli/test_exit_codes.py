"""The exit codes: one table in code, the same in the documentation, and one for every error."""

from __future__ import annotations

import re
from pathlib import Path

from niss import errors
from niss.cli.errors import CRASHED, EXIT_CODES, INTERRUPTED

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "exit-codes.md"


def test_the_documentation_holds_the_same_table() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(str(code), name, meaning) for code, name, meaning in EXIT_CODES]


def test_every_error_has_a_code_of_the_table() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert {kind.exit_code for kind in kinds if issubclass(kind, errors.NissError)} == {1, 2, 3, 4, 5, 6, 7}
    codes = [code for code, _, _ in EXIT_CODES]
    assert len(codes) == len(set(codes))
    assert {0, CRASHED, INTERRUPTED, 1, 2, 3, 4, 5, 6, 7} == set(codes)
