"""`niss up`: a whole federation on one machine, as the processes that several machines would run.

`deployment` starts and configures everything, `processes` takes it all down again, `certificates` makes the keys.
"""

from __future__ import annotations

from niss.local.certificates import Certificates, make_certificates, make_node_key
from niss.local.deployment import Deployment, Settings, free_port
from niss.local.processes import Processes, Started, marked

__all__ = [
    "Certificates",
    "Deployment",
    "Processes",
    "Settings",
    "Started",
    "free_port",
    "make_certificates",
    "make_node_key",
    "marked",
]
