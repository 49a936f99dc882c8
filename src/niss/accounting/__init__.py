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
    from niss.methods import RELATIONS
    from niss.views import calibrate_tau2, effective_variance

# Each module, and the names of `__all__` that it holds.
_MODULES = {
    "niss.accounting.account": "Account CommittedAccount DrawnAccount scheduled_run upload_mu",
    "niss.accounting.committed": "Committed",
    "niss.accounting.discretisation": "Promise grid_delta run_grid_delta",
    "niss.accounting.ledger": "Charge ChargeableLedger LedgerHeader Ledger",
    "niss.accounting.ledger_file": "LedgerFile",
    "niss.accounting.judgement": "Outlook outlook",
    "niss.accounting.outsider": "OutsiderClaim outsider_epsilon",
    "niss.accounting.planner": "Forecast forecast plan",
    "niss.accounting.plans": "Plan RoundPlan",
    "niss.accounting.asked": "PlanQuestion",
    "niss.accounting.statement": "Statement assess make_statement stated_delta stated_relation",
    "niss.accounting.terms": "make_schedule make_terms propose_carried_round propose_round",
    "niss.methods": "RELATIONS",
    "niss.views": "calibrate_tau2 effective_variance",
}

__all__ = [
    "RELATIONS",
    "Account",
    "Charge",
    "ChargeableLedger",
    "Committed",
    "CommittedAccount",
    "DrawnAccount",
    "Forecast",
    "Ledger",
    "LedgerFile",
    "LedgerHeader",
    "Outlook",
    "OutsiderClaim",
    "Plan",
    "PlanQuestion",
    "Promise",
    "RoundPlan",
    "Statement",
    "assess",
    "calibrate_tau2",
    "effective_variance",
    "forecast",
    "grid_delta",
    "make_schedule",
    "make_statement",
    "make_terms",
    "outlook",
    "outsider_epsilon",
    "plan",
    "propose_carried_round",
    "propose_round",
    "run_grid_delta",
    "scheduled_run",
    "stated_delta",
    "stated_relation",
    "upload_mu",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module 'niss.accounting' has no attribute {name!r}")
