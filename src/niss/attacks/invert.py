"""`niss attack dlg` and `niss attack invert`: pictures from one client's upload, once for every method.

`dlg` is the paper's Figure 4 (Deep Leakage from Gradients on a small LeNet), and the same from the joint view.
`invert` is Inverting Gradients on the models of the experiments, with batches and several local steps.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from niss.attacks.experiment import (
    DEFAULT_PICTURE,
    MODELS,
    Clients,
    Delta,
    Device,
    Epsilon,
    Experiment,
    Findings,
    Help,
    Image,
    Iterations,
    Label,
    Methods,
    PlanName,
    Progress,
    Restarts,
    Row,
    Seed,
    Tau2,
    View,
    check_at_least,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from matplotlib.figure import Figure

    from niss.attacks.federation import Federation
    from niss.attacks.inversion import DlgSettings, Inversion, InvertSettings
    from niss.attacks.pictures import Pictures
    from niss.attacks.rounds import FloatArray, Setting, SimulatedRound
    from niss.randomness import SimStream

COLUMNS = {
    "case": "Case",
    "epsilon_joint": "ε joint",
    "noise": "Noise ÷ update",
    "loss": "DLG loss",
    "mse": "MSE",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "label_found": "Label found",
    "iterations": "Iterations",
}
_MOST_PICTURES = 6


@dataclass(frozen=True)
class Case:
    """A guess of the victim's update, under a name that the table and the figure show."""

    name: str
    simulated: SimulatedRound
    guess: FloatArray

    def row(self, federation: Federation, inversion: Inversion) -> Row:
        """Scores of the recovered pictures, beside what was promised and how wrong the guess was."""
        from niss.attacks.federation import VICTIM
        from niss.attacks.pictures import score_pictures
        from niss.attacks.rounds import relative_error

        joint, marginal = self.simulated.claimed_epsilon(VICTIM)
        return {
            "case": self.name,
            "method": self.simulated.plan.plan.method,
            "epsilon_joint": joint,
            "epsilon_marginal": marginal,
            "noise": relative_error(self.guess, self.simulated.updates[VICTIM]),
            "loss": inversion.losses[-1] if inversion.losses else float("nan"),
            **score_pictures(inversion.pictures, federation.pictures.pixels).to_json(),
            "label_found": sorted(inversion.labels.tolist()) == sorted(federation.pictures.labels.tolist()),
            "labels": inversion.labels.tolist(),
            "iterations": len(inversion.losses),
            "stopped": inversion.stopped or "all iterations done",
        }


def run_case(
    case: Case,
    federation: Federation,
    search: Callable[..., Inversion],
    findings: Findings,
    *,
    stream: SimStream,
    device: torch.device,
    progress: Progress,
) -> Inversion:
    """Invert one guess; adds its row, its losses and its frames to the findings.

    search   `deep_leakage` or `invert_update` with its settings
    """
    inversion = search(
        federation.as_gradient(case.guess),
        federation.update_function(case.simulated.plan.plan),
        federation.pictures,
        stream=stream,
        device=device,
        progress=partial(progress, case.name),
    )
    findings.rows.append(case.row(federation, inversion))
    findings.curves.setdefault("losses", {})[case.name] = inversion.losses
    frames = findings.pictures.setdefault("frames", {})
    frames[case.name] = [(number, pictures[0]) for number, pictures in inversion.frames]
    return inversion


def nest_search(options: dict[str, Any], name: str, search: DlgSettings | InvertSettings) -> dict[str, Any]:
    """The options with those of the search, given or not, under one name, as `attack.json` has them."""
    inner = asdict(search)
    return {key: value for key, value in options.items() if key not in inner} | {name: inner}


@dataclass(frozen=True, kw_only=True)
class InversionExperiment(Experiment):
    """One inversion per method, on the same victim with the same network.

    view   `alone`: the server looks at the victim's upload by itself, as the paper does; `joint`: it uses all uploads
           and knows the others' updates
    """

    image: Image = DEFAULT_PICTURE
    label: Label = None
    methods: Methods = ("fedavg", "dp-fedavg", "niss")
    view: View = "alone"
    plan: PlanName = "default"
    clients: Clients = 30
    epsilon: Epsilon = None
    delta: Delta = None
    tau2: Tau2 = None
    iterations: Iterations
    restarts: Restarts
    seed: Seed = 1
    device: Device = "auto"

    @abstractmethod
    def _pictures(self) -> Pictures: ...

    @abstractmethod
    def _federation(self, pictures: Pictures, learning_rate: float, stream: SimStream) -> Federation: ...

    @abstractmethod
    def _invert(self, case: Case, federation: Federation, findings: Findings, **options: Any) -> None: ...

    def check(self) -> None:
        """Refuse what cannot be used."""
        from niss.attacks.rounds import check_methods, check_view
        from niss.learning import choose_device
        from niss.randomness import SimStream

        check_methods(self.methods)
        check_view(self.view)
        self._setting()
        self._pictures()
        choose_device(self.device, field="--device")
        SimStream(self.seed)

    def _setting(self) -> Setting:
        from niss.attacks.rounds import make_setting

        return make_setting(
            self.plan, clients=self.clients, epsilon=self.epsilon, delta=self.delta, tau2=self.tau2
        )

    def run(self, findings: Findings, progress: Progress) -> None:
        """One case per method: simulate the round, guess the victim's update, invert it."""
        import torch

        from niss.attacks.estimates import estimate_alone, estimate_jointly
        from niss.attacks.federation import VICTIM
        from niss.attacks.pictures import blind_guess
        from niss.learning import choose_device
        from niss.randomness import SimStream

        setting, pictures, stream = self._setting(), self._pictures(), SimStream(self.seed)
        federation = self._federation(pictures, setting.learning_rate, stream.child("scene"))
        findings.pictures["originals"] = pictures.pixels
        findings.curves["blind_guess_psnr"] = blind_guess(pictures.pixels)
        estimate = estimate_alone if self.view == "alone" else estimate_jointly
        for method in self.methods:
            simulated = setting.with_plan(method=method).simulate(
                federation.updates,
                federation.weights.numpy(),
                stream=stream.child("round"),
                knows_updates_of=range(1, self.clients),
            )
            self._invert(
                Case(method, simulated, estimate(simulated.observation, VICTIM).update),
                federation,
                findings,
                stream=stream,
                device=torch.device(choose_device(self.device, field="--device")),
                progress=progress,
            )
        scores = "; ".join(f"{row['case']} {row['psnr']:.1f} dB" for row in findings.rows)
        findings.headline = (
            f"PSNR of the recovered picture{'s' if len(pictures.pixels) > 1 else ''}: {scores}. "
            f"An even grey would score {findings.curves['blind_guess_psnr']:.1f} dB."
        )
        findings.finished = True


@dataclass(frozen=True, kw_only=True)
class DlgExperiment(InversionExperiment):
    """Deep Leakage from Gradients against one picture and one step of a LeNet with sigmoids."""

    name: ClassVar[str] = "dlg"
    summary: ClassVar[str] = "Deep Leakage from Gradients: recover a picture from one client's upload."
    examples: ClassVar[tuple[str, ...]] = (
        "niss attack dlg --out runs/dlg",
        "niss attack dlg --plan paper --methods fedavg,dp-fedavg,niss --out runs/figure-4",
        "niss attack dlg --plan paper --view joint --methods niss --image photo.png",
    )
    columns: ClassVar[dict[str, str]] = COLUMNS

    iterations: Iterations = 2000
    restarts: Restarts = 4

    def check(self) -> None:
        """Refuse what cannot be used."""
        self._search()
        super().check()

    def settings(self) -> dict[str, Any]:
        """The options, those of the search under `dlg`."""
        return nest_search(super().settings(), "dlg", self._search())

    def _search(self) -> DlgSettings:
        from niss.attacks.inversion import DlgSettings

        return DlgSettings(iterations=self.iterations, restarts=self.restarts)

    def _pictures(self) -> Pictures:
        from niss.attacks.pictures import load_pictures

        return load_pictures(self.image, label=self.label)

    def _federation(self, pictures: Pictures, learning_rate: float, stream: SimStream) -> Federation:
        from niss.attacks.federation import make_federation

        return make_federation(
            pictures, model="lenet", clients=self.clients, stream=stream, learning_rate=learning_rate
        )

    def _invert(self, case: Case, federation: Federation, findings: Findings, **options: Any) -> None:
        from niss.attacks.inversion import deep_leakage

        stream = options.pop("stream").child("dlg")
        search = partial(deep_leakage, settings=self._search())
        run_case(case, federation, search, findings, stream=stream, **options)

    def draw(self, findings: Findings) -> Figure | None:
        """A strip of pictures for each method, and the losses."""
        from niss.attacks.drawing import draw_strips

        return draw_strips(findings)


@dataclass(frozen=True, kw_only=True)
class InvertExperiment(InversionExperiment):
    """Cosine distance and total variation, on the update of a client that may hold several pictures."""

    name: ClassVar[str] = "invert"
    summary: ClassVar[str] = (
        "Inverting Gradients: cosine distance and total variation, for ReLU models, batches and several steps."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "niss attack invert --out runs/invert",
        "niss attack invert --batch 4 --steps 3 --methods fedavg,niss",
        "niss attack invert --model cnn --methods fedavg --clients 3 --iterations 300",
    )
    columns: ClassVar[dict[str, str]] = {**COLUMNS, "loss": "1 − cos"}

    iterations: Iterations = 1200
    restarts: Restarts = 2
    batch: Annotated[int, Help("Pictures of the victim, from the given one on.")] = 1
    model: Annotated[str, Help("mlp, cnn or lenet.", choices=MODELS)] = "mlp"
    steps: Annotated[int, Help("Local steps, each on all pictures.")] = 1
    total_variation: Annotated[float, Help("Weight of the total variation.", flag="--tv")] = 1e-4

    def check(self) -> None:
        """Refuse what cannot be used."""
        from niss.attacks.federation import check_model

        check_model(self.model)
        check_at_least(1, steps=self.steps)
        self._search()
        super().check()

    def settings(self) -> dict[str, Any]:
        """The options, those of the search under `search`."""
        return nest_search(super().settings(), "search", self._search())

    def _search(self) -> InvertSettings:
        from niss.attacks.inversion import InvertSettings

        return InvertSettings(
            iterations=self.iterations, restarts=self.restarts, total_variation=self.total_variation
        )

    def _pictures(self) -> Pictures:
        from niss.attacks.pictures import load_pictures

        return load_pictures(self.image, count=self.batch, label=self.label)

    def _federation(self, pictures: Pictures, learning_rate: float, stream: SimStream) -> Federation:
        from niss.attacks.federation import make_federation

        return make_federation(
            pictures,
            model=self.model,
            clients=self.clients,
            stream=stream,
            learning_rate=learning_rate,
            steps=self.steps,
        )

    def _invert(self, case: Case, federation: Federation, findings: Findings, **options: Any) -> None:
        from niss.attacks.inversion import invert_update
        from niss.attacks.pictures import best_order

        stream = options.pop("stream").child("search")
        search = partial(invert_update, settings=self._search())
        inversion = run_case(case, federation, search, findings, stream=stream, **options)
        order = best_order(inversion.pictures, federation.pictures.pixels)
        findings.pictures.setdefault("recovered", {})[case.name] = inversion.pictures[order]

    def draw(self, findings: Findings) -> Figure | None:
        """A row of originals, a row per method, and the loss curves at the right or below."""
        from niss.attacks import drawing

        recovered = findings.pictures.get("recovered", {})
        if not recovered:
            return None
        originals = findings.pictures["originals"][:_MOST_PICTURES]
        scores = {row["case"]: row for row in findings.rows}
        count, rows = len(originals), len(recovered) + 1
        with drawing.style():
            if count <= 2:
                figure = drawing.new_figure(1.3 * rows)
                pictures, curves = drawing.two_parts(figure, (1.0 + 1.2 * count, 4.4), beside=True)
            else:
                figure = drawing.new_figure(1.15 * rows + 2.6)
                pictures, curves = drawing.two_parts(figure, (1.15 * rows, 2.6))
            axes = pictures.subplots(rows, count + 1, squeeze=False)
            for strip, (name, batch) in zip(axes, [("original", originals), *recovered.items()], strict=True):
                drawing.draw_label(strip[0], name, scores.get(name), places=(0.6, 0.3))
                for one, place in zip(batch, strip[1:], strict=False):
                    drawing.show_picture(place, one)
            drawing.draw_losses(curves.subplots(), findings, "Mismatch, 1 − cosine")
        return figure
