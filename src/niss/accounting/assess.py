# moved
from niss.accounting.protocol_rounds import LEAST_STEPS, Assessor, charge_to  # noqa: F401
