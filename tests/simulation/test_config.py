"""Settings are frozen, survive a round trip, and are refused with the name of the fault."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import niss
from niss.methods import METHODS
from niss.settings import to_values
from niss.simulation import Config, load_config, make_config, preset, with_overrides
from support.federation import small_config

positive = st.floats(1e-3, 1e3)
methods = st.fixed_dictionaries(
    {"name": st.sampled_from(["fedavg", "dp-fedavg", "central-dp", "niss"])},
    optional={
        "kappa": positive,
        "neighbours": st.integers(1, 10),
        "graph": st.sampled_from(["regular", "complete", "random"]),
        "tau2": st.one_of(st.just("calibrated"), st.floats(0, 2)),
    },
)
configs = st.fixed_dictionaries(
    {"methods": st.lists(methods, min_size=1, max_size=3, unique_by=lambda method: method["name"])},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "rounds": st.integers(1, 500),
        "data": st.fixed_dictionaries(
            {"clients": st.integers(200, 5000)},
            optional={"split": st.sampled_from(["iid", "shards", "dirichlet"]), "alpha": positive},
        ),
        "training": st.fixed_dictionaries(
            {},
            optional={
                "participants": st.integers(2, 200),
                "sampling": st.sampled_from(["shuffled", "uniform"]),
                "learning_rate": positive,
            },
        ),
        "privacy": st.fixed_dictionaries(
            {}, optional={"epsilon": positive, "delta": st.floats(1e-9, 0.1), "clip": positive}
        ),
    },
)


@given(configs)
@settings(deadline=None, max_examples=60)
def test_a_config_survives_the_manifest(values):
    config = make_config(values)
    assert make_config(to_values(config)) == config
    for method in config.methods:
        assert config.plan(method).participations == config.participations


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Config().rounds = 3


def test_silos_are_all_the_clients_there_are_and_take_part_in_every_round():
    config = make_config({"rounds": 7, "data": {"silos": 5}})
    assert (config.clients, config.participants, config.participations) == (5, 5, 7)
    assert with_overrides(config, {"data.silos": 8}).participants == 8


@pytest.mark.parametrize("name", ["demo", "silos", "paper"])
def test_presets_load(name):
    config = preset(name)
    assert config.name == name
    for method in config.methods:
        config.plan(method)
    assert config.participations == {"demo": 6, "silos": 100, "paper": 1}[name]


def test_the_paper_preset_has_the_papers_numbers():
    config = preset("paper")
    plan = config.plan(config.methods[1])
    drawn = plan.for_round(range(30), weights=[1 / 30] * 30, records=[600] * 30, beacon=b"")
    assert drawn.own_variance[0] ** 0.5 == pytest.approx(0.00434, abs=5e-6)
    assert drawn.unit_variance == pytest.approx(drawn.own_variance[0] / 10)
    assert plan.heuristic


SIX = {"participants": 6}
RECORD = {"unit": "record", "batch": 0.1}
ADAPTIVE = {"epsilon": 20.0, "clip": 4.0, "quantile": 0.5, "first_clip": 0.1}
CARRIED, SECRET, CORRELATED = (
    [{"name": "niss-carried"}],
    [{"name": "central-dp-sampled"}],
    [{"name": "central-mf"}],
)
MULTIPLIED = [{"name": "niss", "neighbours": 3, "distortion": "scalar", "tau2": 0.1}]
REFUSED = [
    # One key: unknown, out of range, no name.
    ({"privacy": {"epsiln": 3}}, r"privacy.epsiln: unknown key\nhint: did you mean 'epsilon'\?"),
    ({"rouns": 3}, r"rouns: unknown key\nhint: did you mean 'rounds'\?"),
    ({"methods": [{"tau": 1}]}, r"methods.0.tau: unknown key\nhint: did you mean 'tau2'\?"),
    ({"privacy": {"epsilon": -1}}, "privacy.epsilon: Input should be greater than 0"),
    ({"methods": [{"tau2": -1}]}, "methods.0.tau2: Input should be greater than or equal to 0"),
    ({"methods": [{"name": "nis"}]}, r"did you mean 'niss'\?"),
    ({"methods": []}, "methods"),
    ({"training": {"participants": 1}}, "training.participants"),
    ({"privacy": {"delta": 1.5}}, "privacy.delta"),
    ({"methods": [{"label": "../up"}]}, "name of a folder"),
    ({"model": {"name": "mpl"}}, r"model.name: .*'mpl'\)\nhint: did you mean 'mlp'\?"),
    ({"model": {"hidden": [3, 0]}}, "model.hidden.1: Input should be greater than or equal to 1"),
    *(
        ({"training": {**SIX, name: value}}, f"training.{name}: Input should be")
        for name, value in {
            "epochs": 0, "batch_size": 1.5, "learning_rate": 0.0, "momentum": 1.0, "weight_decay": -1e-9,
            "workers": 0, "device": "tpu",
        }.items()
    ),
    # Clients and how they are drawn.
    ({"training": {"participants": 20}}, "training.participants: 20 in a round, but there are only 12 clients"),
    ({"privacy": {"epsilon": [1.0, 2.0]}}, "privacy.epsilon: 2 values for 12 clients"),
    ({"methods": [{"tau2": [0.1, 0.2]}]}, "methods.tau2: 2 values for 12 clients"),
    ({"privacy": {"collusion": 0.7}}, "5 colluders of 6 participants leave nobody"),
    ({"privacy": {"mode": "repair", "collusion": 0.6}}, "a repair needs 6 of 6 participants"),
    # Silos, and their records.
    ({"data": {"silos": 5, "clients": 5}}, "^data.clients: "),
    ({"data": {"silos": 1}}, "^data.silos: "),
    ({"data": {"silos": 5}, "training": {"participants": 3}}, "^training.participants: "),
    ({"data": {"dataset": "shakespeare", "size_ratio": 2.0}}, "^data.size_ratio: "),
    ({"privacy": RECORD}, "data.silos: .*take part in every round"),
    ({"data": {"silos": 5}, "privacy": {"unit": "record"}, "training": {}}, "privacy.batch: is missing"),
    ({"data": {"silos": 5}, "privacy": {**RECORD, "unit": "client"}, "training": {}}, "privacy.batch: .*only records"),
    ({"data": {"silos": 5}, "privacy": {**RECORD, "relation": "replace-one"}, "training": {}}, "privacy.relation"),
    ({"data": {"silos": 5}, "privacy": {**RECORD, "participations": 2}, "training": {}}, "privacy.participations"),
    *(
        ({"data": {"silos": 5}, "privacy": RECORD, "training": {name: value}}, f"training.{name}: .*one secret batch")
        for name, value in {"epochs": 1, "batch_size": 4, "learning_rate": 1.0, "momentum": 0.5}.items()
    ),
    ({"data": {"silos": 5}, "privacy": RECORD, "training": {"weights": "declared"}}, "training.weights"),
    ({"data": {"silos": 5}, "privacy": RECORD, "training": {}, "methods": [{"carry": True}]}, "gains nothing"),
    ({"training": {"participants": 5, "sampling": "cyclic"}}, "do not make whole cohorts"),
    ({"training": {"participants": 3, "sampling": "uniform", "separation": 5}}, "ask for at most 4"),
    ({"training": {"participants": 3, "sampling": "cyclic", "separation": 5}}, "ask for at most 4"),
    ({"training": {"participants": 3, "sampling": "shuffled", "separation": 2}}, "again in the next round"),
    ({"training": {"participants": 3, "sampling": "poisson", "separation": 2}}, "again in the next round"),
    ({"training": {"participants": 3, "sampling": "poisson", "weights": "declared"}}, "who else takes part"),
    # The server's optimiser.
    ({"training": {**SIX, "server_momentum": 0.9}}, "training.server_momentum"),
    ({"training": {**SIX, "server_optimizer": "momentum", "server_beta2": 0.9}}, "training.server_beta2"),
    ({"training": {**SIX, "server_optimizer": "momentum", "server_epsilon": 0.1}}, "training.server_epsilon"),
    ({"training": {**SIX, "server_optimizer": "adam", "server_momentum": 1.0}}, "training.server_momentum"),
    ({"training": {**SIX, "server_optimizer": "adam", "server_epsilon": 0.0}}, "training.server_epsilon"),
    ({"training": {**SIX, "server_optimizer": "fedadam"}}, "training.server_optimizer"),
    # The promise, and a clip that follows the norms.
    ({"privacy": {"mechanism": "classical"}}, "allow_invalid"),
    ({"privacy": {**ADAPTIVE, "first_clip": 5.0}}, "times the largest clip"),
    ({"privacy": {**ADAPTIVE, "quantile": 1.0}}, "less than 1"),
    ({"privacy": {**ADAPTIVE, "quantile": None}}, "stays as it is without a quantile"),
    ({"privacy": {**ADAPTIVE, "unit": "record"}, "training": {**SIX, "epochs": 1}}, "norms of whole updates"),
    *(
        ({"privacy": ADAPTIVE, "methods": [{"name": name}], "training": {**SIX, "sampling": "cyclic"}},
         "^privacy.quantile: .*takes noise of one round out in another")
        for name, method in METHODS.items() if method.correlates
    ),
    # Shares.
    ({"methods": [{"distortion": "scalar"}]}, "methods.tau2: only the additive distortion can be calibrated"),
    ({"methods": [{"graph": "coalition"}]}, "methods.groups: a coalition graph needs groups"),
    ({"methods": [{"name": "niss"}, {"name": "niss"}]}, "its own label"),
    ({"methods": MULTIPLIED, "privacy": {"mode": "repair"}}, r"(?s)methods\.distortion.*additive"),
    # What carried shares cannot promise.
    ({"methods": CARRIED, "training": {"participants": 5}}, "whole cohorts"),
    ({"methods": CARRIED, "training": {**SIX, "sampling": "uniform"}}, "may return at once"),
    ({"methods": CARRIED, "training": {**SIX, "weights": "declared"}}, "all have to weigh the same"),
    ({"methods": CARRIED, "privacy": {"scope": "round"}}, "whole training"),
    ({"methods": CARRIED, "privacy": {"participations": 1}}, "its turn comes 2 times"),
    ({"methods": CARRIED, "privacy": {"epsilon": [3.0] * 12}}, "one target for all"),
    ({"methods": CARRIED, "training": {**SIX, "server_rate_schedule": "linear"}}, "the rate has changed"),
    ({"methods": [{**CARRIED[0], "graph": "regular"}]}, "everyone shares with everyone .got 'regular'"),
    ({"methods": [{**CARRIED[0], "graph": "random"}]}, "everyone shares with everyone .got 'random'"),
    ({"methods": [{**CARRIED[0], "distortion": "scalar", "tau2": 0.1}]}, "additive"),
    ({"methods": [{"name": "central-dp", "carry": True}]}, "no shares that could be carried"),
    # What the rivals cannot promise.
    ({"methods": [{"name": "central-mf", "bands": 3}]}, "3 bands, but a client may return after 2 rounds"),
    ({"methods": CORRELATED, "training": {**SIX, "sampling": "uniform"}}, "may return at once"),
    ({"methods": CORRELATED, "training": {"participants": 5}}, "whole cohorts"),
    ({"methods": CORRELATED, "privacy": {"scope": "round"}}, "whole training"),
    ({"methods": SECRET, "privacy": {"scope": "round"}}, "whole training"),
    ({"methods": SECRET, "privacy": {"participations": 2}}, "secret draw"),
    ({"methods": SECRET, "privacy": {"relation": "replace-one"}}, "zero-out"),
    ({"methods": SECRET, "training": {**SIX, "weights": "declared"}}, "who else takes part"),
    ({"methods": SECRET, "privacy": {"epsilon": [3.0] * 12}}, "one number"),
    ({"methods": [{"name": "secagg-ddg", "threshold": 7}]}, "7 uploads of 6"),
    ({"methods": [{"name": "secagg-ddg", "threshold": 2}], "privacy": {"collusion": 0.3}},
     "nobody whose noise is unknown"),
    # What the dataset cannot do, before it is loaded.
    ({"data": {"dataset": "mnist", "split": "natural"}}, "^data.split: "),
    ({"data": {"dataset": "shakespeare", "split": "iid"}}, "^data.split: "),
    ({"data": {"dataset": "shakespeare", "clients": 628}}, "^data.clients: "),
    ({"data": {"dataset": "shakespeare"}, "training": {"participants": 700}}, r"only 627 clients\nhint: lower it$"),
    ({"data": {"dataset": "shakespeare"}, "training": {"participants": 50, "sampling": "cyclic"}},
     r"divides them, or data.clients = 600$"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_fault_is_named_with_its_fix(changes, message):
    with pytest.raises(niss.errors.ConfigError, match=message):
        small_config(**changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": [{"graph": "random"}]}, "methods.graph: .* not 'random'.*use graph = 'regular'"),
        ({"methods": [{"graph": "coalition", "groups": [[0, 1], [2, 3]]}]},
         "methods.graph: .* not 'coalition'.*use graph = 'regular'"),
        ({"methods": [{"graph": "complete"}]}, "methods.neighbours: 10 shares .* use neighbours = 199"),
        ({"methods": [{"distortion": "scalar", "tau2": 0.3}]}, "methods.distortion: .* 'additive'"),
        ({"methods": [{"distortion": "coordinate", "tau2": 0.3}]}, "methods.distortion: .* 'additive'"),
        ({"methods": [{"tau2": [0.1] * 1000}]}, "methods.tau2: .* give one number"),
        ({"privacy": {"epsilon": [3.0] * 1000}}, "privacy.epsilon: .* give one number"),
        ({"privacy": {"unit": "nbafl"}}, "privacy.unit: .* use unit = 'client'"),
        ({"training": {"weights": "declared"}}, "training.weights: .* use weights = 'equal'"),
    ],
)  # fmt: skip
def test_what_the_protocol_would_ignore_is_refused(values, message):
    make_config(values)
    with pytest.raises(niss.errors.ConfigError, match="(?s)" + message):
        make_config({**values, "exchange": "protocol"})


@pytest.mark.parametrize(
    "method",
    [
        {"graph": "complete", "neighbours": 199},
        {"distortion": "scalar", "tau2": 0.0},
        {"tau2": 0.3},
        {"name": "dp-fedavg", "graph": "random"},
    ],
)
def test_what_the_protocol_can_do_is_accepted(method):
    assert make_config({"exchange": "protocol", "methods": [method]}).exchange == "protocol"


def test_what_stands_beside_a_refusal_is_accepted():
    small_config(methods=MULTIPLIED, privacy={"mode": "tolerate", "dropout": 0.1})
    cyclic = {"participants": 50, "sampling": "cyclic"}
    make_config({"data": {"dataset": "shakespeare", "clients": 600}, "training": cyclic})


def test_a_plan_and_the_settings_made_of_it_say_the_same():
    shares = {"kappa": 3.0, "neighbours": 7.0, "tau2": 0.25, "collusion": 0.2}
    plan = niss.Plan(epsilon=2.0, participations=4, relation="replace-one", mode="tolerate", **shares)
    config = Config().with_plan(plan)
    assert config.plan(config.methods[0]) == replace(plan, horizon=config.rounds)
    assert Config().with_plan(replace(plan, mode="planned")) == config
    calibrated = replace(plan, method="dp-fedavg", tau2=None)
    config = Config().with_plan(calibrated)
    assert config.methods[0].tau2 == "calibrated"
    assert config.plan(config.methods[0]) == replace(calibrated, horizon=config.rounds)
    adaptive = small_config(privacy=ADAPTIVE)
    kept = adaptive.with_plan(adaptive.plan(adaptive.methods[0])).privacy
    assert (kept.quantile, kept.first_clip) == (0.5, 0.1)


def test_carry_is_the_same_as_the_name_and_a_config_can_be_written_and_read():
    by_name, by_switch = (
        small_config(methods=[method]) for method in ({"name": "niss-carried"}, {"carry": True})
    )
    assert by_name == by_switch
    assert by_name.methods[0].graph == "complete"
    again = make_config(to_values(by_name))
    assert again == by_name
    assert small_config(methods=[{"carry": True, "kappa": 3.0}]).methods[0].kappa == 3.0


def test_overrides_reach_nested_settings_and_are_checked():
    config = with_overrides(Config(), {"privacy.epsilon": 8, "rounds": 2})
    assert (config.privacy.epsilon, config.rounds) == (8.0, 2)
    with pytest.raises(niss.errors.ConfigError, match="did you mean 'epsilon'"):
        with_overrides(Config(), {"privacy.epsilonn": 8})
    with pytest.raises(niss.errors.ConfigError, match="methods is a list"):
        with_overrides(Config(), {"methods.0.tau2": 8})
    with pytest.raises(niss.errors.ConfigError, match="rounds: is not a section"):
        with_overrides(Config(), {"rounds.first.last": 8})


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(niss.errors.ConfigError, match=r"nowhere\.toml"):
        load_config(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    with pytest.raises(niss.errors.ConfigError, match="not valid TOML"):
        load_config(tmp_path / "broken.toml")
    (tmp_path / "good.toml").write_text("rounds = 3\n[privacy]\nepsilon = 2\n")
    assert load_config(tmp_path / "good.toml").privacy.epsilon == 2.0
