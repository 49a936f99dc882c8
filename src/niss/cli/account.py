"""`niss account`: what each client of a run spent, from its verified ledger."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import Doc

from niss.cli.options import argument, from_options, option
from niss.cli.terminal import print_json, print_sentence, print_table, results, say, warn
from niss.errors import ConfigError, RunFolderError
from niss.files import LEDGER, MANIFEST, find_json, write_output

if TYPE_CHECKING:
    from niss.accounting.ledger import Amount
    from niss.accounting.ledger_file import LedgerFile

_MOST_ROWS = 10
"""How many clients the table shows, those that spent most; --json and --csv have all."""


@dataclass(frozen=True)
class AccountOptions:
    """Whose charges to show, and where to write them."""

    run: Annotated[
        Path, Doc("The folder of a run or comparison, finished or not; or a node's own `niss-state` folder.")
    ] = argument()
    client: Annotated[str | None, Doc("One client: every round it was charged for.")] = None
    as_json: Annotated[bool, Doc("Print all of it as JSON.")] = option(False, "--json")
    csv: Annotated[Path | None, Doc("Write every charge of every client as CSV.")] = option(
        None, metavar="FILE"
    )
    plot: Annotated[Path | None, Doc("Draw epsilon spent over the rounds, as .png or .svg.")] = option(
        None, metavar="FILE"
    )


@from_options(AccountOptions)
def account_command(options: AccountOptions) -> None:
    """Verify the ledger of a run and show what its clients spent of what they were promised.

    Examples:
    niss account runs/demo
    niss account runs/demo/niss --client 17
    niss account runs/demo --csv charges.csv --plot spent.png
    niss account node-0                             a Flower node's own books, and which limit binds
    """
    from niss.accounting.ledger_file import LedgerFile

    run, client = options.run, options.client
    paths = find_ledgers(run)
    ledgers = {label: LedgerFile.read(path) for label, path in paths.items()}
    for ledger in ledgers.values():
        if client is not None and client not in ledger.clients:
            known = ledger.clients
            hint = f"its clients: {known[0]} to {known[-1]}" if known else "nobody was charged yet"
            raise ConfigError(f"client {client!r} is not in {ledger.path}", field="--client", hint=hint)
        if ledger.torn:
            warn(f"{ledger.path}: the last line is incomplete (a crash, or a run in progress) and ignored")
    comparison = run.is_dir() and not (run / LEDGER).is_file()
    if options.plot is not None:
        from niss.report.ledger import spending_of
        from niss.report.run_charts import save_charts, spending_charts

        spent = [spending_of(label, ledger) for label, ledger in ledgers.items()]
        save_charts(options.plot, spending_charts([one for one in spent if one is not None]))
    if options.csv is not None:
        write_output(options.csv, _as_csv(ledgers, client, comparison=comparison).encode())
    if options.as_json:
        values = [{"label": label, **_as_json(ledger, client)} for label, ledger in ledgers.items()]
        print_json({"methods": values} if comparison else values[0])
        return
    for number, (label, ledger) in enumerate(ledgers.items()):
        if number:
            results().print()
        _print_ledger(label, ledger, client)


def find_ledgers(run: Path) -> dict[str, Path]:
    """The ledger of a run, or of each method of a comparison in the order of its settings, by label."""
    from niss.runs.folder import planned_methods

    if run.is_file():
        return {run.name: run}
    if not run.is_dir():
        raise RunFolderError(f"{run} does not exist", hint="give the folder that `niss` wrote the run to")
    methods = planned_methods(find_json(run / MANIFEST) or {})
    order = [str(method.get("label") or method.get("name")) for method in methods]
    if (run / LEDGER).is_file():
        return {order[0] if len(order) == 1 else run.resolve().name: run / LEDGER}
    labels = sorted(path.parent.name for path in run.glob(f"*/{LEDGER}"))
    if not labels:
        hint = "give the folder of a run or a comparison"
        raise RunFolderError(f"{run} does not contain {LEDGER}", hint=hint)
    missing = [name for name in order if name not in labels]
    if missing:
        say(f"no ledger yet for: {', '.join(missing)}")
    labels.sort(key=lambda label: order.index(label) if label in order else len(order))
    return {label: run / label / LEDGER for label in labels}


def _print_ledger(label: str, ledger: LedgerFile, client: str | None) -> None:
    """A head line, the clients that spent most or the rounds of one client, and what the numbers mean."""
    from rich.markup import escape

    from niss.claims import digits, printed_claim
    from niss.report.ledger import client_rows, format_claim, format_spent, spending

    header = ledger.header
    data = f" of {escape(header.dataset)}" if header.dataset else ""
    results().print(
        f"[bold]{escape(label)}[/bold]: {len(ledger.entries)} charges, chain verified, head {ledger.head[:12]}; "
        f"unit {escape(header.unit)}{data}, {escape(header.relation)}, delta {digits(header.delta)}"
    )
    spent = "slots taken" if header.unit == "record" else "mu spent"
    if client is None:
        rows = [
            (
                row.client,
                str(row.participations),
                format_spent(row.spent),
                printed_claim(row.epsilon_spent),
                format_claim(row.epsilon_claim),
            )
            for row in client_rows(ledger, _MOST_ROWS)
        ]
        print_table(("Client", "Charges", spent, "epsilon spent", "epsilon claim"), rows)
    else:
        charges = [
            (str(number), str(attempt), format_spent(mu), printed_claim(epsilon))
            for number, attempt, mu, epsilon in spending(ledger, client)
        ]
        print_table(("Round", "Attempt", "mu", "epsilon spent so far"), charges)
    for note in _notes(ledger, client):
        print_sentence(note)


def _notes(ledger: LedgerFile, client: str | None) -> list[str]:
    """What the numbers mean, in sentences below the table: what was claimed in advance, and against whom it holds.

    A heuristic promises nothing, a method without a claim only reports what happened, and a method that trusts its
    server protects nobody against that server. Methods that this version does not know have no note of their own.
    """
    from niss.methods import METHODS
    from niss.report.ledger import client_rows, format_claim, is_heuristic

    notes = []
    rows = client_rows(ledger, 1)
    if client is None and (more := len(ledger.clients) - _MOST_ROWS) > 0:
        notes.append(f"and {more} more clients, none of them worse off")
    if client is not None:
        claim = None if is_heuristic(ledger) else ledger.epsilon(ledger.budget(client))
        words = "none" if claim is None else f"epsilon {format_claim(claim)}"
        notes.append(f"client {client}: claim {words}")
    if is_heuristic(ledger):
        notes.append("The noise follows a heuristic that proves nothing: mu is a label here, not a promise.")
    elif any(ledger.epsilon(budget) is not None for budget in ledger.header.promised):
        notes.append("The claim was fixed in advance and is promised; spent is only where the total stands.")
    else:
        notes.append("Nothing was promised in advance: spent tells what happened, not what was claimed.")
    notes += _record_notes(ledger, rows[0].spent if client is None and rows else None)
    notes += _limit_notes(ledger)
    bases = {str(entry.basis.get("method")): entry.basis for entry in ledger.entries}
    for name, basis in sorted(bases.items()):
        if name not in METHODS:
            continue
        if note := METHODS[name].ledger_note(basis):
            notes.append(note)
        if METHODS[name].trusts_server:
            others = " and know who took part" if METHODS[name].secret_draw else ""
            seen = f"{name}: against those who see the released models{others}"
            notes.append(f"{seen}; its server sees every bare update.")
    return notes


def _record_notes(ledger: LedgerFile, spent: Amount | None) -> list[str]:
    """Of rounds that hide records: what the worst-off silo's would be worth with all batches known, and to people."""
    from niss.accounting.statement import if_batches_were_known, of_people
    from niss.mechanism import Slots

    left = ledger.header.delta - ledger.header.delta_failure
    if not isinstance(spent, Slots) or not (known := if_batches_were_known(spent, left)):
        return []
    return [known, of_people(spent, left)]


def _limit_notes(ledger: LedgerFile) -> list[str]:
    """Of a node's own ledger: the limits on all its runs together, what is spent of each, and which binds."""
    from niss.accounting.ledger import FIRST_BUDGET, binding
    from niss.claims import rounded_up
    from niss.report.ledger import node_limits

    limits = node_limits(ledger)
    if not limits:
        return []
    spent = ledger.spent("self") if ledger.participations("self") else 0.0
    notes = [f"Limit: {limit.words}; {rounded_up(limit.spent(spent))} of it is spent." for limit in limits]
    if (smallest := binding(limits)) is not None and len(limits) > 1:
        notes.append(f"What binds is {smallest.source}.")
        if smallest.source == FIRST_BUDGET:
            notes.append("It was fixed by the first charge: a larger niss-epsilon does not raise it.")
    return notes


def _as_json(ledger: LedgerFile, client: str | None) -> dict[str, Any]:
    """A ledger as JSON: the charges of all clients or of one; a heuristic spends no epsilon, since it proves none."""
    from niss.report.ledger import is_heuristic, node_limits

    value = {**ledger.to_json(), "heuristic": is_heuristic(ledger)}
    if limits := node_limits(ledger):
        value["limits"] = [asdict(limit) for limit in limits]
    if value["heuristic"]:
        for one in value["clients"]:
            one["epsilon_spent"] = None
    if client is not None:
        value["clients"] = [one for one in value["clients"] if one["client"] == client]
        value["entries"] = [
            {**entry, "charges": {client: entry["charges"][client]}}
            for entry in value["entries"]
            if client in entry["charges"]
        ]
    return value


def _as_csv(ledgers: dict[str, LedgerFile], client: str | None, *, comparison: bool) -> str:
    """The charges of all ledgers in one table; those of a comparison have a first column with the method."""
    from niss.accounting.ledger_file import CSV_COLUMNS

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *CSV_COLUMNS] if comparison else CSV_COLUMNS)
    for label, ledger in ledgers.items():
        for row in ledger.rows():
            if client in (None, row[2]):
                writer.writerow([label, *row] if comparison else row)
    return text.getvalue()
