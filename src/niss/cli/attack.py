"""`niss attack`: attacks on what really leaves the devices. The work is in `niss.attacks`, imported when needed."""

from __future__ import annotations

from typing import Annotated

import typer

from niss.cli import attack_rounds, choices
from niss.cli.attack_options import (
    AsJson,
    Clients,
    Delta,
    Device,
    Epsilon,
    Image,
    Iterations,
    Label,
    Out,
    Overwrite,
    Quiet,
    Restarts,
    Seed,
    names,
)
from niss.cli.completion import one_of, several_of

EXAMPLES = """Examples:

  niss attack joint --out runs/joint

  niss attack dlg --plan paper --methods fedavg,dp-fedavg,niss --out runs/figure-4

  niss attack audit --rounds 100000
"""

app = typer.Typer(
    help="Attack what leaves the devices, and see what an adversary gets.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Methods = Annotated[
    str,
    typer.Option(
        help="Comma-separated: fedavg, dp-fedavg, central-dp, niss.",
        autocompletion=several_of(choices.METHODS),
    ),
]
View = Annotated[
    str,
    typer.Option(
        help="alone (the victim's upload) or joint (all uploads).",
        autocompletion=one_of(choices.ATTACK_VIEWS),
    ),
]
PlanName = Annotated[
    str,
    typer.Option(
        "--plan",
        help="default, or paper: the noise of its Figure 4.",
        autocompletion=one_of(choices.ATTACK_PLANS),
    ),
]
Tau2 = Annotated[float | None, typer.Option(help="Distortion of received shares; default: that of the plan.")]


@app.command(
    "dlg",
    epilog="""Examples:

  niss attack dlg --out runs/dlg

  niss attack dlg --plan paper --methods fedavg,dp-fedavg,niss --out runs/figure-4

  niss attack dlg --plan paper --view joint --methods niss --image photo.png
""",
)
def dlg_command(
    image: Image = "mnist-mini:0",
    label: Label = None,
    methods: Methods = "fedavg,dp-fedavg,niss",
    view: View = "alone",
    plan: PlanName = "default",
    clients: Clients = 30,
    epsilon: Epsilon = None,
    delta: Delta = None,
    tau2: Tau2 = None,
    iterations: Iterations = 2000,
    restarts: Restarts = 4,
    seed: Seed = 1,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Deep Leakage from Gradients: recover a picture from one client's upload."""
    from niss.attacks.dlg import DlgSettings
    from niss.attacks.experiments.dlg import DlgExperiment
    from niss.attacks.figures.strips import draw_strips
    from niss.cli.attack_work import execute

    experiment = DlgExperiment(
        image=image,
        label=label,
        methods=names(methods),
        view=view,
        plan=plan,
        clients=clients,
        epsilon=epsilon,
        delta=delta,
        tau2=tau2,
        seed=seed,
        device=device,
        dlg=DlgSettings(iterations=iterations, restarts=restarts),
    )
    execute(experiment, draw_strips, out=out, overwrite=overwrite, as_json=as_json, quiet=quiet)


@app.command(
    "joint",
    epilog="""Examples:

  niss attack joint --out runs/joint

  niss attack joint --image photo.png --label 3 --json
""",
)
def joint_command(
    image: Image = "mnist-mini:0",
    label: Label = None,
    clients: Clients = 30,
    epsilon: Epsilon = None,
    delta: Delta = None,
    iterations: Iterations = 2000,
    restarts: Restarts = 4,
    seed: Seed = 1,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Put all uploads together: at tau = 0 the victim's picture falls out, at the calibrated tau^2 it does not."""
    from niss.attacks.dlg import DlgSettings
    from niss.attacks.experiments.joint import JointExperiment
    from niss.attacks.figures.strips import draw_strips
    from niss.cli.attack_work import execute

    experiment = JointExperiment(
        image=image,
        label=label,
        clients=clients,
        epsilon=epsilon,
        delta=delta,
        seed=seed,
        device=device,
        dlg=DlgSettings(iterations=iterations, restarts=restarts),
    )
    execute(experiment, draw_strips, out=out, overwrite=overwrite, as_json=as_json, quiet=quiet)


@app.command(
    "invert",
    epilog="""Examples:

  niss attack invert --out runs/invert

  niss attack invert --batch 4 --steps 3 --methods fedavg,niss

  niss attack invert --model cnn --methods fedavg --clients 3 --iterations 300
""",
)
def invert_command(
    image: Image = "mnist-mini:0",
    label: Label = None,
    batch: Annotated[int, typer.Option(help="Pictures of the victim, from the given one on.")] = 1,
    model: Annotated[
        str, typer.Option(help="mlp, cnn or lenet.", autocompletion=one_of(choices.ATTACK_MODELS))
    ] = "mlp",
    steps: Annotated[int, typer.Option(help="Local steps, each on all pictures.")] = 1,
    methods: Methods = "fedavg,dp-fedavg,niss",
    view: View = "alone",
    plan: PlanName = "default",
    clients: Clients = 30,
    epsilon: Epsilon = None,
    delta: Delta = None,
    tau2: Tau2 = None,
    iterations: Iterations = 1200,
    restarts: Restarts = 2,
    tv: Annotated[float, typer.Option(help="Weight of the total variation.")] = 1e-4,
    seed: Seed = 1,
    device: Device = "auto",
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Inverting Gradients: cosine distance and total variation, for ReLU models, batches and several steps."""
    from niss.attacks.experiments.invert import InvertExperiment
    from niss.attacks.figures.batches import draw_batches
    from niss.attacks.inverting import InvertSettings
    from niss.cli.attack_work import execute

    experiment = InvertExperiment(
        image=image,
        label=label,
        batch=batch,
        model=model,
        steps=steps,
        methods=names(methods),
        view=view,
        plan=plan,
        clients=clients,
        epsilon=epsilon,
        delta=delta,
        tau2=tau2,
        seed=seed,
        device=device,
        search=InvertSettings(iterations=iterations, restarts=restarts, total_variation=tv),
    )
    execute(experiment, draw_batches, out=out, overwrite=overwrite, as_json=as_json, quiet=quiet)


attack_rounds.register(app)
