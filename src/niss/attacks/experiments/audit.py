# moved
from niss.attacks.audit import AuditExperiment  # noqa: F401
