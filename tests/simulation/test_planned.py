"""A plan that is printed as JSON is what `niss run --plan` runs; `kappa = "planned"` is the planner's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from niss.accounting import forecast
from niss.cli import app
from niss.cli.simulate import run_command
from niss.errors import ConfigError
from niss.settings import to_values
from niss.simulation import make_config, settings_of_plan, with_overrides
from niss.ui.pages import run_arguments


def printed(*options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", *options, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)  # type: ignore[no-any-return]


ROUND = (
    "--participants", "12", "--rounds", "6", "--participations", "3", "--epsilon", "8", "--collusion", "0.1",
)  # fmt: skip
CARRIED = (
    "--participants", "10", "--clients", "30", "--rounds", "9", "--carry", "--epsilon", "5", "--clip", "2",
)  # fmt: skip


def test_the_shares_of_a_run_are_as_strong_as_the_planner_finds_best() -> None:
    config = make_config({"data": {"clients": 60}, "training": {"participants": 30}})
    assert config.methods[0].kappa == "planned"
    planned = forecast(participants=30, neighbours=10.0, participations=config.participations)
    assert config.plan(config.methods[0]).kappa == planned.plan.kappa > 4.0
    fixed = make_config({"methods": [{"kappa": 2.0}]})
    assert fixed.plan(fixed.methods[0]).kappa == 2.0
    given = make_config({"methods": [{"tau2": 0.3}]})
    assert given.plan(given.methods[0]).kappa == 1.0


@pytest.mark.parametrize(
    "method",
    [
        {"graph": "complete"},
        {"graph": "random"},
        {"graph": "coalition", "groups": [list(range(10)), list(range(10, 20))]},
        {"neighbours": 3},
        {"name": "dp-fedavg"},
        {"name": "niss-carried"},
    ],
    ids=str,
)
def test_every_method_and_graph_finds_a_strength(method: dict[str, Any]) -> None:
    config = make_config(
        {"rounds": 4, "data": {"clients": 20}, "training": {"participants": 10}, "methods": [method]}
    )
    assert config.plan(config.methods[0]).kappa > 0.0


@pytest.mark.parametrize("options", [ROUND, CARRIED], ids=["round", "carried"])
def test_the_settings_of_a_plan_promise_what_it_promises(options: tuple[str, ...]) -> None:
    values = printed(*options)
    settings, method = settings_of_plan(values)
    config = with_overrides(make_config({}), settings)
    config = make_config({**to_values(config), "methods": [method]})
    plan = config.plan(config.methods[0])
    assert (plan.epsilon, plan.clip) == (8.0, 1.0) if options is ROUND else (5.0, 2.0)
    assert plan.kappa == pytest.approx(values["plan"]["kappa"])
    assert config.rounds == values["rounds"]
    assert config.participations == 3
    if options is ROUND:
        assert (plan.collusion, plan.neighbours) == (
            values["plan"]["collusion"],
            values["plan"]["neighbours"],
        )


@pytest.mark.parametrize("options", [ROUND, CARRIED], ids=["round", "carried"])
def test_a_plan_is_run_from_its_file_and_from_the_flags_that_are_shown(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'niss[train]'")
    values = printed(*options)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    small = ["--set", "data.samples_per_client=4", "--set", "model.hidden=[4]", "--json", "--quiet"]
    results = []
    for number, chosen in enumerate((["--plan", str(path)], run_arguments(values))):
        done = CliRunner().invoke(app, ["run", *chosen, *small, "--out", str(tmp_path / str(number))])
        assert done.exit_code == 0, done.output
        results.append(json.loads(done.stdout))
        promised = values["epsilon_joint"]
        assert results[-1]["epsilon_joint"] == pytest.approx(promised, rel=0.02)
        assert results[-1]["epsilon_joint"] <= promised * (1 + 1e-9)
    assert results[0]["accuracy"] == results[1]["accuracy"]


def test_more_rounds_than_were_planned_for_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(printed(*ROUND)), encoding="utf-8")
    with pytest.raises(ConfigError, match="the plan is for 3"):
        run_command(plan=path, rounds=60, out=tmp_path / "out")


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("[", "{}", '{"plan": 3}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="--plan"):
            run_command(plan=path, out=tmp_path / "out")
    with pytest.raises(ConfigError, match="lacks something"):
        settings_of_plan({"plan": {}})
