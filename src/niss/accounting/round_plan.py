# moved
from niss.accounting.plans import Balance, RoundPlan  # noqa: F401
