"""`niss keys`: making an identity, and showing its public half."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niss.cli.help_text import examples

if TYPE_CHECKING:
    from niss.protocol.keys import Identity

EXAMPLES = examples("niss keys new", "niss keys show")

app = typer.Typer(help="Make and show the identity of a client.", epilog=EXAMPLES, no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


@app.command("new", epilog=examples("niss keys new", "niss keys new --out north.key"))
def new_command(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="The new key file. Default: niss/identity.key in your configuration."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make an identity in a file that only you can read. A file that is there is never overwritten."""
    import os

    from niss.cli.terminal import messages
    from niss.protocol.keyfile import create_keyfile, default_keyfile
    from niss.protocol.keys import Identity

    path = default_keyfile(os.environ) if out is None else out
    identity = Identity.generate(os.urandom)
    create_keyfile(path, identity)
    _print(path, identity, as_json=as_json)
    messages().print(
        "Give the public key to your coalition; never give away the file.", soft_wrap=True, markup=False
    )


@app.command("show", epilog=examples("niss keys show", "niss keys show north.key --json"))
def show_command(
    path: Annotated[
        Path | None, typer.Argument(help="A key file. Default: niss/identity.key in your configuration.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the public key of an identity and its fingerprint. Nothing secret is printed."""
    import os

    from niss.protocol.keyfile import default_keyfile, load_identity

    path = default_keyfile(os.environ) if path is None else path
    _print(path, load_identity(path), as_json=as_json)


def _print(path: Path, identity: Identity, *, as_json: bool) -> None:
    from niss.cli.terminal import print_json
    from niss.protocol.keys import fingerprint

    shown = {
        "path": str(path),
        "public_key": identity.public.hex(),
        "fingerprint": fingerprint(identity.public),
    }
    if as_json:
        print_json(shown)
        return
    width = max(len(label) for label in shown) + 2
    for label, value in shown.items():
        typer.echo(f"{(label.replace('_', ' ') + ':').ljust(width)}{value}")
