"""The searches of attacks take one thread, whatever the process may use: more make small steps slower."""

from __future__ import annotations

import numpy as np
import pytest

from niss.randomness import SimStream

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'niss[train]'")


@pytest.mark.parametrize("name", ["deep_leakage", "invert_update"])
def test_a_search_computes_with_one_thread(name: str) -> None:
    from niss import attacks
    from niss.attacks.inversion import DlgSettings, InvertSettings

    pictures = attacks.load_pictures("mnist-mini:0")
    federation = attacks.make_federation(
        pictures, model="mlp", hidden=(4,), clients=2, stream=SimStream(1).child("scene")
    )
    settings = {
        "deep_leakage": DlgSettings(iterations=2, restarts=1),
        "invert_update": InvertSettings(iterations=2, restarts=1),
    }[name]
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        getattr(attacks, name)(
            np.asarray(federation.as_gradient(federation.updates[0])),
            federation.update_function(),
            pictures,
            settings,
            stream=SimStream(2),
            progress=lambda *_: seen.append(torch.get_num_threads()),
        )
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
