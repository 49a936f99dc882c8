"""`niss attack dlg`, `niss attack invert` and `niss attack joint`: pictures from what clients upload.

`dlg` is the paper's Figure 4 (Deep Leakage from Gradients on a small LeNet), and the same from the joint view.
`invert` is Inverting Gradients on the models of the experiments, with batches and several local steps. Both take one
client's upload, once for every method. `joint` shows why the noise is calibrated for a server that sees every upload.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt
from typing_extensions import Doc

from niss import attacks
from niss.attacks import experiment
from niss.attacks.experiment import VICTIM, Findings, Progress, Row
from niss.settings import Count, OneOf

if TYPE_CHECKING:
    from niss.accounting import Plan
    from niss.attacks.estimates import FloatArray
    from niss.attacks.federation import AttackedFederation
    from niss.attacks.inversion import Inversion, Search
    from niss.attacks.pictures import Pictures
    from niss.attacks.rounds import RoundSetting, SimulatedRound
    from niss.charts import Chart, Strip

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
# How many pictures of a batch the figure shows, and how many on the way.
_MOST_PICTURES, _FRAMES = 5, 4

Iterations = Annotated[Count, Doc("Most iterations; it stops early when nothing moves any more.")]
Restarts = Annotated[Count, Doc("Random starts, tried side by side.")]


@dataclass(frozen=True)
class Case:
    """One thing to invert.

    name    what the table and the figure call it
    plan    of the round behind it
    truth   the victim's update in that round, clipped
    guess   the adversary's estimate of it
    notes   what else its row says
    """

    name: str
    plan: Plan
    truth: FloatArray
    guess: FloatArray
    notes: Row

    @classmethod
    def of(cls, name: str, simulated: SimulatedRound, guess: FloatArray, **notes: Any) -> Case:
        """An estimate in a simulated round, with what was promised there."""
        joint, marginal = simulated.claimed_epsilon(VICTIM)
        promised = {"epsilon_joint": joint, "epsilon_marginal": marginal}
        return cls(name, simulated.plan.plan, simulated.updates[VICTIM], guess, promised | notes)

    def invert(self, federation: AttackedFederation, search: Search, **options: Any) -> Inversion:
        """The pictures that the search finds behind the guess; `options` as those of `Search.invert`."""
        gradient = federation.as_gradient(self.guess)
        function = federation.update_function(self.plan)
        return search.invert(gradient, function, federation.pictures, **options)

    def row(self, federation: AttackedFederation, inversion: Inversion) -> Row:
        """Scores of the recovered pictures, beside what was promised and how wrong the guess was."""
        pictures = federation.pictures
        return {
            "case": self.name,
            "method": self.plan.kind.name,
            "noise": attacks.rounds.relative_error(self.guess, self.truth),
            "loss": inversion.losses[-1] if inversion.losses else float("nan"),
            **asdict(attacks.pictures.score_pictures(inversion.pictures, pictures.pixels)),
            "label_found": sorted(inversion.labels.tolist()) == sorted(pictures.labels.tolist()),
            "labels": inversion.labels.tolist(),
            "iterations": len(inversion.losses),
            "stopped": inversion.stopped or "all iterations done",
            **self.notes,
        }


@dataclass(frozen=True, kw_only=True)
class SearchExperiment(experiment.PictureExperiment):
    """An attack that searches for pictures whose update fits a guess of the victim's.

    search_name   under which the settings of the search stand in the results, and its randomness in the stream
    """

    search_name: ClassVar[str] = "dlg"
    loss_name: ClassVar[str] = "DLG loss"

    iterations: Iterations = 2000
    restarts: Restarts = 4
    device: Annotated[Literal["auto", "cpu", "cuda"], Doc("auto, cpu or cuda.")] = "auto"

    def check(self) -> None:
        """Refuse what cannot be used."""
        from niss.learning import choose_device

        super().check()
        choose_device(self.device, field="--device")

    def settings(self) -> dict[str, Any]:
        """The options, with those of the search, given or not, under its name."""
        search = asdict(self.search())
        options = {key: value for key, value in super().settings().items() if key not in search}
        return options | {self.search_name: search}

    def search(self) -> Search:
        """How the pictures are looked for."""
        return attacks.inversion.DeepLeakage(iterations=self.iterations, restarts=self.restarts)

    def model_options(self) -> dict[str, Any]:
        """One step of a LeNet, at the rate of the plan."""
        return {"model": "lenet", "learning_rate": self.setting().learning_rate}

    @abstractmethod
    def cases(self, federation: AttackedFederation) -> Iterator[Case]:
        """What is to be inverted."""

    def attack(self, findings: Findings, progress: Progress) -> None:
        """Invert one case after the other; each adds a row, losses, frames and recovered pictures."""
        import torch

        from niss.learning import choose_device

        federation = self.train(findings)
        originals = federation.pictures.pixels
        losses = findings.curves["losses"] = {}
        frames, recovered = (findings.pictures.setdefault(name, {}) for name in ("frames", "recovered"))
        for case in self.cases(federation):
            inversion = case.invert(
                federation,
                self.search(),
                stream=self.stream(self.search_name),
                device=torch.device(choose_device(self.device, field="--device")),
                progress=partial(progress, case.name),
            )
            findings.rows.append(case.row(federation, inversion))
            losses[case.name] = inversion.losses
            frames[case.name] = [(f"iter. {number}", shown[0]) for number, shown in inversion.frames]
            order = attacks.pictures.best_order(inversion.pictures, originals)
            recovered[case.name] = inversion.pictures[order]
        self.sweep(federation, findings, progress)

    def sweep(self, federation: AttackedFederation, findings: Findings, progress: Progress) -> None:
        """What else is to be found out, after all cases."""

    def charts(self, findings: Findings) -> list[Chart]:
        """The loss of each case over the iterations."""
        from niss.charts import Curves, Series, marked, numbered, points
        from niss.methods import METHODS, look_of

        promised = {row["case"]: isfinite(row["epsilon_joint"]) for row in findings.rows}
        series = []
        for number, (case, losses) in enumerate(findings.curves.get("losses", {}).items()):
            look, name = numbered(number), case
            if case in METHODS:
                look = look_of(case, protected=promised[case])
                name = marked(case, protected=promised[case])
            found = points(range(1, len(losses) + 1), losses, "xy")
            series.append(Series(name, look, found, marks=True))
        name = self.loss_name
        return [
            Curves(
                title=f"{name} by iteration",
                across="Iteration",
                up=name,
                series=series,
                log="xy",
                head="Iteration",
            )
        ]

    def strips(self, findings: Findings) -> list[Strip]:
        """The original and frames of the search, for each case."""
        return [
            experiment.strip_of(name, findings, frames, _FRAMES)
            for name, frames in findings.pictures.get("frames", {}).items()
        ]


@dataclass(frozen=True, kw_only=True)
class MethodsExperiment(SearchExperiment):
    """One search per method, on the same victim with the same network and the same randomness.

    methods   of `niss.methods`, one case each
    view      `alone`: the server looks at the victim's upload by itself, as the paper does; `joint`: it uses all
              uploads and knows the others' updates
    plan      the preset of `niss.attacks.rounds.make_setting`
    tau2      None: as the preset says
    """

    methods: Annotated[
        tuple[Annotated[str, OneOf(experiment.visible_names)], ...],
        Doc("Comma-separated: fedavg, dp-fedavg, ..."),
    ] = ("fedavg", "dp-fedavg", "niss")
    view: Annotated[Literal["alone", "joint"], Doc("alone (the victim's upload) or joint (all uploads).")] = (
        "alone"
    )
    plan: Annotated[experiment.Preset, Doc("default, or paper: the noise of its Figure 4.")] = "default"
    tau2: Annotated[float | None, Doc("Distortion of received shares; default: that of the plan.")] = None

    def setting(self) -> RoundSetting:
        """The plan of the chosen preset."""
        return self.make_setting(self.plan, tau2=self.tau2)

    def cases(self, federation: AttackedFederation) -> Iterator[Case]:
        """The victim's update under each method, guessed from the same round."""
        estimate = (
            attacks.estimates.estimate_alone if self.view == "alone" else attacks.estimates.estimate_jointly
        )
        for method in self.methods:
            simulated = federation.simulate(self.setting().with_plan(method=method), self.stream("round"))
            yield Case.of(method, simulated, estimate(simulated.observation, VICTIM).update)

    def headline(self, findings: Findings) -> str:
        """The PSNR of each method."""
        scores = "; ".join(f"{row['case']} {row['psnr']:.1f} dB" for row in findings.rows)
        return (
            f"PSNR of the recovered pictures: {scores}. "
            f"An even grey would score {findings.curves['blind_guess_psnr']:.1f} dB."
        )


@dataclass(frozen=True, kw_only=True)
class DlgExperiment(MethodsExperiment):
    """Deep Leakage from Gradients: recover a picture from one client's upload.

    One picture, one step of a LeNet with sigmoids: the setting of the paper's Figure 4, which reads the loss and takes
    a high one for protection. The PSNR beside it tells whether the picture is there.

    Examples:
        niss attack dlg --out runs/dlg
        niss attack dlg --plan paper --methods fedavg,dp-fedavg,niss --out runs/figure-4
        niss attack dlg --plan paper --view joint --methods niss --image photo.png
    """

    name = "dlg"
    columns: ClassVar[dict[str, str]] = COLUMNS


@dataclass(frozen=True, kw_only=True)
class InvertExperiment(MethodsExperiment):
    """Inverting Gradients: cosine distance and total variation, for ReLU models, batches and several steps.

    Unlike DLG it copes with ReLU, with a clip, and with a client that takes several steps on several pictures; labels
    are read from the last bias, and the order of a batch, which no gradient tells, is taken as it fits best.

    Examples:
        niss attack invert --out runs/invert
        niss attack invert --batch 4 --steps 3 --methods fedavg,niss
        niss attack invert --model cnn --methods fedavg --clients 3 --iterations 300
    """

    name = "invert"
    columns: ClassVar[dict[str, str]] = {**COLUMNS, "loss": "1 − cos"}
    search_name = "search"
    loss_name = "Mismatch, 1 − cosine"

    iterations: Iterations = 1200
    restarts: Restarts = 2
    batch: Annotated[Count, Doc("Pictures of the victim, from the given one on.")] = 1
    model: Annotated[Literal["mlp", "cnn", "lenet"], Doc("mlp, cnn or lenet.")] = "mlp"
    steps: Annotated[Count, Doc("Local steps, each on all pictures.")] = 1
    tv: Annotated[float, Ge(0), Lt(inf), Doc("Weight of the total variation.")] = 1e-4

    def search(self) -> Search:
        """How the pictures are looked for."""
        return attacks.inversion.InvertingGradients(
            iterations=self.iterations, restarts=self.restarts, total_variation=self.tv
        )

    def load_pictures(self) -> Pictures:
        """The victim's pictures, as many as `batch`."""
        return attacks.federation.load_pictures(self.image, count=self.batch)

    def model_options(self) -> dict[str, Any]:
        """The steps of the chosen model."""
        return {**super().model_options(), "model": self.model, "steps": self.steps}

    def strips(self, findings: Findings) -> list[Strip]:
        """A row of originals, and one per method."""
        from niss.charts import Strip

        recovered = findings.pictures.get("recovered", {})
        if not recovered:
            return []
        scores = {row["case"]: f"{row['psnr']:.1f} dB" for row in findings.rows}
        batches = {"original": findings.pictures["originals"], **recovered}
        return [
            Strip(name, [("", one) for one in batch[:_MOST_PICTURES]], scores.get(name, ""))
            for name, batch in batches.items()
        ]


@dataclass(frozen=True, kw_only=True)
class JointExperiment(SearchExperiment):
    """Put all uploads together: at tau = 0 the victim's picture falls out, at a calibrated tau^2 it does not.

    With tau = 0 the shares cancel in the sum of all uploads, so a server that knows the other updates has the victim's;
    one that does not know them has the sum. DLG is run on the upload alone, on both of these, and on the best estimate
    at the calibrated tau^2. A sweep over tau^2 then compares the error of that estimate with the accountant's
    sqrt(h v) / (p ||x||), v being the effective variance.

    points   values of tau^2 in the sweep; no option of the command

    Examples:
        niss attack joint --out runs/joint
        niss attack joint --image photo.png --json
    """

    name = "joint"
    columns: ClassVar[dict[str, str]] = {**COLUMNS, "predicted": "Predicted noise"}

    points: Annotated[int, Ge(2)] = 13

    def cases(self, federation: AttackedFederation) -> Iterator[Case]:
        """Four guesses of the same update, in the same round but for the setting and what the server knows."""
        alone, jointly = attacks.estimates.estimate_alone, attacks.estimates.estimate_jointly
        calibrated = self.setting()
        bare = calibrated.with_plan(tau2=0.0)
        cases = (
            ("τ = 0, upload alone", bare, True, alone),
            ("τ = 0, all uploads", bare, True, jointly),
            ("τ = 0, others unknown", bare, False, jointly),
            ("calibrated τ², all uploads", calibrated, True, jointly),
        )
        for name, setting, known, estimate in cases:
            simulated = federation.simulate(setting, self.stream("round"), others_known=known)
            predicted = simulated.predicted_error(VICTIM) if known and estimate is jointly else None
            guess = estimate(simulated.observation, VICTIM).update
            yield Case.of(name, simulated, guess, predicted=predicted)

    def headline(self, findings: Findings) -> str:
        """What all uploads give away that each alone hides."""
        psnr = {row["case"]: row["psnr"] for row in findings.rows}
        return (
            f"All uploads of a round with τ = 0 together give the picture away "
            f"({psnr['τ = 0, all uploads']:.1f} dB) though each alone hides it "
            f"({psnr['τ = 0, upload alone']:.1f} dB); with calibrated τ² the same attack gets "
            f"{psnr['calibrated τ², all uploads']:.1f} dB."
        )

    def sweep(self, federation: AttackedFederation, findings: Findings, progress: Progress) -> None:
        """The error of the joint estimate over tau^2, measured and as the accountant predicts it."""
        import numpy as np

        setting = self.setting()
        chosen = float(federation.simulate(setting, self.stream("round")).plan.tau2[0])
        curve: dict[str, list[float]] = {"tau2": [], "measured": [], "predicted": []}
        findings.curves |= {"sweep": curve, "calibrated_tau2": chosen}
        grid = np.geomspace(1e-10 * chosen, 100.0 * chosen, self.points)
        for number, tau2 in enumerate(grid.tolist(), start=1):
            simulated = federation.simulate(setting.with_plan(tau2=tau2), self.stream("round"))
            guess = attacks.estimates.estimate_jointly(simulated.observation, VICTIM)
            curve["tau2"].append(tau2)
            curve["measured"].append(attacks.rounds.relative_error(guess.update, simulated.updates[VICTIM]))
            curve["predicted"].append(simulated.predicted_error(VICTIM))
            progress("sweep over τ²", number, self.points, f"τ² = {tau2:.2g}")

    def charts(self, findings: Findings) -> list[Chart]:
        """The losses, and the error of the joint estimate over tau^2, with the tau^2 that calibration gives."""
        from niss.charts import Curves, measured_against

        sweep = findings.curves.get("sweep")
        if sweep is None:
            return super().charts(findings)
        errors = Curves(
            title="Error of the joint estimate over the distortion τ²",
            across="Distortion τ²",
            up="Error ÷ update",
            series=measured_against("accountant", sweep["tau2"], sweep["predicted"], sweep["measured"]),
            log="xy",
            limits={"calibrated": findings.curves["calibrated_tau2"]},
            head="τ²",
        )
        return [*super().charts(findings), errors]
