"""Nodes that want to end the run, on real SuperLink and SuperNode processes. Only in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest

from flower.test_deployment import FAULTY, WITHOUT_NOISE, caveats, check_sums, finished, nothing_is_left
from niss.local.deployment import Deployment, Settings

pytestmark = pytest.mark.slow


def test_degenerate_keys_and_a_malformed_reply_cost_their_nodes_alone(tmp_path):
    options: dict[int, dict[str, Any]] = {
        number: {"niss-state": None, **WITHOUT_NOISE} for number in range(8)
    }
    options[1] |= {"fault": "degenerate"}
    options[2] |= {"fault": "malformed", "fault-round": 2}
    settings = Settings(nodes=8, tls=False, tracker=False, pinned=False, node_options=options)
    with Deployment(tmp_path / "up", settings) as federation:
        run = federation.submit(FAULTY, {"rounds": 3, "timeout": 120.0})
        report = finished(federation, run)
    assert nothing_is_left(federation)
    others = set(range(8)) - {1}
    check_sums(federation, [others, others - {2}, others])
    assert [one["survivors"] for one in report["rounds"]] == [7, 6, 7]
    assert all(one["exact"] for one in report["rounds"])
    assert "not a string of bytes" in " ".join(report["rounds"][1]["lost"].values())
    assert "degenerate" in caveats(report)
