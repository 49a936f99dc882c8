"""The ledger file is a filter that survives crashes, and shows whatever was changed in it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.accounting import Charge, Ledger, LedgerFile, LedgerHeader
from niss.accounting.ledger_file import CSV_COLUMNS, seal
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import Slots, gdp_epsilon
from support.refusals import refuses

BUDGETS = {"a": 2.0, "b": 1.0, "c": None}

mu = st.floats(0.0, 1.5, allow_nan=False)
rounds_charged = st.lists(
    st.dictionaries(st.sampled_from(sorted(BUDGETS)), st.builds(Charge.of, mu, mu), min_size=1), max_size=6
)


def new(folder: Path, budgets: dict[str, float | None] | None = BUDGETS) -> LedgerFile:
    return LedgerFile.create(folder / "ledger.jsonl", LedgerHeader(run="test", budgets=budgets, delta=1e-5))


def filled(folder: Path, count: int = 3) -> Path:
    with new(folder) as ledger:
        for number in range(1, count + 1):
            ledger.charge(
                number, 0, {"a": Charge.of(0.5, 0.1), "c": Charge.of(math.inf, 0.2)}, {"colluders": 2}
            )
    return ledger.path


@cache
def three_charges() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return filled(Path(folder)).read_bytes()


def spent(ledger: LedgerFile) -> dict[str, tuple[float, float, int]]:
    return {
        client: (ledger.spent(client), ledger.spent_alone(client), ledger.participations(client))
        for client in ledger.clients
    }


@settings(deadline=None, max_examples=60)
@given(rounds=rounds_charged)
def test_it_charges_what_fits_refuses_the_rest_and_reads_back_the_same(rounds: list[dict]) -> None:
    """And so does the ledger in memory; a round that one client cannot afford is refused whole."""
    expected, names = {client: [0.0, 0.0, 0] for client in BUDGETS}, list(BUDGETS)
    memory = Ledger.empty(
        3, np.array([math.inf if budget is None else budget for budget in BUDGETS.values()])
    )
    with tempfile.TemporaryDirectory() as folder, new(Path(folder)) as ledger:
        for number, charges in enumerate(rounds):
            fits = all(
                BUDGETS[client] is None
                or expected[client][0] + charge.mu2 <= BUDGETS[client] ** 2 * (1 + 1e-9)
                for client, charge in charges.items()
            )
            before = ledger.path.read_bytes()
            columns = ((charge.mu2, charge.marginal_mu2) for charge in charges.values())
            together = Charge(*map(np.array, zip(*columns, strict=True)))
            who = np.array([names.index(client) for client in charges])
            if not fits:
                with pytest.raises(PrivacyError, match="overspend"):
                    ledger.charge(number, 0, charges)
                with pytest.raises(PrivacyError, match="overspend"):
                    memory.charge(who, together)
                assert ledger.path.read_bytes() == before
                continue
            ledger.charge(number, 0, charges)
            memory.charge(who, together)
            for client, charge in charges.items():
                expected[client][0] += charge.mu2
                expected[client][1] += charge.marginal_mu2
                expected[client][2] += 1
        for client, (joint, marginal, count) in expected.items():
            assert ledger.spent(client) == pytest.approx(math.sqrt(joint))
            assert ledger.spent_alone(client) == pytest.approx(math.sqrt(marginal))
            assert ledger.participations(client) == count
            place = names.index(client)
            assert memory.joint_squared[place] == pytest.approx(joint)
            assert memory.marginal_squared[place] == pytest.approx(marginal)
            assert memory.participations[place] == count
        ledger.close()
        with LedgerFile.open(ledger.path) as again:
            assert again.entries == ledger.entries
            assert again.header == ledger.header
            assert again.head == ledger.head
            assert spent(again) == spent(ledger)
            assert again.torn == b""


@settings(deadline=None, max_examples=80)
@given(data=st.data(), garbage=st.binary(max_size=3))
def test_a_crash_at_any_byte_of_the_last_append_leaves_the_durable_prefix(
    data: st.DataObject, garbage: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        path.write_bytes(three_charges())
        with LedgerFile.open(path) as ledger:
            before, size = spent(ledger), path.stat().st_size
            ledger.charge(4, 0, {"a": Charge.of(0.7, 0.1)}, {"colluders": 2})
            after = spent(ledger)
        whole = path.read_bytes()
        cut = data.draw(st.integers(size, len(whole)))
        path.write_bytes(whole[:cut])
        with LedgerFile.open(path) as ledger:
            # Without its end of line alone, all of the record is there: it counts.
            assert spent(ledger) == (after if cut >= len(whole) - 1 else before)
            assert ledger.torn == (b"" if cut >= len(whole) - 1 else whole[size:cut])
            ledger.charge(5, 0, {"a": Charge.of(0.1, 0.1)})
            then = spent(ledger)
        with LedgerFile.open(path) as ledger:
            assert spent(ledger) == then
            assert ledger.torn == b""
        # After a power failure a file system may leave zeros in place of the bytes it had not written.
        zeros = whole[size:cut][: len(whole) - size - 2] + bytes(len(garbage))
        path.write_bytes(whole[:size] + zeros)
        assert spent(LedgerFile.read(path)) == before


def test_a_changed_byte_anywhere_is_found_by_its_line(tmp_path: Path) -> None:
    path = filled(tmp_path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        line = whole.count(b"\n", 0, place) + 1
        with pytest.raises(PrivacyError, match=f"line {line}"):
            LedgerFile.open(path)
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("order", "line"),
    [((0, 2, 1, 3), 2), ((0, 1, 3), 3), ((0, 2, 3), 2), ((0, 1, 2, 2), 4), ((0, 1, 1, 2), 3), ((1, 2, 3), 1)],
)
def test_lines_moved_removed_or_doubled_are_found_by_line(
    tmp_path: Path, order: tuple[int, ...], line: int
) -> None:
    path = filled(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[number] for number in order))
    with pytest.raises(PrivacyError, match=f"line {line}") as caught:
        LedgerFile.open(path)
    assert caught.value.hint is not None


def test_a_record_of_another_ledger_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with new(tmp_path / "other", {"a": 99.0}) as other:
        other.charge(1, 0, {"a": Charge.of(0.5, 0.1)})
    path = filled(tmp_path, count=0)
    path.write_bytes(path.read_bytes() + other.path.read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(PrivacyError, match="line 2"):
        LedgerFile.open(path)


def test_a_tail_cut_off_is_seen_with_the_head_kept_elsewhere(tmp_path: Path) -> None:
    path = filled(tmp_path)
    ledger = LedgerFile.read(path)
    anchors = [entry.hash for entry in ledger.entries]
    assert anchors[-1] == ledger.head
    for anchor in anchors:
        # Charges made after the anchor was kept are no loss.
        LedgerFile.read(path, expected_head=anchor)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    LedgerFile.open(path).close()
    LedgerFile.open(path, expected_head=anchors[-2]).close()
    with pytest.raises(PrivacyError, match="kept as its head"):
        LedgerFile.open(path, expected_head=anchors[-1])


def test_the_first_record_commits_to_the_header(tmp_path: Path) -> None:
    path = filled(tmp_path)
    with new_header(path) as ledger:
        header = ledger.path.read_bytes()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([header, *lines[1:]]))
    with pytest.raises(PrivacyError, match="line 2"):
        LedgerFile.open(path)


def new_header(path: Path) -> LedgerFile:
    """Another header, well formed, with a larger budget."""
    return LedgerFile.create(
        path.with_name("generous.jsonl"), LedgerHeader(run="test", budgets={**BUDGETS, "a": 99.0}, delta=1e-5)
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((1, 0, {"a": Charge.of(0.1, 0.1)}), "charged before"),
        ((2, 0, {"a": Charge.of(math.nan, 0.1)}), r"charges\[a\]"),
        ((2, 0, {"c": Charge.of(0.1, math.nan)}), r"charges\[c\]"),
        ((2, 0, {"c": Charge(-0.1, 0.1)}), r"charges\[c\]"),
        ((2, 0, {"c": Charge(0.1, 0.1, grid_delta=math.nan)}), r"charges\[c\]"),
        ((2, 0, {"c": Charge(slot=(0.05, 1.3))}), "a round that hides records cannot be charged"),
        ((2, 0, {"a": Charge.of(math.inf, 0.1)}), "overspend"),
        ((2, 0, {"a": Charge.of(1e200, 0.1)}), "overspend"),
        ((2, 0, {"c": Charge.of(0.1, 0.1), "b": Charge.of(1.01, 0.1)}), r"client b .* budget: mu 1\.01 of 1"),
        ((2, 0, {"z": Charge.of(0.1, 0.1)}), "client 'z' is not in"),
        ((2, 0, {7: Charge.of(0.1, 0.1)}), "named by strings"),
        ((2, 0, {}), "at least one client"),
        ((-1, 0, {"a": Charge.of(0.1, 0.1)}), "round"),
        ((2, 0.5, {"a": Charge.of(0.1, 0.1)}), "attempt"),
        ((True, 1, {"a": Charge.of(0.1, 0.1)}), "round"),
        ((2, 0, {"a": Charge.of(0.1, 0.1)}, {"loss": math.nan}), "basis"),
        ((2, 0, {"a": Charge.of(0.1, 0.1)}, {"data": "x" * 5000}), "basis"),
        ((2, 0, {"a": Charge.of(0.1, 0.1)}, {"x": object()}), "basis"),
    ],
)
def test_what_is_refused_leaves_no_trace(tmp_path: Path, arguments: tuple, match: str) -> None:
    with new(tmp_path) as ledger:
        ledger.charge(1, 0, {"a": Charge.of(0.1, 0.1)})
        before = ledger.path.read_bytes(), spent(ledger), ledger.head
        with pytest.raises(PrivacyError, match=match):
            ledger.charge(*arguments)
        assert (ledger.path.read_bytes(), spent(ledger), ledger.head) == before
        ledger.charge(1, 1, {"a": Charge.of(0.1, 0.1)})


def test_without_budgets_anyone_may_come_and_nothing_is_claimed(tmp_path: Path) -> None:
    with new(tmp_path, None) as ledger:
        assert ledger.clients == ()
        ledger.charge(1, 0, {"10": Charge.of(math.inf, 1.0), "9": Charge.of(0.5, math.inf)})
        assert ledger.clients == ("9", "10")
        assert ledger.budget("9") is None
        assert ledger.epsilon(ledger.spent("10")) is None
        assert ledger.epsilon(ledger.spent("9")) == gdp_epsilon(0.5, 1e-5)
        with pytest.raises(PrivacyError, match="'11' is not in"):
            ledger.spent("11")
    assert json.loads(ledger.path.read_text().splitlines()[1])["charges"]["10"]["mu2"] is None


def test_what_failures_cost_is_taken_from_delta(tmp_path: Path) -> None:
    with LedgerFile.create(
        tmp_path / "l.jsonl", LedgerHeader(run="x", delta=1e-5, delta_failure=4e-6)
    ) as ledger:
        ledger.charge(1, 0, {"a": Charge.of(0.5, 0.1)})
    again = LedgerFile.read(ledger.path)
    assert again.epsilon(again.spent("a")) == gdp_epsilon(0.5, 6e-6)
    assert again.to_json()["delta_failure"] == 4e-6


def test_an_overspent_file_is_refused_even_with_a_sound_chain(tmp_path: Path) -> None:
    """Written by someone who can compute hashes, but kept to the header's budget."""
    with new(tmp_path, {"k": 1.0}) as ledger:
        ledger._spent["k"] = (-5.0, 0.0, 0, Slots())
        ledger.charge(1, 0, {"k": Charge.of(2.0, 0.0)})
    with pytest.raises(PrivacyError, match="line 2: client k would overspend"):
        LedgerFile.read(ledger.path)


@pytest.mark.parametrize(
    ("line", "change", "match"),
    [
        (0, {"format": "niss-ledger/1"}, "format is 'niss-ledger/1', not 'niss-ledger/3'"),
        (1, {"charges": {"a": 0.25}, "each": {"marginal_mu2": 0.01, "slot": [0.05, 1.3]}}, "hides records"),
        (1, {"charges": {"a": {"mu2": "0.25", "marginal_mu2": 0.01}}}, "damaged"),
        (1, {"charges": {"a": {"mu2": 0.25}}}, "damaged"),
        (1, {"charges": {"a": {"mu2": 0.25, "marginal_mu2": 0.01}}}, "damaged"),
        (1, {"charges": {"a": {"mu2": 0.25, "marginal_mu2": 0.01, "new": 1.0}}}, "damaged"),
        (1, {"mus": {"a": {"mu_joint": 0.5, "mu_marginal": 0.1}}}, "damaged"),
    ],
)
def test_what_this_version_cannot_count_is_refused_even_with_a_sound_chain(
    tmp_path: Path, line: int, change: dict, match: str
) -> None:
    path = filled(tmp_path, count=1)
    records = [json.loads(text) for text in path.read_text().splitlines()]
    del records[line]["hash"]
    records[line].update(change)
    if "mus" in change:
        del records[line]["charges"]
    lines = path.read_bytes().splitlines()
    lines[line] = seal(records[line])[0]
    path.write_bytes(b"\n".join(lines) + b"\n")
    for opener in (LedgerFile.open, LedgerFile.read):
        with pytest.raises(PrivacyError, match=f"line {line + 1}.*{match}") as caught:
            opener(path)
        assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"delta": 0.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"delta_failure": 1e-5}, "delta_failure"),
        ({"delta_failure": -1e-7}, "delta_failure"),
        ({"budgets": {"a": -1.0}}, "budgets.a"),
        ({"budgets": {"a": math.inf}}, "budgets.a"),
        ({"budgets": {"a": math.nan}}, "budgets.a"),
        ({"budgets": {3: 1.0}}, "budgets.3"),
        ({"run": None}, "run"),
    ],
)
def test_a_header_that_promises_nonsense_is_not_written(tmp_path: Path, change: dict, field: str) -> None:
    good = {"run": "x", "delta": 1e-5}
    with refuses(field):
        LedgerFile.create(tmp_path / "l.jsonl", LedgerHeader(**{**good, **change}))
    assert not (tmp_path / "l.jsonl").exists()


def test_a_million_clients_are_a_number_and_a_budget(tmp_path: Path) -> None:
    header = LedgerHeader(run="x", delta=1e-5, numbered=1_000_000, each=1.0)
    with LedgerFile.create(tmp_path / "l.jsonl", header) as ledger:
        for client in ("-1", "1000000", "007", "x", "\u0663", "9" * 5000):
            with pytest.raises(PrivacyError, match="is not in"):
                ledger.charge(0, 0, {client: Charge.of(0.1, 0.1)})
        charges = {str(1_000 * number): Charge.of(0.5 + 1e-9 * number, 0.1) for number in range(1_000)}
        ledger.charge(0, 0, charges)
        with pytest.raises(PrivacyError, match="overspend"):
            ledger.charge(1, 0, {"999000": Charge.of(0.9, 0.1)})
    again = LedgerFile.read(ledger.path)
    assert again.entries[0].charges == charges
    assert (again.clients[-1], len(again.clients), again.charged[-1]) == ("999999", 1_000_000, "999000")
    assert (again.budget("5"), again.spent("5"), again.participations("5")) == (1.0, 0.0, 0)
    assert again.spent("7000") == pytest.approx(0.5)
    assert ledger.path.stat().st_size < 1_000 + 32 * 1_000
    with pytest.raises(ConfigError, match="not both"):
        LedgerHeader(run="x", delta=1e-5, numbered=3, budgets={"a": 1.0})


def test_a_ledger_is_not_created_twice_nor_opened_where_there_is_none(tmp_path: Path) -> None:
    path = filled(tmp_path)
    before = path.read_bytes()
    with pytest.raises(PrivacyError, match="exists already"):
        new(tmp_path)
    assert path.read_bytes() == before
    for opener in (LedgerFile.open, LedgerFile.read):
        with pytest.raises(PrivacyError, match="cannot read") as caught:
            opener(tmp_path / "nowhere.jsonl")
        assert caught.value.hint is not None
    with pytest.raises(PrivacyError, match="cannot create"):
        new(tmp_path / "no such folder")
    path.write_bytes(b"")
    with pytest.raises(PrivacyError, match="no header"):
        LedgerFile.open(path)


def test_a_charge_that_cannot_be_written_is_not_counted_and_ends_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    ledger = new(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(PrivacyError, match="No space left"):
            ledger.charge(1, 0, {"a": Charge.of(0.5, 0.1)})
    assert ledger.entries == ()
    with pytest.raises(PrivacyError, match="closed"):
        ledger.charge(2, 0, {"a": Charge.of(0.5, 0.1)})
    # It did reach the disk here, so it counts: the safe side.
    assert LedgerFile.read(ledger.path).participations("a") == 1


def test_a_charge_is_synced_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new(tmp_path) as ledger:
        synced: list[bytes] = []
        monkeypatch.setattr(os, "fsync", lambda _: synced.append(ledger.path.read_bytes()))
        entry = ledger.charge(1, 0, {"a": Charge.of(0.5, 0.1)})
        assert entry.hash.encode() in synced[-1]


def test_only_one_process_charges_while_others_may_read(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = filled(tmp_path)
    code = (
        "import sys; from niss.accounting.ledger_file import LedgerFile\n"
        "from niss.errors import PrivacyError\n"
        "print(len(LedgerFile.read(sys.argv[1]).entries))\n"
        "try: LedgerFile.open(sys.argv[1])\n"
        "except PrivacyError as error: print(error.message)\n"
        "else: print('opened')\n"
    )

    def other() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    with LedgerFile.open(path):
        count, answer = other()
        assert count == "3"
        assert "in use by another process" in answer
        with pytest.raises(PrivacyError, match="in use"):
            LedgerFile.open(path)
    assert other() == ["3", "opened"]


def test_killed_while_charging_it_keeps_every_charge_that_returned(tmp_path: Path) -> None:
    code = (
        "import sys; from niss.accounting import Charge, LedgerFile, LedgerHeader\n"
        "ledger = LedgerFile.create(sys.argv[1], LedgerHeader(run='k', budgets={'a': 1e6}, delta=1e-5))\n"
        "for number in range(10**9):\n"
        "    ledger.charge(number, 0, {'a': Charge.of(0.5, 0.25)}, {'note': 'x' * 1000})\n"
        "    print(number, flush=True)\n"
    )
    path = tmp_path / "ledger.jsonl"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        returned = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        returned += [int(line) for line in process.stdout.read().splitlines()]
    with LedgerFile.open(path) as ledger:
        # One charge may have become durable without its return being told.
        assert len(returned) <= len(ledger.entries) <= len(returned) + 1
        assert ledger.spent("a") == pytest.approx(0.5 * math.sqrt(len(ledger.entries)))
        ledger.charge(10**9, 0, {"a": Charge.of(0.5, 0.25)})


def test_rows_and_json_tell_the_same_as_the_ledger(tmp_path: Path) -> None:
    with new(tmp_path, {"9": 2.0, "10": None, 'odd, "name"': 1.0}) as ledger:
        ledger.charge(
            1, 0, {"9": Charge.of(0.1 + 0.2, 0.1), 'odd, "name"': Charge.of(1 / 3, 1e-9)}, {"colluders": 2}
        )
        ledger.charge(1, 1, {"10": Charge.of(math.inf, 0.5), "9": Charge.of(0.2, math.inf)})
    assert CSV_COLUMNS == ("round", "attempt", "client", "mu_joint", "mu_marginal")
    back: dict[tuple[int, int], dict[str, tuple[float, float]]] = {}
    for number, attempt, client, *mus in ledger.rows():
        back.setdefault((number, attempt), {})[client] = tuple(mus)
    assert back == {
        (entry.round, entry.attempt): {
            client: (charge.joint, charge.marginal) for client, charge in entry.charges.items()
        }
        for entry in ledger.entries
    }

    value = json.loads(json.dumps(ledger.to_json(), allow_nan=False))
    assert value["head"] == ledger.head
    assert [charge["hash"] for charge in value["entries"]] == [entry.hash for entry in ledger.entries]
    assert value["entries"][0]["basis"] == {"colluders": 2}
    assert value["entries"][1]["charges"]["10"] == {"mu2": None, "marginal_mu2": 0.25}
    clients = {one["client"]: one for one in value["clients"]}
    assert list(clients) == ["9", "10", 'odd, "name"']
    assert clients["9"]["mu_spent"] == ledger.spent("9")
    assert clients["9"]["epsilon_spent"] == gdp_epsilon(ledger.spent("9"), 1e-5)
    assert clients["9"]["epsilon_claim"] == gdp_epsilon(2.0, 1e-5)
    assert clients["9"]["epsilon_spent_marginal"] is None
    assert clients["10"]["mu_spent"] is None
    assert clients["10"]["epsilon_claim"] is None


RECORDS = ((0.05, 2.0, 2), (0.1, 1.0, 1))


def of_records(folder: Path, budget: object = RECORDS, **changes: object) -> LedgerFile:
    header = {"run": "r", "budgets": {"a": budget}, "delta": 1e-5, "delta_failure": 1e-6, "unit": "record"}
    return LedgerFile.create(
        folder / "records.jsonl", LedgerHeader(**{**header, "dataset": "scans", **changes})
    )


def test_a_ledger_of_records_knows_its_slots_again(tmp_path: Path) -> None:
    with of_records(tmp_path) as ledger:
        for number, slot in enumerate([(0.1, 1.0), (0.03, 2.5)]):
            ledger.charge(number, 0, {"a": Charge(1.0 / slot[1] ** 2, slot=slot, grid_delta=1e-8)})
        with pytest.raises(PrivacyError, match=r"none of its 1 free slots \(of 3\)"):
            ledger.charge(2, 0, {"a": Charge(slot=(0.1, 1.0))})
    again = LedgerFile.read(ledger.path)
    assert again.header.dataset == "scans"
    assert again.budget("a") == Slots.of(*RECORDS)
    assert again.spent("a") == Slots.of((0.05, 2.0, 1), (0.1, 1.0, 1))
    assert again.epsilon(again.budget("a")) == Slots.of(*RECORDS).epsilon(9e-6)
    (told,) = again.to_json()["clients"]
    assert told["slots_claim"] == [list(one) for one in RECORDS]
    assert told["slots_spent"] == [[0.05, 2.0, 1], [0.1, 1.0, 1]]
    assert 0.0 < told["epsilon_spent"] < told["epsilon_claim"]
    with LedgerFile.open(ledger.path) as ledger:
        ledger.charge(2, 0, {"a": Charge(slot=(0.05, 2.0))})
        with pytest.raises(PrivacyError, match="0 free slots"):
            ledger.charge(3, 0, {"a": Charge(slot=(0.05, 2.0))})


def test_each_attempt_takes_a_slot(tmp_path: Path) -> None:
    """It draws a fresh batch and so is a round of its own; `test_slots` has what using a batch again would cost."""
    with of_records(tmp_path, ((0.05, 2.0, 2),)) as ledger:
        for attempt in range(2):
            ledger.charge(1, attempt, {"a": Charge(slot=(0.05, 2.0))})
        with pytest.raises(PrivacyError, match="0 free slots"):
            ledger.charge(1, 2, {"a": Charge(slot=(0.05, 2.0))})


def test_a_file_with_a_round_that_no_slot_covers_is_refused_even_with_a_sound_chain(tmp_path: Path) -> None:
    with of_records(tmp_path) as ledger:
        ledger.charge(1, 0, {"a": Charge(slot=(0.05, 2.0))})
    lines = ledger.path.read_bytes().splitlines()
    for slot, match in (
        ([0.2, 2.0], "covers a round"),
        ([0.0, 2.0], "is no slot"),
        (None, "hides whole clients"),
    ):
        entry = json.loads(lines[1])
        del entry["hash"]
        entry["each"].pop("slot")
        if slot is not None:
            entry["each"]["slot"] = slot
        ledger.path.write_bytes(lines[0] + b"\n" + seal(entry)[0] + b"\n")
        with pytest.raises(PrivacyError, match=f"line 2.*{match}"):
            LedgerFile.read(ledger.path)


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "client"},
        {"budgets": {"a": 1.0}},
        {"budgets": {"a": ((0.0, 1.0, 3),)}},
        {"budgets": {"a": ((0.5, 1.0, 0),)}},
    ],
)
def test_budgets_are_of_the_unit(tmp_path: Path, change: dict) -> None:
    with pytest.raises(ConfigError):
        of_records(tmp_path, **change)
    assert not (tmp_path / "records.jsonl").exists()
