"""What each client is promised: the joint view, the ledger, the plan and the statement."""

from niss.accounting.joint import calibrate_tau2, effective_variance
from niss.accounting.ledger import Ledger
from niss.accounting.plan import METHODS, RELATIONS, UNITS, Plan
from niss.accounting.round_plan import Balance, RoundPlan
from niss.accounting.statement import ClientStatement, Statement, make_statement

__all__ = [
    "METHODS",
    "RELATIONS",
    "UNITS",
    "Balance",
    "ClientStatement",
    "Ledger",
    "Plan",
    "RoundPlan",
    "Statement",
    "calibrate_tau2",
    "effective_variance",
    "make_statement",
]
