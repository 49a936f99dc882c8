"""The public interface is what `__all__` says, and importing it is light."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


ATTACKS = "from niss.attacks import EXPERIMENTS, load_experiment; "


@pytest.mark.parametrize(
    ("done", "heavy"),
    [
        ("import niss, niss.accounting, niss.graph; niss.ShareGraph, niss.records", "torch"),
        # What is wrong with settings is said at once, not after seconds of loading.
        ("import niss; niss.make_config({'rounds': 2})", "torch"),
        ("import niss.cli", "torch scipy matplotlib pydantic numpy fastapi uvicorn"),
        (
            ATTACKS + "all(load_experiment(name)() for name in EXPERIMENTS)",
            "torch scipy matplotlib pydantic numpy",
        ),
        (
            ATTACKS + "(audit := load_experiment('audit')(rounds=200)).run(audit.start(), lambda *_: None)",
            "torch matplotlib",
        ),
    ],
    ids=["plans", "settings", "command line", "options of attacks", "an audit"],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(done: str, heavy: str) -> None:
    code = f"import sys; {done}; print([name for name in {heavy.split()} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")
