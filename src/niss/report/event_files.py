# moved
from niss.report.export import write_event_files  # noqa: F401
