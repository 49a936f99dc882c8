"""A small federation, a wide one whose clients learn nothing, and runs that are killed: shared by tests of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import niss
from niss.accounting.assumed import fewest_participants
from niss.files import CHECKPOINT, LEDGER, METRICS, MODEL, PRIVACY, RESULT
from niss.protocol.keys import Entropy
from niss.randomness import SimStream
from niss.session.proposal import Setup
from niss.simulation import Config, make_config
from niss.simulation.method_run import MethodRun
from niss.simulation.round import OpenRound
from niss.simulation.uploads import Played


def small_config(**changes: object) -> Config:
    """Twelve clients, six a round, four rounds, calibrated niss; any section may be replaced."""
    values: dict[str, object] = {
        "name": "small",
        "seed": 3,
        "rounds": 4,
        "data": {"clients": 12},
        "training": {"participants": 6, "epochs": 2, "batch_size": 4, "learning_rate": 0.1},
        "privacy": {"epsilon": 20.0, "clip": 1.0},
        "methods": [{"name": "niss", "neighbours": 3}],
    }
    return make_config({**values, **changes})


def exchange_of(plan: niss.Plan, *, entropy: Entropy = os.urandom, **setup: Any) -> Played:
    """The parties of the real protocol; rounds may have as few clients as their plan allows."""
    return Played(
        Setup(plan=plan, **{"participants": fewest_participants(plan), "modulus_bits": 64, **setup}), entropy
    )


class WideRun:
    """A run whose clients learn next to nothing: the uploads of every round, and the noise in every model.

    width    of a linear model with 50 outputs
    updates  (round, shape) -> what the clients of a round learned instead
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        method: dict[str, Any],
        *,
        clients: int = 12,
        cohort: int = 4,
        width: int = 400,
        updates: Callable[[int, tuple[int, int]], np.ndarray] | None = None,
        out: Path | None = None,
        **changes: Any,
    ) -> None:
        generator = SimStream(1).generator()
        data = [
            (generator.standard_normal((3, width), dtype=np.float32), np.array([0, 1, 2]))
            for _ in range(clients)
        ]
        self.given: dict[str, Any] = {"model": nn.Linear(width, 50), "clients": data, "test": data[0]}
        training = {"participants": cohort, "sampling": "cyclic", "epochs": 1, "batch_size": 10}
        training |= {"learning_rate": 1e-9, **changes.pop("training", {})}
        settings = {
            "rounds": 7,
            "data": {"clients": clients},
            "privacy": {"epsilon": 3.0, "clip": 0.5},
            **changes,
        }
        self.config = small_config(**settings, training=training, methods=[method])
        self.plan = self.config.plan(self.config.methods[0])
        self.uploads: list[np.ndarray] = []
        self.plans: list[Any] = []
        tensors = self.given["model"].state_dict().values()
        models = [np.concatenate([tensor.double().numpy().ravel() for tensor in tensors])]
        record, finish = MethodRun.record, OpenRound.finish

        def recording(run: MethodRun, result: Any, seconds: float) -> None:
            models.append(result.weights.double().numpy())
            record(run, result, seconds)

        def finishing(opened: OpenRound, uploads: Any) -> Any:
            if updates is not None:
                uploads.rows()[:] = updates(opened.number, uploads.shape)
            result = finish(opened, uploads)
            self.plans.append(opened.round_plan)
            self.uploads.append(uploads.rows().astype(np.float64))
            return result

        with monkeypatch.context() as patch:
            patch.setattr(MethodRun, "record", recording)
            patch.setattr(OpenRound, "finish", finishing)
            self.result = niss.run(self.config, out=out, **self.given)
        self.models = np.stack(models[1:]) - models[0]
        self.added = np.diff(np.stack(models), axis=0)


class Killed(BaseException):
    """Stands for kill -9: nothing in the product may catch it."""


@contextmanager
def killed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool], *, after: bool = False
) -> Iterator[None]:
    """What runs in here is killed where `owner.name` is called, or has returned, with arguments as `when` says."""
    original = getattr(owner, name)

    def dying(*arguments: Any, **keywords: Any) -> Any:
        if not after and when(*arguments):
            raise Killed
        result = original(*arguments, **keywords)
        if after and when(*arguments):
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            yield


def assert_same_run(one: Path, other: Path) -> None:
    """The two folders hold the same bytes, but for when the runs began and how long they took."""
    for name in (METRICS, LEDGER, MODEL, PRIVACY, RESULT, CHECKPOINT):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def assert_resumes(
    folder: Path,
    config: Config,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *death: Any,
    **how: Any,
) -> Path:
    """A run that was killed (as `killed` says) and resumed equals one that was not; returns its folder."""
    niss.run(config, out=folder / "whole", **given)
    with killed(monkeypatch, *death, **how):
        niss.run(config, out=folder / "cut", **given)
    assert not (folder / "cut" / "result.json").exists()
    niss.resume(folder / "cut", **given)
    assert_same_run(folder / "whole", folder / "cut")
    return folder / "cut"
