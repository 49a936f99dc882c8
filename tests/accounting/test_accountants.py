"""Every accountant passes the same suite, and dp-accounting, told what our ledger holds, finds what it says."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from niss.accounting import Charge, LedgerFile, LedgerHeader
from niss.accounting.outsider import client_dp_event, outsider_epsilon, to_dp_event
from niss.errors import PrivacyError
from niss.mechanism import gdp_epsilon
from support.accountant_contract import AccountantContract


class TestLedgerFile(AccountantContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder, self.made = tmp_path, 0

    def epsilon(self, mus: list[float], delta: float) -> float | None:
        self.made += 1
        path = self.folder / f"{self.made}.jsonl"
        with LedgerFile.create(path, LedgerHeader(run="x", budgets={"k": None}, delta=delta)) as ledger:
            for number, mu in enumerate(mus):
                ledger.charge(number, 0, {"k": Charge.of(mu, mu)})
            return ledger.epsilon(ledger.spent("k"))


class TestDpEvents(AccountantContract):
    """dp-accounting's PLD, told our rounds as events; deltas that are none are for it to refuse."""

    above = below = 1e-3
    refused = (([0.3, math.nan], 1e-5), ([-0.3], 1e-5))

    def epsilon(self, mus: list[float], delta: float) -> float | None:
        accountant = PLDAccountant()
        accountant.compose(to_dp_event(mus))
        epsilon = float(accountant.get_epsilon(delta))
        return epsilon if math.isfinite(epsilon) else None


class OutsiderContract(AccountantContract):
    sampling = ""
    clients = participants = 100
    relation = "zero-out"

    def epsilon(self, mus: list[float], delta: float) -> float | None:
        return outsider_epsilon(
            mus=mus,
            unit="client",
            relation=self.relation,
            sampling=self.sampling,
            clients=self.clients,
            participants=self.participants,
            delta=delta,
        ).epsilon


class TestShuffled(OutsiderContract):
    sampling = "shuffled"


class TestPoissonOfEveryone(OutsiderContract):
    sampling = "poisson"
    above = below = 1e-3


class TestPoisson(OutsiderContract):
    sampling = "poisson"
    participants = 30
    above, below = 0.0, 1.0


class TestUniformOfEveryone(OutsiderContract):
    sampling = "uniform"
    relation = "replace-one"


class TestUniform(OutsiderContract):
    sampling = "uniform"
    participants = 5
    relation = "replace-one"
    above, below = 0.0, 1.0


def test_the_value_of_the_field_notes() -> None:
    mus = [1.0 / 0.4553] * 30
    accountant = PLDAccountant()
    accountant.compose(to_dp_event(mus))
    epsilon = accountant.get_epsilon(1e-4)
    assert epsilon == pytest.approx(116.2, abs=0.05)
    assert epsilon == pytest.approx(gdp_epsilon(math.sqrt(30) / 0.4553, 1e-4), rel=1e-3)


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
    with LedgerFile.create(tmp_path / "l.jsonl", LedgerHeader(run="x", delta=1e-5)) as ledger:
        ledger.charge(1, 0, {"a": Charge.of(0.5, 9.0), "b": Charge.of(math.inf, 9.0)})
        ledger.charge(2, 0, {"b": Charge.of(0.5, 9.0)})
        ledger.charge(3, 0, {"a": Charge.of(0.25, 9.0)})
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
