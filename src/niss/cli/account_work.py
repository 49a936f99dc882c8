"""What `niss account` does: finds the ledgers, verifies their chains, shows and exports them."""

from __future__ import annotations

import csv as csv_format
import io
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from niss.accounting.ledger_file import LedgerFile
from niss.cli.terminal import messages, print_json, results, warn
from niss.errors import ConfigError, RunFolderError
from niss.report.files import read_json_object, write_atomically
from niss.report.ledger_rows import (
    client_rows,
    format_claim,
    format_mu,
    format_spent,
    is_heuristic,
    spending,
)
from niss.report.method_folder import planned_methods

LEDGER = "ledger.jsonl"
SHOWN = 10

Ledgers = list[tuple[str, LedgerFile]]


def account(run: Path, *, client: str | None, as_json: bool, csv: Path | None, plot: Path | None) -> None:
    paths = find_ledgers(run)
    ledgers = [(label, LedgerFile.read(path)) for label, path in paths]
    for _, ledger in ledgers:
        if client is not None and client not in ledger.clients:
            raise ConfigError(
                f"client {client!r} is not in {ledger.path}", field="--client", hint=_range(ledger)
            )
        if ledger.torn:
            warn(f"{ledger.path}: the last line is unfinished (a crash, or a run at work) and does not count")
    alone = paths[0][1].parent == run or run.is_file()
    if plot is not None:
        from niss.report.ledger_chart import save_ledger_chart

        save_ledger_chart(plot, ledgers)
    if csv is not None:
        write_atomically(csv, _as_csv(ledgers, client, alone=alone).encode())
    if as_json:
        values = [{"label": label, **_as_json(ledger, client)} for label, ledger in ledgers]
        print_json(values[0] if alone else {"methods": values})
        return
    _print_tables(ledgers, client)


def find_ledgers(run: Path) -> list[tuple[str, Path]]:
    """(label, path) of the ledger of a run, or of each method of a comparison in the order of its settings."""
    if run.is_file():
        return [(run.name, run)]
    if not run.is_dir():
        raise RunFolderError(f"{run} does not exist", hint="give the folder that `niss` wrote the run to")
    order = [str(m.get("label") or m.get("name")) for m in planned_methods(_manifest(run))]
    if (run / LEDGER).is_file():
        return [(order[0] if len(order) == 1 else run.resolve().name, run / LEDGER)]
    found = sorted(
        run.glob(f"*/{LEDGER}"),
        key=lambda path: (
            order.index(path.parent.name) if path.parent.name in order else len(order),
            path.parent.name,
        ),
    )
    if not found:
        raise RunFolderError(
            f"{run} holds no {LEDGER}",
            hint="give the folder of a run or a comparison; runs of an older niss have none: run it again",
        )
    missing = [name for name in order if not (run / name / LEDGER).is_file()]
    if missing:
        messages().print(f"no ledger yet of: {', '.join(missing)}", soft_wrap=True, markup=False)
    return [(path.parent.name, path) for path in found]


def _manifest(run: Path) -> dict[str, Any]:
    return read_json_object(run / "manifest.json") or {}


def _print_tables(ledgers: Ledgers, client: str | None) -> None:
    console = results()
    for number, (label, ledger) in enumerate(ledgers):
        if number:
            console.print()
        header = ledger.header
        console.print(
            f"[bold]{escape(label)}[/bold]: {len(ledger.entries)} charges, chain verified, head {ledger.head[:12]}; "
            f"unit {escape(header.unit)}, {escape(header.relation)}, delta {header.delta:g}",
            soft_wrap=True,
        )
        console.print(_worst_table(ledger) if client is None else _client_table(ledger, client))
        for note in _notes(ledger, client):
            console.print(note, soft_wrap=True, markup=False)


def _worst_table(ledger: LedgerFile) -> Table:
    table = _table("Client", "Charges", "mu spent", "epsilon spent", "epsilon claim")
    for row in client_rows(ledger)[:SHOWN]:
        table.add_row(
            escape(row.client),
            str(row.participations),
            format_mu(row.mu_spent),
            format_spent(row.epsilon_spent),
            format_claim(row.epsilon_claim),
        )
    return table


def _client_table(ledger: LedgerFile, client: str) -> Table:
    table = _table("Round", "Attempt", "mu", "epsilon spent so far")
    for round_number, attempt, mu, epsilon in spending(ledger, client):
        table.add_row(str(round_number), str(attempt), format_mu(mu), format_spent(epsilon))
    return table


def _table(*columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _notes(ledger: LedgerFile, client: str | None) -> list[str]:
    notes = []
    rows = client_rows(ledger)
    if client is None and len(rows) > SHOWN:
        notes.append(f"and {len(rows) - SHOWN} more clients, none of them worse off")
    if client is not None:
        claim = next(row.epsilon_claim for row in rows if row.client == client)
        notes.append(
            f"client {client}: claim {'none' if claim is None else 'epsilon ' + format_claim(claim)}"
        )
    if is_heuristic(ledger):
        notes.append("The noise follows a heuristic that proves nothing: mu is a label here, not a promise.")
    elif any(row.epsilon_claim is not None for row in rows):
        notes.append(
            "The claim was fixed in advance and is what is promised; spent is only where the total stands."
        )
    else:
        notes.append("Nothing was promised in advance: spent tells what happened, not what was claimed.")
    if any(entry.basis.get("method") == "central-dp" for entry in ledger.entries):
        notes.append(
            "central-dp: against those who see the released models; its server sees every bare update."
        )
    return notes


def _as_json(ledger: LedgerFile, client: str | None) -> dict[str, Any]:
    value = {**ledger.to_json(), "heuristic": is_heuristic(ledger)}
    if value["heuristic"]:
        for one in value["clients"]:
            one["epsilon_spent"] = None
    if client is not None:
        value["clients"] = [one for one in value["clients"] if one["client"] == client]
        value["charges"] = [
            {**charge, "mus": {client: charge["mus"][client]}}
            for charge in value["charges"]
            if client in charge["mus"]
        ]
    return value


def _as_csv(ledgers: Ledgers, client: str | None, *, alone: bool) -> str:
    text = io.StringIO()
    writer = csv_format.writer(text, lineterminator="\n")
    for number, (label, ledger) in enumerate(ledgers):
        header, *rows = csv_format.reader(io.StringIO(ledger.to_csv()))
        if number == 0:
            writer.writerow(header if alone else ["method", *header])
        for row in rows:
            if client in (None, row[2]):
                writer.writerow(row if alone else [label, *row])
    return text.getvalue()


def _range(ledger: LedgerFile) -> str:
    clients = ledger.clients
    return f"its clients: {clients[0]} to {clients[-1]}" if clients else "nobody was charged yet"
