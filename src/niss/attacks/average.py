"""`niss attack average`: a server that never moves the model and averages a client's uploads over the rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from niss.attacks.experiment import (
    DEFAULT_PICTURE,
    Clients,
    Delta,
    Epsilon,
    Experiment,
    Findings,
    Help,
    Hidden,
    Image,
    Progress,
    Seed,
    check_at_least,
)
from niss.errors import PrivacyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from niss.attacks.rounds import Setting


@dataclass(frozen=True, kw_only=True)
class AverageExperiment(Experiment):
    """The same update under fresh noise, round after round; the budget covers `participations` of them.

    The graph is complete, so that every round has the same plan, and each round is estimated from all uploads.
    """

    name: ClassVar[str] = "average"
    summary: ClassVar[str] = (
        "Average a client's uploads over rounds of a model that never moves; the ledger says when to stop."
    )
    examples: ClassVar[tuple[str, ...]] = ("niss attack average --rounds 3000 --out runs/average",)
    columns: ClassVar[dict[str, str]] = {
        "rounds": "Rounds",
        "error": "Error ÷ update",
        "predicted_error": "Error, predicted",
        "psnr": "PSNR, dB",
        "mu": "μ spent",
        "epsilon": "ε spent",
        "within_budget": "Ledger allows it",
    }

    image: Image = DEFAULT_PICTURE
    clients: Clients = 6
    epsilon: Epsilon = None
    delta: Delta = None
    participations: Annotated[int, Help("Rounds that the budget covers.")] = 1
    rounds: Annotated[int, Help("Rounds the server averages over.")] = 10_000
    hidden: Hidden = 4
    seed: Seed = 1

    def check(self) -> None:
        """Refuse what cannot be used."""
        from niss.attacks.pictures import load_pictures
        from niss.randomness import SimStream

        check_at_least(1, rounds=self.rounds, participations=self.participations)
        self._setting()
        SimStream(self.seed)
        load_pictures(self.image)

    def _setting(self) -> Setting:
        from niss.attacks.rounds import make_setting

        return make_setting(
            "default",
            clients=self.clients,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=float(self.clients - 1),
        ).with_plan(graph="complete", participations=self.participations)

    def run(self, findings: Findings, progress: Progress) -> None:
        """Average the estimates of all rounds; a row after 1, 3, 10, 30, ... rounds."""
        import numpy as np

        from niss.accounting import Ledger
        from niss.attacks.estimates import estimate_jointly
        from niss.attacks.federation import VICTIM, make_federation
        from niss.attacks.pictures import blind_guess, load_pictures
        from niss.attacks.rounds import relative_error
        from niss.mechanism import gdp_epsilon
        from niss.randomness import SimStream

        setting, stream, pictures = self._setting(), SimStream(self.seed), load_pictures(self.image)
        federation = make_federation(
            pictures, model="mlp", hidden=(self.hidden,), clients=self.clients, stream=stream.child("scene")
        )
        weights = federation.weights.numpy()
        findings.pictures["originals"] = pictures.pixels
        findings.curves["blind_guess_psnr"] = blind_guess(pictures.pixels)
        ledger = Ledger.empty(self.clients, setting.plan.budget(self.clients))
        allowed, refused = 0, False
        first = setting.simulate(federation.updates, weights, stream=stream.child("round", 0))
        truth, mu = first.updates[VICTIM], float(first.plan.joint_mu[VICTIM])
        total = np.zeros_like(truth)
        marks = {part * 10**power for power in range(10) for part in (1, 3)} | {self.rounds}
        for number in range(1, self.rounds + 1):
            simulated = setting.simulate(
                federation.updates,
                weights,
                stream=stream.child("round", number),
                knows_updates_of=range(1, self.clients),
                public=first.observation.plan,
            )
            if not refused:
                try:
                    ledger.charge(
                        np.arange(self.clients), simulated.plan.joint_mu, simulated.plan.marginal_mu
                    )
                    allowed = number
                except PrivacyError:
                    refused = True
            total += estimate_jointly(simulated.observation, VICTIM).update
            progress("rounds", number, self.rounds, "")
            if number not in marks:
                continue
            guess = total / number
            picture, psnr = federation.read_picture(guess)
            spent = mu * float(np.sqrt(number))
            findings.rows.append(
                {
                    "rounds": number,
                    "error": relative_error(guess, truth),
                    "predicted_error": first.predicted_error(VICTIM) / float(np.sqrt(number)),
                    "psnr": psnr,
                    "mu": spent,
                    "epsilon": gdp_epsilon(spent, setting.plan.delta),
                    "within_budget": number <= allowed,
                }
            )
            findings.pictures.setdefault("steps", []).append((number, picture))
        findings.curves["allowed_rounds"] = allowed
        last = findings.rows[-1]
        findings.headline = (
            f"{last['rounds']} rounds of a still model bring the error from {findings.rows[0]['error']:.3g} to "
            f"{last['error']:.3g} times the update and the picture to {last['psnr']:.1f} dB; that spends "
            f"ε = {last['epsilon']:.3g}. The ledger refuses every round after the first {allowed}."
        )
        findings.finished = True

    def draw(self, findings: Findings) -> Figure | None:
        """The picture, the error and the PSNR over the rounds, and where the ledger stops them."""
        from niss.attacks.drawing import draw_steps

        return draw_steps(findings, "rounds", "Rounds of a still model")
