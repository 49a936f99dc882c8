"""Every accountant passes the same suite, and dp-accounting, told what our ledger holds, finds what it says."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from niss.accounting import Charge, LedgerFile, LedgerHeader
from niss.accounting.outsider import outsider_epsilon
from niss.errors import NissError
from niss.mechanism import gdp_epsilon

ROUNDS = [0.3, 0.5, 0.3]
DELTA = 1e-5


class Accountant(NamedTuple):
    """`epsilon(mus, delta)` of rounds that are mu-GDP each, without sampling; None: no guarantee.

    It may exceed the exact curve by the part `above` of it, and fall short by `below`: 0 but for rounding,
    except where amplification by sampling is what the accountant is for.
    """

    epsilon: Callable[[list[float], float], float | None]
    above: float = 1e-9
    below: float = 1e-9

    def known(self, mus: list[float], delta: float = DELTA) -> float:
        epsilon = self.epsilon(mus, delta)
        assert epsilon is not None
        return epsilon


def of_ledger(mus: list[float], delta: float) -> float | None:
    header = LedgerHeader(run="x", budgets={"k": None}, delta=delta)
    with tempfile.TemporaryDirectory() as folder, LedgerFile.create(Path(folder) / "l", header) as ledger:
        for number, mu in enumerate(mus):
            ledger.charge(number, 0, {"k": Charge.of(mu, mu)})
        return ledger.epsilon(ledger.spent("k"))


def of_outsider(
    mus: list[float], delta: float, *, sampling: str, participants: int = 100, relation: str = "zero-out"
) -> float | None:
    told = {"unit": "client", "relation": relation, "clients": 100, "participants": participants}
    return outsider_epsilon(mus=mus, sampling=sampling, delta=delta, **told).epsilon


UNIFORM = partial(of_outsider, sampling="uniform", relation="replace-one")
ACCOUNTANTS = {
    "ledger": Accountant(of_ledger),
    "shuffled": Accountant(partial(of_outsider, sampling="shuffled")),
    "poisson of everyone": Accountant(partial(of_outsider, sampling="poisson"), 1e-3, 1e-3),
    "poisson": Accountant(partial(of_outsider, sampling="poisson", participants=30), 0.0, 1.0),
    "uniform of everyone": Accountant(UNIFORM),
    "uniform": Accountant(partial(UNIFORM, participants=5), 0.0, 1.0),
}


@pytest.fixture(params=ACCOUNTANTS)
def accountant(request: pytest.FixtureRequest) -> Accountant:
    return ACCOUNTANTS[request.param]


def test_rounds_compose_in_any_order_and_more_of_them_less_noise_and_a_smaller_delta_cost_more(
    accountant: Accountant,
) -> None:
    known, three = accountant.known, accountant.known(ROUNDS)
    assert accountant.epsilon([], DELTA) == pytest.approx(0.0, abs=1e-9)
    assert known(ROUNDS[::-1]) == pytest.approx(three, rel=1e-9)
    for costs in (
        [*(known(ROUNDS[:count]) for count in range(len(ROUNDS))), three],
        [known([0.5 * mu for mu in ROUNDS]), three, known([2.0 * mu for mu in ROUNDS])],
        [known(ROUNDS, 1e-2), three, known(ROUNDS, 1e-6)],
        [three, known([0.3, 0.5, 0.4])],
    ):
        assert all(less < more for less, more in pairwise(costs))


@pytest.mark.parametrize("mus", [ROUNDS, [0.05], [1.0] * 4, [0.1] * 40, [2.0, 1e-3]])
def test_it_agrees_with_the_exact_curve(accountant: Accountant, mus: list[float]) -> None:
    exact = gdp_epsilon(math.sqrt(math.fsum(mu**2 for mu in mus)), DELTA)
    found = accountant.known(mus)
    assert (1.0 - accountant.below) * exact - 1e-9 <= found <= (1.0 + accountant.above) * exact + 1e-9


def test_it_refuses_rather_than_guess(accountant: Accountant) -> None:
    assert accountant.epsilon([0.3, math.inf], DELTA) is None, "a round without noise leaves no guarantee"
    refused = (([0.3, math.nan], DELTA), ([-0.3], DELTA), ([0.3], 0.0), ([0.3], 1.0), ([0.3], math.nan))
    for mus, delta in refused:
        with pytest.raises(NissError):
            accountant.epsilon(mus, delta)


@pytest.mark.parametrize(
    ("mus", "delta", "known"),
    [(ROUNDS, DELTA, None), ([2.0, 1e-3], 1e-2, None), ([1.0 / 0.4553] * 30, 1e-4, 116.2)],
    ids=["", "unlike", "field notes"],
)
def test_dp_accounting_told_what_the_ledger_holds_finds_what_it_says(
    tmp_path: Path, mus: list[float], delta: float, known: float | None
) -> None:
    """Of one client, by its own charges in the joint view; the other has no guarantee."""
    with LedgerFile.create(tmp_path / "l.jsonl", LedgerHeader(run="x", delta=delta)) as ledger:
        ledger.charge(0, 0, {"b": Charge.of(math.inf, 9.0)})
        for number, mu in enumerate(mus, start=1):
            ledger.charge(number, 0, {"a": Charge.of(mu, 9.0), "b": Charge.of(0.5, 9.0)})
    accountant = PLDAccountant()
    for entry in ledger.entries[1:]:
        accountant.compose(dp_accounting.GaussianDpEvent(1.0 / entry.charges["a"].joint))
    epsilon = accountant.get_epsilon(delta)
    assert epsilon == pytest.approx(ledger.epsilon(ledger.spent("a")), rel=1e-3)
    assert known is None or epsilon == pytest.approx(known, abs=0.05)
    assert ledger.epsilon(ledger.spent("b")) is None


def test_importing_the_ledger_does_not_import_dp_accounting() -> None:
    code = "import sys, niss.accounting.ledger_file, niss.accounting.outsider; print('dp_accounting' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
