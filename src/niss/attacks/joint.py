"""`niss attack joint`: why the noise is calibrated for a server that sees every upload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from niss import attacks
from niss.attacks.experiment import VICTIM, Findings, Progress, check_at_least
from niss.attacks.invert import COLUMNS, Case, SearchExperiment

if TYPE_CHECKING:
    from niss.charts import Chart


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
        niss attack joint --image photo.png --label 3 --json
    """

    name = "joint"
    columns: ClassVar[dict[str, str]] = {**COLUMNS, "predicted": "Predicted noise"}

    points: int = 13

    def check(self) -> None:
        """Refuse what cannot be used."""
        check_at_least(2, self.points, "points")
        super().check()

    def run(self, findings: Findings, progress: Progress) -> None:
        """DLG on four guesses of the same update, then the sweep over tau^2."""
        alone, jointly = attacks.estimate_alone, attacks.estimate_jointly
        calibrated = self.setting()
        bare, others = calibrated.with_plan(tau2=0.0), range(1, self.clients)
        federation = attacks.make_federation(
            self.load_pictures(), model="lenet", clients=self.clients, stream=self.stream("scene")
        )
        cases = (
            ("τ = 0, upload alone", bare, others, alone),
            ("τ = 0, all uploads", bare, others, jointly),
            ("τ = 0, others unknown", bare, range(0), jointly),
            ("calibrated τ², all uploads", calibrated, others, jointly),
        )
        for name, setting, known, estimate in cases:
            simulated = self._simulate(setting, federation, known)
            case = Case(name, simulated, estimate(simulated.observation, VICTIM).update)
            row = self.run_case(case, federation, findings, progress)
            predictable = estimate is jointly and len(known) > 0
            row["predicted"] = simulated.predicted_error(VICTIM) if predictable else None
        self._sweep(findings, federation, calibrated, progress)
        psnr = {row["case"]: row["psnr"] for row in findings.rows}
        findings.headline = (
            f"All uploads of a round with τ = 0 together give the picture away "
            f"({psnr['τ = 0, all uploads']:.1f} dB) though each alone hides it "
            f"({psnr['τ = 0, upload alone']:.1f} dB); with calibrated τ² the same attack gets "
            f"{psnr['calibrated τ², all uploads']:.1f} dB."
        )
        findings.finished = True

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

    def _sweep(
        self,
        findings: Findings,
        federation: attacks.Federation,
        setting: attacks.Setting,
        progress: Progress,
    ) -> None:
        """The error of the joint estimate over tau^2, measured and as the accountant predicts it."""
        import numpy as np

        others = range(1, self.clients)
        chosen = float(self._simulate(setting, federation, others).plan.tau2[0])
        curve: dict[str, list[float]] = {"tau2": [], "measured": [], "predicted": []}
        findings.curves["sweep"] = curve
        findings.curves["calibrated_tau2"] = chosen
        grid = np.geomspace(1e-10 * chosen, 100.0 * chosen, self.points)
        for number, tau2 in enumerate(grid.tolist(), start=1):
            simulated = self._simulate(setting.with_plan(tau2=tau2), federation, others)
            guess = attacks.estimate_jointly(simulated.observation, VICTIM)
            curve["tau2"].append(tau2)
            curve["measured"].append(attacks.relative_error(guess.update, simulated.updates[VICTIM]))
            curve["predicted"].append(simulated.predicted_error(VICTIM))
            progress("sweep over τ²", number, self.points, f"τ² = {tau2:.2g}")

    def _simulate(
        self, setting: attacks.Setting, federation: attacks.Federation, known: range
    ) -> attacks.SimulatedRound:
        """The same round each time, but for the setting and whose updates the server knows."""
        return setting.simulate(
            federation.updates,
            federation.weights.numpy(),
            stream=self.stream("round"),
            knows_updates_of=known,
        )
