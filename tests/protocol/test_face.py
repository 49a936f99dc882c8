"""The face of the room: every name it promises is there, and asking for it loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import niss.protocol


def promised() -> dict[str, str]:
    """What a type checker sees: the home of each name."""
    tree = ast.parse(Path(niss.protocol.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_every_promised_name_is_there_and_no_other() -> None:
    assert sorted(promised()) == dir(niss.protocol)
    for name, home in promised().items():
        value = getattr(niss.protocol, name)
        assert value is getattr(import_module(home), name), name
        assert getattr(value, "__module__", home) in (home, "types", "typing", "collections.abc"), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'niss\.protocol' has no attribute 'Letters'"):
        _ = niss.protocol.Letters  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("import niss.protocol", "numpy cryptography torch flwr asyncio socket"),
        ("from niss.protocol import Identity, load_identity", "numpy torch flwr asyncio socket"),
        ("from niss.protocol import Client, Server, decode", "torch flwr asyncio"),
    ],
)
def test_importing_loads_nothing_heavy(imports: str, absent: str) -> None:
    code = f"import sys; {imports}; print(sorted(set({absent.split()}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
