"""`niss data`: which datasets there are, and fetching them."""

from __future__ import annotations

from typing import Annotated

import typer

from niss.cli.choices import DATASETS
from niss.cli.completion import one_of
from niss.cli.help_text import examples
from niss.cli.switches import Quiet

EXAMPLES = examples("niss data list", "niss data fetch mnist")

app = typer.Typer(help="List and fetch datasets.", epilog=EXAMPLES, no_args_is_help=True)


@app.command("list", epilog=examples("niss data list", "niss data list --json"))
def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Show every dataset, where it comes from and whether it is on this machine."""
    from rich.table import Table

    from niss.cli.terminal import print_json, results
    from niss.data import list_datasets

    datasets = list_datasets()
    if as_json:
        print_json(
            [
                {
                    "name": info.name,
                    "description": info.description,
                    "image_shape": list(info.image_shape),
                    "classes": info.classes,
                    "train_size": info.train_size,
                    "test_size": info.test_size,
                    "licence": info.licence,
                    "source": info.source,
                    "available": info.available,
                    "location": None if info.location is None else str(info.location),
                }
                for info in datasets
            ]
        )
        return
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for column in ("Name", "Images", "Train", "Test", "Here", "Description"):
        table.add_column(column, justify="right" if column in ("Train", "Test") else "left")
    for info in datasets:
        shape = "x".join(str(side) for side in info.image_shape)
        here = "yes" if info.available else "no"
        table.add_row(info.name, shape, f"{info.train_size:,}", f"{info.test_size:,}", here, info.description)
    results().print(table)


@app.command("fetch", epilog=examples("niss data fetch mnist", "niss data fetch cifar10 --quiet"))
def fetch_command(
    name: Annotated[
        str, typer.Argument(help="A name from `niss data list`.", autocompletion=one_of(DATASETS))
    ],
    quiet: Quiet = False,
) -> None:
    """Download a dataset, verify its checksums, and print where it is. Interrupted downloads resume."""
    from niss.cli.terminal import DownloadProgress, kept_on_interrupt
    from niss.data import fetch_dataset

    kept = f"what has arrived is kept. Go on with: niss data fetch {name}"
    with kept_on_interrupt(lambda: kept), DownloadProgress(quiet=quiet) as progress:
        path = fetch_dataset(name, progress=progress)
    typer.echo(str(path))
