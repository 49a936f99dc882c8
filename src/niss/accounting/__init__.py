"""What each client is promised: plans, ledgers and statements.

`plan` and `forecast` find the cheapest protection for a target; a `Plan` gives every round its noise and its cost;
a `Ledger` or `LedgerFile` charges that cost against a budget; `make_statement` says what was promised in the end, and
`assess` what one graph and its noise would promise.

Names are imported on first use, so that what a planner is asked can be read without loading numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niss.accounting.account import (
        Account,
        CommittedAccount,
        DrawnAccount,
        scheduled_run,
        upload_mu,
    )
    from niss.accounting.asked import PlanQuestion
    from niss.accounting.committed import Committed
    from niss.accounting.discretisation import Promise, grid_delta, run_grid_delta
    from niss.accounting.judgement import Outlook, outlook
    from niss.accounting.ledger import Charge, ChargeableLedger, Ledger, LedgerHeader
    from niss.accounting.ledger_file import LedgerFile
    from niss.accounting.outsider import OutsiderClaim, outsider_epsilon
    from niss.accounting.planner import Forecast, forecast, plan
    from niss.accounting.plans import Plan, RoundPlan
    from niss.accounting.statement import (
        Statement,
        assess,
        make_statement,
        stated_delta,
        stated_relation,
    )
    from niss.accounting.terms import make_schedule, make_terms, propose_carried_round, propose_round

# Where the names are, the module that loads nothing heavy first.
_MODULES = (
    *("asked", "ledger", "plans", "planner", "account", "committed", "terms", "statement", "judgement"),
    *("discretisation", "ledger_file", "outsider"),
)


def __getattr__(name: str) -> Any:
    for module in _MODULES if name[0] != "_" else ():
        found = vars(import_module(f"niss.accounting.{module}"))
        if name in found:
            return found[name]
    raise AttributeError(f"module 'niss.accounting' has no attribute {name!r}")
