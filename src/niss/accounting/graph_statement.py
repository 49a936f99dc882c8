# moved
from niss.accounting.statement import assess as statement  # noqa: F401
