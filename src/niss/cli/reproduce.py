"""`niss reproduce`: the paper's Figures 3 and 4, the sweep over sigma_k, what lies beyond, and the scale of a round."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from niss.cli import choices
from niss.cli.completion import one_of, several_of
from niss.cli.help_text import examples
from niss.cli.switches import Quiet

EPILOG = """Examples:

  niss reproduce figure-3 --panel mnist-mlp-iid --rounds 100 --seeds 3 --device cuda

  niss reproduce figure-3 --panel cifar10-cnn-iid --x 0,1 --first-seed 2 --seeds 1 --stop-after 280

  niss reproduce figure-4 --image mnist:7,cifar10:7 --seeds 3

  niss reproduce beyond --setting mnist-iid-client --epsilons 3 --variant none,collusion

  niss reproduce merge other/results --out results/paper

What is in the result files is never run again; what was interrupted goes on where it stopped.
"""

app = typer.Typer(
    help="Run the paper's experiments, and those beyond it.", no_args_is_help=True, epilog=EPILOG
)

Out = Annotated[Path, typer.Option(help="Folder of the result files, figures and tables.")]
Work = Annotated[Path, typer.Option(help="Folder of the runs, from which an interrupted one goes on.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds.")]
FirstSeed = Annotated[int, typer.Option(min=0, help="The first of them.")]
Device = Annotated[
    str,
    typer.Option(help="Where clients train: auto, cpu or cuda.", autocompletion=one_of(choices.DEVICES)),
]
Panels = Annotated[
    str, typer.Option(help="Comma-separated, or all.", autocompletion=several_of(("all", *choices.PANELS)))
]
StopAfter = Annotated[float | None, typer.Option(help="Stop after so many seconds, ready to go on.")]
AtOnce = Annotated[
    int, typer.Option(min=1, help="Cells that train together; results are kept after each such group.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the paper.")
]
RESULTS, RUNS = Path("results/paper"), Path("runs/reproduce")


@app.command(
    "figure-3",
    epilog=examples(
        "niss reproduce figure-3 --panel mnist-mlp-iid --device cuda",
        "niss reproduce figure-3 --panel all --seeds 1 --dry-run",
    ),
)
def figure_3_command(
    panel: Panels = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 100,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 1,
    x: Annotated[str, typer.Option(help="Comma-separated values of X = tau^2.")] = "0,0.3,0.6,1",
    reading: Annotated[
        str,
        typer.Option(
            help="Of the sensitivity: see `niss reproduce readings`; or sigma_k itself.",
            autocompletion=one_of(choices.READINGS),
        ),
    ] = "nbafl",
    device: Device = "auto",
    settings: Settings = None,
    out: Out = RESULTS,
    work: Work = RUNS,
    stop_after: StopAfter = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be run.")] = False,
    quiet: Quiet = False,
) -> None:
    """The eight panels of Figure 3: accuracy over rounds at X = 0, 0.3, 0.6 and 1."""
    given = dict(locals())
    from niss.cli.reproduce_work import figure_3

    figure_3(given)


@app.command("figure-4", epilog=examples("niss reproduce figure-4 --image mnist:7 --seeds 3"))
def figure_4_command(
    image: Annotated[
        str, typer.Option(help="Training pictures, comma-separated DATASET:INDEX; or all.")
    ] = "all",
    level: Annotated[
        str,
        typer.Option(
            help="Comma-separated ways to protect an upload, e.g. fedavg,dp-fedavg,niss; or all.",
            autocompletion=several_of(("all", *choices.FIGURE_4_LEVELS)),
        ),
    ] = "all",
    reading: Annotated[
        str,
        typer.Option(
            help="Comma-separated: see `niss reproduce readings`; or sigma_k itself.",
            autocompletion=several_of(choices.READINGS),
        ),
    ] = "nbafl",
    seeds: Seeds = 3,
    first_seed: FirstSeed = 1,
    iterations: Annotated[int, typer.Option(min=1, help="Most iterations of the search.")] = 2000,
    restarts: Annotated[int, typer.Option(min=1, help="Random starts, tried side by side.")] = 4,
    device: Device = "auto",
    out: Out = RESULTS,
    work: Work = RUNS,
    stop_after: StopAfter = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be run.")] = False,
    quiet: Quiet = False,
) -> None:
    """Figure 4, Deep Leakage from Gradients: what comes back of a client's picture, on a CPU."""
    given = dict(locals())
    from niss.cli.reproduce_leaks import figure_4

    figure_4(given)


@app.command("sweep", epilog=examples("niss reproduce sweep --panel mnist-mlp-iid --sigmas 0.001,0.01,0.1"))
def sweep_command(
    panel: Panels = "mnist-mlp-iid",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 100,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 1,
    sigmas: Annotated[str | None, typer.Option(help="Comma-separated values of sigma_k.")] = None,
    device: Device = "auto",
    settings: Settings = None,
    out: Out = RESULTS,
    work: Work = RUNS,
    stop_after: StopAfter = None,
    quiet: Quiet = False,
) -> None:
    """X = 1 over the size of the noise: where would the paper's gaps arise?"""
    given = dict(locals())
    from niss.cli.reproduce_work import sweep

    sweep(given)


@app.command(
    "beyond",
    epilog=examples("niss reproduce beyond --setting mnist-iid-client --epsilons 3 --methods niss-planned"),
)
def beyond_command(
    setting: Annotated[
        str,
        typer.Option(
            help="Comma-separated, e.g. mnist-iid-client; or all.",
            autocompletion=several_of(("all", *choices.SETTINGS)),
        ),
    ] = "all",
    epsilons: Annotated[str, typer.Option(help="Comma-separated, over the whole training.")] = "1,3,8",
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; all by default.", autocompletion=several_of(choices.BEYOND_METHODS)
        ),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            help="Comma-separated: none, collusion, tolerate, repair.",
            autocompletion=several_of(choices.VARIANTS),
        ),
    ] = "none,collusion",
    seeds: Seeds = 3,
    first_seed: FirstSeed = 1,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds.")] = None,
    participants: Annotated[int | None, typer.Option(min=2, help="Participants a round.")] = None,
    tune: Annotated[bool, typer.Option(help="Tune clip, rate and width on held-out images first.")] = True,
    tune_epsilons: Annotated[
        str, typer.Option(help="Where to tune; the others take the nearest one's choice.")
    ] = "3",
    tune_only: Annotated[bool, typer.Option("--tune-only", help="Tune, and stop.")] = False,
    at_once: AtOnce = 8,
    device: Device = "auto",
    out: Out = RESULTS,
    work: Work = RUNS,
    stop_after: StopAfter = None,
    quiet: Quiet = False,
) -> None:
    """Every method at the same epsilon in the joint view, tuned with the same effort."""
    given = dict(locals())
    from niss.cli.reproduce_work import beyond

    beyond(given)


@app.command("scale", epilog=examples("niss reproduce scale --sizes 30,100 --seeds 1"))
def scale_command(
    sizes: Annotated[str, typer.Option(help="Participants a round, comma-separated.")] = "30,100,1000",
    dataset: Annotated[str, typer.Option(help="See `niss data list`.")] = "mnist",
    epsilon: Annotated[float, typer.Option(help="Over the whole training.")] = 3.0,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 1,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds.")] = None,
    at_once: AtOnce = 8,
    device: Device = "auto",
    out: Out = RESULTS,
    work: Work = RUNS,
    stop_after: StopAfter = None,
    quiet: Quiet = False,
) -> None:
    """The comparison with 30, 100 and 1,000 participants a round."""
    given = dict(locals())
    from niss.cli.reproduce_work import scale

    scale(given)


@app.command("merge", epilog=examples("niss reproduce merge other/results --out results/paper"))
def merge_command(
    folders: Annotated[list[Path], typer.Argument(help="Result folders from elsewhere.")],
    out: Out = RESULTS,
) -> None:
    """Take the cells of other result folders into this one, and draw figures and tables again."""
    from niss.cli.reproduce_work import present
    from experiments.reproduce.results import merge_results

    merge_results(folders, out)
    present(out)


@app.command("figures", epilog=examples("niss reproduce figures --out results/paper"))
def figures_command(out: Out = RESULTS, work: Work = RUNS) -> None:
    """Draw the figures and write the tables again from the result files."""
    from niss.cli.reproduce_work import present
    from niss.errors import RunFolderError

    if not out.is_dir():
        raise RunFolderError(
            f"{out} does not exist", hint="run `niss reproduce figure-3` or another one first"
        )
    present(out, work)


@app.command("readings", epilog=examples("niss reproduce readings"))
def readings_command() -> None:
    """The readings of the paper's sensitivity, and the noise each one gives."""
    from experiments.reproduce.tables import readings_table

    typer.echo(readings_table(), nl=False)
