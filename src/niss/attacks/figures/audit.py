# moved
from niss.attacks.audit import AuditExperiment

draw_audit = AuditExperiment().draw
