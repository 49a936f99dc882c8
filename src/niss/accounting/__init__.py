"""What each client is promised: the joint view, the ledger, the plan and the statement."""

from niss.accounting.coalitions import CoalitionPlan, Group, plan_coalitions
from niss.accounting.dp_events import client_dp_event, to_dp_event
from niss.accounting.graph_statement import statement
from niss.accounting.ledger import Ledger
from niss.accounting.ledger_file import LedgerFile
from niss.accounting.outsider import OutsiderClaim, outsider_epsilon
from niss.accounting.plan import RELATIONS, UNITS, Plan
from niss.accounting.planner import Planned, TradeOff, make_plan
from niss.accounting.round_plan import Balance, RoundPlan
from niss.accounting.statement import ClientStatement, Statement, make_statement
from niss.methods import METHODS
from niss.views import (
    Corruption,
    WorstCase,
    calibrate_for,
    calibrate_tau2,
    colluding_neighbours,
    effective_variance,
    worst_case,
)

__all__ = [
    "METHODS",
    "RELATIONS",
    "UNITS",
    "Balance",
    "ClientStatement",
    "CoalitionPlan",
    "Corruption",
    "Group",
    "Ledger",
    "LedgerFile",
    "OutsiderClaim",
    "Plan",
    "Planned",
    "RoundPlan",
    "Statement",
    "TradeOff",
    "WorstCase",
    "calibrate_for",
    "calibrate_tau2",
    "client_dp_event",
    "colluding_neighbours",
    "effective_variance",
    "make_plan",
    "make_statement",
    "outsider_epsilon",
    "plan_coalitions",
    "statement",
    "to_dp_event",
    "worst_case",
]
