"""`niss bench`: how fast this machine simulates."""

from __future__ import annotations

from typing import Annotated

import typer

from niss.cli.choices import DEVICES, MODELS
from niss.cli.completion import one_of
from niss.cli.switches import Quiet

EXAMPLES = """Examples:

  niss bench                       a round of the paper with the MLP: 30 clients x 600 samples x 5 epochs

  niss bench --model cnn --quick

  niss bench --device cuda --json

The benchmarks against other simulators are in the folder benchmarks/ of the repository.
"""


def bench_command(
    model: Annotated[str, typer.Option(help="mlp or cnn.", autocompletion=one_of(MODELS))] = "mlp",
    clients: Annotated[int, typer.Option(help="Clients in the round.")] = 30,
    samples: Annotated[int, typer.Option(help="Samples of each client.")] = 600,
    epochs: Annotated[int, typer.Option(help="Local epochs.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Local batch size.")] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", autocompletion=one_of(DEVICES))] = "auto",
    tf32: Annotated[bool, typer.Option("--tf32", help="Allow TF32 products on a GPU.")] = False,
    repeats: Annotated[int, typer.Option(help="Rounds that are timed.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="6 clients, 100 samples, 1 epoch.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Quiet = False,  # noqa: ARG001 (its callback does the work)
) -> None:
    """Time a round of local training beside the plain PyTorch loop, and the noise."""
    from niss.cli.terminal import print_json, working
    from niss.learning import choose_device
    from niss.simulation.speed import Round, measure

    if quick:
        clients, samples, epochs = min(clients, 6), min(samples, 100), min(epochs, 1)
    work = Round(model, clients, samples, epochs, batch_size)
    with working("warming up") as say:
        speed = measure(work, device=choose_device(device), tf32=tf32, repeats=repeats, progress=say)
    if as_json:
        print_json(speed.to_json())
        return
    rows = (
        f"engine        {speed.engine}",
        f"round         {speed.seconds:.3g} s: {clients} clients x {work.steps} steps, {speed.parameters:,} parameters",
        f"plain loop    {speed.plain_seconds:.3g} s, from {speed.plain_clients} of the clients",
        f"ratio         {speed.ratio_to_plain:.1f} times as fast",
        f"shares        {speed.share_nanoseconds:.1f} ns a coordinate, simulated",
        f"shares        {speed.secret_nanoseconds:.1f} ns a coordinate, cryptographic",
    )
    typer.echo("\n".join(rows))
