"""A client's ledger in the words of Google's dp-accounting, so that others can check our sums."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from niss.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from niss.accounting.ledger_file import LedgerFile


def to_dp_event(mus: Iterable[float | None]) -> DpEvent:
    """All rounds of one client as a `ComposedDpEvent`: `GaussianDpEvent(1 / mu)` for each.

    Equal rounds are one `SelfComposedDpEvent`; composition does not mind the order. Infinite mu, or None,
    is a `NonPrivateDpEvent`; a mu of 0 reveals nothing and is left out. Give it to an accountant with its
    default relation: the sensitivity is already in mu, and REPLACE_ONE would double it in a PLDAccountant.
    """
    import dp_accounting

    counts = Counter(_checked(mu) for mu in mus)
    events = []
    for mu, count in counts.items():
        if mu == 0.0:
            continue
        event = (
            dp_accounting.NonPrivateDpEvent()
            if math.isinf(mu)
            else dp_accounting.GaussianDpEvent(noise_multiplier=1.0 / mu)
        )
        events.append(event if count == 1 else dp_accounting.SelfComposedDpEvent(event, count))
    return dp_accounting.ComposedDpEvent(events)


def dp_accounting_epsilon(mus: Iterable[float | None], delta: float) -> float | None:
    """Epsilon of these rounds by dp-accounting's PLD accountant; None: no guarantee.

    For checking: `gdp_epsilon(sqrt(sum of mu^2), delta)` is exact and quicker.
    """
    from dp_accounting.pld import PLDAccountant

    if not 0.0 < delta < 1.0:
        raise ConfigError(f"must lie strictly between 0 and 1, not {delta!r}", field="delta")
    accountant = PLDAccountant()
    accountant.compose(to_dp_event(mus))
    epsilon = float(accountant.get_epsilon(delta))
    return epsilon if math.isfinite(epsilon) else None


def client_dp_event(ledger: LedgerFile, client: str) -> DpEvent:
    """The joint-view charges of one client of a ledger, for an accountant of your choice."""
    ledger.budget(client)  # Refuses a client the ledger does not know.
    return to_dp_event(entry.mus[client].joint for entry in ledger.entries if client in entry.mus)


def _checked(mu: float | None) -> float:
    value = math.inf if mu is None else float(mu)
    if not value >= 0.0:
        raise ConfigError(f"must be a number, not below 0, not {mu!r}", field="mus")
    return value
