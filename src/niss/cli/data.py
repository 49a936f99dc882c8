"""`niss data`: which datasets there are, and fetching them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

app = typer.Typer(help="List and fetch datasets.", no_args_is_help=True)


@app.command("list", epilog="Example: niss data list --json")
def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Show every dataset, where it comes from and whether it is on this machine."""
    from niss.cli.terminal import print_json
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
    Console(highlight=False).print(table)


@app.command("fetch", epilog="Example: niss data fetch mnist")
def fetch_command(name: Annotated[str, typer.Argument(help="A name from `niss data list`.")]) -> None:
    """Download a dataset, verify its checksums, and print where it is. Interrupted downloads resume."""
    from niss.cli.terminal import messages
    from niss.data import fetch_dataset

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=messages(),
    )
    tasks: dict[str, TaskID] = {}
    with bar:

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done, total=total)

        path = fetch_dataset(name, progress=show)
    typer.echo(str(path))
