"""`niss node`: a node's books, when they go on to another identity."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from niss.cli.keys import read_public_key
from niss.cli.options import argument, examples, from_options, option, register
from niss.cli.terminal import print_json, say
from niss.errors import ConfigError
from niss.files import write_new

if TYPE_CHECKING:
    from niss.accounting.handover import Handover
    from niss.accounting.ledger_file import LedgerFile

app = typer.Typer(
    help="Hand a node's books over to a new identity.",
    epilog=examples(
        "niss node hand-over node-0 --to 3b6a27bc... --out books.json",
        "niss node adopt new-node-0 books.json --from 3b6a27bc...",
    ),
    no_args_is_help=True,
)


@dataclass(frozen=True)
class HandOverOptions:
    """Whose books go to whom.

    folder  The node's `niss-state` folder, which is closed for good.
    to      Public key of the identity that goes on, as its `niss keys show` prints it.
    out     The file to give to it.
    """

    folder: Path = argument(metavar="FOLDER")
    to: str = option(metavar="KEY")
    out: Path = option(metavar="FILE")


@register(app, "hand-over")
@from_options(HandOverOptions)
def hand_over_command(options: HandOverOptions) -> None:
    """Close a node's books in favour of another identity, and write the file that it takes them over from.

    Stop the node first. Its folder answers no round any more; asked again for the same identity, the same file.

    Examples:
    niss node hand-over node-0 --to 3b6a27bc... --out books.json
    """
    heir = read_public_key(options.to, "--to")
    if options.out.exists():
        raise ConfigError(f"{options.out} exists already", field="--out", hint="give another name")
    from niss.flower.handover import hand_over

    books = hand_over(options.folder, heir)
    try:
        write_new(options.out, books)
    except OSError as error:
        raise ConfigError(f"cannot write {options.out}: {error.strerror}", field="--out") from None
    say(f"{options.folder} is closed. Give {options.out} to the new node: niss node adopt")


@dataclass(frozen=True)
class AdoptOptions:
    """Who takes over whose books.

    folder   A folder with the new identity (`identity.key`) and nothing else.
    books    The file that `niss node hand-over` wrote.
    giver    Public key of the old identity, from your coalition file.
    as_json  Print as JSON.
    """

    folder: Path = argument(metavar="FOLDER")
    books: Path = argument(metavar="FILE")
    giver: str = option(MISSING, "--from", metavar="KEY")
    as_json: bool = option(False, "--json")


@register(app, "adopt")
@from_options(AdoptOptions)
def adopt_command(options: AdoptOptions) -> None:
    """Begin a node's folder with the books of another identity, once all of them are verified.

    Examples:
    niss node adopt new-node-0 books.json --from 3b6a27bc...
    """
    giver, data = read_public_key(options.giver, "--from"), _read(options.books)
    from niss.accounting.handover import Handover
    from niss.flower.handover import adopt

    ledger = adopt(options.folder, data, giver)
    _print(Handover.from_bytes(data), ledger, as_json=options.as_json)


@dataclass(frozen=True)
class VerifyOptions:
    """What to verify, and against what.

    books      The file that `niss node hand-over` wrote.
    coalition  The coalition file in which the old identity stands.
    as_json    Print as JSON.
    """

    books: Path = argument(metavar="FILE")
    coalition: Path = option(metavar="FILE")
    as_json: bool = option(False, "--json")


@register(app, "verify")
@from_options(VerifyOptions)
def verify_command(options: VerifyOptions) -> None:
    """Verify a hand-over without taking anything over: for the coalition, before it puts the new identity in.

    Examples:
    niss node verify books.json --coalition coalition.toml
    """
    from niss.accounting.handover import Handover
    from niss.protocol.coalition_file import load_coalition

    books = Handover.from_bytes(_read(options.books))
    name = load_coalition(options.coalition).require(books.giver)
    ledger = books.check(books.giver)
    _print(books, ledger, as_json=options.as_json, name=name)


def _print(books: Handover, ledger: LedgerFile, *, as_json: bool, name: str | None = None) -> None:
    """From whom, to whom, and what was spent."""
    from niss.protocol.keys import fingerprint

    (client,) = ledger.clients
    spent, claim = ledger.epsilon(ledger.spent(client)), ledger.epsilon(ledger.budget(client))
    values = {
        "from": books.giver.hex(),
        "to": books.heir.hex(),
        "charges": sum(any(mu.joint for mu in entry.mus.values()) for entry in ledger.entries),
        "epsilon_spent": spent,
        "epsilon_claim": claim,
        "delta": ledger.header.delta,
        "head": ledger.head,
    }
    if name is not None:
        values["name"] = name
    if as_json:
        print_json(values)
        return
    typer.echo(f"from:     {fingerprint(books.giver)}{'' if name is None else f' ({name})'}")
    typer.echo(f"to:       {fingerprint(books.heir)}")
    typer.echo(f"          {books.heir.hex()}")
    known = "nothing promised" if claim is None else f"epsilon {claim:.4g} at delta {ledger.header.delta:g}"
    typer.echo(f"charges:  {values['charges']}, chain verified, head {ledger.head[:12]}")
    typer.echo(f"spent:    {'no bound' if spent is None else f'epsilon {spent:.4g}'} of {known}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="FILE") from None
