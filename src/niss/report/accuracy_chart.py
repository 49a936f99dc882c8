# moved
from niss.report.method_charts import LINE_STYLES, MARKERS  # noqa: F401
