"""The demo, whole: the numbers a newcomer is promised."""

from __future__ import annotations

import pytest

import niss


@pytest.mark.slow
def test_the_demo_shows_what_it_claims(tmp_path):
    comparison = niss.compare(niss.preset("demo"), out=tmp_path / "demo")
    lines = {line["label"]: line for line in comparison.summary["methods"]}
    for label in ("niss-carried", "central-dp", "niss", "dp-fedavg"):
        assert 2.9 < lines[label]["epsilon_joint"] <= 3.0 + 1e-9
    assert lines["niss-as-printed"]["epsilon_joint"] is None
    assert lines["fedavg"]["accuracy"] > 0.84
    assert lines["central-dp"]["accuracy"] > 0.82
    assert lines["niss"]["accuracy"] > 0.82
    assert lines["niss-carried"]["accuracy"] > lines["central-dp"]["accuracy"]
    assert lines["dp-fedavg"]["accuracy"] < 0.35
    noise = {result.label: result.rounds[-1].model_noise_variance for result in comparison}
    assert noise["niss-carried"] < 0.35 * noise["central-dp"]
    for line in lines.values():
        if line["aggregate_variance_predicted"]:
            assert line["aggregate_variance"] == pytest.approx(line["aggregate_variance_predicted"], rel=0.02)
