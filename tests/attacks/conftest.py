"""Small federations that several tests attack."""

from __future__ import annotations

import pytest
import torch

from niss.attacks.federation import AttackedFederation, load_pictures, make_federation
from niss.randomness import SimStream


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Many small steps: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def mlp_federation() -> AttackedFederation:
    return make_federation(
        load_pictures("mnist-mini:0"), model="mlp", hidden=(32,), clients=12, stream=SimStream(11)
    )


@pytest.fixture(scope="session")
def lenet_federation() -> AttackedFederation:
    return make_federation(load_pictures("mnist-mini:0"), model="lenet", clients=12, stream=SimStream(12))
