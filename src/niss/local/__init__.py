"""`niss up`: a whole federation on one machine, as the processes that several machines would run.

`deployment` starts and configures everything, `processes` takes it all down again, `watchdog` does so where its owner
is killed, `certificates` makes the keys.
"""

from __future__ import annotations

from niss.local.certificates import Certificates, make_certificates, make_node_key
from niss.local.deployment import (
    RESUME,
    Deployment,
    Settings,
    app_settings,
    built_in_app,
    check_app,
    free_port,
)
from niss.local.processes import Processes, Started, marked

__all__ = [
    "RESUME",
    "Certificates",
    "Deployment",
    "Processes",
    "Settings",
    "Started",
    "app_settings",
    "built_in_app",
    "check_app",
    "free_port",
    "make_certificates",
    "make_node_key",
    "marked",
]
