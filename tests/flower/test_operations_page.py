"""The page on operations names the formats and the metrics that there are."""

from __future__ import annotations

import re

from docs.snippets import ROOT
from flower.grid import FakeGrid
from flower.test_prometheus import node_app
from flower.test_trust import NODES, ODD, start, with_folders
from niss.flower import proposal
from niss.flower.prometheus import server_text
from niss.protocol import wire

PAGE = (ROOT / "docs" / "guides" / "operations.md").read_text(encoding="utf-8")


def test_the_versions_are_those_of_the_code():
    rows = dict(re.findall(r"^\| ([a-z (),]+) \| (\d+ \| [^|]+?) \|$", PAGE, re.MULTILINE))
    assert rows["messages of a round (wire)"] == f"{wire.VERSION} | {wire.VERSION}"
    read = " and ".join(map(str, proposal._VERSIONS))
    assert rows["proposal of a run"] == f"{proposal.VERSION} | {read}"
    assert rows["enrolment"] == f"{proposal.ENROLMENT_VERSION} | {proposal.ENROLMENT_VERSION}"


def test_every_metric_is_on_the_page_and_every_one_on_the_page_exists(tmp_path, monkeypatch):
    grid, path = FakeGrid(NODES), tmp_path / "node.prom"
    with_folders(grid, tmp_path / "nodes")
    grid.apps[ODD] = node_app(path, monkeypatch)
    text = server_text(start(grid)) + path.read_text()
    shown = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) - {"niss_server_info", "niss_node_info"}
    assert shown == set(re.findall(r"`(niss_(?:server|node)_\w+)", PAGE))
