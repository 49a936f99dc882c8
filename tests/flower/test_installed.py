"""Whether the tests of this folder could run at all."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from niss.errors import ConfigError


def test_flower_is_installed():
    if find_spec("flwr") is None:
        pytest.skip("Flower is not installed: pip install 'niss[flower]' to run the tests of niss.flower")
    import niss.flower

    assert niss.flower.NissStrategy.__name__ == "NissStrategy"


def test_without_flower_the_error_says_what_to_install(monkeypatch):
    import niss.flower

    def missing(_name):
        raise ModuleNotFoundError("No module named 'flwr'", name="flwr")

    monkeypatch.setattr(niss.flower, "import_module", missing)
    monkeypatch.delitem(vars(niss.flower), "niss_mod", raising=False)
    with pytest.raises(ConfigError, match="not installed") as caught:
        _ = niss.flower.niss_mod
    assert "niss[flower]" in caught.value.hint
