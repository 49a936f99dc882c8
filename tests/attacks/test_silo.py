"""Attacks on the uploads of silos: a record that fails, and a picture that may be there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from niss.accounting import Plan
from niss.attacks import lying
from niss.attacks.experiment import Findings
from niss.attacks.federation import FailingSilo, weights_of
from niss.attacks.silo import BARE, OracleExperiment, SiloExperiment
from niss.protocol import encode
from niss.randomness import SimStream

CLIP, SILOS = 0.5, 5
PLAN = Plan(
    unit="record", batch=1.0, records=100, clip=CLIP, neighbours=SILOS - 1.0, graph="complete", epsilon=8.0
)


def run(experiment: Any) -> Findings:
    findings: Findings = experiment.start()
    experiment.run(findings, lambda *_: None)
    return findings


def moved(failure: str, length: int, *, blank: bool) -> float:
    """In clips, by a record that fails."""
    weights = weights_of(failure)
    without, present = (FailingSilo(length, CLIP, one, blank=blank) for one in (None, failure))
    return float(np.linalg.norm(present.added(weights, CLIP) - without.added(weights, CLIP))) / CLIP


@pytest.mark.parametrize("failure", ["overflows", "raises an exception"])
def test_a_record_that_fails_moves_the_sum_by_less_than_its_clip(failure: str) -> None:
    """A blank instead, which a silo that fails as a whole would send, moves it by all that the others add."""
    for length in (3, 30):
        assert moved(failure, length, blank=False) <= 1e-5
        assert moved(failure, length, blank=True) == pytest.approx(length, rel=1e-5)


def test_weights_at_which_one_record_overflows_change_neither_the_form_of_the_upload_nor_the_work() -> None:
    weights, seen = weights_of("overflows"), []
    for failure in (None, "overflows"):
        silo = FailingSilo(10, CLIP, failure, blank=False)
        server = lying.LyingServer(PLAN, SILOS, coordinates=weights.size, stream=SimStream(1))
        uploaded = server.upload(0, (silo.records, weights))
        seen.append((silo.calls, len(encode(server.uploads[0]))))
        assert np.isfinite(uploaded).all()
    assert seen[0] == seen[1]
    assert seen[0][0] == 1


def test_the_oracle_measures_what_a_blank_gives_away() -> None:
    """10 runs each way at mu 0.7: 30 clips are 21 deviations, measured to 16 %, and none to 0.6 clips; 5 of each."""
    findings = run(OracleExperiment(runs=10, seed=3))
    rows = {(row["failure"], row["rule"], row["sum"]): row for row in findings.rows}
    off, on = rows["overflows", "off", 30], rows["overflows", "on", 30]
    assert (off["verdict"], on["verdict"]) == ("the claim is void", "nothing beyond its clip")
    assert off["measured"] == pytest.approx(30.0, rel=0.8)
    assert abs(on["measured"]) < 4.0
    assert on["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert rows["overflows", "off", 3]["epsilon"] == pytest.approx(3.9, rel=0.02)
    assert rows["overflows", "off", 10]["epsilon"] == pytest.approx(52.6, rel=0.02)
    assert off["epsilon"] == pytest.approx(976.0, rel=0.02)
    assert "turns epsilon 1 into 3.94" in findings.headline


def test_a_picture_shows_in_a_bare_upload_and_not_in_that_of_niss() -> None:
    """An AUC of 0.69 from 20 scores each way: all 20 above all others, or below 0.2, at rates below 1e-6."""
    findings = run(SiloExperiment(runs=20, iterations=60, restarts=1, records=3, clients=3))
    bare, hidden = findings.rows
    assert (bare["case"], bare["auc"]) == (BARE, 1.0)
    assert bare["noise"] < 1e-4, "single precision"
    assert bare["psnr"] > findings.curves["blind_guess_psnr"] > hidden["psnr"]
    assert hidden["epsilon_joint"] == pytest.approx(3.0, abs=0.01)
    assert hidden["noise"] > 50.0
    assert 0.2 < hidden["auc"] < 1.0
