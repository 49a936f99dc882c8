# moved
from niss.report.ledger import (  # noqa: F401
    client_rows,
    format_claim,
    format_mu,
    format_spent,
    is_heuristic,
    spending,
)
