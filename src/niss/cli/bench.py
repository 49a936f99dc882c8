"""`niss bench`: how fast this machine simulates."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = """Examples:

  niss bench                       a round of the paper with the MLP: 30 clients x 600 samples x 5 epochs

  niss bench --model cnn --quick

  niss bench --device cuda --json

The benchmarks against other simulators are in the folder benchmarks/ of the repository.
"""


def bench_command(
    model: Annotated[str, typer.Option(help="mlp or cnn.")] = "mlp",
    clients: Annotated[int, typer.Option(help="Clients in the round.")] = 30,
    samples: Annotated[int, typer.Option(help="Samples of each client.")] = 600,
    epochs: Annotated[int, typer.Option(help="Local epochs.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Local batch size.")] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tf32: Annotated[bool, typer.Option("--tf32", help="Allow TF32 products on a GPU.")] = False,
    repeats: Annotated[int, typer.Option(help="Rounds that are timed.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="6 clients, 100 samples, 1 epoch.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Time a round of local training beside the plain PyTorch loop, and the noise."""
    from niss.cli.terminal import messages, print_json
    from niss.simulation.speed import Round, measure
    from niss.simulation.training import choose_device

    if quick:
        clients, samples, epochs = min(clients, 6), min(samples, 100), min(epochs, 1)
    work = Round(model, clients, samples, epochs, batch_size)
    with messages().status("warming up") as status:
        speed = measure(
            work, device=choose_device(device), tf32=tf32, repeats=repeats, progress=status.update
        )
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
