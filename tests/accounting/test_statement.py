"""The statement says what was promised, to whom, against whom, and where nothing was: of a run, and of one graph."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import niss
from niss.accounting import Charge, Ledger, OutsiderClaim, Plan, Statement, make_statement
from niss.mechanism import Slots, gdp_epsilon, poisson_multiplier
from support.refusals import refuses

CLIENTS = 6


def _after(rounds: int, notes: tuple[str, ...] = (), **settings: Any) -> Statement:
    """The statement after that many rounds in which clients 0 to 4 of six took part."""
    plan = Plan(**({"neighbours": 3.0, "participations": max(rounds, 1)} | settings))
    ledger = Ledger.empty(CLIENTS, plan.budget(CLIENTS) if plan.calibrated else None)
    for number in range(rounds):
        prepared = plan.for_round(range(5), weights=0.2, records=100, beacon=bytes([number]))
        ledger.charge(
            prepared.participants, Charge.of(prepared.joint_mu, prepared.marginal_mu, batch=plan.batch)
        )
    return make_statement(plan, ledger, notes=notes)


def test_calibrated_noise_promises_the_target() -> None:
    statement = _after(4, epsilon=3.0, delta=1e-5, graph="complete")
    # Less than promised: what is reserved for a grid is not needed in a simulation.
    assert statement.epsilon_joint == pytest.approx(2.99657, rel=1e-5)
    assert statement.budget_epsilon == pytest.approx(3.0, rel=1e-9)
    assert statement.words.startswith(
        "(3.00, 1e-5)-differential privacy for every client over 4 participations"
    )
    assert "no client colludes" in statement.words
    assert "one client's whole data" in statement.words
    assert not statement.heuristic
    assert any("collude" in caveat for caveat in statement.caveats)
    assert "that the client took part is not hidden" in statement.words


def test_clients_are_listed_with_what_they_spent() -> None:
    statement = _after(4, epsilon=(2.5, 3.0, 3.0, 3.0, 3.5, 9.0))
    assert [client.client for client in statement.clients] == list(range(CLIENTS))
    assert [client.participations for client in statement.clients] == [4, 4, 4, 4, 4, 0]
    assert statement.clients[5].epsilon_joint == 0.0
    spent = [client.epsilon_joint for client in statement.clients[:5]]
    assert statement.epsilon_joint == max(value for value in spent if value is not None)
    for client, target in zip(statement.clients, (2.5, 3.0, 3.0, 3.0, 3.5), strict=False):
        assert client.mu_joint is not None
        assert client.epsilon_joint == gdp_epsilon(client.mu_joint, 1e-5)
        assert client.epsilon_joint <= target + 1e-6
        assert client.mu_marginal is not None
        assert client.mu_marginal < client.mu_joint


NO = "No guarantee in the joint view. "
BARE = ("cancel exactly", "the paper's view")
GROUPS = {"graph": "coalition", "groups": ((0, 1), (2, 3, 4)), "neighbours": 1.0}
LABEL = ("a label, not a promise",)


@pytest.mark.parametrize(
    ("rounds", "settings", "start", "said", "unsaid"),
    [
        (2, {"tau2": 0.0}, NO, BARE, ()),
        (2, {"tau2": 0.0, "distortion": "scalar"}, NO, BARE, ()),
        (2, {"tau2": 0.0, "distortion": "coordinate"}, NO, BARE, ()),
        (1, {"tau2": 0.5, "distortion": "coordinate"}, NO, ("per coordinate",), BARE[:1]),
        (1, {"tau2": 0.5, "distortion": "scalar"}, NO, ("factors",), BARE[:1]),
        (1, {"tau2": (0.0, 0.0, 0.5, 0.5, 0.5), **GROUPS}, NO, ("some group",), BARE[:1]),
        (1, {"unit": "nbafl"}, "No guarantee", LABEL, ()),
        (1, {"mechanism": "classical", "allow_invalid": True, "epsilon": 10.0}, "No guarantee", LABEL, ()),
        (2, {"method": "fedavg"}, "No privacy", (), ()),
        (0, {}, "Nothing was uploaded, so nothing was revealed.", (), ()),
    ],
    ids=str,
)
def test_where_there_is_no_guarantee_there_is_no_number_and_the_reason_that_holds(
    rounds: int, settings: dict[str, Any], start: str, said: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    statement = _after(rounds, **settings)
    assert statement.words.startswith(start)
    for words in said:
        assert words in statement.words
    for words in unsaid:
        assert words not in statement.words
    assert statement.epsilon_joint is None
    assert statement.heuristic == (said == LABEL)
    if rounds:
        assert statement.clients[0].epsilon_joint is None
    if said == LABEL:
        assert all(client.epsilon_joint is None for client in statement.clients)
    if start == NO:
        assert statement.budget_epsilon is None
        assert statement.clients[0].mu_joint is None
    if said == BARE:
        assert statement.epsilon_marginal is not None
    if start == "No privacy":
        assert statement.epsilon_marginal is None
        assert statement.caveats == ()


def test_central_dp_names_the_trusted_server() -> None:
    statement = _after(1, method="central-dp")
    assert statement.epsilon_joint == pytest.approx(3.0, rel=1e-6)
    assert "trusted" in statement.adversary
    assert statement.adversary in statement.words
    assert statement.epsilon_marginal is None
    assert "One upload alone carries no noise" in statement.words


def test_dp_fedavg_holds_in_both_views() -> None:
    statement = _after(3, method="dp-fedavg")
    assert statement.epsilon_joint == pytest.approx(3.0, rel=1e-6)
    assert statement.epsilon_marginal == statement.epsilon_joint
    assert not any("collude" in caveat for caveat in statement.caveats)


@pytest.mark.slow
def test_a_statement_about_records_says_what_it_rests_on() -> None:
    """Epsilon 1 over 600 rounds with batches of 5 %: beside it what is left if all are known, and of people."""
    plan = Plan(unit="record", batch=0.05, records=60_000, epsilon=1.0, participations=600)
    z = poisson_multiplier(1.0, 1e-5, 0.05, 600)
    ledger = Ledger.empty(2, Slots.of((0.05, z, 600)))
    for _ in range(600):
        ledger.charge(np.arange(2), Charge.of(1.0 / z, batch=0.05))
    statement = make_statement(plan, ledger)
    assert statement.epsilon_joint == pytest.approx(1.0, rel=1e-3)
    assert statement.budget_epsilon >= statement.epsilon_joint
    assert (statement.unit, statement.relation) == ("record", "zero-out")
    assert "if all became known, epsilon would be 5.65." in statement.words
    assert any("has epsilon 2.16 with 2, 6.19 with 5, 14.48 with 10" in one for one in statement.caveats)
    assert statement.epsilon_marginal is None
    assert statement.paper == ""


@pytest.mark.parametrize(("graph", "fixed"), [("complete", False), ("regular", True)])
def test_colluders_are_said_to_be_fixed_before_the_graph_only_where_the_claim_rests_on_it(
    graph: str, fixed: bool
) -> None:
    """Where everyone is near everyone, those that are placed after it was drawn are as bad: two words for one thing."""
    statement = _after(1, graph=graph, collusion=0.2)
    assert "up to 20 % of a round's participants" in statement.adversary
    assert ("fixed before its graph was drawn" in statement.words) == fixed


def test_delta_is_that_of_every_graph_that_was_drawn_whoever_was_shown_it() -> None:
    """Three participations of each client in 120 rounds: a server could have chosen the three that it shows to one."""
    plan, ledger = Plan(collusion=0.1, participations=3, neighbours=10.0), Ledger.empty(40)
    for number in range(120):
        ledger.charge(np.array([number % 40]), Charge.of(0.1))
    statement = make_statement(plan, ledger)
    assert statement.delta == pytest.approx(1e-5 + 117 * 0.1 * 1e-5 / 3)
    assert any("is for 3 rounds, of which there were 120" in caveat for caveat in statement.caveats)
    assert make_statement(replace(plan, horizon=120), ledger).delta == plan.delta


def test_a_silo_without_noise_has_no_claim_for_its_records() -> None:
    ledger = Ledger.empty(2, unit="record")
    ledger.charge(np.arange(2), Charge.of(np.inf, batch=0.05))
    plan = Plan(unit="record", batch=0.05, records=600, tau2=0.0, neighbours=1.0)
    statement = make_statement(plan, ledger)
    assert statement.epsilon_joint is None
    assert statement.words.startswith("No guarantee in the joint view.")


def test_units_relations_and_random_lists_are_named() -> None:
    record = _after(1, unit="record", batch=0.1, records=100)
    assert record.relation == "zero-out"
    assert (
        "privacy for every record over 1 participation, hiding one record (added or removed)" in record.words
    )
    replaced = _after(1, relation="replace-one")
    assert replaced.relation == "replace-one"
    assert "replaced by any other" in replaced.words
    assert "over 1 participation," in replaced.words
    listed = _after(1, graph="random", tau2=0.5)
    assert any("random list" in caveat and "Theorem 2" in caveat for caveat in listed.caveats)


@pytest.mark.parametrize(
    ("epsilon", "shown"), [(3.004, "3.01"), (3.0, "3.00"), (0.001, "0.01"), (2.999, "3.00")]
)
def test_a_printed_epsilon_is_never_below_the_true_one(epsilon: float, shown: str) -> None:
    assert _after(1, method="dp-fedavg", epsilon=epsilon).words.startswith(f"({shown}, ")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tau2": 0.0},
        {"method": "fedavg"},
        {"method": "central-dp"},
        {"unit": "nbafl"},
        {"tau2": 0.1, "distortion": "coordinate"},
        {"epsilon": (2.0, 2.1, 2.2, 2.3, 2.4, 6.0)},
    ],
)
def test_every_statement_is_strict_json(settings: dict[str, Any]) -> None:
    statement = _after(2, notes=("a note",), **settings)
    text = json.dumps(statement.to_json(), allow_nan=False)
    read = json.loads(text)
    assert read["words"] == statement.words
    assert read["caveats"][-1] == "a note"
    assert read["clients"] == CLIENTS
    assert read["epsilon_joint"] == statement.epsilon_joint


def test_one_unprotected_round_ends_the_guarantee() -> None:
    plan = Plan(tau2=0.1)
    ledger = Ledger.empty(2)
    both = np.arange(2)
    ledger.charge(both, Charge.of(0.5, 0.1))
    assert make_statement(plan, ledger).epsilon_joint is not None
    ledger.charge(both[:1], Charge.of(np.inf, 0.1))
    statement = make_statement(plan, ledger)
    assert statement.epsilon_joint is None
    assert statement.clients[0].epsilon_joint is None
    assert statement.clients[1].epsilon_joint is not None


def test_where_the_noise_came_from_is_said_truly() -> None:
    plan, ledger = Plan(neighbours=3.0), Ledger.empty(CLIENTS)
    seeded, drawn = (make_statement(plan, ledger, noise_from=source) for source in ("seed", "entropy"))
    assert "comes from a seed" in seeded.caveats[0]
    assert "do not follow from the seed" in drawn.caveats[0]
    assert "one process" in drawn.caveats[0]
    assert seeded.caveats[1:] == drawn.caveats[1:]
    assert make_statement(Plan(method="fedavg"), ledger, noise_from="entropy").caveats == ()


@pytest.mark.parametrize("claim", [{"relation": "zero-out"}, {"unit": "record"}, {"delta": 2e-5}])
def test_a_claim_in_another_relation_is_not_put_beside_the_joint_one(claim: dict[str, Any]) -> None:
    plan = Plan(relation="replace-one", neighbours=3.0)
    told = {"epsilon": 1.38, "delta": 1e-5, "unit": "client", "relation": "replace-one"}
    told |= {"accountant": "x", "words": "y"}
    ledger = Ledger.empty(CLIENTS)
    assert make_statement(plan, ledger, outsider=OutsiderClaim(**told)).epsilon_outsider == 1.38
    with refuses("outsider"):
        make_statement(plan, ledger, outsider=OutsiderClaim(**{**told, **claim}))


GRAPH = niss.ShareGraph.regular(12, degree=4, beacon=b"statement")


def make(**changes: object) -> niss.Statement:
    noise = {"unit_variance": 0.25, "residual_variance": 0.2, "sensitivity": 0.5, "delta": 1e-5}
    return niss.assess(GRAPH, **{**noise, **changes})  # type: ignore[arg-type]


def test_numbers_follow_from_the_effective_variance() -> None:
    made = make(participations=4)
    variance = niss.effective_variance(GRAPH, unit_variance=0.25, residual_variance=0.2)
    for client, value in zip(made.clients, variance, strict=True):
        assert client.mu_joint == pytest.approx(2 * 0.5 / math.sqrt(value))
        assert client.epsilon_joint == pytest.approx(gdp_epsilon(client.mu_joint, 1e-5))
        assert client.mu_marginal == pytest.approx(2 * 0.5 / math.sqrt(0.25 * 8 + 0.2))
    assert made.epsilon_joint == max(client.epsilon_joint for client in made.clients)
    assert json.loads(json.dumps(made.to_json()))["epsilon_joint"] == made.epsilon_joint


def test_without_residual_noise_there_is_no_guarantee_and_no_number() -> None:
    made = make(residual_variance=0.0)
    assert made.epsilon_joint is None
    assert made.words.startswith("No guarantee")
    assert made.epsilon_marginal is not None
    assert "what the paper counts" in made.paper


def test_colluders_drops_and_reveals_are_told_apart() -> None:
    plain = make()
    corrupted = make(colluders=[0, 1])
    assert [client.client for client in corrupted.clients] == list(range(2, 12))
    assert corrupted.epsilon_joint > plain.epsilon_joint
    assert "up to 16.7 % of a round's participants" in corrupted.adversary
    dropped = make(dropped=[0, 1])
    assert dropped.epsilon_joint < corrupted.epsilon_joint
    pairs = [(2, int(other)) for other in GRAPH.neighbours(2)]
    bare = make(revealed=pairs)
    assert bare.clients[2].mu_joint == pytest.approx(0.5 / math.sqrt(0.2))
    assert f"{len(pairs)} edges were revealed" in bare.adversary


def test_sensitivities_may_differ_and_are_checked() -> None:
    made = make(sensitivity=np.linspace(0.1, 0.5, 12))
    assert made.clients[0].epsilon_joint < made.clients[11].epsilon_joint
    with pytest.raises(niss.errors.ConfigError, match="sensitivity"):
        make(sensitivity=[0.1, 0.2])
    with pytest.raises(niss.errors.ConfigError, match="participations"):
        make(participations=0)


def test_it_says_what_is_not_protected() -> None:
    assert any("took part" in line for line in make().not_protected)
