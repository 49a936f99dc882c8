"""`niss attack average` and `niss attack rerun`: the same update under fresh noise, again and again, and their mean.

`average` never moves the model and averages a client's uploads over the rounds. `rerun` opens the same round again,
against a client that has lost its memory: the seeds of the shares follow from the round's context, which is the same
again, so that y - y' = p (x - x') + eta - eta', and the shares are gone. The second time the server sends a model of
zeros, on which nothing but the last bias can move, so that x' is known up to a label; and it asks again and again until
the fresh residual noise has averaged out too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from niss import attacks
from niss.attacks import experiment
from niss.attacks.experiment import VICTIM, Findings, Help, Progress, Row
from niss.claims import rounded_up
from niss.errors import PrivacyError, RemoteProtocolError

if TYPE_CHECKING:
    from niss.attacks.observation import FloatArray
    from niss.charts import Chart, Strip
    from niss.protocol.messages import RoundOpen

# How many of the pictures on the way the figure shows.
_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class RepeatedExperiment(experiment.PictureExperiment):
    """Guesses of one update under fresh noise, whose mean comes closer the more there are of them.

    counted   what is counted: the key of the count in the rows, and its name on an axis
    """

    counted: ClassVar[tuple[str, str]]

    @abstractmethod
    def run(self, findings: Findings, progress: Progress) -> None:
        """Attack, and fill the findings on the way."""

    def average(
        self,
        findings: Findings,
        progress: Progress,
        federation: attacks.AttackedFederation,
        guess_of: Callable[[int], FloatArray],
        row_of: Callable[[int], Row],
        *,
        truth: FloatArray,
        repeats: int,
        marks: Collection[int],
    ) -> None:
        """Add up the guesses 1, 2, ..., `repeats`; after each that is in `marks`, and after the last, add a row.

        `row_of` gives what is expected of that many, and the count; the error and the picture of their mean are added.
        """
        total, (key, _) = 0.0 * truth, self.counted
        for number in range(1, repeats + 1):
            total += guess_of(number)
            progress(key, number, repeats, "")
            if number not in marks and number != repeats:
                continue
            guess = total / number
            picture, psnr = federation.read_picture(guess)
            row = {**row_of(number), "error": attacks.relative_error(guess, truth), "psnr": psnr}
            findings.rows.append(row)
            findings.pictures.setdefault("steps", []).append((row[key], picture))

    def charts(self, findings: Findings) -> list[Chart]:
        """The error and the PSNR over the count, and where the ledger stops it."""
        from niss.charts import Curves, Series, measured_against, numbered, points

        key, across = self.counted
        rows = [row for row in findings.rows if row.get("error") is not None]
        counts = [row[key] for row in rows]
        predicted, measured = ([row[name] for row in rows] for name in ("predicted_error", "error"))
        allowed = findings.curves.get("allowed_rounds")
        shared: dict[str, Any] = {
            "across": across,
            "head": key.capitalize(),
            "limits": {"the ledger refuses more": float(allowed)} if allowed else {},
        }
        psnr = Series(
            "recovered", numbered(2), points(counts, [row["psnr"] for row in rows], "x"), marks=True
        )
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
                series=[psnr],
                log="x",
                levels=experiment.grey_level(findings),
                **shared,
            ),
        ]

    def strips(self, findings: Findings) -> list[Strip]:
        """The original, and the picture after more and more guesses."""
        steps = findings.pictures.get("steps", [])
        if not steps:
            return []
        shown = experiment.some_of(steps, _STEPS)
        return [experiment.strip_of("recovered", findings, [(f"{count:,}", one) for count, one in shown])]


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

    def setting(self) -> attacks.RoundSetting:
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

        def estimate(number: int) -> FloatArray:
            """From all uploads of a round, which the ledger charges as long as it can."""
            nonlocal allowed, refused
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
            return attacks.estimate_jointly(simulated.observation, VICTIM).update

        def expected(number: int) -> Row:
            spent = mu * sqrt(number)
            return {
                "rounds": number,
                "predicted_error": first.predicted_error(VICTIM) / sqrt(number),
                "mu": spent,
                "epsilon": gdp_epsilon(spent, setting.plan.delta),
                "within_budget": number <= allowed,
            }

        marks = {part * 10**power for power in range(10) for part in (1, 3)}
        self.average(
            findings, progress, federation, estimate, expected, truth=truth, repeats=self.rounds, marks=marks
        )
        findings.curves["allowed_rounds"] = allowed
        last = findings.rows[-1]
        findings.headline = (
            f"{last['rounds']} rounds of a still model bring the error from {findings.rows[0]['error']:.3g} to "
            f"{last['error']:.3g} times the update and the picture to {last['psnr']:.1f} dB; that spends "
            f"ε = {rounded_up(last['epsilon'])}. The ledger refuses every round after the first {allowed}."
        )
        findings.finished = True


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
    columns: ClassVar[dict[str, str]] = {
        "client": "Client",
        "answers": "Answers",
        "refusal": "Second answer",
        **experiment.PICTURE_COLUMNS,
    }

    clients: experiment.Clients = 24
    repeats: Annotated[int, Help("How often each of the two models is sent.", least=1)] = 1024

    def setting(self) -> attacks.RoundSetting:
        """Everyone shares noise with everyone."""
        return self.make_setting(neighbours=self.clients - 1.0)

    def run(self, findings: Findings, progress: Progress) -> None:
        """Ask the victim, restored each time, for both answers; a row after 1, 4, 16, ... pairs of them."""
        from niss.protocol.agreement import agree

        protocol_rounds, clip_update = attacks.protocol_rounds, attacks.rounds.clip_update
        plan, federation = self.setting().plan, self.train(findings)
        truth = clip_update(federation.updates[VICTIM], plan)
        server = protocol_rounds.DishonestServer(
            plan, self.clients, coordinates=truth.size, mode="tolerate", stream=self.stream("parties")
        )
        opened = server.open()
        agreed = agree(opened)
        before = server.clients[VICTIM].stored[-1]
        dead = federation.victims_update_from(0.0 * federation.weights, self.stream("dead"))
        dead = clip_update(dead, plan)
        findings.rows.append(_refusal(server, opened, truth))
        # Of each difference the server does not know the noise of two answers, nor the dead model's update.
        noise = 2.0 * self.clients**2 * agreed.terms.residual_variance * truth.size
        unknown, energy = float((dead**2).sum()), float((truth**2).sum())

        def difference(_number: int) -> FloatArray:
            """Of two answers of the victim, restored each time."""
            answers = []
            for update in (truth, dead):
                server.clients[VICTIM].restore(before)
                answers.append(protocol_rounds.vector_of(server.upload(opened, VICTIM, update), agreed))
            found: FloatArray = self.clients * (answers[0] - answers[1])
            return found

        def expected(number: int) -> Row:
            return {
                "client": "without memory",
                "answers": 2 * number,
                "refusal": "given",
                "predicted_error": sqrt((noise / number + unknown) / energy),
            }

        marks = {2**power for power in range(0, 31, 2)}
        self.average(
            findings,
            progress,
            federation,
            difference,
            expected,
            truth=truth,
            repeats=self.repeats,
            marks=marks,
        )
        last = findings.rows[-1]
        findings.headline = (
            f"A client with its memory refuses the second time. Without it, {last['answers']} answers to one round "
            f"leave an error of {last['error']:.2g} times the update and a picture of {last['psnr']:.1f} dB."
        )
        findings.finished = True


def _refusal(server: attacks.protocol_rounds.DishonestServer, opened: RoundOpen, truth: FloatArray) -> Row:
    """The client as it is meant to be: it answers once. Raises `PrivacyError` if it answers twice."""
    server.upload(opened, VICTIM, truth)
    try:
        server.upload(opened, VICTIM, truth)
    except RemoteProtocolError as error:
        return {"client": "with memory", "answers": 1, "refusal": f"refused: {error.message}"}
    raise PrivacyError("a client with its memory answered the same round twice")
