# moved
from niss.report.ledger_charts import save_ledger_chart  # noqa: F401
