"""`niss attack average`, `rerun` and `fake-dropout`: servers that ask for more than one honest round.

`average` never moves the model and averages a client's uploads over the rounds. `rerun` opens the same round again,
against a client that has lost its memory: the seeds of the shares follow from the round's context, which is the same
again, so that y - y' = p (x - x') + eta - eta', and the shares are gone. The second time the server sends a model of
zeros, on which nothing but the last bias can move, so that x' is known up to a label; and it asks again and again until
the fresh residual noise has averaged out too. `fake-dropout` calls a live client dropped, to have its noise revealed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge
from typing_extensions import Doc

from niss import attacks
from niss.attacks import experiment
from niss.attacks.experiment import VICTIM, Findings, Progress, Row
from niss.claims import rounded_up
from niss.errors import PrivacyError, RemoteProtocolError
from niss.settings import Count

if TYPE_CHECKING:
    from niss.attacks.estimates import FloatArray
    from niss.attacks.federation import AttackedFederation
    from niss.attacks.lying import LyingServer, Survivors
    from niss.attacks.rounds import RoundSetting
    from niss.charts import Chart, Strip

# How many of the pictures on the way the figure shows.
_STEPS = 6
CLAIMS = ("all alive", "all dropped", "graded")


@dataclass(frozen=True, kw_only=True)
class DishonestExperiment(experiment.ReadingExperiment):
    """A server that does not keep to the rules, on the round of a plan in which everyone shares with everyone."""

    def setting(self) -> RoundSetting:
        """Everyone shares noise with everyone."""
        return self.make_setting(neighbours=self.clients - 1.0)

    def clipped(self, federation: AttackedFederation) -> list[FloatArray]:
        """What the clients contribute, seat by seat."""
        plan = self.setting().plan
        return [attacks.rounds.clip_update(update, plan) for update in federation.updates]

    def server(self, coordinates: int) -> LyingServer:
        """One that talks to real nodes, whose keys and noise follow from the seed."""
        return attacks.lying.LyingServer(
            self.setting().plan,
            self.clients,
            coordinates=coordinates,
            stream=self.stream("parties"),
        )


@dataclass(frozen=True, kw_only=True)
class RepeatedExperiment(DishonestExperiment):
    """Guesses of one update under fresh noise, whose mean comes closer the more there are of them.

    counted   what is counted: the key of the count in the rows, and its name on an axis
    steps     after so many guesses the mean is looked at, and after the last
    """

    counted: ClassVar[tuple[str, str]]
    steps: ClassVar[frozenset[int]]

    @abstractmethod
    def guesses(
        self, federation: AttackedFederation, findings: Findings
    ) -> Iterator[tuple[int, FloatArray, Row]]:
        """Guess after guess: how many are yet to come, the guess, and the count and what is expected of the mean."""

    def attack(self, findings: Findings, progress: Progress) -> None:
        """Add up the guesses; some of their means get a row, with the error and the picture of the mean."""
        federation, (key, _) = self.train(findings), self.counted
        truth = self.clipped(federation)[VICTIM]
        total = 0.0 * truth
        guesses = self.guesses(federation, findings)
        for number, (left, guess, expected) in enumerate(guesses, start=1):
            total += guess
            progress(key, number, number + left, "")
            if number in self.steps or left == 0:
                mean = total / number
                picture, psnr = federation.read_picture(mean)
                error = attacks.rounds.relative_error(mean, truth)
                findings.rows.append({**expected, "error": error, "psnr": psnr})
                findings.pictures.setdefault("steps", []).append((f"{expected[key]:,}", picture))

    def charts(self, findings: Findings) -> list[Chart]:
        """The error and the PSNR over the count, and where the ledger stops it."""
        from niss.charts import Curves, Series, measured_against, numbered, points

        key, across = self.counted
        rows = [row for row in findings.rows if row.get("error") is not None]
        counts, predicted, measured, psnrs = (
            [row[name] for row in rows] for name in (key, "predicted_error", "error", "psnr")
        )
        allowed = findings.curves.get("allowed_rounds")
        shared: dict[str, Any] = {
            "across": across,
            "head": key.capitalize(),
            "limits": {"the ledger refuses more": float(allowed)} if allowed else {},
        }
        return [
            Curves(
                title=f"Error of the estimate by {key}",
                up="Error ÷ update",
                series=measured_against("predicted", counts, predicted, measured),
                log="xy",
                **shared,
            ),
            Curves(
                title=f"Quality of the picture by {key}",
                up="PSNR, dB",
                series=[Series("recovered", numbered(2), points(counts, psnrs, "x"), marks=True)],
                log="x",
                levels=experiment.grey_level(findings),
                **shared,
            ),
        ]

    def strips(self, findings: Findings) -> list[Strip]:
        """The original, and the picture after more and more guesses."""
        shown = findings.pictures.get("steps", [])
        return [experiment.strip_of("recovered", findings, shown, _STEPS)] if shown else []


@dataclass(frozen=True, kw_only=True)
class AverageExperiment(RepeatedExperiment):
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
    counted = ("rounds", "Rounds with the same model")
    steps = frozenset(part * 10**power for power in range(10) for part in (1, 3))
    columns: ClassVar[dict[str, str]] = {
        "rounds": "Rounds",
        **experiment.PICTURE_COLUMNS,
        "mu": "μ spent",
        "epsilon": "ε spent",
        "within_budget": "Ledger allows it",
    }

    clients: experiment.Clients = 6
    participations: Annotated[Count, Doc("Rounds that the budget covers.")] = 1
    rounds: Annotated[Count, Doc("Rounds the server averages over.")] = 10_000

    def setting(self) -> RoundSetting:
        """A complete graph, and a budget for `participations` rounds."""
        return super().setting().with_plan(graph="complete", participations=self.participations)

    def guesses(
        self, federation: AttackedFederation, findings: Findings
    ) -> Iterator[tuple[int, FloatArray, Row]]:
        """From all uploads of a round, which the ledger charges as long as it can."""
        from niss.accounting import Charge, Ledger
        from niss.mechanism import gdp_epsilon

        setting = self.setting()
        ledger = Ledger.empty(self.clients, setting.plan.budget(self.clients))
        first = federation.simulate(setting, self.stream("round", 0))
        plan, once = first.plan, first.predicted_error(VICTIM)
        findings.curves["allowed_rounds"] = 0
        for number in range(1, self.rounds + 1):
            stream = self.stream("round", number)
            simulated = federation.simulate(setting, stream, public=first.observation.plan)
            if findings.curves["allowed_rounds"] == number - 1:
                with suppress(PrivacyError):
                    ledger.charge(plan.participants, Charge.of(plan.joint_mu, plan.marginal_mu))
                    findings.curves["allowed_rounds"] = number
            spent = float(plan.joint_mu[VICTIM]) * sqrt(number)
            expected = {
                "rounds": number,
                "predicted_error": once / sqrt(number),
                "mu": spent,
                "epsilon": gdp_epsilon(spent, setting.plan.delta),
                "within_budget": number <= findings.curves["allowed_rounds"],
            }
            guess = attacks.estimates.estimate_jointly(simulated.observation, VICTIM).update
            yield self.rounds - number, guess, expected

    def headline(self, findings: Findings) -> str:
        """How far the error fell, and what it cost."""
        first, last = findings.rows[0], findings.rows[-1]
        return (
            f"{last['rounds']} rounds of a still model bring the error from {first['error']:.3g} to "
            f"{last['error']:.3g} times the update and the picture to {last['psnr']:.1f} dB; that spends "
            f"ε = {rounded_up(last['epsilon'])}. The ledger refuses every round after the first "
            f"{findings.curves['allowed_rounds']}."
        )


@dataclass(frozen=True, kw_only=True)
class RerunExperiment(RepeatedExperiment):
    """Open the same round again and again: a client with its memory refuses, one without gives itself away.

    Half of the answers are to the real model, half to the model of zeros. With n of each the error is expected to be
    sqrt(2 m^2 eta^2 h / n + ||x'||^2) / ||x||: fresh residual noise eta that averages out, and the update x' on the
    model of zeros, which the server does not know.

    repeats   n; the state that the client had before the round is restored for each of the 2 n answers

    Examples:
        niss attack rerun --repeats 256 --out runs/rerun
    """

    name = "rerun"
    counted = ("answers", "Answers to the same round")
    steps = frozenset(2**power for power in range(0, 31, 2))
    columns: ClassVar[dict[str, str]] = {
        "client": "Client",
        "answers": "Answers",
        "refusal": "Second answer",
        **experiment.PICTURE_COLUMNS,
    }

    clients: experiment.Clients = 24
    repeats: Annotated[Count, Doc("How often each of the two models is sent.")] = 1024

    def guesses(
        self, federation: AttackedFederation, findings: Findings
    ) -> Iterator[tuple[int, FloatArray, Row]]:
        """The difference of two answers of the victim, restored each time."""
        plan, truth = self.setting().plan, self.clipped(federation)[VICTIM]
        server = self.server(truth.size)
        before = server.backup(VICTIM)
        dead = federation.train(federation.pictures, 0.0 * federation.function.weights, self.stream("dead"))
        dead = attacks.rounds.clip_update(dead, plan)
        findings.rows.append(_refusal(server, truth))
        # Of each difference the server does not know the noise of two answers, nor the dead model's update.
        noise = 2.0 * self.clients**2 * server.agreed.terms.residual_variance * truth.size
        unknown, energy = float((dead**2).sum()), float((truth**2).sum())
        for number in range(1, self.repeats + 1):
            answers = []
            for update in (truth, dead):
                server.restore(VICTIM, before)
                answers.append(server.upload(VICTIM, update))
            expected = {
                "client": "without memory",
                "answers": 2 * number,
                "refusal": "given",
                "predicted_error": sqrt((noise / number + unknown) / energy),
            }
            yield self.repeats - number, self.clients * (answers[0] - answers[1]), expected

    def headline(self, findings: Findings) -> str:
        """What a client without its memory gives away."""
        last = findings.rows[-1]
        return (
            f"A client with its memory refuses the second time. Without it, {last['answers']} answers to one round "
            f"leave an error of {last['error']:.2g} times the update and a picture of {last['psnr']:.1f} dB."
        )


def _refusal(server: LyingServer, truth: FloatArray) -> Row:
    """The client as it is meant to be: it answers once. Raises `PrivacyError` if it answers twice."""
    server.upload(VICTIM, truth)
    try:
        server.upload(VICTIM, truth)
    except RemoteProtocolError as error:
        return {"client": "with memory", "answers": 1, "refusal": f"refused: {error.message}"}
    raise PrivacyError("a client with its memory answered the same round twice")


@dataclass(frozen=True, kw_only=True)
class FakeDropoutExperiment(DishonestExperiment):
    """A server calls a live client dropped to have its noise revealed: the rule of one answer a round off and on.

    Three claims, each against members of the committee that remember what they answered (the rule is on) and members
    that do not (off).

    `all alive` and `all dropped` tell every member the same; `graded` tells as many as the threshold needs that the
    victim is alive, which gets its self-mask, and the others that it dropped out, for its edges; then each the other.

    The accountant says what noise each outcome leaves the victim, in parts of what its ledger was charged for; the
    server's best linear estimate of the update then errs as much as that predicts. With the rule on, no claim may leave
    less than was charged.

    Examples:
        niss attack fake-dropout --out runs/fake-dropout
    """

    name = "fake-dropout"
    columns: ClassVar[dict[str, str]] = {
        "story": "Server's claim",
        "rule": "One answer a round",
        "edges": "Edges of the victim",
        "mask_rebuilt": "Mask rebuilt",
        "left": "Noise left ÷ charged",
        "epsilon": "ε reached",
        "promised": "ε promised",
        **experiment.ERROR_COLUMNS,
    }

    clients: Annotated[int, Ge(6), experiment.CLIENTS] = 24

    def setting(self) -> RoundSetting:
        """Edges may be revealed to repair dropouts."""
        return super().setting().with_plan(mode="repair")

    def attack(self, findings: Findings, progress: Progress) -> None:
        """Gather the uploads of one round, then try each claim on the clients as they were after it."""
        updates = self.clipped(self.train(findings))
        server, uploads = self.server(updates[0].size), []
        for seat, update in enumerate(updates):
            uploads.append(server.upload(seat, update))
            progress("uploads", seat + 1, self.clients, "")
        cases = [(claim, rule) for claim in CLAIMS for rule in ("off", "on")]
        for number, (claim, rule) in enumerate(cases, start=1):
            told = _told(server, claim)
            revealed = attacks.lying.claim_survivors(server, told, remembers=rule == "on")
            row = {
                "story": claim,
                "rule": rule,
                "edges": sum(VICTIM in ends for ends in revealed.edges),
                "mask_rebuilt": VICTIM in revealed.masks,
            }
            findings.rows.append(row | _left(server, revealed, uploads, updates))
            progress("claims", number, len(cases), f"{claim}, rule {rule}")

    def headline(self, findings: Findings) -> str:
        """What the graded claim leaves."""
        off, on = findings.rows[-2:]
        twice, once = (rounded_up(row["epsilon"]) for row in (off, on))
        return (
            f"The graded claim leaves {100 * off['left']:.0f} % of the charged noise (ε {twice}) where "
            f"members answer twice, and {100 * on['left']:.0f} % (ε {once}) where they answer once; "
            f"ε {rounded_up(on['promised'])} was promised."
        )

    def charts(self, findings: Findings) -> list[Chart]:
        """The noise left after each claim, with the rule off and on; below 1 is less than was charged."""
        marks = [(f"“{row['story']}”", experiment.ruled_mark(row, "left", ".2f")) for row in findings.rows]
        title = "Noise left by what the server tells the committee"
        return [experiment.rules_chart(title, "Noise variance left ÷ charged", marks)]


def _told(server: LyingServer, claim: str) -> dict[int, list[Survivors]]:
    """What each member of the committee but the victim is told, one survivor set after the other."""
    alive = tuple(range(server.size))
    dropped = tuple(seat for seat in alive if seat != VICTIM)
    members = [seat for seat in server.agreed.committee if seat != VICTIM]
    if claim != "graded":
        return {seat: [alive if claim == "all alive" else dropped] for seat in members}
    believers = members[: server.agreed.terms.threshold]
    return {seat: [alive, dropped] if seat in believers else [dropped, alive] for seat in members}


def _left(
    server: LyingServer,
    revealed: attacks.lying.RevealedSecrets,
    uploads: list[FloatArray],
    updates: list[FloatArray],
) -> Row:
    """What is left of the noise that the victim was charged for, and how well the server then guesses its update."""
    from niss.mechanism import gdp_epsilon

    size, delta, truth = server.size, server.plan.delta, updates[VICTIM]
    sensitivity, mu = float(server.plan.sensitivity(1.0 / size, 1.0)), server.charged(VICTIM)
    left = revealed.variance_left(VICTIM)
    known = {seat: update for seat, update in enumerate(updates) if seat != VICTIM}
    guess = revealed.estimate(uploads, known, VICTIM)
    return {
        "left": left / (sensitivity / mu) ** 2,
        "epsilon": gdp_epsilon(sensitivity / sqrt(left), delta),
        "promised": gdp_epsilon(mu, delta),
        "error": attacks.rounds.relative_error(guess, truth),
        "predicted_error": size * sqrt(left * truth.size / float((truth**2).sum())),
    }
