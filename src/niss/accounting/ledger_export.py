# moved
from niss.accounting.ledger_chain import client_order  # noqa: F401
