"""The public interface is what `__all__` says, and importing it is light."""

from __future__ import annotations

import subprocess
import sys

import niss


def test_public_names_resolve_and_match():
    assert sorted(niss.__all__) == sorted(set(niss.__all__))
    assert {"errors", "records", "run", "Plan", "__version__"} <= set(niss.__all__)
    for name in niss.__all__:
        assert getattr(niss, name) is not None
    assert dir(niss) == sorted(niss.__all__)


def test_unknown_names_are_attribute_errors():
    assert not hasattr(niss, "nonsense")


def test_every_room_exports_what_it_lists():
    from importlib import import_module

    for room in ("attacks", "data", "learning", "records", "report"):
        module = import_module(f"niss.{room}")
        for name in module.__all__:
            assert hasattr(module, name), f"{room}.{name}"


def test_accounting_and_import_need_no_torch():
    code = (
        "import sys, niss, niss.accounting, niss.graph; niss.ShareGraph, niss.records; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_settings_are_read_without_torch():
    """What is wrong with them is said at once, not after seconds of loading."""
    code = "import sys, niss; niss.make_config({'rounds': 2}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
