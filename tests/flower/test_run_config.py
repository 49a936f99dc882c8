"""Plan, mode, tracker and key from `[tool.flwr.app.config]`."""

from __future__ import annotations

import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg

from flower.grid import FakeGrid, global_model
from niss.accounting import Plan
from niss.errors import ConfigError
from niss.flower import NissStrategy
from niss.flower.given import for_rounds, plan_of, strategy_options

SETTINGS = {"rounds": 3, "epsilon": 8.0, "clip": 2.0, "neighbours": 3, "server-key": "", "tracker": ""}


def context(**settings) -> Context:
    return Context(1, 1, {}, RecordDict(), {**SETTINGS, **settings})


def test_the_plan_of_the_settings_runs():
    strategy = NissStrategy.from_run_config(context(delta=1e-6), FedAvg(fraction_evaluate=0.0))
    strategy.start(FakeGrid(), global_model(), num_rounds=3, timeout=1)
    assert [one.survivors for one in strategy.rounds] == [6] * 3
    assert (strategy.plan.epsilon, strategy.plan.delta, strategy.plan.participations) == (8.0, 1e-6, 3)


def test_noise_is_carried_where_the_settings_say_so():
    with_it = context(carry=True, separation=2, dropout=0.1, pattern="any", rounds=4)
    strategy = NissStrategy.from_run_config(with_it, FedAvg(fraction_evaluate=0.0))
    strategy.start(FakeGrid(), global_model(), num_rounds=4, timeout=1)
    assert [one.survivors for one in strategy.rounds] == [3] * 4
    plan = strategy.plan
    assert (plan.separation, plan.pattern, plan.dropout, plan.horizon, plan.participants) == (
        *(2, "any", 0.1),
        *(4, 3),
    )
    assert plan_of(context(carry=False, separation=2).run_config) == plan_of(context().run_config)
    with pytest.raises(ConfigError, match="carry: invalid value 'true'"):
        strategy_options({"carry": "true"})
    with pytest.raises(ConfigError, match="gain nothing"):
        NissStrategy.from_run_config(context(carry=True), FedAvg(fraction_evaluate=0.0))


def test_silos_are_repaired_unless_the_settings_say_otherwise():
    silos = {**SETTINGS, "unit": "record", "batch": 0.05, "records": 6000}
    plan = plan_of(silos)
    assert (plan.unit, plan.batch, plan.records, plan.settled_mode) == ("record", 0.05, 6000, "repair")
    assert plan_of({**silos, "mode": "tolerate"}).mode == plan_of(SETTINGS).settled_mode == "tolerate"


def test_delta_pays_for_the_graphs_of_all_rounds_that_a_run_may_have():
    """Though a client is planned to take part in three of them."""
    given = Plan(clip=2.0, epsilon=8.0, participations=3, neighbours=3, collusion=0.1)
    for plan in (for_rounds(given, 120), for_rounds(plan_of({**SETTINGS, "collusion": 0.1}), 120)):
        assert plan.turns == 3
        assert plan.graphs >= 120
        assert plan.failure <= 0.1 * plan.delta / 120


def test_every_setting_arrives():
    settings = {
        **{"num-server-rounds": 5, "epsilon": "3", "delta": 1e-6, "clip": 1, "kappa": 4, "neighbours": 4},
        **{"collusion": 0.2, "relation": "replace-one", "mode": "repair", "dropout": 0.1, "participants": 7},
        **{"tracker": "https://t", "tracker-ca": "ca", "server-key": "k", "coalition": "c"},
        **{"report": "r", "resume": "f", "stage-timeout": 5, "unrelated": "x"},
        **{"clip-quantile": 0.4, "first-clip": "0.2"},
    }
    assert plan_of(settings) == Plan(
        epsilon=3.0,
        delta=1e-6,
        clip=1.0,
        kappa=4.0,
        neighbours=4.0,
        collusion=0.2,
        relation="replace-one",
        participations=5,
        dropout=0.1,
        mode="repair",
    )
    assert strategy_options(settings) == {
        "participants": 7,
        "tracker": "https://t",
        "tracker_ca": "ca",
        "key": "k",
        "coalition": "c",
        "report": "r",
        "resume": "f",
        "stage_timeout": 5.0,
        "quantile": 0.4,
        "first_clip": 0.2,
    }


def test_what_the_app_says_itself_goes_before():
    strategy = NissStrategy.from_run_config(context(participants=9), FedAvg(), participants=4)
    assert strategy._participants == 4
    own = Plan(clip=1.0, epsilon=1.0, participations=1)
    strategy = NissStrategy.from_run_config(context(participants=9), FedAvg(), plan=own)
    assert (strategy.plan.epsilon, strategy._participants) == (1.0, 9)


@pytest.mark.parametrize("name", ["epsilon", "clip", "rounds"])
def test_a_setting_that_is_missing_or_no_number_is_named(name):
    with pytest.raises(ConfigError, match=rf"^{name}: is missing"):
        plan_of({key: value for key, value in SETTINGS.items() if key != name})
    with pytest.raises(ConfigError, match=rf"^{name}: .*'many'"):
        plan_of({**SETTINGS, name: "many"})


def test_so_is_one_of_the_strategy():
    with pytest.raises(ConfigError, match=r"^stage-timeout: invalid value 'long'"):
        strategy_options({"stage-timeout": "long"})
