"""`niss attack average`: a server that never moves the model and averages a client's uploads over the rounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from niss.accounting import Ledger
from niss.attacks.estimates import estimate_jointly
from niss.attacks.findings import Findings, Progress
from niss.attacks.pictures import DEFAULT_PICTURE, load_pictures
from niss.attacks.plans import Setting, make_setting
from niss.attacks.reading import read_picture
from niss.attacks.scene import VICTIM, make_scene
from niss.attacks.scores import blind_guess, score_pictures
from niss.attacks.staging import relative_error
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import gdp_epsilon
from niss.randomness import SimStream

COLUMNS = {
    "rounds": "Rounds",
    "error": "Error ÷ update",
    "predicted_error": "Error, predicted",
    "psnr": "PSNR, dB",
    "mu": "μ spent",
    "epsilon": "ε spent",
    "within_budget": "Ledger allows it",
}


@dataclass(frozen=True, kw_only=True)
class AverageExperiment:
    """The same update under fresh noise, round after round; the budget covers `participations` of them.

    The graph is complete, so that every round has the same plan, and each round is estimated from all uploads.
    """

    image: str = DEFAULT_PICTURE
    clients: int = 6
    epsilon: float | None = None
    delta: float | None = None
    participations: int = 1
    rounds: int = 10_000
    hidden: int = 4
    seed: int = 1

    def start(self) -> Findings:
        for name in ("rounds", "participations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", field=f"--{name}")
        self._setting()
        SimStream(self.seed)
        load_pictures(self.image)
        return Findings("average", asdict(self), dict(COLUMNS))

    def _setting(self) -> Setting:
        setting = make_setting(
            "default",
            clients=self.clients,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=float(self.clients - 1),
        )
        plan = replace(setting.plan, graph="complete", participations=self.participations)
        return replace(setting, plan=plan)

    def run(self, findings: Findings, progress: Progress) -> None:
        setting, stream, pictures = self._setting(), SimStream(self.seed), load_pictures(self.image)
        scene = make_scene(
            pictures,
            model="mlp",
            hidden=(self.hidden,),
            clients=self.clients,
            stream=stream.child("scene"),
        )
        weights = scene.weights.numpy()
        findings.pictures["original"] = pictures.pixels[0]
        findings.curves["blind_guess_psnr"] = blind_guess(pictures.pixels)
        everyone = np.arange(self.clients)
        ledger = Ledger.empty(self.clients, setting.plan.budget(self.clients))
        allowed, refused = 0, False
        first = setting.stage(scene.updates, weights, stream=stream.child("round", 0))
        truth = first.updates[VICTIM]
        mu = float(first.plan.joint_mu[VICTIM])
        one = np.sqrt(first.predicted_variance(VICTIM) * truth.size / np.sum(truth**2)) * self.clients
        total = np.zeros_like(truth)
        marks = {10**power for power in range(10)} | {3 * 10**power for power in range(10)} | {self.rounds}
        for number in range(1, self.rounds + 1):
            staged = setting.stage(
                scene.updates,
                weights,
                stream=stream.child("round", number),
                knows_updates_of=range(1, self.clients),
                public=first.observation.plan,
            )
            if not refused:
                try:
                    ledger.charge(everyone, staged.plan.joint_mu, staged.plan.marginal_mu)
                    allowed = number
                except PrivacyError:
                    refused = True
            total += estimate_jointly(staged.observation, VICTIM).update
            progress("rounds", number, self.rounds, "")
            if number not in marks:
                continue
            guess = total / number
            shown = read_picture(scene.as_gradient(guess), scene.imitation(), scene.pictures)
            spent = mu * float(np.sqrt(number))
            findings.rows.append(
                {
                    "rounds": number,
                    "error": relative_error(guess, truth),
                    "predicted_error": float(one / np.sqrt(number)),
                    "psnr": score_pictures(shown, pictures.pixels).psnr,
                    "mu": spent,
                    "epsilon": gdp_epsilon(spent, setting.plan.delta),
                    "within_budget": number <= allowed,
                }
            )
            findings.pictures.setdefault("steps", []).append((number, shown[0]))
        findings.curves["allowed_rounds"] = allowed
        last = findings.rows[-1]
        findings.headline = (
            f"{last['rounds']} rounds of a still model bring the error from {findings.rows[0]['error']:.3g} to "
            f"{last['error']:.3g} times the update and the picture to {last['psnr']:.1f} dB; that spends "
            f"ε = {last['epsilon']:.3g}. The ledger refuses every round after the first {allowed}."
        )
        findings.finished = True
