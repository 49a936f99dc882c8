"""The page on operations names the formats that there are."""

from __future__ import annotations

import re

from docs.snippets import ROOT
from niss.flower import proposal
from niss.protocol import wire

PAGE = (ROOT / "docs" / "guides" / "operations.md").read_text(encoding="utf-8")


def test_the_versions_are_those_of_the_code():
    rows = dict(re.findall(r"^\| ([a-z (),]+) \| (\d+ \| [^|]+?) \|$", PAGE, re.MULTILINE))
    assert rows["messages of a round (wire)"] == f"{wire.VERSION} | {wire.VERSION}"
    assert rows["proposal of a run"] == f"{proposal.VERSION} | {proposal.VERSION}"
    assert rows["enrolment"] == f"{proposal.ENROLMENT_VERSION} | {proposal.ENROLMENT_VERSION}"
