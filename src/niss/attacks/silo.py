"""`niss attack silo` and `niss attack oracle`: what the upload of a silo gives away of one of its records.

`silo` asks of a picture whether it is among a silo's records, and what it looks like, without noise and with that of
NISS. `oracle` has a record that fails: at weights at which it alone overflows, or wherever its gradient is asked for.
Every upload is that of a real node, which draws, clips, rounds and hides by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge
from typing_extensions import Doc

from niss import attacks
from niss.attacks import experiment
from niss.attacks.experiment import VICTIM, Experiment, Findings, Progress, Row
from niss.attacks.invert import Case, SearchExperiment
from niss.claims import rounded_up
from niss.settings import Count

if TYPE_CHECKING:
    from niss.accounting import Plan
    from niss.attacks.estimates import FloatArray
    from niss.attacks.federation import AttackedFederation
    from niss.attacks.rounds import RoundSetting
    from niss.charts import Chart
    from niss.randomness import SimStream
    from niss.records import Records

BARE, HIDDEN = "without niss", "with niss"
_BINS = 16
# Of the run whose epsilon is quoted where a record moves the upload too far: q, rounds, epsilon.
_RUN = (0.05, 600, 1.0)
# What a silo's other records add up to, in clips.
_SUMS = (3, 10, 30)


@dataclass(frozen=True, kw_only=True)
class SiloExperiment(SearchExperiment):
    """What a silo's upload gives away of one picture: whether it is there, and what it looks like.

    Several silos take part in a round that hides records. The server knows everything but one picture: all other
    records, and who was drawn, as the claim allows it. What is left of the first silo's sum is the clipped gradient of
    the picture, if it is there, and noise. Deep Leakage looks for the picture behind it; and over many runs, with the
    picture and without it, the likelihood ratio tells whether it is there. Once without noise, and once with all
    uploads of the real protocol. The whole budget goes into one round, where it hides least.

    records   of each silo
    runs      with the picture among them, and as many without it

    Examples:
        niss attack silo --out runs/silo
        niss attack silo --epsilon 1 --records 50 --image mnist-mini:3
    """

    name = "silo"
    columns: ClassVar[dict[str, str]] = {
        "case": "Upload",
        "epsilon_joint": "ε of a record",
        "noise": "Noise ÷ gradient",
        "auc": "There or not, AUC",
        "mu": "μ claimed",
        "measured": "μ measured",
        "psnr": "PSNR, dB",
        "ssim": "SSIM",
        "label_found": "Label found",
        "iterations": "Iterations",
    }

    clients: experiment.Clients = 5
    records: Annotated[Count, Doc("Of each silo.")] = 20
    runs: Annotated[int, Ge(20), Doc("With the picture, and as many without it.")] = 100

    def setting(self) -> RoundSetting:
        """Silos that all share with all, every record in the batch; a step of 1 is the gradient itself."""
        return replace(self.silo_setting(self.clients * self.records), learning_rate=1.0)

    def cases(self, federation: AttackedFederation) -> Iterator[Case]:
        """The same gradient, bare and as the server guesses it from all uploads."""
        from niss.mechanism import gdp_epsilon

        plan, scene = self.setting().plan, _Scene.of(self, federation)
        promised = {"epsilon_joint": inf, "epsilon_marginal": inf, "method": "fedavg", "mu": None}
        yield Case(BARE, plan, scene.truth, scene.bare(True), promised)
        guess, mu = scene.guess(plan, True, self.stream("round"))
        epsilon = gdp_epsilon(mu, plan.gaussian_delta)
        yield Case(HIDDEN, plan, scene.truth, guess, {"epsilon_joint": epsilon, "mu": mu})

    def sweep(self, federation: AttackedFederation, findings: Findings, progress: Progress) -> None:
        """Whether the picture is there, by the likelihood ratio: a score of 1 with it, of 0 without it, and noise."""
        import numpy as np

        plan, scene = self.setting().plan, _Scene.of(self, federation)
        found: tuple[list[float], list[float]] = ([], [])
        for number in range(self.runs):
            for there, scored in enumerate(found):
                guess, _ = scene.guess(plan, bool(there), self.stream("run", there, number))
                scored.append(scene.score(guess))
            progress("there or not", number + 1, self.runs, "")
        findings.curves["scores"] = {"without": found[0], "present": found[1]}
        scores = attacks.canary.CanaryScores(np.array(found[0]), np.array(found[1]))
        bare, hidden = findings.rows
        surely = scene.score(scene.bare(True)) > scene.score(scene.bare(False))
        bare |= {"auc": float(surely), "measured": None}
        above = (scores.present[:, None] > scores.without).mean()
        hidden |= {"auc": float(above), "measured": attacks.canary.measure_mu(scores, 0.95).measured}

    def headline(self, findings: Findings) -> str:
        """Both questions, without noise and with it."""
        bare, hidden = findings.rows
        return (
            f"A bare upload tells for sure whether the picture is there, and the search finds {bare['psnr']:.1f} dB. "
            f"With niss, at ε = {rounded_up(hidden['epsilon_joint'])}, the best test ranks an upload with it above one "
            f"without it in {100 * hidden['auc']:.0f} % of all pairs, and the search finds {hidden['psnr']:.1f} dB; an "
            f"even grey would score {findings.curves['blind_guess_psnr']:.1f} dB."
        )

    def charts(self, findings: Findings) -> list[Chart]:
        """The scores with the picture and without it, and the loss of the search."""
        from niss.charts import Curves, Series, numbered
        from niss.methods.look import Look

        scores = findings.curves.get("scores")
        if scores is None:
            return super().charts(findings)
        low, high = (pick([0.0, 1.0, *map(pick, scores.values())]) for pick in (min, max))
        width = (high - low) / _BINS
        series = []
        for number, (name, key) in enumerate((("picture left out", "without"), ("picture there", "present"))):
            counts = [0] * (_BINS + 1)
            for score in scores[key]:
                counts[min(int((score - low) / width), _BINS - 1)] += 1
            bars = [(low + place * width, float(count)) for place, count in enumerate(counts)]
            series.append(Series(f"with niss: {name}", Look(numbered(number).colour, ""), bars))
        histogram = Curves(
            title="Is the picture there? Scores of the best test",
            across="Likelihood-ratio score",
            up="Runs",
            series=series,
            limits={"without niss: 0 left out": 0.0, "without niss: 1 there": 1.0},
            head="Score",
            least=0.0,
            step=True,
        )
        return [histogram, *super().charts(findings)]


@dataclass(frozen=True)
class _Scene:
    """Silos with and without the picture.

    silos    what each holds, without the picture; `full` is the first one with it, `alone` nothing but it
    weights  where all take their gradients
    clip     of each
    """

    alone: Records
    full: Records
    silos: Sequence[Records]
    weights: FloatArray
    clip: float

    @classmethod
    def of(cls, options: SiloExperiment, federation: AttackedFederation) -> _Scene:
        import numpy as np

        from niss.records import Records

        own, each = federation.pictures, options.records
        others = attacks.federation.other_pictures(own, options.clients * each - 1, options.stream("silos"))
        pixels = np.concatenate([one.pixels for one in (own, *others)]).astype(np.float32)
        labels = np.concatenate([one.labels for one in (own, *others)])

        def silo(first: int, last: int) -> Records:
            return Records(federation.function.module, (pixels[first:last], labels[first:last]), chunk=16)

        rest = [silo(number * each, (number + 1) * each) for number in range(1, options.clients)]
        weights = federation.function.weights.double().numpy()
        return cls(silo(0, 1), silo(0, each), [silo(1, each), *rest], weights, options.setting().plan.clip)

    def added(self, records: Records) -> FloatArray:
        """What these add to an upload."""
        import numpy as np

        from niss.records import clipped_sum

        return -clipped_sum(records, self.weights, np.arange(len(records)), self.clip)

    @cached_property
    def truth(self) -> FloatArray:
        """What the picture adds."""
        return self.added(self.alone)

    @cached_property
    def known(self) -> list[FloatArray]:
        """What all other records add, silo by silo; the server knows it."""
        return [self.added(one) for one in self.silos]

    def bare(self, there: bool) -> FloatArray:
        """What an upload without noise leaves of the picture."""
        return self.added(self.full if there else self.silos[0]) - self.known[VICTIM]

    def guess(self, plan: Plan, there: bool, stream: SimStream) -> tuple[FloatArray, float]:
        """What the server makes of a run with niss: its guess of what the picture adds, and the mu that was charged."""
        silos = [self.full if there else self.silos[0], *self.silos[1:]]
        guess, mu = attacks.lying.guess_sum(plan, silos, self.weights, stream, self.known)
        return guess - self.known[VICTIM], mu

    def score(self, guess: FloatArray) -> float:
        """The likelihood ratio as a number that is 1 with the picture and 0 without it, but for noise."""
        return float(guess @ self.truth) / float(self.truth @ self.truth)


@dataclass(frozen=True, kw_only=True)
class OracleExperiment(Experiment):
    """A record that fails: weights at which it alone overflows, or an exception; what uploads and work say of it.

    The server sends weights at which the gradient of one record is not finite, or a record raises an exception wherever
    its gradient is asked for. Where a silo then uploads nothing, its upload has moved by all that its other records
    add, and that many clips are what the noise has to hide. Where the record alone counts as zero, it has not moved.
    Each case with the rule off and on; how far uploads move is measured in rounds of the real protocol.

    The time a silo takes is told as calls of its model, with the record and without it: a silo that works longer
    because of a record is late because of it.

    runs   with the record, and as many without it

    Examples:
        niss attack oracle --out runs/oracle
        niss attack oracle --runs 100 --json
    """

    name = "oracle"
    columns: ClassVar[dict[str, str]] = {
        "failure": "The record",
        "rule": "It alone counts as zero",
        "sum": "Other records add, clips",
        "reach": "Upload moves, clips",
        "measured": "Measured",
        "epsilon": "ε of a run that promises 1",
        "calls_without": "Model calls without it",
        "calls_with": "With it",
        "verdict": "What follows",
    }

    clients: experiment.Clients = 5
    runs: Annotated[int, Ge(10), Doc("With the record, and as many without it.")] = 30

    def setting(self) -> RoundSetting:
        """Silos that all share with all, and every record in the batch."""
        return self.silo_setting(1000)

    def attack(self, findings: Findings, progress: Progress) -> None:
        """Each failure with the rule off and on."""
        from niss.mechanism import Slots, poisson_multiplier

        (batch, rounds, epsilon), delta = _RUN, 1e-5
        multiplier = poisson_multiplier(epsilon, delta, batch, rounds)
        cases = [("overflows", length) for length in _SUMS] + [("raises an exception", _SUMS[1])]
        for failure, length in cases:
            for rule in ("off", "on"):
                name = f"{failure}, rule {rule}, {length} clips"
                row = self._case(failure, rule, length, partial(progress, name))
                run = Slots.of((batch, multiplier / max(row["reach"], 1.0), rounds))
                more = {"epsilon": run.epsilon(delta), "verdict": _told(row)}
                findings.rows.append({"failure": failure, "rule": rule, "sum": length, **row, **more})

    def _case(self, failure: str, rule: str, length: int, progress: Any) -> Row:
        """How far the upload moves in clips, exactly and measured, and how often the model is called."""
        import numpy as np

        plan = self.setting().plan
        failing, weights = attacks.federation, attacks.federation.weights_of(failure)
        other = failing.FailingSilo(0, plan.clip, None, blank=False)
        silos = [failing.FailingSilo(length, plan.clip, one, blank=rule == "off") for one in (None, failure)]
        scores: list[list[float]] = [[], []]
        for number in range(self.runs):
            for there, silo in enumerate(silos):
                held = [silo.records, *[other.records] * (self.clients - 1)]
                stream = self.stream(failure, rule, length, there, number)
                guess, mu = attacks.lying.guess_sum(plan, held, weights, stream)
                scores[there].append(float(guess @ failing.direction()))
            progress(number + 1, self.runs, "")
        found = attacks.canary.CanaryScores(np.array(scores[1]), np.array(scores[0]))
        without, present = (silo.added(weights, plan.clip) for silo in silos)
        return {
            "reach": float(np.linalg.norm(present - without)) / plan.clip,
            "measured": attacks.canary.measure_mu(found, 0.95).measured / mu,
            "calls_without": silos[0].calls / self.runs,
            "calls_with": silos[1].calls / self.runs,
        }

    def headline(self, findings: Findings) -> str:
        """What a blank would cost, and what one record's zero does."""
        overflows = [row for row in findings.rows if row["failure"] == "overflows"]
        blank, zero = ([row for row in overflows if row["rule"] == rule] for rule in ("off", "on"))
        spent = ", ".join(rounded_up(row["epsilon"]) for row in blank)
        sums = ", ".join(str(row["sum"]) for row in blank)
        return (
            f"A silo that uploads nothing because one record overflows turns epsilon 1 into {spent}, where its other "
            f"records add up to {sums} clips. Where the record alone counts as zero, uploads move by "
            f"{max(row['reach'] for row in zero):.2g} clips."
        )

    def charts(self, findings: Findings) -> list[Chart]:
        """How far one record moves the upload, rule off and on; 1 is what the noise is for."""
        marks = [
            (f"{row['failure']}, {row['sum']} clips", experiment.ruled_mark(row, "reach", ".3g"))
            for row in findings.rows
        ]
        chart = experiment.rules_chart("How far one record moves an upload", "Moved ÷ clip", marks)
        spent = [rounded_up(row["epsilon"]) for row in findings.rows if row["rule"] == "off"]
        return [replace(chart, notes=tuple(f"ε {one}" for one in spent))]


def _told(row: Row) -> str:
    if row["reach"] > 1.0:
        return "the claim is void"
    if row["calls_with"] != row["calls_without"]:
        return "the work done says it is there"
    return "nothing beyond its clip"
