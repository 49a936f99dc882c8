"""`on_round`, and the recipes of docs/guides/callbacks.md, each run as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest

import niss
from niss.files import read_json_lines
from niss.runs import RoundRecord
from support.federation import small_config

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "callbacks.md"


def test_every_round_is_told_once_it_is_on_disk(given, tmp_path) -> None:
    told: list[RoundRecord] = []

    def on_round(record: RoundRecord) -> None:
        lines, _ = read_json_lines(tmp_path / "run" / "metrics.jsonl")
        assert RoundRecord.from_json(lines[-1]) == record
        told.append(record)
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        niss.run(small_config(), out=tmp_path / "run", on_round=on_round, **given)
    result = niss.resume(tmp_path / "run", on_round=told.append, **given)
    assert isinstance(result, niss.RunResult)
    assert told == result.rounds


def test_a_comparison_has_no_single_record_of_a_round(given, tmp_path) -> None:
    config = small_config(methods=[{"name": "fedavg"}, {"name": "dp-fedavg"}])
    niss.compare(config, out=tmp_path / "run", **given)
    with pytest.raises(niss.errors.ConfigError, match="comparison") as refused:
        niss.resume(tmp_path / "run", on_round=print, **given)
    assert refused.value.field == "on_round"


class Board:
    """Stands in for what the three libraries write to; it has their signatures, as far as the recipes use them."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert tag == "accuracy"
        self.points.append((global_step or 0, scalar_value))

    def log_metric(self, key: str, value: float, step: int | None = None) -> None:
        self.add_scalar(key, value, step)

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        [(key, value)] = data.items()
        self.add_scalar(key, value, step)


def stand_ins(board: Board) -> dict[str, ModuleType]:
    tensorboard, mlflow, wandb = map(ModuleType, ("torch.utils.tensorboard", "mlflow", "wandb"))
    tensorboard.SummaryWriter = lambda _log_dir: board  # type: ignore[attr-defined]
    mlflow.start_run = lambda **_: board  # type: ignore[attr-defined]
    mlflow.log_metric = board.log_metric  # type: ignore[attr-defined]
    wandb.init = lambda **_: board  # type: ignore[attr-defined]
    return {one.__name__: one for one in (tensorboard, mlflow, wandb)}


RECIPES = [
    block
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    if "with " in block
]


@pytest.fixture
def small(given) -> dict[str, Any]:
    """What a recipe finds: a `niss` whose runs are small ones."""
    small_niss, results = ModuleType("niss"), []

    def run(config: Any, **more: Any) -> Any:
        results.append(niss.run(config, **given, **more))

    small_niss.run = run  # type: ignore[attr-defined]
    return {"niss": small_niss, "config": small_config(), "results": results}


def test_there_are_three_recipes_of_a_few_lines() -> None:
    assert len(RECIPES) == 3
    assert all(len(recipe.strip().splitlines()) <= 5 for recipe in RECIPES)


@pytest.mark.parametrize("recipe", RECIPES, ids=["tensorboard", "mlflow", "wandb"])
def test_a_recipe_logs_every_round(recipe: str, small, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    for name, module in stand_ins(board).items():
        monkeypatch.setitem(sys.modules, name, module)
    exec(recipe, small)  # noqa: S102
    [result] = small["results"]
    assert board.points == [(one.round, one.accuracy) for one in result.rounds]
    assert board.closed


def test_the_real_tensorboard_reads_what_its_recipe_wrote(small, tmp_path, monkeypatch) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    monkeypatch.chdir(tmp_path)
    exec(RECIPES[0], small)  # noqa: S102
    read = events.EventAccumulator(str(tmp_path / "tb" / "niss")).Reload()
    [result] = small["results"]
    found = {one.step: one.value for one in read.Scalars("accuracy")}
    assert found == pytest.approx({one.round: one.accuracy for one in result.rounds}, rel=1e-6)
