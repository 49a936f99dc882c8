"""`niss attack collude`: what neighbours who tell the server their shares give away, for each distortion."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Le
from typing_extensions import Doc

from niss import attacks
from niss.attacks import experiment
from niss.attacks.experiment import VICTIM, Findings, Progress, Row, distortion_names
from niss.errors import ConfigError
from niss.settings import OneOf, Positive

if TYPE_CHECKING:
    from niss.attacks.federation import AttackedFederation
    from niss.attacks.rounds import RoundSetting, SimulatedRound
    from niss.charts import Chart, Curves
    from niss.randomness import SimStream

_PROJECTIONS = 40
_AXES = {
    "rho": ("Neighbours that collude", "Colluding"),
    "tau2": ("Distortion τ², all neighbours collude", "τ²"),
}


@dataclass(frozen=True, kw_only=True)
class ColludeExperiment(experiment.ReadingExperiment):
    """Neighbours tell the server their shares: subtract, project, pick coordinates; sweeps over rho and tau^2.

    Sweeps over rho (at `tau2`) and over tau^2 (at rho = 1). What the colluders know of the victim's shares is first
    only subtracted, then used as well as the distortion allows (`niss.attacks.estimates`); both errors stand beside
    the accountant's prediction. For a distortion with one factor per share the projection is repeated over many
    rounds, where its error should be sqrt(v / h) for v known shares and h coordinates.

    distortions   of `niss.mechanism.DISTORTIONS`
    rho           parts of the victim's neighbours that collude, in a random order that is the same for all
    points        values of tau^2 in its own sweep, from 1e-9 of `tau2` upwards

    Examples:
        niss attack collude --out runs/collude
        niss attack collude --distortions coordinate,additive --neighbours 2 --rho 0,0.5,1
    """

    name = "collude"
    columns: ClassVar[dict[str, str]] = {
        "distortion": "Distortion",
        "rho": "ρ",
        "tau2": "τ²",
        "subtract_error": "Error, subtract",
        "error": "Error, exploit",
        "predicted_error": "Error, predicted",
        "fraction": "Recovered",
        "predicted_fraction": "Recovered, most",
        "best_coordinates": "Best 1 % ÷ all",
        "psnr": "PSNR, dB",
        "predicted_psnr": "PSNR, most",
    }

    hidden: experiment.Hidden = 16
    neighbours: experiment.Neighbours = 10.0
    distortions: Annotated[
        tuple[Annotated[str, OneOf(distortion_names)], ...],
        Doc("Comma-separated: scalar, coordinate, additive."),
    ] = ("scalar", "coordinate", "additive")
    rho: Annotated[
        tuple[Annotated[float, Ge(0), Le(1)], ...],
        Doc("Comma-separated parts of the neighbours that collude."),
    ] = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
    tau2: Annotated[Positive, Doc("Distortion in the sweep over rho; without one see `joint`.")] = 1.0
    points: Annotated[int, Ge(2), Doc("Values of tau^2 in its own sweep, at rho = 1.")] = 6

    def check(self) -> None:
        """Refuse what cannot be used."""
        super().check()
        if self.neighbours > self.clients - 2:
            raise ConfigError(
                f"{self.neighbours:g} neighbours among {self.clients} clients leave nobody honest",
                field="--neighbours",
                hint=f"at most {self.clients - 2}",
            )

    def setting(self, **changes: Any) -> RoundSetting:
        """The plan with so many neighbours, and what else is to be changed."""
        return self.make_setting(neighbours=self.neighbours).with_plan(**changes)

    def attack(self, findings: Findings, progress: Progress) -> None:
        """One round for each distortion, rho and tau^2, attacked with and without the colluders' best use of shares."""
        import numpy as np

        from niss.mechanism import distortion_named

        federation = self.train(findings)
        smaller = np.geomspace(1e-9 * self.tau2, self.tau2, self.points)[:-1]
        cases = [(rho, self.tau2, "rho") for rho in self.rho]
        cases += [(1.0, tau2, "tau2") for tau2 in smaller.tolist()]
        for distortion in self.distortions:
            for number, (rho, tau2, sweep) in enumerate(cases, start=1):
                setting = self.setting(distortion=distortion, tau2=tau2)
                simulated = self._simulate(federation, setting, rho, self.stream("round"))
                row = _row(federation, simulated, self.stream("predicted"))
                findings.rows.append(
                    {"distortion": distortion, "rho": rho, "tau2": tau2, "sweep": sweep, **row}
                )
                progress(distortion, number, len(cases), f"ρ = {rho:g}, τ² = {tau2:.2g}")
        one_factor = [name for name in self.distortions if distortion_named(name).one_factor]
        if one_factor:
            findings.curves["projection"] = self._projection(one_factor[0], federation, progress)

    def _simulate(
        self,
        federation: AttackedFederation,
        setting: RoundSetting,
        rho: float,
        stream: SimStream,
    ) -> SimulatedRound:
        """A round in which the first part `rho` of the victim's neighbours, in a random order, collude."""
        # The graph follows from the beacon alone, so a first look without noise tells who the neighbours are.
        plan = setting.plan.for_round(
            range(self.clients),
            weights=1.0 / self.clients,
            records=1.0,
            beacon=stream.child("beacon").generator().bytes(32),
        )
        near = plan.graph.neighbours(VICTIM)
        order = stream.child("colluders").generator().permutation(near.size)
        colluders = near[order[: round(rho * near.size)]].tolist()
        return federation.simulate(setting, stream, colluders=colluders, keep_factors=True)

    def _projection(
        self, distortion: str, federation: AttackedFederation, progress: Progress
    ) -> dict[str, float]:
        """The root mean square error of the projection at rho = 1 over many rounds, beside sqrt(v / h)."""
        squares, known = [], 0
        setting = self.setting(distortion=distortion, tau2=self.tau2)
        for number in range(_PROJECTIONS):
            simulated = self._simulate(federation, setting, 1.0, self.stream("projection", number))
            guess = attacks.estimates.estimate_jointly(simulated.observation, VICTIM)
            squares.append(attacks.rounds.relative_error(guess.update, simulated.updates[VICTIM]) ** 2)
            known = len(simulated.observation.received(VICTIM))
            progress("projection", number + 1, _PROJECTIONS, "")
        coordinates = federation.updates.shape[1]
        return {
            "measured": sqrt(sum(squares) / len(squares)),
            "predicted": sqrt(known / coordinates),
            "known_shares": float(known),
            "coordinates": float(coordinates),
        }

    def headline(self, findings: Findings) -> str:
        """What is recovered when all neighbours collude."""
        parts = [
            f"{row['distortion']} {100 * row['fraction']:.3g} %"
            for row in findings.rows
            if row["rho"] == 1.0 and row["sweep"] == "rho"
        ]
        text = (
            "Recovered of the update when all neighbours collude: " + "; ".join(parts) + "." if parts else ""
        )
        if "projection" in findings.curves:
            projection = findings.curves["projection"]
            text += (
                f" Projection leaves a relative error of {projection['measured']:.3g}, "
                f"sqrt(v / h) is {projection['predicted']:.3g}."
            )
        return text

    def charts(self, findings: Findings) -> list[Chart]:
        """The error and the PSNR over rho, and both over tau^2 at rho = 1."""
        found: list[Chart] = []
        for over in _AXES:
            rows = [
                row for row in findings.rows if row["sweep"] == over or (over == "tau2" and row["rho"] == 1.0)
            ]
            if rows:
                found += [_curves(findings, rows, over, key) for key in ("error", "psnr")]
        return found


def _row(
    federation: AttackedFederation,
    simulated: SimulatedRound,
    stream: SimStream,
) -> Row:
    """What subtracting the known shares gets, what the best attack gets, and what the accountant expects of it."""
    from niss.mechanism import add_gaussian, distortion_named

    truth, seen = simulated.updates[VICTIM], simulated.observation
    subtracted = attacks.estimates.estimate_jointly(seen, VICTIM, exploit=False)
    guess = attacks.estimates.estimate_jointly(seen, VICTIM)
    noise = simulated.predicted_noise(VICTIM)
    left_out = 0.0
    if distortion_named(simulated.plan.plan.distortion).one_factor:
        left_out = len(seen.received(VICTIM)) / truth.size
    expected = truth.copy()
    add_gaussian(expected, sqrt(noise), stream)
    return {
        "subtract_error": attacks.rounds.relative_error(subtracted.update, truth),
        "error": attacks.rounds.relative_error(guess.update, truth),
        "predicted_error": sqrt(noise * truth.size / float((truth**2).sum()) + left_out),
        # What the adversary expects of a coordinate: the clip, spread evenly.
        "fraction": attacks.rounds.recovered_fraction(
            guess.shrunk(simulated.plan.plan.clip**2 / truth.size), truth
        ),
        "predicted_fraction": simulated.predicted_fraction(VICTIM),
        "best_coordinates": attacks.estimates.best_coordinates(guess, truth),
        "psnr": federation.read_picture(guess.update, guess.variance)[1],
        "predicted_psnr": federation.read_picture(expected)[1],
        "colluders": len(seen.colluders),
    }


def _curves(findings: Findings, rows: list[Row], over: str, key: str) -> Curves:
    """One quantity over rho or tau^2: a line for the accountant and points for the attack, per distortion.

    The values of rho stand side by side, evenly: what happens lies between the last two.
    """
    from niss.charts import Curves, Series, numbered, points

    up, log = ("Error ÷ update", "y") if key == "error" else ("PSNR of the picture, dB", "")
    values = sorted({float(row[over]) for row in rows})
    series = []
    for number, kind in enumerate(dict.fromkeys(row["distortion"] for row in rows)):
        own = sorted((row for row in rows if row["distortion"] == kind), key=lambda row: float(row[over]))
        at, look = [values.index(float(row[over])) for row in own], numbered(number)
        predicted, measured = ([row[name] for row in own] for name in (f"predicted_{key}", key))
        series.append(Series(f"{kind}: accountant", look, points(at, predicted, log)))
        series.append(Series(f"{kind}: attack", look, points(at, measured, log), line=False))
    reached = [y for one in series if not one.line for _, y in one.points]
    words, head = _AXES[over]
    return Curves(
        title=f"{up.partition(',')[0]} over {'colluders' if over == 'rho' else 'the distortion τ²'}",
        across=words,
        up=up,
        series=series,
        log=log,
        ticks=tuple(
            f"{100 * value:.3g} %" if over == "rho" else f"{value:.1g}".replace("e-0", "e-")
            for value in values
        ),
        levels=experiment.grey_level(findings) if key == "psnr" else {},
        head=head,
        # Where the accountant promises nothing its line leaves the chart.
        least=0.4 * min(reached) if log else 0.0,
        most=None if log else 1.15 * max(reached),
    )
