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
from niss.accounting.outsider import outsider_epsilon
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


@pytest.mark.parametrize(
    ("mus", "delta", "known"),
    [([0.3, 0.5, 0.3], 1e-5, None), ([2.0, 1e-3], 1e-2, None), ([1.0 / 0.4553] * 30, 1e-4, 116.2)],
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
    code = (
        "import sys, niss.accounting.ledger_file, niss.accounting.outsider; "
        "print('dp_accounting' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
