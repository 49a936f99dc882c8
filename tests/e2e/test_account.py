"""`niss account`: a real comparison's ledgers, verified, shown, exported and drawn."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import typer
from torch import nn
from typer.testing import CliRunner, Result

import niss
from niss.accounting import Charge, LedgerFile, LedgerHeader
from niss.cli.account import account_command
from niss.randomness import SimStream
from support.federation import small_config

app = typer.Typer()
app.command()(account_command)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("account") / "run"
    draw = SimStream(1).generator()
    clients = [
        (draw.standard_normal((6, 5)).astype(np.float32), draw.integers(0, 3, 6).astype(np.int64))
        for _ in range(13)
    ]
    trusting = {"name": "central-dp", "label": "a trusted one"}
    methods = [{"name": "niss", "neighbours": 3}, {"name": "fedavg"}, trusting]
    config = small_config(methods=methods, data={"clients": 12})
    niss.compare(config, out=folder, model=nn.Linear(5, 3), clients=clients[:12], test=clients[12])
    return folder


def account(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shown(*arguments: str | Path) -> str:
    result = account(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_comparison_shows_a_table_for_each_method_in_its_order(comparison: Path) -> None:
    text = shown(comparison)
    places = [
        text.index(f"{name}: 4 charges, chain verified") for name in ("niss", "fedavg", "a trusted one")
    ]
    assert places == sorted(places)
    assert text.count("epsilon spent") == 3
    assert text.count("epsilon claim") == 3
    assert "no guarantee" in text[places[1] : places[2]]
    assert "no guarantee" not in text[: places[1]]
    assert "and 2 more clients, none of them worse off" in text
    assert "its server sees every bare update" in " ".join(text[places[2] :].split())
    assert "uarantee" not in text.replace("no guarantee", "")


def test_the_numbers_are_those_of_the_statement(comparison: Path) -> None:
    value = json.loads(shown(comparison / "niss", "--json"))
    statement = json.loads((comparison / "niss" / "privacy.json").read_text())
    assert len(value["clients"]) == statement["clients"] == 12
    assert [one["client"] for one in value["clients"]] == [str(number) for number in range(12)]
    taken = [one for one in value["clients"] if one["participations"]]
    assert max(one["epsilon_spent"] for one in taken) == pytest.approx(statement["epsilon_joint"])
    assert max(one["mu_spent"] for one in taken) == pytest.approx(statement["mu_joint"])
    assert all(one["epsilon_claim"] == pytest.approx(20.0, rel=1e-3) for one in value["clients"])
    assert value["head"] == LedgerFile.read(comparison / "niss" / "ledger.jsonl").head
    both = json.loads(shown(comparison, "--json"))
    assert [method["label"] for method in both["methods"]] == ["niss", "fedavg", "a trusted one"]
    assert both["methods"][0] == value


def test_one_client_is_shown_round_by_round(comparison: Path) -> None:
    ledger = LedgerFile.read(comparison / "niss" / "ledger.jsonl")
    rounds = [entry.round for entry in ledger.entries if "3" in entry.charges]
    text = shown(comparison / "niss", "--client", "3")
    rows = [line.split("│") for line in text.splitlines() if "│" in line]
    assert [int(row[0]) for row in rows] == rounds
    assert "client 3: claim epsilon 19.9" in text
    value = json.loads(shown(comparison / "niss", "--client", "3", "--json"))
    assert [one["client"] for one in value["clients"]] == ["3"]
    assert [list(entry["charges"]) for entry in value["entries"]] == [["3"]] * len(rounds)


def test_csv_holds_every_charge(comparison: Path, tmp_path: Path) -> None:
    shown(comparison, "--csv", tmp_path / "all.csv")
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert len(rows) == 3 * 4 * 6
    assert {row["method"] for row in rows} == {"niss", "fedavg", "a trusted one"}
    assert {row["mu_joint"] for row in rows if row["method"] == "fedavg"} == {"inf"}
    shown(comparison / "niss", "--csv", tmp_path / "one.csv", "--client", "3")
    ledger = LedgerFile.read(comparison / "niss" / "ledger.jsonl")
    mine = [entry.charges["3"].joint for entry in ledger.entries if "3" in entry.charges]
    assert [float(row["mu_joint"]) for row in csv.DictReader((tmp_path / "one.csv").open())] == mine


def test_the_chart_is_drawn(comparison: Path, tmp_path: Path) -> None:
    shown(comparison, "--plot", tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def copied(comparison: Path, tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes((comparison / "niss" / "ledger.jsonl").read_bytes())
    return path


def test_a_ledger_being_written_is_shown_as_far_as_it_is_whole(copied: Path) -> None:
    copied.write_bytes(copied.read_bytes()[:-20])
    before = copied.read_bytes()
    result = account(copied.parent)
    assert "3 charges, chain verified" in result.stdout
    assert "the last line is incomplete" in result.stderr
    assert copied.read_bytes() == before


def test_damage_is_refused_by_line(copied: Path) -> None:
    copied.write_bytes(copied.read_bytes().replace(b'"round":2', b'"round":7'))
    error = account(copied.parent).exception
    assert isinstance(error, niss.errors.PrivacyError)
    assert "line 3" in error.message
    assert error.hint is not None


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        (("nowhere",), niss.errors.RunFolderError, "does not exist"),
        ((".",), niss.errors.RunFolderError, r"does not contain ledger\.jsonl"),
        (("ledger.jsonl", "--client", "99"), niss.errors.ConfigError, "'99' is not in"),
        (("ledger.jsonl", "--plot", "x.pdf"), niss.errors.ConfigError, "neither .png nor .svg"),
    ],
)
def test_errors_come_with_a_hint(
    copied: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], kind: type, match: str
) -> None:
    monkeypatch.chdir(copied.parent)
    if arguments == (".",):
        copied.unlink()
    error = account(*arguments).exception
    assert isinstance(error, kind)
    assert error.hint is not None
    with pytest.raises(kind, match=match):
        raise error


def test_a_heuristic_shows_no_epsilon(tmp_path: Path) -> None:
    with LedgerFile.create(
        tmp_path / "ledger.jsonl", LedgerHeader(run="paper", delta=1e-4, unit="nbafl", relation="replace-one")
    ) as ledger:
        ledger.charge(1, 0, {"0": Charge.of(0.5, 0.1)}, {"heuristic": True})
    text = shown(tmp_path)
    assert "proves nothing" in text
    assert "no guarantee" in text
    assert json.loads(shown(tmp_path, "--json"))["clients"][0]["epsilon_spent"] is None
