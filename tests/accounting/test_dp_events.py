"""dp-accounting, told what our ledger holds, finds what our ledger says."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from niss.accounting.ledger_file import LedgerFile
from niss.accounting.outsider import client_dp_event, dp_accounting_epsilon, to_dp_event
from niss.errors import PrivacyError
from niss.mechanism import gdp_epsilon


def test_the_value_of_the_field_notes() -> None:
    mus = [1.0 / 0.4553] * 30
    accountant = PLDAccountant()
    accountant.compose(to_dp_event(mus))
    epsilon = accountant.get_epsilon(1e-4)
    assert epsilon == pytest.approx(116.2, abs=0.05)
    assert epsilon == pytest.approx(gdp_epsilon(math.sqrt(30) / 0.4553, 1e-4), rel=1e-3)


@pytest.mark.parametrize("delta", [1e-3, 1e-6])
@pytest.mark.parametrize("mus", [[0.5], [0.2, 0.7, 0.2], [0.1] * 40, [2.0, 1e-3]])
def test_pld_agrees_with_exact_composition(mus: list[float], delta: float) -> None:
    exact = gdp_epsilon(math.sqrt(math.fsum(mu**2 for mu in mus)), delta)
    assert dp_accounting_epsilon(mus, delta) == pytest.approx(exact, rel=1e-3, abs=1e-4)


def test_rounds_become_gaussian_events() -> None:
    gaussian = dp_accounting.GaussianDpEvent
    assert to_dp_event([0.5, 0.25, 0.5]) == dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(gaussian(2.0), 2), gaussian(4.0)]
    )
    assert to_dp_event([0.0]) == dp_accounting.ComposedDpEvent([])
    assert to_dp_event([None, math.inf]) == dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(dp_accounting.NonPrivateDpEvent(), 2)]
    )


def test_a_ledgers_client_is_told_by_its_charges_alone(tmp_path: Path) -> None:
    with LedgerFile.create(
        tmp_path / "l.jsonl", run="x", delta=1e-5, unit="client", relation="zero-out"
    ) as ledger:
        ledger.charge(1, 0, {"a": (0.5, 9.0), "b": (math.inf, 9.0)})
        ledger.charge(2, 0, {"b": (0.5, 9.0)})
        ledger.charge(3, 0, {"a": (0.25, 9.0)})
    assert client_dp_event(ledger, "a") == to_dp_event([0.5, 0.25])
    accountant = PLDAccountant()
    accountant.compose(client_dp_event(ledger, "a"))
    assert accountant.get_epsilon(1e-5) == pytest.approx(ledger.epsilon(ledger.spent("a")), rel=1e-3)
    with pytest.raises(PrivacyError, match="'z' is not in"):
        client_dp_event(ledger, "z")


def test_importing_the_ledger_does_not_import_dp_accounting() -> None:
    code = (
        "import sys, niss.accounting.ledger_file, niss.accounting.outsider; "
        "print('dp_accounting' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
