"""Methods are compared on the same clients, batches and initial weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import niss
from support.federation import small_config


def test_methods_are_paired(given):
    """With practically no noise, dp-fedavg and niss walk the path of the same clipped averaging."""
    methods = [{"name": "dp-fedavg"}, {"name": "central-dp"}, {"name": "niss", "neighbours": 3}]
    config = small_config(privacy={"epsilon": 1e12, "clip": 1.0}, methods=methods)
    results = niss.compare(config, **given).results
    for other in results[1:]:
        for name, tensor in results[0].state_dict.items():
            assert torch.allclose(tensor, other.state_dict[name], atol=1e-4)


def test_the_summary_has_the_promised_fields_and_results_are_found_by_label(given):
    methods = [{"name": "fedavg"}, {"name": "niss", "label": "shared", "kappa": 2.0, "neighbours": 3}]
    comparison = niss.compare(small_config(methods=methods), **given)
    fields = {"method", "kappa", "accuracy", "epsilon_joint", "epsilon_marginal"}
    fields |= {"aggregate_variance", "aggregate_variance_predicted"}
    for line in comparison.summary["methods"]:
        assert fields <= set(line)
    plain, noisy = comparison.summary["methods"]
    assert plain["epsilon_joint"] is None
    assert plain["aggregate_variance"] == 0.0
    assert noisy["kappa"] == 2.0
    assert [result.label for result in comparison] == ["fedavg", "shared"]
    assert len(comparison) == 2
    shared = comparison["shared"]
    assert shared is comparison.results[1]
    assert shared.method == "niss"
    assert shared.accuracy == shared.summary["accuracy"] == shared.rounds[-1].accuracy
    assert shared.epsilon == shared.summary["epsilon_joint"] == shared.statement.epsilon_joint
    assert comparison["fedavg"].epsilon is None
    assert comparison.summary["methods"] == [result.summary for result in comparison]
    with pytest.raises(KeyError, match="fedavg, shared"):
        comparison["niss"]


def test_another_seed_gives_another_run_and_the_same_seed_the_same(given):
    def weights(seed):
        result = niss.run(small_config(seed=seed), **given)
        return result.state_dict["weight"].numpy()

    assert np.array_equal(weights(3), weights(3))
    assert not np.array_equal(weights(3), weights(4))


def test_the_global_generators_and_the_users_model_are_left_alone(given):
    state, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 (watched, not used)
    niss.run(small_config(), **given)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    assert float(given["model"].weight.detach().abs().max()) == 0.0


@pytest.mark.parametrize(
    ("data", "match"),
    [({"clients": 40}, r"data.clients: 40 .* 12 datasets"), ({"silos": 3}, "data.silos: 3")],
)
def test_another_number_of_datasets_than_was_named_is_refused(given, data, match):
    training = {"participants": 3}
    with pytest.raises(niss.errors.ConfigError, match=match):
        niss.run(small_config(data=data, training=training), **given)
    assert niss.run(small_config(data={}, training=training), **given).rounds


def test_several_methods_need_compare_and_progress_is_told_every_round(given):
    events = []
    config = small_config(methods=[{"name": "fedavg"}, {"name": "dp-fedavg"}], evaluate_every=3)
    with pytest.raises(niss.errors.ConfigError, match="compare"):
        niss.run(config, **given)
    niss.compare(config, **given, progress=events.append)
    assert [(event.label, event.round) for event in events] == [
        (label, number) for number in (1, 2, 3, 4) for label in ("fedavg", "dp-fedavg")
    ]
    assert [event.accuracy is None for event in events[::2]] == [True, True, False, False]
