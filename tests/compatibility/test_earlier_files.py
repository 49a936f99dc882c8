"""Files that an earlier niss wrote are read by this one: run folders, ledgers, key files, a node's folder.

`written_by_0_1` holds them as they were (wire messages are in `tests/protocol/golden_wire.txt`): a comparison of four
methods, a run that was killed after two of its four rounds, a key file with three prekeys, and the folder of a Flower
node after two rounds. The keys protect nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from niss.accounting.ledger_file import LedgerFile
from niss.protocol.keyfile import load_identity, load_keyfile
from niss.report import write_report
from niss.simulation import Comparison, RunResult, resume

EARLIER = Path(__file__).with_name("written_by_0_1")
METHODS = ["niss-kappa-4", "central-dp", "fedavg", "dp-fedavg"]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A copy to write to, with the modes that git does not keep."""
    copy = tmp_path / "earlier"
    shutil.copytree(EARLIER, copy)
    for path in copy.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return copy


def test_a_finished_comparison_is_read_back_unchanged(earlier: Path) -> None:
    comparison = resume(earlier / "comparison")
    assert isinstance(comparison, Comparison)
    assert [result.summary["label"] for result in comparison.results] == METHODS
    for result in comparison.results:
        folder = EARLIER / "comparison" / result.summary["label"]
        assert result.summary == json.loads((folder / "result.json").read_text())
        assert result.metrics == [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        again = earlier / "comparison" / folder.name
        for name in ("result.json", "metrics.jsonl", "ledger.jsonl", "model.safetensors"):
            assert (again / name).read_bytes() == (folder / name).read_bytes(), name


def test_a_killed_run_goes_on_from_its_checkpoint(earlier: Path) -> None:
    before = (earlier / "unfinished" / "metrics.jsonl").read_bytes()
    result = resume(earlier / "unfinished")
    assert isinstance(result, RunResult)
    assert len(result.metrics) == 4
    assert (earlier / "unfinished" / "metrics.jsonl").read_bytes().startswith(before)
    ledger = LedgerFile.read(earlier / "unfinished" / "ledger.jsonl")
    finished = LedgerFile.read(EARLIER / "comparison" / "niss-kappa-4" / "ledger.jsonl")
    # Graphs are drawn in another way since: what was charged stays, and further rounds cost as much.
    kept = len(before.splitlines())
    assert [entry.mus for entry in ledger.entries][:kept] == [entry.mus for entry in finished.entries][:kept]
    for entry, other in zip(ledger.entries, finished.entries, strict=True):
        # A client that has little left may not be asked again, since a part of delta is now reserved.
        assert entry.mus.keys() <= other.mus.keys()
        for client, mu in entry.mus.items():
            assert mu.joint == pytest.approx(other.mus[client].joint, rel=0.02)


def test_a_report_is_made_of_an_earlier_folder(earlier: Path) -> None:
    page = write_report(earlier / "comparison").read_text()
    for method in METHODS:
        assert method in page


@pytest.mark.parametrize("method", METHODS)
def test_a_ledger_verifies_and_says_what_was_spent(method: str) -> None:
    ledger = LedgerFile.read(EARLIER / "comparison" / method / "ledger.jsonl")
    assert len(ledger.entries) == 4
    statement = json.loads((EARLIER / "comparison" / method / "privacy.json").read_text())
    worst = max(ledger.spent(client) for client in ledger.clients)
    claimed = statement["epsilon_joint"]
    assert ledger.epsilon(worst) == (None if claimed is None else pytest.approx(claimed, rel=1e-9))


def test_a_key_file_with_prekeys(earlier: Path) -> None:
    file = load_keyfile(earlier / "identity.key")
    assert file.identity.public.hex() == "e1141fba06dc4a5ebd8e2ea7a716350b17656ce41fddc31b2acfa883a59b5636"
    assert len(file.prekeys) == 3


def test_the_folder_of_a_flower_node(earlier: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    from niss.flower.state import ClientState

    ledger = LedgerFile.read(earlier / "node" / "ledger.jsonl")
    assert ledger.spent("self") == pytest.approx(1.178061532905401, rel=1e-12)
    assert ledger.participations("self") == 2
    identity = load_identity(earlier / "node" / "identity.key")
    assert identity.public.hex() == "41ce81b4ca93fe0c9fc3cf7e1f173844500468be2dcf74dd2118a78e1c71e2e3"
    state = ClientState.from_bytes((earlier / "node" / "notes").read_bytes())
    assert state.steps == {"6ab196de2eea25833291006cdabcba43": 3}
    assert state.memory is not None
    assert list(state.proposals) == ["6ab196de2eea25833291006cdabcba43"]
