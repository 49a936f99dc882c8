"""A graph that costs more than was promised is drawn again, before anyone is asked or charged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import niss
from niss.accounting import make_terms
from niss.accounting.ledger_file import LedgerFile
from niss.protocol.keys import LINKS_PER_ROUND, link_of
from niss.randomness import SimStream
from niss.runs import RoundRecord
from niss.simulation import federation
from niss.simulation.method_run import CheckpointFolder
from niss.simulation.uploads import Played
from support.federation import exchange_of, killed, small_config

PLAN = niss.Plan(clip=1.0, epsilon=3.0, neighbours=3, attempts=LINKS_PER_ROUND)
SEED = 15


@pytest.fixture
def unlucky(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every first attempt is refused: the terms have half the noise that graphs were found to need."""
    monkeypatch.setattr("niss.accounting.terms._MARGIN", 0.5)


def entropy(seed: int) -> Callable[[int], bytes]:
    return SimStream(seed).generator().bytes


def play(
    plan: niss.Plan,
    charges: list[tuple[float, float, int]],
    *,
    seed: int = SEED,
    size: int = 12,
) -> tuple[Played, np.ndarray, RoundRecord]:
    exchange = exchange_of(plan, rounds=1, coordinates=4, entropy=entropy(seed))
    summed = exchange.exchange(
        0,
        np.arange(size),
        lambda _seat: np.zeros(4),
        charge=lambda charge, attempt: charges.append((charge.mu2[0], charge.marginal_mu2, attempt)),
    )
    return exchange, summed.total, summed.record


def allowed(plan: niss.Plan) -> float:
    return float(plan.round_mu(np.zeros(1, dtype=np.int64))[0])


@pytest.mark.usefixtures("unlucky")
def test_the_next_attempt_has_its_own_link_and_more_noise() -> None:
    charges: list[tuple[float, float, int]] = []
    exchange, _, record = play(PLAN, charges)
    agreed = exchange.session.round.agreed
    first, terms = make_terms(PLAN, participants=12, coordinates=4, run=b"", number=0), agreed.terms
    assert record.attempts == terms.attempt + 1 > 1
    assert agreed.opened.beacon.index == link_of(0, terms.attempt)
    assert terms.residual_variance >= 1.1 * first.residual_variance
    assert charges == [(record.mu_joint**2, record.mu_marginal**2, terms.attempt)], "one charge"
    assert record.mu_joint <= allowed(PLAN)
    assert record.exact


def test_a_graph_that_happens_to_be_bad_is_drawn_again() -> None:
    """About one graph in ten of 12 clients with 3 neighbours is refused; that 300 are not has a chance of 1e-13."""
    tried = (play(PLAN, [], seed=seed) for seed in range(300))
    record = next(record for _, _, record in tried if record.attempts > 1)
    assert record.mu_joint <= allowed(PLAN)


@pytest.mark.usefixtures("unlucky")
def test_when_all_attempts_are_refused_nothing_is_charged_and_the_error_says_what_to_do() -> None:
    charges: list[tuple[float, float, int]] = []
    with pytest.raises(
        niss.errors.PrivacyError, match="round 1: none of 1 graphs keeps the promise"
    ) as caught:
        play(replace(PLAN, attempts=1), charges)
    assert caught.value.hint is not None
    assert "more neighbours" in caught.value.hint
    assert charges == []


@pytest.mark.usefixtures("unlucky")
def test_the_same_entropy_plays_the_same_attempts() -> None:
    (_, total, record), (_, again, other) = play(PLAN, []), play(PLAN, [])
    assert record.attempts > 1
    assert record.public == other.public
    assert np.array_equal(total, again)


def test_no_more_attempts_than_links() -> None:
    with pytest.raises(niss.errors.ConfigError, match=r"plan\.attempts"):
        exchange_of(replace(PLAN, attempts=LINKS_PER_ROUND + 1), rounds=1, coordinates=4)


def test_delta_pays_for_every_attempt() -> None:
    privacy = {"epsilon": 20.0, "clip": 1.0, "collusion": 0.3}
    protocol, simulated = (
        (config := small_config(exchange=exchange, privacy=privacy)).plan(config.methods[0])
        for exchange in ("protocol", "simulated")
    )
    assert (protocol.attempts, simulated.attempts) == (LINKS_PER_ROUND, 1)
    assert protocol.failure == pytest.approx(simulated.failure / LINKS_PER_ROUND)


def protocol_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on runs draw keys, beacons and noise from this seed."""
    monkeypatch.setattr(federation, "Played", partial(Played, entropy=entropy(seed)))


def twelve(**changes: Any) -> niss.Config:
    training = {"participants": 12, "epochs": 1, "batch_size": 4, "learning_rate": 0.1}
    return small_config(**{"exchange": "protocol", "rounds": 3, "training": training, **changes})


@pytest.mark.usefixtures("unlucky")
def test_a_run_goes_on_tells_of_it_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given
) -> None:
    protocol_run(SEED, monkeypatch)
    with killed(
        monkeypatch, CheckpointFolder, "append_round", lambda _, record, __: record.round == 1, after=True
    ):
        niss.run(twelve(), out=tmp_path / "a", **given)
    # Round 1 had several attempts, and one charge. No checkpoint holds it: it is played, and charged, anew.
    assert len(LedgerFile.read(tmp_path / "a" / "ledger.jsonl").entries) == 1
    protocol_run(SEED, monkeypatch)
    result = niss.resume(tmp_path / "a", **given)
    attempts = [line.attempts for line in result.rounds]
    assert min(attempts) > 1
    again = sum(attempts) - 3
    told = f"{again} graphs would have cost more"
    assert any(caveat.startswith(told) for caveat in result.statement.caveats)
    ledger = LedgerFile.read(tmp_path / "a" / "ledger.jsonl")
    assert [(entry.round, entry.attempt + 1) for entry in ledger.entries] == list(enumerate(attempts, 1))
    assert all(ledger.participations(str(client)) == 3 for client in range(12))
    assert result.statement.epsilon_joint <= 20.0 * (1 + 1e-9)


def test_a_resumed_ledger_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given) -> None:
    """Noise and keys are never drawn twice, but on a complete graph the cost of a round does not depend on them."""
    config = twelve(methods=[{"name": "niss", "neighbours": 11, "graph": "complete"}])
    niss.run(config, out=tmp_path / "whole", **given)
    with killed(monkeypatch, CheckpointFolder, "save_checkpoint", lambda _, rounds, __: rounds == 2):
        niss.run(config, out=tmp_path / "cut", **given)
    niss.resume(tmp_path / "cut", **given)
    whole, cut = ((tmp_path / name / "ledger.jsonl").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


@pytest.mark.usefixtures("unlucky")
def test_a_run_whose_attempts_are_used_up_ends_with_its_ledger_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given
) -> None:
    protocol_run(SEED, monkeypatch)
    monkeypatch.setattr("niss.protocol.keys.LINKS_PER_ROUND", 1)
    with pytest.raises(niss.errors.PrivacyError, match="more neighbours"):
        niss.run(twelve(), out=tmp_path / "a", **given)
    assert not LedgerFile.read(tmp_path / "a" / "ledger.jsonl").entries
