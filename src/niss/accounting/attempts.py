# moved
from niss.accounting.protocol_rounds import draw_round  # noqa: F401
