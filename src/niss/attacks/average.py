"""`niss attack average`: a server that never moves the model and averages a client's uploads over the rounds."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Annotated, ClassVar

from niss import attacks
from niss.attacks import experiment
from niss.attacks.experiment import VICTIM, Findings, Help, Progress
from niss.claims import rounded_up
from niss.errors import PrivacyError


@dataclass(frozen=True, kw_only=True)
class AverageExperiment(experiment.PictureExperiment):
    """Average a client's uploads over rounds of a model that never moves; the ledger says when to stop.

    The same update under fresh noise, round after round; the graph is complete, so that every round has the same plan,
    and each is estimated from all uploads. After n rounds the error has fallen to 1 / sqrt(n) of that of one, and
    sqrt(n) times its mu is spent. The ledger charges every round until it refuses one.

    participations   rounds that the budget covers
    rounds           rounds that the server would like to have

    Examples:
        niss attack average --rounds 3000 --out runs/average
    """

    name = "average"
    columns: ClassVar[dict[str, str]] = {
        "rounds": "Rounds",
        **experiment.PICTURE_COLUMNS,
        "mu": "μ spent",
        "epsilon": "ε spent",
        "within_budget": "Ledger allows it",
    }

    clients: experiment.Clients = 6
    participations: Annotated[int, Help("Rounds that the budget covers.", least=1)] = 1
    rounds: Annotated[int, Help("Rounds the server averages over.", least=1)] = 10_000

    def setting(self) -> attacks.Setting:
        """A complete graph, and a budget for `participations` rounds."""
        setting = self.make_setting(neighbours=self.clients - 1.0)
        return setting.with_plan(graph="complete", participations=self.participations)

    def run(self, findings: Findings, progress: Progress) -> None:
        """Average the estimates of all rounds; a row after 1, 3, 10, 30, ... rounds."""
        from niss.accounting import Ledger
        from niss.mechanism import gdp_epsilon

        setting, federation = self.setting(), self.train(findings)
        weights, others = federation.weights.numpy(), range(1, self.clients)
        ledger = Ledger.empty(self.clients, setting.plan.budget(self.clients))
        allowed, refused = 0, False
        first = setting.simulate(federation.updates, weights, stream=self.stream("round", 0))
        truth, mu = first.updates[VICTIM], float(first.plan.joint_mu[VICTIM])
        total = 0.0 * truth
        marks = {part * 10**power for power in range(10) for part in (1, 3)} | {self.rounds}
        for number in range(1, self.rounds + 1):
            simulated = setting.simulate(
                federation.updates,
                weights,
                stream=self.stream("round", number),
                knows_updates_of=others,
                public=first.observation.plan,
            )
            if not refused:
                plan = simulated.plan
                try:
                    ledger.charge(plan.participants, plan.joint_mu, plan.marginal_mu)
                    allowed = number
                except PrivacyError:
                    refused = True
            total += attacks.estimate_jointly(simulated.observation, VICTIM).update
            progress("rounds", number, self.rounds, "")
            if number not in marks:
                continue
            guess, spent = total / number, mu * sqrt(number)
            picture, psnr = federation.read_picture(guess)
            findings.rows.append(
                {
                    "rounds": number,
                    "error": attacks.relative_error(guess, truth),
                    "predicted_error": first.predicted_error(VICTIM) / sqrt(number),
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
            f"ε = {rounded_up(last['epsilon'])}. The ledger refuses every round after the first {allowed}."
        )
        findings.finished = True

    def draw(self, findings: Findings) -> attacks.drawing.Figure | None:
        """The picture, the error and the PSNR over the rounds, and where the ledger stops them."""
        return attacks.drawing.draw_steps(findings, "rounds", "Rounds with the same model")
