"""`niss up`: a whole federation on one machine, as the processes that several machines would run.

`deployment` starts and configures everything, `processes` takes it all down again, also where its owner is killed,
`certificates` makes the keys, and `apps` knows the apps that run on it.
"""

from __future__ import annotations

from niss.local.apps import RESUME, app_settings, built_in_app, check_app, new_app
from niss.local.certificates import Certificates, make_certificates, make_node_key
from niss.local.deployment import Deployment, Settings, free_port
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
    "new_app",
]
