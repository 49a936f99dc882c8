"""Metrics and weights inside the upload: within the clip whatever an app reports, and named in the proposal."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niss.accounting import Plan, make_terms
from niss.errors import ConfigError, RemoteProtocolError
from niss.mechanism import l2_norm
from niss.mechanism.blocks import Blocks
from niss.mechanism.grid import Grid
from niss.mechanism.rounding import round_randomly
from niss.protocol.keys import SIGNATURE_BYTES
from niss.protocol.messages import Terms
from niss.randomness import SecretStream
from niss.session.books import Books, RunState
from niss.session.metrics import WEIGHT, NoisyMetrics, adaptive_clip, with_own
from niss.session.proposal import read_proposal
from niss.settings import check_json, to_values
from session.scene import CARRIED, Scene, signed_proposal

RANGES = {"accuracy": (0.0, 1.0), "loss": (0.0, 8.0)}
MIDDLE = [None, "word", math.nan, [0.9], True, b"1", object()]


def _terms() -> Terms:
    return make_terms(
        Plan(tau2=0.0, clip=2.0, participations=3, neighbours=3),
        participants=4,
        coordinates=5,
        run=bytes(16),
        number=0,
    )


@given(
    update=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    given_values=st.lists(
        st.floats() | st.integers() | st.sampled_from([*MIDDLE, 10**400, -(10**400)]),
        min_size=1,
        max_size=5,
    ),
    # Half of the least positive number is 0: a range as narrow as that is refused.
    ends=st.tuples(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300)).filter(
        lambda one: (one[1] - one[0]) / 2.0 > 0.0
    ),
    part=st.floats(0.01, 0.9),
    clip=st.floats(1e-6, 1e6),
    bits=st.integers(1, 30),
    participants=st.integers(2, 500),
)
def test_its_norm_is_never_above_the_clip(update, given_values, ends, part, clip, bits, participants) -> None:
    named = {f"metric {number}": value for number, value in enumerate(given_values)}
    metrics = NoisyMetrics(dict.fromkeys(named, ends), part)
    terms = replace(_terms(), clip=clip, grid_bits=bits)
    joined = metrics.joined(Blocks.of(np.array(update)), named, terms, participants).array()
    assert joined.shape == (len(update) + len(named),)
    assert l2_norm(joined) <= clip
    tail = joined[len(update) :]
    assert l2_norm(tail) <= part * clip * (1.0 + 1e-12)
    alone = metrics.joined(Blocks.of(np.zeros(len(update))), named, terms, participants).array()[
        len(update) :
    ]
    np.testing.assert_allclose(tail, alone, rtol=1e-12)
    assert l2_norm(joined[: len(update)]) <= math.sqrt(1.0 - part**2) * clip * (1.0 + 1e-12)


@pytest.mark.parametrize(
    ("value", "position"),
    [(0, -1.0), (1, 1.0), (0.75, 0.5), (-3.0, -1.0), (math.inf, 1.0), (10**400, 1.0)]
    + [(value, 0.0) for value in MIDDLE],
)
def test_where_a_number_lies_in_its_range(value, position) -> None:
    metrics = NoisyMetrics({"accuracy": (0, 1)}, part=0.5)
    joined = metrics.joined(Blocks.of(np.zeros(3)), {"accuracy": value}, _terms(), 4).array()
    assert joined.tolist() == [0.0, 0.0, 0.0, position]  # 0.5 of a clip of 2.


def test_a_missing_metric_lies_in_the_middle() -> None:
    metrics = NoisyMetrics(RANGES)
    assert metrics.joined(Blocks.of(np.zeros(3)), {}, _terms(), 4).array().tolist() == [0.0] * 5


def test_nothing_is_changed_where_there_are_no_metrics() -> None:
    update = Blocks.of(np.array([3.0, 4.0]))
    assert NoisyMetrics().joined(update, {"loss": 1.0}, _terms(), 4) is update


def test_rounding_to_the_grid_shortens_updates_and_not_metrics() -> None:
    """Of a model with as many coordinates an update as long as the clip is shortened by 7 %."""
    size, participants = 250_000, 30
    plan = Plan(clip=1.0, epsilon=8.0, participations=20, neighbours=10, kappa=2.0)
    terms = make_terms(plan, participants=participants, coordinates=size + 2, run=bytes(16), number=0)
    update = np.random.default_rng(1).normal(size=size)
    metrics = NoisyMetrics(RANGES)
    joined = metrics.joined(Blocks.of(update), {"accuracy": 1.0, "loss": 0.0}, terms, participants).array()
    wanted = np.array([0.2, -0.2]) / math.sqrt(2.0)
    np.testing.assert_allclose(joined[-2:], wanted, rtol=1e-12)
    grid = Grid(terms.grid_bits)
    steps = round_randomly(grid, joined / participants, 1.0 / participants, SecretStream(bytes(32)))
    np.testing.assert_allclose(steps[-2:], grid.in_steps(wanted / participants), rtol=0, atol=1.0)
    uneven = np.append(update * math.sqrt(0.96) / l2_norm(update), wanted)
    alike = round_randomly(grid, uneven / participants, 1.0 / participants, SecretStream(bytes(32)))
    assert abs(alike[-1]) < 0.97 * abs(steps[-1]), "else the update need not be shortened in advance"


@given(
    update=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    count=st.floats() | st.integers() | st.sampled_from([None, "many", True, 10**400, -(10**400)]),
    cap=st.floats(1e-3, 1e9),
    part=st.floats(0.01, 0.9),
    clip=st.floats(1e-6, 1e6),
)
def test_a_weight_only_makes_an_upload_shorter(update, count, cap, part, clip) -> None:
    metrics = NoisyMetrics({f"{WEIGHT}n": (0.0, cap)}, part)
    terms = replace(_terms(), clip=clip)
    joined = metrics.joined(Blocks.of(np.array(update)), {"n": count}, terms, 10).array()
    assert l2_norm(joined) <= clip
    room = clip * math.sqrt(1.0 - part**2)
    share = 0.5 + 0.5 * joined[-1] / (part * clip)
    assert -1e-9 <= share <= 1.0 + 1e-9
    assert l2_norm(joined[:-1]) <= room * max(share, 0.0) * (1.0 + 1e-9) + 1e-9 * clip


def test_noise_in_the_weights_is_averaged_over_the_rounds_and_never_divides_by_nothing() -> None:
    session = Scene.of(False).start()
    books = session.books
    assert books.weigh(0.6) == 0.6
    assert books.weigh(0.2) == pytest.approx(0.4)
    kept = check_json(RunState, json.dumps(to_values(session.state)))
    assert Books(session.proposal, kept, books.assess).weigh(0.4) == pytest.approx(0.4)
    assert Books(session.proposal, RunState(b"", 1.0), books.assess).weigh(-3.0) == 0.05


def test_the_proposal_says_which_metrics() -> None:
    scene = Scene.of(False)
    proposal = scene.start().proposal
    for metrics in (NoisyMetrics(RANGES, 0.3), NoisyMetrics()):
        signed = replace(proposal, metrics=metrics).signed(scene.identity)
        assert read_proposal(signed).metrics == metrics


@pytest.mark.parametrize(
    "metrics",
    [
        1,
        [],
        {"ranges": {"a": [0, 1]}, "part": 0.2, "more": 1},
        {"ranges": {"a": [0, 1]}, "part": 0.0},
        {"ranges": {"a": [0, 1]}, "part": 1.0},
        {"ranges": {"a": [0, 1]}, "part": "0.2"},
        {"ranges": {"a": [0, 1]}, "part": math.nan},
        {"ranges": {"a": [1, 0]}, "part": 0.2},
        {"ranges": {"a": [0, math.nan]}, "part": 0.2},
        {"ranges": {"a\x1b[31m": [0, 1]}, "part": 0.2},
        {"ranges": ["a"], "part": 0.2},
    ],
)
def test_a_proposal_with_metrics_that_cannot_be_is_refused(metrics) -> None:
    scene = Scene.of(False)
    text = json.loads(scene.start().state.proposal[SIGNATURE_BYTES:])
    text["metrics"] = metrics
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        read_proposal(signed_proposal(scene.identity, text))


@pytest.mark.parametrize(
    "ranges",
    [
        {"": (0, 1)},
        {"a\nb": (0, 1)},
        {"x" * 65: (0, 1)},
        {"niss-lost": (0, 1)},
        {"loss": (0, 1), "loss_noise_sd": (0, 1)},
        {"loss": (1, 1)},
        {"loss": (1, 0)},
        {"loss": (0, math.inf)},
        {"loss": (-1.7e308, 1.7e308)},
        {"loss": (0, 5e-324)},
        {"loss": (0, math.nan)},
        {"loss": (0, 1, 2)},
        {"loss": 1},
        {"loss": (0, 10**400)},
    ],
)
def test_names_and_ranges_that_cannot_be(ranges) -> None:
    with pytest.raises(ConfigError, match="metrics"):
        NoisyMetrics(ranges)


def test_weights_and_a_plan_that_carries_noise() -> None:
    for ranges in ({f"{WEIGHT}a": (0, 1), f"{WEIGHT}b": (0, 1)}, {f"{WEIGHT}a": (1, 2)}, {WEIGHT: (0, 1)}):
        with pytest.raises(ConfigError, match="metrics"):
            NoisyMetrics(ranges)
    for use in (
        lambda: with_own(CARRIED, None, None, "num-examples", 10),
        lambda: adaptive_clip(CARRIED, 0.5, None),
    ):
        with pytest.raises(ConfigError, match="noise of one round out in another"):
            use()
