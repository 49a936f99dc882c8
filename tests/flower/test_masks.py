"""Uniform masks in a Flower run: the noise is what was planned, and a void round leaves the model as it was."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

from flower.grid import FIRST, FakeGrid, global_model
from niss.accounting import Plan
from niss.errors import ConfigError, ProtocolError, RemoteProtocolError
from niss.flower import NissStrategy
from niss.flower.proposal import Proposal, plan_values, read_proposal
from niss.flower.run_config import plan_of
from niss.flower.transport import Stage
from niss.protocol.keys import Identity
from support.protocol_round import seeded_entropy

NODES = 8
MASKS = Plan(clip=0.5, epsilon=8.0, participations=3, neighbours=7, dropped=1, revealed=1, shares="uniform")


def strategy(report: object = None, plan: Plan = MASKS) -> NissStrategy:
    return NissStrategy(FedAvg(fraction_evaluate=0.0), plan=plan, mode="repair", report=report)  # type: ignore[arg-type]


def weights(record: object) -> np.ndarray:
    return np.concatenate([array.numpy().ravel() for array in record.values()])  # type: ignore[attr-defined]


def losing(nodes: set[int], number: int) -> object:
    """What a grid does that loses the uploads of these nodes in one round."""

    def tamper(message: Message) -> Message | None:
        stage = message.content["niss"]["stage"]
        opening = stage == Stage.ROUND and message.content["config"]["server-round"] == number
        return None if opening and message.metadata.dst_node_id in nodes else message

    return tamper


def test_a_lost_client_is_repaired_and_the_noise_is_that_of_the_plan() -> None:
    grid, wrapped = FakeGrid(NODES), strategy()
    grid.tamper = losing({FIRST + 3}, 2)  # type: ignore[assignment]
    wrapped.start(grid, global_model(), num_rounds=3, timeout=1)
    assert [one.survivors for one in wrapped.rounds] == [8, 7, 8]
    assert all(one.exact and not one.void for one in wrapped.rounds)
    # Sized for one dropped client of eight; the mean over eight has 8 / 7 of a trusted server's variance.
    own = 0.5 / 8 / float(wrapped.plan.round_mu(np.zeros(1, dtype=np.int64))[0])
    assert wrapped.rounds[0].deviation == pytest.approx(own * np.sqrt(8 / 7), rel=1e-6)
    assert wrapped.statement.epsilon_joint == pytest.approx(8.0, rel=0.1)


def test_a_void_round_keeps_the_model_is_reported_and_charged(tmp_path: object) -> None:
    grid, wrapped = FakeGrid(NODES), strategy(tmp_path / "report.json")  # type: ignore[operator]
    grid.tamper = losing({FIRST + 3, FIRST + 4}, 2)  # type: ignore[assignment]
    before: list[np.ndarray] = []
    aggregate = wrapped.aggregate_train

    def watched(server_round: int, replies: object) -> object:
        result = aggregate(server_round, replies)  # type: ignore[arg-type]
        before.append(result[0])  # type: ignore[arg-type]
        return result

    wrapped.aggregate_train = watched  # type: ignore[method-assign, assignment]
    wrapped.start(grid, global_model(), num_rounds=3, timeout=1)
    report = wrapped.rounds[1]
    assert report.void
    assert not report.exact
    assert (report.survivors, report.deviation) == (0, 0.0)
    assert any("the round is void" in problem for problem in report.problems)
    assert before[0] is not None
    assert before[1] is None, "nothing for Flower to put in the place of the model"
    assert before[2] is not None
    assert [one.void for one in wrapped.rounds] == [False, True, False]
    assert len(wrapped.account.charges) == 3
    caveats = " ".join(wrapped.statement.caveats)
    assert "Rounds that are void, since uniform masks could not be taken out: 1." in caveats
    assert "noise was left uncancelled: 0." in caveats
    written = json.loads((tmp_path / "report.json").read_text())  # type: ignore[operator]
    assert [one["void"] for one in written["rounds"]] == [False, True, False]


def test_a_run_of_void_rounds_alone_says_why_there_is_no_model() -> None:
    grid, wrapped = FakeGrid(NODES), strategy()
    grid.tamper = losing({FIRST + 3, FIRST + 4}, 1)  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="uniform masks could not be taken out"):
        wrapped.start(grid, global_model(), num_rounds=1, timeout=1)


def test_masks_are_refused_where_rounds_are_not_repaired() -> None:
    with pytest.raises(ConfigError, match="no sum after a dropout"):
        NissStrategy(FedAvg(), plan=MASKS)
    settings = {"rounds": 3, "epsilon": 8.0, "clip": 2.0, "mode": "repair", "shares": "uniform", "kappa": 4.0}
    assert plan_of(settings).uniform


def proposal(plan: Plan, mode: str) -> bytes:
    server = Identity.generate(seeded_entropy("server"))
    keys = bytes(range(32))
    return Proposal(bytes(16), server.public, keys, keys, plan, mode, 4, 2).signed(server)


def test_a_proposal_says_what_is_shared_and_otherwise_looks_as_it_did() -> None:
    gaussian = Plan(clip=0.5, participations=3)
    assert "shares" not in plan_values(gaussian)
    assert read_proposal(proposal(gaussian, "tolerate")).plan == gaussian
    assert read_proposal(proposal(MASKS, "repair")).plan == MASKS
    with pytest.raises(RemoteProtocolError, match="no sum after a dropout"):
        read_proposal(proposal(MASKS, "tolerate"))


def test_a_server_that_sends_other_shares_than_it_proposed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes agreed to masks; the server opens rounds with Gaussian shares of kappa 1 instead."""
    from dataclasses import replace

    from niss.flower import session

    made = session.make_terms

    def weaker(plan: Plan, **settings: object) -> object:
        return made(replace(plan, shares="gaussian"), **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "make_terms", weaker)
    with pytest.raises(ProtocolError, match="no round took place"):
        strategy().start(FakeGrid(NODES), global_model(), num_rounds=1, timeout=1)
