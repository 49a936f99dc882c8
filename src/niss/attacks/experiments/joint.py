"""`niss attack joint`: why the noise is calibrated for a server that sees every upload."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from niss.attacks.dlg import DlgSettings
from niss.attacks.estimates import estimate_alone, estimate_jointly
from niss.attacks.experiments.picture_cases import COLUMNS, Case, run_dlg_case
from niss.attacks.findings import Findings, Progress
from niss.attacks.pictures import DEFAULT_PICTURE, load_pictures
from niss.attacks.plans import Setting, make_setting
from niss.attacks.scene import VICTIM, Scene, make_scene
from niss.attacks.scores import blind_guess
from niss.attacks.staging import Staged, relative_error
from niss.errors import ConfigError
from niss.learning import choose_device
from niss.randomness import SimStream


@dataclass(frozen=True, kw_only=True)
class JointExperiment:
    """NISS with tau = 0 and with calibrated tau^2: the victim's upload alone, then all uploads together."""

    image: str = DEFAULT_PICTURE
    label: int | None = None
    clients: int = 30
    epsilon: float | None = None
    delta: float | None = None
    points: int = 13
    seed: int = 1
    device: str = "auto"
    dlg: DlgSettings = field(default_factory=DlgSettings)

    def start(self) -> Findings:
        if self.points < 2:
            raise ConfigError(f"must be at least 2, not {self.points}", field="--points")
        self._setting()
        choose_device(self.device, field="--device")
        SimStream(self.seed)
        load_pictures(self.image, label=self.label)
        columns = {**COLUMNS, "predicted": "Predicted noise"}
        return Findings("joint", asdict(self), columns)

    def _setting(self) -> Setting:
        return make_setting("default", clients=self.clients, epsilon=self.epsilon, delta=self.delta)

    def run(self, findings: Findings, progress: Progress) -> None:
        pictures, setting = load_pictures(self.image, label=self.label), self._setting()
        stream = SimStream(self.seed)
        scene = make_scene(pictures, model="lenet", clients=self.clients, stream=stream.child("scene"))
        findings.pictures["original"] = pictures.pixels[0]
        findings.curves["blind_guess_psnr"] = blind_guess(pictures.pixels)
        bare, calibrated = setting.with_tau2(0.0), setting
        everyone = range(1, self.clients)
        plans = (
            ("τ = 0, upload alone", bare, everyone, False),
            ("τ = 0, all uploads", bare, everyone, True),
            ("τ = 0, others unknown", bare, (), True),
            ("calibrated τ², all uploads", calibrated, everyone, True),
        )
        for name, own, knows, jointly in plans:
            staged = _stage(own, scene, stream, knows)
            guess = estimate_jointly if jointly else estimate_alone
            case = Case(name, own, staged, guess(staged.observation, VICTIM).update)
            row = run_dlg_case(
                case,
                scene,
                self.dlg,
                findings,
                stream=stream.child("dlg"),
                device=torch.device(choose_device(self.device, field="--device")),
                progress=progress,
            )
            row["predicted"] = _predicted_error(staged) if jointly and len(knows) else None
        self._sweep(findings, scene, calibrated, stream, progress)
        by_name = {row["case"]: row for row in findings.rows}
        findings.headline = (
            f"All uploads of a round with τ = 0 together give the picture away "
            f"({by_name['τ = 0, all uploads']['psnr']:.1f} dB) though each alone hides it "
            f"({by_name['τ = 0, upload alone']['psnr']:.1f} dB); with calibrated τ² the same attack gets "
            f"{by_name['calibrated τ², all uploads']['psnr']:.1f} dB."
        )
        findings.finished = True

    def _sweep(
        self, findings: Findings, scene: Scene, setting: Setting, stream: SimStream, progress: Progress
    ) -> None:
        """The error of the joint estimate over tau^2, measured and as the accountant predicts it."""
        chosen = float(_stage(setting, scene, stream, range(1, self.clients)).plan.tau2[0])
        grid = np.geomspace(1e-10 * chosen, 100.0 * chosen, self.points)
        curve: dict[str, list[float]] = {"tau2": [], "measured": [], "predicted": []}
        findings.curves["sweep"] = curve
        findings.curves["calibrated_tau2"] = chosen
        for number, tau2 in enumerate(grid, start=1):
            staged = _stage(setting.with_tau2(float(tau2)), scene, stream, range(1, self.clients))
            guess = estimate_jointly(staged.observation, VICTIM)
            curve["tau2"].append(float(tau2))
            curve["measured"].append(relative_error(guess.update, staged.updates[VICTIM]))
            curve["predicted"].append(_predicted_error(staged))
            progress("sweep over τ²", number, self.points, f"τ² = {tau2:.2g}")


def _stage(setting: Setting, scene: Scene, stream: SimStream, knows: range | tuple[()]) -> Staged:
    return setting.stage(
        scene.updates, scene.weights.numpy(), stream=stream.child("round"), knows_updates_of=knows
    )


def _predicted_error(staged: Staged) -> float:
    """sqrt(h v) / (p ||x||): the error the accountant expects of the best estimate, relative to the update."""
    truth = staged.updates[VICTIM]
    variance = staged.predicted_variance(VICTIM) / float(staged.observation.share[VICTIM]) ** 2
    return float(np.sqrt(truth.size * variance / np.sum(truth**2)))
