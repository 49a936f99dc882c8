"""`niss attack dlg`: the paper's Figure 4, and the same from the joint view."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch

from niss.attacks.dlg import DlgSettings
from niss.attacks.estimates import estimate_alone, estimate_jointly
from niss.attacks.experiments.picture_cases import COLUMNS, Case, run_dlg_case
from niss.attacks.findings import Findings, Progress
from niss.attacks.pictures import DEFAULT_PICTURE, Pictures, load_pictures
from niss.attacks.plans import Setting, check_methods, check_view, make_setting
from niss.attacks.scene import VICTIM, make_scene
from niss.attacks.scores import blind_guess
from niss.learning import choose_device
from niss.randomness import SimStream


@dataclass(frozen=True, kw_only=True)
class DlgExperiment:
    """DLG against one picture, once per method.

    view    `alone`: the server looks at the victim's upload by itself, as the paper does; `joint`: it uses
            all uploads and knows the others' updates
    """

    image: str = DEFAULT_PICTURE
    label: int | None = None
    methods: tuple[str, ...] = ("fedavg", "dp-fedavg", "niss")
    view: str = "alone"
    plan: str = "default"
    clients: int = 30
    epsilon: float | None = None
    delta: float | None = None
    tau2: float | None = None
    seed: int = 1
    device: str = "auto"
    dlg: DlgSettings = field(default_factory=DlgSettings)

    def start(self) -> Findings:
        check_methods(self.methods)
        check_view(self.view)
        self._parts()
        return Findings("dlg", asdict(self), dict(COLUMNS))

    def _parts(self) -> tuple[Setting, SimStream, torch.device, Pictures]:
        setting = make_setting(
            self.plan, clients=self.clients, epsilon=self.epsilon, delta=self.delta, tau2=self.tau2
        )
        pictures = load_pictures(self.image, label=self.label)
        device = torch.device(choose_device(self.device, field="--device"))
        return setting, SimStream(self.seed), device, pictures

    def run(self, findings: Findings, progress: Progress) -> None:
        setting, stream, device, pictures = self._parts()
        scene = make_scene(
            pictures,
            model="lenet",
            clients=self.clients,
            stream=stream.child("scene"),
            learning_rate=setting.learning_rate,
        )
        findings.pictures["original"] = pictures.pixels[0]
        findings.curves["blind_guess_psnr"] = blind_guess(pictures.pixels)
        guess = estimate_alone if self.view == "alone" else estimate_jointly
        for method in self.methods:
            own = setting.with_method(method)
            staged = own.stage(
                scene.updates,
                scene.weights.numpy(),
                stream=stream.child("round"),
                knows_updates_of=range(1, self.clients),
            )
            run_dlg_case(
                Case(method, own, staged, guess(staged.observation, VICTIM).update),
                scene,
                self.dlg,
                findings,
                stream=stream.child("dlg"),
                device=device,
                progress=progress,
            )
        findings.headline = self._headline(findings)
        findings.finished = True

    def _headline(self, findings: Findings) -> str:
        shown = "; ".join(f"{row['case']} {row['psnr']:.1f} dB" for row in findings.rows)
        blind = findings.curves["blind_guess_psnr"]
        return f"PSNR of the recovered picture: {shown}. An even grey would score {blind:.1f} dB."
