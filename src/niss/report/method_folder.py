# moved
from niss.report.run_folder import planned_methods  # noqa: F401
