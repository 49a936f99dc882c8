"""`niss attack joint`: why the noise is calibrated for a server that sees every upload."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from niss.attacks.experiment import (
    DEFAULT_PICTURE,
    Clients,
    Delta,
    Device,
    Epsilon,
    Experiment,
    Findings,
    Image,
    Iterations,
    Label,
    Progress,
    Restarts,
    Seed,
    check_at_least,
)
from niss.attacks.invert import COLUMNS, Case, nest_search, run_case

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from niss.attacks.federation import Federation
    from niss.attacks.inversion import DlgSettings
    from niss.attacks.rounds import Setting, SimulatedRound
    from niss.randomness import SimStream


@dataclass(frozen=True, kw_only=True)
class JointExperiment(Experiment):
    """NISS with tau = 0 and with calibrated tau^2: the victim's upload alone, then all uploads together.

    points   values of tau^2 in the sweep, which compares the error of the joint estimate with the accountant's
    """

    name: ClassVar[str] = "joint"
    summary: ClassVar[str] = (
        "Put all uploads together: at tau = 0 the victim's picture falls out, at the calibrated tau^2 it does not."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "niss attack joint --out runs/joint",
        "niss attack joint --image photo.png --label 3 --json",
    )
    columns: ClassVar[dict[str, str]] = {**COLUMNS, "predicted": "Predicted noise"}

    image: Image = DEFAULT_PICTURE
    label: Label = None
    clients: Clients = 30
    epsilon: Epsilon = None
    delta: Delta = None
    points: int = 13
    iterations: Iterations = 2000
    restarts: Restarts = 4
    seed: Seed = 1
    device: Device = "auto"

    def check(self) -> None:
        """Refuse what cannot be used."""
        from niss.attacks.pictures import load_pictures
        from niss.learning import choose_device
        from niss.randomness import SimStream

        check_at_least(2, points=self.points)
        self._search()
        self._setting()
        choose_device(self.device, field="--device")
        SimStream(self.seed)
        load_pictures(self.image, label=self.label)

    def settings(self) -> dict[str, Any]:
        """The options, those of the search under `dlg`."""
        return nest_search(super().settings(), "dlg", self._search())

    def _search(self) -> DlgSettings:
        from niss.attacks.inversion import DlgSettings

        return DlgSettings(iterations=self.iterations, restarts=self.restarts)

    def _setting(self) -> Setting:
        from niss.attacks.rounds import make_setting

        return make_setting("default", clients=self.clients, epsilon=self.epsilon, delta=self.delta)

    def run(self, findings: Findings, progress: Progress) -> None:
        """DLG on four guesses of the same update, then the sweep over tau^2."""
        import torch

        from niss.attacks.estimates import estimate_alone, estimate_jointly
        from niss.attacks.federation import VICTIM, make_federation
        from niss.attacks.inversion import deep_leakage
        from niss.attacks.pictures import blind_guess, load_pictures
        from niss.learning import choose_device
        from niss.randomness import SimStream

        pictures, calibrated = load_pictures(self.image, label=self.label), self._setting()
        stream = SimStream(self.seed)
        federation = make_federation(
            pictures, model="lenet", clients=self.clients, stream=stream.child("scene")
        )
        findings.pictures["originals"] = pictures.pixels
        findings.curves["blind_guess_psnr"] = blind_guess(pictures.pixels)
        bare = calibrated.with_plan(tau2=0.0)
        everyone = range(1, self.clients)
        cases = (
            ("τ = 0, upload alone", bare, everyone, estimate_alone),
            ("τ = 0, all uploads", bare, everyone, estimate_jointly),
            ("τ = 0, others unknown", bare, range(0), estimate_jointly),
            ("calibrated τ², all uploads", calibrated, everyone, estimate_jointly),
        )
        for name, setting, known, estimate in cases:
            simulated = _simulate(setting, federation, stream, known)
            run_case(
                Case(name, simulated, estimate(simulated.observation, VICTIM).update),
                federation,
                partial(deep_leakage, settings=self._search()),
                findings,
                stream=stream.child("dlg"),
                device=torch.device(choose_device(self.device, field="--device")),
                progress=progress,
            )
            predictable = estimate is estimate_jointly and len(known) > 0
            findings.rows[-1]["predicted"] = simulated.predicted_error(VICTIM) if predictable else None
        self._sweep(findings, federation, calibrated, stream, progress)
        psnr = {row["case"]: row["psnr"] for row in findings.rows}
        findings.headline = (
            f"All uploads of a round with τ = 0 together give the picture away "
            f"({psnr['τ = 0, all uploads']:.1f} dB) though each alone hides it "
            f"({psnr['τ = 0, upload alone']:.1f} dB); with calibrated τ² the same attack gets "
            f"{psnr['calibrated τ², all uploads']:.1f} dB."
        )
        findings.finished = True

    def _sweep(
        self,
        findings: Findings,
        federation: Federation,
        setting: Setting,
        stream: SimStream,
        progress: Progress,
    ) -> None:
        """The error of the joint estimate over tau^2, measured and as the accountant predicts it."""
        import numpy as np

        from niss.attacks.estimates import estimate_jointly
        from niss.attacks.federation import VICTIM
        from niss.attacks.rounds import relative_error

        others = range(1, self.clients)
        chosen = float(_simulate(setting, federation, stream, others).plan.tau2[0])
        curve: dict[str, list[float]] = {"tau2": [], "measured": [], "predicted": []}
        findings.curves["sweep"] = curve
        findings.curves["calibrated_tau2"] = chosen
        grid = np.geomspace(1e-10 * chosen, 100.0 * chosen, self.points)
        for number, tau2 in enumerate(grid.tolist(), start=1):
            simulated = _simulate(setting.with_plan(tau2=tau2), federation, stream, others)
            guess = estimate_jointly(simulated.observation, VICTIM)
            curve["tau2"].append(tau2)
            curve["measured"].append(relative_error(guess.update, simulated.updates[VICTIM]))
            curve["predicted"].append(simulated.predicted_error(VICTIM))
            progress("sweep over τ²", number, self.points, f"τ² = {tau2:.2g}")

    def draw(self, findings: Findings) -> Figure | None:
        """A strip of pictures for each case, the losses, and the sweep over tau^2."""
        from niss.attacks.drawing import draw_strips

        return draw_strips(findings)


def _simulate(setting: Setting, federation: Federation, stream: SimStream, known: range) -> SimulatedRound:
    """The same round each time, but for the setting and whose updates the server knows."""
    return setting.simulate(
        federation.updates, federation.weights.numpy(), stream=stream.child("round"), knows_updates_of=known
    )
