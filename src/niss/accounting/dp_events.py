# moved
from niss.accounting.outsider import client_dp_event, dp_accounting_epsilon, to_dp_event  # noqa: F401
