"""`niss attack invert`: Inverting Gradients on the models of the experiments, batches and several local steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from niss.attacks.estimates import estimate_alone, estimate_jointly
from niss.attacks.experiments.picture_cases import COLUMNS, Case, case_row
from niss.attacks.findings import Findings, Progress
from niss.attacks.inverting import InvertSettings, invert_update
from niss.attacks.pictures import DEFAULT_PICTURE, Pictures, load_pictures
from niss.attacks.plans import Setting, check_methods, check_view, make_setting
from niss.attacks.scene import MODELS, VICTIM, make_scene
from niss.attacks.scores import best_order, blind_guess
from niss.errors import ConfigError
from niss.learning import choose_device
from niss.randomness import SimStream


@dataclass(frozen=True, kw_only=True)
class InvertExperiment:
    """Cosine distance and total variation, once per method, on one client's update."""

    image: str = DEFAULT_PICTURE
    label: int | None = None
    batch: int = 1
    model: str = "mlp"
    steps: int = 1
    methods: tuple[str, ...] = ("fedavg", "dp-fedavg", "niss")
    view: str = "alone"
    plan: str = "default"
    clients: int = 30
    epsilon: float | None = None
    delta: float | None = None
    tau2: float | None = None
    seed: int = 1
    device: str = "auto"
    search: InvertSettings = field(default_factory=InvertSettings)

    def start(self) -> Findings:
        check_methods(self.methods)
        check_view(self.view)
        if self.model not in MODELS:
            raise ConfigError(
                f"unknown model {self.model!r}", field="--model", hint="use one of: " + ", ".join(MODELS)
            )
        if self.steps < 1:
            raise ConfigError(f"must be at least 1, not {self.steps}", field="--steps")
        self._parts()
        choose_device(self.device, field="--device")
        SimStream(self.seed)
        return Findings("invert", asdict(self), {**COLUMNS, "loss": "1 − cos"})

    def _parts(self) -> tuple[Setting, Pictures]:
        setting = make_setting(
            self.plan, clients=self.clients, epsilon=self.epsilon, delta=self.delta, tau2=self.tau2
        )
        return setting, load_pictures(self.image, count=self.batch, label=self.label)

    def run(self, findings: Findings, progress: Progress) -> None:
        (setting, pictures), stream = self._parts(), SimStream(self.seed)
        scene = make_scene(
            pictures,
            model=self.model,
            clients=self.clients,
            stream=stream.child("scene"),
            learning_rate=setting.learning_rate,
            steps=self.steps,
        )
        findings.pictures["original"] = pictures.pixels
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
            case = Case(method, own, staged, guess(staged.observation, VICTIM).update)
            found = invert_update(
                scene.as_gradient(case.guess),
                scene.imitation(own.plan),
                scene.pictures,
                self.search,
                stream=stream.child("search"),
                device=torch.device(choose_device(self.device, field="--device")),
                progress=partial(progress, method),
            )
            findings.rows.append(case_row(case, scene, found))
            findings.curves.setdefault("losses", {})[method] = found.losses
            ordered = found.pictures[best_order(found.pictures, pictures.pixels)]
            findings.pictures.setdefault("recovered", {})[method] = ordered
        shown = "; ".join(f"{row['case']} {row['psnr']:.1f} dB" for row in findings.rows)
        blind = findings.curves["blind_guess_psnr"]
        findings.headline = (
            f"PSNR of the recovered pictures: {shown}. An even grey would score {blind:.1f} dB."
        )
        findings.finished = True
