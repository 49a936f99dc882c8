"""`niss attack collude`: what neighbours who tell the server their shares give away, for each distortion."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from niss.attacks.estimates import Estimate, estimate_jointly
from niss.attacks.findings import Findings, Progress, Row
from niss.attacks.pictures import DEFAULT_PICTURE, load_pictures
from niss.attacks.plans import Setting, make_setting
from niss.attacks.reading import read_picture
from niss.attacks.scene import VICTIM, Scene, make_scene
from niss.attacks.scores import blind_guess, score_pictures
from niss.attacks.staging import Staged, recovered_fraction, relative_error
from niss.errors import ConfigError
from niss.mechanism import DISTORTIONS, add_gaussian
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]

COLUMNS = {
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
_PROJECTIONS = 40
_BEST = 0.01


@dataclass(frozen=True, kw_only=True)
class ColludeExperiment:
    """Sweeps over rho (at `tau2`) and over tau^2 (at rho = 1); rho counts the victim's neighbours that collude."""

    image: str = DEFAULT_PICTURE
    distortions: tuple[str, ...] = tuple(DISTORTIONS)
    clients: int = 30
    neighbours: float = 10.0
    epsilon: float | None = None
    delta: float | None = None
    tau2: float = 1.0
    rhos: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
    points: int = 6
    hidden: int = 16
    seed: int = 1

    def start(self) -> Findings:
        for distortion in self.distortions:
            if distortion not in DISTORTIONS:
                raise ConfigError(
                    f"unknown distortion {distortion!r}",
                    field="--distortions",
                    hint="use some of: " + ", ".join(DISTORTIONS),
                )
        if not self.rhos or not all(0.0 <= rho <= 1.0 for rho in self.rhos):
            raise ConfigError("must lie in [0, 1]", field="--rho", hint="for example 0,0.5,1")
        if not self.tau2 > 0.0:
            raise ConfigError(
                f"must be above 0, not {self.tau2!r}", field="--tau2", hint="tau = 0: `niss attack joint`"
            )
        if self.points < 2:
            raise ConfigError(f"must be at least 2, not {self.points}", field="--points")
        if self.neighbours > self.clients - 2:
            raise ConfigError(
                f"{self.neighbours:g} neighbours among {self.clients} clients leave nobody honest",
                field="--neighbours",
                hint=f"at most {self.clients - 2}",
            )
        self._setting()
        SimStream(self.seed)
        load_pictures(self.image)
        return Findings("collude", asdict(self), dict(COLUMNS))

    def _setting(self) -> Setting:
        return make_setting(
            "default",
            clients=self.clients,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=self.neighbours,
        )

    def run(self, findings: Findings, progress: Progress) -> None:
        pictures, stream = load_pictures(self.image), SimStream(self.seed)
        scene = make_scene(
            pictures, model="mlp", hidden=(self.hidden,), clients=self.clients, stream=stream.child("scene")
        )
        findings.curves["blind_guess_psnr"] = blind_guess(pictures.pixels)
        smaller = np.geomspace(1e-9 * self.tau2, self.tau2, self.points)[:-1]
        cases = [(rho, self.tau2, "rho") for rho in self.rhos] + [
            (1.0, float(tau2), "tau2") for tau2 in smaller
        ]
        for distortion in self.distortions:
            for number, (rho, tau2, sweep) in enumerate(cases, start=1):
                setting = self._setting().with_distortion(distortion, tau2)
                staged = self._stage(scene, setting, rho, stream.child("round"))
                row = _row(scene, staged, stream.child("predicted"))
                findings.rows.append(
                    {"distortion": distortion, "rho": rho, "tau2": tau2, "sweep": sweep, **row}
                )
                progress(distortion, number, len(cases), f"ρ = {rho:g}, τ² = {tau2:.2g}")
        if "scalar" in self.distortions:
            findings.curves["projection"] = self._projection(scene, stream, progress)
        findings.headline = _headline(findings)
        findings.finished = True

    def _stage(self, scene: Scene, setting: Setting, rho: float, stream: SimStream) -> Staged:
        """A round in which the first part `rho` of the victim's neighbours, in a random order, collude."""
        weights = scene.weights.numpy()
        # The graph follows from the beacon alone, so a first look without noise tells who the neighbours are.
        plan = setting.plan.for_round(
            np.arange(self.clients),
            weights=np.full(self.clients, 1.0 / self.clients),
            records=np.ones(self.clients),
            beacon=stream.child("beacon").generator().bytes(32),
        )
        near = plan.graph.neighbours(VICTIM)
        order = stream.child("colluders").generator().permutation(near.size)
        chosen = near[order[: round(rho * near.size)]]
        return setting.stage(
            scene.updates,
            weights,
            stream=stream,
            colluders=[int(seat) for seat in chosen],
            knows_updates_of=range(1, self.clients),
            keep_factors=setting.plan.distortion == "coordinate",
        )

    def _projection(self, scene: Scene, stream: SimStream, progress: Progress) -> dict[str, float]:
        """The root mean square error of the projection at rho = 1 over many rounds, beside sqrt(v / h)."""
        squares, known = [], 0
        setting = self._setting().with_distortion("scalar", self.tau2)
        for number in range(_PROJECTIONS):
            staged = self._stage(scene, setting, 1.0, stream.child("projection", number))
            guess = estimate_jointly(staged.observation, VICTIM)
            squares.append(relative_error(guess.update, staged.updates[VICTIM]) ** 2)
            known = sum(receiver == VICTIM for _, receiver in staged.observation.known_shares)
            progress("projection", number + 1, _PROJECTIONS, "")
        coordinates = scene.updates.shape[1]
        return {
            "measured": float(np.sqrt(np.mean(squares))),
            "predicted": float(np.sqrt(known / coordinates)),
            "known_shares": float(known),
            "coordinates": float(coordinates),
        }


def _row(scene: Scene, staged: Staged, stream: SimStream) -> Row:
    truth, seen = staged.updates[VICTIM], staged.observation
    plainly = estimate_jointly(seen, VICTIM, exploit=False)
    guess = estimate_jointly(seen, VICTIM)
    noise = staged.predicted_variance(VICTIM) / float(seen.share[VICTIM]) ** 2
    left_out = 0.0
    if staged.plan.plan.distortion == "scalar":
        left_out = sum(receiver == VICTIM for _, receiver in seen.known_shares) / truth.size
    expected = truth.copy()
    add_gaussian(expected, float(np.sqrt(noise)), stream)
    return {
        "subtract_error": relative_error(plainly.update, truth),
        "error": relative_error(guess.update, truth),
        "predicted_error": float(np.sqrt(noise * truth.size / np.sum(truth**2) + left_out)),
        # What the adversary expects of a coordinate: the clip, spread evenly.
        "fraction": recovered_fraction(guess.shrunk(staged.plan.plan.clip**2 / truth.size), truth),
        "predicted_fraction": staged.predicted_fraction(VICTIM),
        "best_coordinates": best_coordinates(guess, truth),
        "psnr": _psnr(scene, guess.update, guess.variance),
        "predicted_psnr": _psnr(scene, expected),
        "colluders": len(seen.colluders),
    }


def best_coordinates(guess: Estimate, truth: FloatArray, part: float = _BEST) -> float:
    """The error on the coordinates the adversary trusts most, as a part of its error on all; 1: no choice helps."""
    size = max(1, int(part * truth.size))
    squares = (guess.update - truth) ** 2
    everywhere = float(np.mean(squares))
    trusted = np.argsort(guess.variance, kind="stable")[:size]
    return float(np.sqrt(np.mean(squares[trusted]) / everywhere)) if everywhere > 0.0 else 1.0


def _psnr(scene: Scene, update: FloatArray, variance: FloatArray | None = None) -> float:
    shown = read_picture(scene.as_gradient(update), scene.imitation(), scene.pictures, variance)
    return score_pictures(shown, scene.pictures.pixels).psnr


def _headline(findings: Findings) -> str:
    parts = [
        f"{row['distortion']} {100 * row['fraction']:.3g} %"
        for row in findings.rows
        if row["rho"] == 1.0 and row["sweep"] == "rho"
    ]
    text = "Recovered of the update when all neighbours collude: " + "; ".join(parts) + "." if parts else ""
    if "projection" in findings.curves:
        found = findings.curves["projection"]
        text += (
            f" Projection leaves a relative error of {found['measured']:.3g}, "
            f"sqrt(v / h) is {found['predicted']:.3g}."
        )
    return text
