# moved
from niss.accounting.protocol_rounds import grid_delta, make_terms  # noqa: F401
