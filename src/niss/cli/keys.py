"""`niss keys`: making an identity, and showing its public half."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niss.cli.options import examples, register
from niss.cli.terminal import print_json, say
from niss.errors import ConfigError, RemoteProtocolError

if TYPE_CHECKING:
    from niss.protocol.keys import Identity

app = typer.Typer(
    help="Make and show the identity of a client.",
    epilog=examples("niss keys new", "niss keys show"),
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


@register(app, "new")
def new_command(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="The new key file. Default: niss/identity.key in your configuration."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make an identity in a file that only you can read. A file that is there is never overwritten.

    Examples:
    niss keys new
    niss keys new --out north.key
    """
    from niss.protocol.keyfile import create_keyfile, default_keyfile
    from niss.protocol.keys import Identity

    path = default_keyfile(os.environ) if out is None else out
    identity = Identity.generate(os.urandom)
    create_keyfile(path, identity)
    _print(path, identity, as_json=as_json)
    say("Give the public key to your coalition; never give away the file.")


@register(app, "show")
def show_command(
    path: Annotated[
        Path | None, typer.Argument(help="A key file. Default: niss/identity.key in your configuration.")
    ] = None,
    as_json: AsJson = False,
    public: Annotated[bool, typer.Option("--public", help="Print the public key alone.")] = False,
) -> None:
    """Show the public key of an identity and its fingerprint. Nothing secret is printed.

    Examples:
    niss keys show
    niss keys show north.key --json
    niss keys show north.key --public
    """
    from niss.protocol.keyfile import default_keyfile, load_identity

    path = default_keyfile(os.environ) if path is None else path
    identity = load_identity(path)
    if public:
        typer.echo(identity.public.hex())
        return
    _print(path, identity, as_json=as_json)


def read_public_key(text: str, field: str) -> bytes:
    """A public key from its hex form. `ConfigError`, naming the option, where it is not one, or one of small order."""
    from niss.protocol.keys import check_public

    hint = "copy it from what its owner's `niss keys show` prints"
    try:
        public = bytes.fromhex(text)
    except ValueError:
        raise ConfigError("expected a public key in hex", field=field, hint=hint) from None
    try:
        check_public(public)
    except RemoteProtocolError as error:
        raise ConfigError(error.message, field=field, hint=hint) from None
    return public


def _print(path: Path, identity: Identity, *, as_json: bool) -> None:
    """Print the public half of an identity, and where its file is."""
    from niss.protocol.keys import fingerprint

    values = {
        "path": str(path),
        "public_key": identity.public.hex(),
        "fingerprint": fingerprint(identity.public),
    }
    if as_json:
        print_json(values)
        return
    width = max(len(label) for label in values) + 2
    for label, value in values.items():
        typer.echo(f"{(label.replace('_', ' ') + ':').ljust(width)}{value}")
