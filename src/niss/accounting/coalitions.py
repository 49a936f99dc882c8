# moved
from niss.accounting.planner import CoalitionPlan, Group, plan_coalitions  # noqa: F401
