"""Several processes train a run together: the same as one process up to the order of summation."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import niss
from niss.accounting.ledger_file import LedgerFile
from niss.cli.errors import INTERRUPTED
from niss.errors import ConfigError, NissError, RanksError
from niss.files import read_json, read_json_lines
from niss.settings import to_values
from niss.simulation.method_run import RoundEvent
from niss.simulation.ranks import Ranks, rank_in
from support.federation import small_config
from support.ranks import do, ended, play, start_ranks

LOST = {"epsilon": 20.0, "clip": 1.0, "dropout": 0.3}
REPAIRED = {**LOST, "mode": "repair"}
CARRIED = {"name": "niss-carried"}
CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"methods": [{"name": "fedavg"}]},
    "dp-fedavg": {"methods": [{"name": "dp-fedavg"}]},
    "central-dp": {"methods": [{"name": "central-dp"}]},
    "central-mf": {"methods": [{"name": "central-mf"}]},
    "secagg-ddg": {"methods": [{"name": "secagg-ddg"}]},
    "niss": {"methods": [{"name": "niss", "neighbours": 3}]},
    "everyone": {"methods": [{"name": "niss", "graph": "complete"}]},
    "scalar": {"methods": [{"name": "niss", "neighbours": 3, "distortion": "scalar", "tau2": 0.3}]},
    "coordinate": {"methods": [{"name": "niss", "neighbours": 3, "distortion": "coordinate", "tau2": 0.3}]},
    "dropouts": {"methods": [{"name": "niss", "neighbours": 3}], "privacy": LOST},
    "everyone, dropouts": {"methods": [{"name": "niss", "graph": "complete"}], "privacy": LOST},
    "repaired": {
        "methods": [{"name": "niss", "neighbours": 4}],
        "privacy": REPAIRED,
    },
    "everyone, repaired": {
        "methods": [{"name": "niss", "graph": "complete"}],
        "privacy": REPAIRED,
    },
    "carried": {"methods": [{**CARRIED, "closing": True}]},
    "carried, dropouts": {"methods": [CARRIED], "privacy": REPAIRED},
    "quantile": {
        "methods": [{"name": "niss", "neighbours": 3}],
        "privacy": {"epsilon": 20.0, "clip": 1.0, "quantile": 0.5},
    },
}


COMPARED = [{"name": "fedavg"}, {"name": "niss", "neighbours": 3}, {"name": "central-mf"}]
AGAIN = ("everyone, dropouts", "carried", "niss", "quantile")
RESUMED = "carried, dropouts"
SAME_BYTES = ("metrics.jsonl", "ledger.jsonl", "model.safetensors", "privacy.json", "checkpoint.safetensors")


def settings(name: str, **changes: Any) -> dict[str, Any]:
    return to_values(small_config(**{**CASES[name], **changes}))


def run_into(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {"do": "run", "config": settings(name, **changes), "out": str(folder / name)}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, a comparison and something to be refused, with two ranks; and all but the last with one process."""
    folder = tmp_path_factory.mktemp("ranks")
    refused = run_into(folder, "niss", exchange="protocol")

    def pieces(place: str) -> list[dict[str, Any]]:
        compared = {
            "do": "compare",
            "config": settings("niss", methods=COMPARED),
            "out": str(folder / place / "all"),
        }
        return [*(run_into(folder / place, name) for name in CASES), compared]

    for *done, said in play([*pieces("two"), refused], folder):
        assert not any(done)
        assert said.startswith("exchange: the parties of the real protocol are in one process")
    assert not any(map(do, pieces("one")))
    return folder


@pytest.fixture(scope="module")
def once_more(played: Path) -> Path:
    """Some cases again with two ranks; and a run that one process began, two ranks went on with, and one ended."""
    folder = played / "again"
    begun = run_into(played / "mixed", RESUMED)
    assert do({**begun, "stop": 1}) == "stopped"
    pieces = [*(run_into(folder, name) for name in AGAIN), {**begun, "do": "resume", "stop": 3}]
    done = [""] * len(AGAIN)
    (*first, stopped), (*other, lost) = play(pieces, played)
    assert (first, other, stopped) == (done, done, "stopped")
    assert lost.startswith("rank 1 lost another rank")
    assert len(read_json_lines(Path(begun["out"]) / "metrics.jsonl")[0]) == 3
    assert do({**begun, "do": "resume"}) == ""
    return played


def assert_equal_runs(found: Path, expected: Path, tolerance: float = 1e-10) -> None:
    """Weights and what was measured within the tolerance; what was charged and is claimed, to the last bit."""
    values, states = load_file(expected / "model.safetensors"), load_file(found / "model.safetensors")
    assert max(float(np.abs(part).max()) for part in values.values()) > 0.01
    for name, part in values.items():
        np.testing.assert_allclose(states[name], part, rtol=tolerance, atol=tolerance)
    lines = [read_json_lines(folder / "metrics.jsonl")[0] for folder in (found, expected)]
    for one, other in zip(*lines, strict=True):
        for name, value in other.items():
            if isinstance(value, float):
                assert one[name] == pytest.approx(value, rel=100 * tolerance, abs=100 * tolerance), name
            else:
                assert one[name] == value, name
    for name in ("privacy.json", "diagnostics.jsonl"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    with LedgerFile.open(found / "ledger.jsonl") as one, LedgerFile.open(expected / "ledger.jsonl") as other:
        assert [entry.charges for entry in one.entries] == [entry.charges for entry in other.entries]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(played: Path, name: str) -> None:
    assert_equal_runs(played / "two" / name, played / "one" / name)


@pytest.mark.parametrize("name", AGAIN)
def test_two_ranks_give_the_same_bits_again(once_more: Path, name: str) -> None:
    for file in SAME_BYTES:
        again = (once_more / "again" / name / file).read_bytes()
        assert again == (once_more / "two" / name / file).read_bytes(), file


def test_a_run_is_resumed_with_another_number_of_ranks(once_more: Path) -> None:
    assert_equal_runs(once_more / "mixed" / RESUMED, once_more / "one" / RESUMED)


@pytest.mark.parametrize("method", COMPARED, ids=lambda method: method["name"])
def test_a_comparison_goes_over_all_ranks(played: Path, method: dict[str, Any]) -> None:
    assert_equal_runs(played / "two" / "all" / method["name"], played / "one" / "all" / method["name"])
    assert (played / "two" / "all" / "summary.json").exists()


def test_more_ranks_than_clients_and_unequal_parts(tmp_path: Path) -> None:
    """Three ranks: rounds of two leave one without anything to train, rounds of seven have parts of two and three."""
    few = {"training": {"participants": 2, "epochs": 2, "batch_size": 4, "learning_rate": 0.1}}
    many = {"training": {"participants": 7, "epochs": 1, "batch_size": 4, "sampling": "uniform"}}
    single = {"materials": {"dtype": "float32"}}
    pieces = [
        run_into(Path("few"), "everyone", **few),
        run_into(Path("many"), "everyone, dropouts", **many),
        {**run_into(Path("single"), "carried"), **single},
        {**run_into(Path("single"), "niss", **many), **single},
    ]

    def into(place: str) -> list[dict[str, Any]]:
        return [{**piece, "out": str(tmp_path / place / piece["out"])} for piece in pieces]

    assert play(into("three"), tmp_path, count=3) == [[""] * len(pieces)] * 3
    for piece, other, tolerance in zip(into("one"), into("three"), (1e-10, 1e-10, 1e-4, 1e-4), strict=True):
        do(piece)
        assert_equal_runs(Path(other["out"]), Path(piece["out"]), tolerance)


def test_the_manifest_says_how_many_ranks(played: Path) -> None:
    engine = read_json(played / "two" / "niss" / "manifest.json")["engine"]
    assert "2 ranks" in engine
    assert "order of summation" in engine


def test_jobs_are_dealt_by_their_size() -> None:
    loads = [9, 1, 1, 1, 5, 5, 2, 30, 4, 4]
    parts = [Ranks(rank, 3, rank, 3).deal(loads) for rank in range(3)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(loads)))
    sums = sorted(sum(loads[job] for job in part) for part in parts)
    assert sums == [16, 16, 30]
    assert [part.tolist() for part in parts] == [sorted(part.tolist()) for part in parts]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
    ],
)
def test_numbers_that_number_nothing_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK"):
        rank_in(variables)


def test_one_process_is_no_rank() -> None:
    assert rank_in({}) is None
    assert rank_in({"RANK": "0", "WORLD_SIZE": "1"}) is None


ENDLESS = (
    "-m", "niss", "run", "--device", "cpu", "--rounds", "4000", "--clients", "20", "--participants", "4",
    "--epochs", "1", "--method", "fedavg", "--set", "data.samples_per_client=10", "--set", "model.hidden=[]",
    "--set", "training.workers=1", "--set", "evaluate_every=1000",
)  # fmt: skip


def wait_for_rounds(folder: Path, processes: list[subprocess.Popen[str]], rounds: int = 3) -> None:
    until = time.monotonic() + 300.0
    while (
        not (folder / "metrics.jsonl").exists()
        or len((folder / "metrics.jsonl").read_text().split("\n")) < rounds
    ):
        assert time.monotonic() < until
        assert all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.05)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_run_and_its_folder_can_be_resumed(tmp_path: Path, killed: int) -> None:
    processes = start_ranks([*ENDLESS, "--out", str(tmp_path / "run")])
    wait_for_rounds(tmp_path / "run", processes)
    processes[killed].kill()
    results = ended(processes)
    assert results[killed][0] == -signal.SIGKILL
    status, out, err = results[1 - killed]
    assert status == RanksError.exit_code
    assert out == ""
    assert f"error: rank {1 - killed} lost another rank" in err
    assert f"niss run --resume {tmp_path / 'run'}" in err
    assert "Traceback" not in err
    rounds = len(read_json_lines(tmp_path / "run" / "metrics.jsonl")[0])

    def stop(event: RoundEvent) -> None:
        raise NissError(f"stopped after {event.round}")

    with pytest.raises(NissError, match=f"stopped after {rounds + 1}|stopped after {rounds}"):
        niss.resume(tmp_path / "run", progress=stop)


def test_ctrl_c_ends_all_ranks_and_the_first_says_what_is_kept(tmp_path: Path) -> None:
    processes = start_ranks([*ENDLESS, "--out", str(tmp_path / "run")])
    wait_for_rounds(tmp_path / "run", processes)
    for process in processes:
        process.send_signal(signal.SIGINT)
    (status, out, err), (other, *said) = ended(processes)
    assert status == INTERRUPTED
    assert out == ""
    assert "every whole round is kept" in err
    assert other in (INTERRUPTED, RanksError.exit_code)
    assert said == ["", ""]
