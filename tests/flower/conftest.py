"""Tests of the Flower room; without Flower they are left out, and `test_installed.py` says so."""

from __future__ import annotations

import logging
import os
import warnings

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    with warnings.catch_warnings():
        # Flower and the versions of typer and click it pins warn while they are imported.
        warnings.simplefilter("ignore")
        import flwr.clientapp
        import flwr.serverapp.strategy  # noqa: F401
except ModuleNotFoundError:
    collect_ignore_glob = ["test_[!i]*.py"]
else:
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ModuleNotFoundError:
        pass  # Only the newer ones ask which task makes a message.
    else:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

# So that `caplog` hears what Flower's own logger shows.
logging.getLogger("flwr").propagate = True
logging.getLogger("flwr").setLevel(logging.INFO)
