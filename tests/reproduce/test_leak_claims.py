"""The claims about Figure 4, from made-up attacks: those that hold, and each one failing alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.reproduce.claims import BARE, HIDDEN, JOINT, LOSS, PAPER, check_claims
from experiments.reproduce.paper import attack_cells
from experiments.reproduce.results import Attempt, Leaks
from experiments.reproduce.text import computed_text
from support.results import keep

PSNR = {"fedavg": 70.0, "dp-fedavg": 25.0, "niss": 9.0, "niss-joint": 70.0, "niss-calibrated": 25.0}
PSNR |= {
    "client-dp-fedavg": 3.0,
    "client-niss": 3.0,
    "client-niss-joint": 65.0,
    "client-niss-calibrated": 3.0,
}
LOSSES = {"fedavg": 1e-8, "dp-fedavg": 0.2, "niss": 0.5}


def made_up() -> Leaks:
    cells = tuple(
        Attempt(
            id=name,
            labels=labels,
            noise=0.0,
            loss=LOSSES.get(level.name, 1.0),
            losses=((1, 5.0), (9, LOSSES.get(level.name, 1.0))),
            frames=((1, 2.0), (9, PSNR[level.name])),
            iterations=9,
            stopped="",
            mse=0.1,
            psnr=PSNR[level.name],
            ssim=0.5,
            label_found=True,
            epsilon_joint=None,
            epsilon_marginal=None,
            seconds=1.0,
        )
        for name, (labels, level, _) in attack_cells([1, 2]).items()
    )
    return Leaks("figure-4", "mnist-0", {"image": "mnist:0", "grey_psnr": 10.0}, cells)


def verdicts(folder, leaks):
    keep(folder, leaks)
    return {c.name.partition(": ")[2]: c.holds for c in check_claims(folder) if c.name.startswith("mnist:0")}


def test_all_hold(tmp_path):
    assert verdicts(tmp_path, made_up()) == dict.fromkeys((BARE, JOINT, HIDDEN, LOSS, PAPER), True)
    assert computed_text(tmp_path, "figure-4.mnist-0.dp-fedavg") == "25.0 ± 0.0 dB"
    assert computed_text(tmp_path, "figure-4.mnist-7.niss") == "not measured yet"


@pytest.mark.parametrize(
    ("level", "changes", "broken"),
    [
        ("fedavg", {"psnr": 19.0}, BARE),
        ("fedavg", {"label_found": False}, BARE),
        ("client-niss-joint", {"psnr": 19.0}, JOINT),
        ("client-niss-calibrated", {"frames": ((1, 11.0), (9, 3.0))}, HIDDEN),
        ("dp-fedavg", {"loss": 0.6}, LOSS),
        ("niss", {"frames": ((1, 11.0), (9, 9.0))}, PAPER),
    ],
)
def test_one_seed_is_enough_to_break_a_claim(tmp_path, level, changes, broken):
    leaks = made_up()
    cells = tuple(
        replace(cell, **changes) if cell.labels["level"] == level and cell.labels["seed"] == 2 else cell
        for cell in leaks.cells
    )
    found = verdicts(tmp_path, replace(leaks, cells=cells))
    assert [name for name, holds in found.items() if not holds] == [broken]
    claims = {claim.name: claim for claim in check_claims(tmp_path)}
    assert claims[f"mnist:0: {PAPER}"].required is False
    assert claims[f"mnist:0: {BARE}"].required is True
