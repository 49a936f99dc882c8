# moved
from niss.accounting.plans import FAILURE_SHARE, RELATIONS, UNITS, Plan  # noqa: F401
