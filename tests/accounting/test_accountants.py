"""Every accountant passes the same suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from niss.accounting.ledger_file import LedgerFile
from niss.accounting.outsider import dp_accounting_epsilon, outsider_epsilon
from support.accountant_contract import AccountantContract


class TestLedgerFile(AccountantContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder, self.made = tmp_path, 0

    def epsilon(self, mus: list[float], delta: float) -> float | None:
        self.made += 1
        path = self.folder / f"{self.made}.jsonl"
        with LedgerFile.create(
            path, run="x", budgets={"k": None}, delta=delta, unit="client", relation="zero-out"
        ) as ledger:
            for number, mu in enumerate(mus):
                ledger.charge(number, 0, {"k": (mu, mu)})
            return ledger.epsilon(ledger.spent("k"))


class TestDpEvents(AccountantContract):
    above = below = 1e-3

    def epsilon(self, mus: list[float], delta: float) -> float | None:
        return dp_accounting_epsilon(mus, delta)


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
