"""`niss attack rerun`: the same round again, against a client that has lost its memory.

The seeds of the shares follow from the round's context, which is the same again: y - y' = p (x - x') + eta - eta', and
the shares are gone. The second time the server sends a model of zeros, on which nothing but the last bias can move, so
that x' is known up to a label; and it asks again and again until the fresh residual noise has averaged out too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Annotated, ClassVar

from niss import attacks
from niss.attacks import experiment
from niss.attacks.experiment import VICTIM, Findings, Help, Progress, Row
from niss.errors import PrivacyError, RemoteProtocolError

if TYPE_CHECKING:
    from niss.protocol.messages import RoundOpen


@dataclass(frozen=True, kw_only=True)
class RerunExperiment(experiment.PictureExperiment):
    """Open the same round again and again: a client with its memory refuses, one without gives itself away.

    Half of the answers are to the real model, half to the model of zeros. With n of each the error is expected to be
    sqrt(2 m^2 eta^2 h / n + ||x'||^2) / ||x||: fresh residual noise eta that averages out, and the update x' on the
    model of zeros, which the server does not know.

    repeats   n; the state that the client had before the round is restored for each of the 2 n answers

    Examples:
        niss attack rerun --repeats 256 --out runs/rerun
    """

    name = "rerun"
    columns: ClassVar[dict[str, str]] = {
        "client": "Client",
        "answers": "Answers",
        "refusal": "Second answer",
        **experiment.PICTURE_COLUMNS,
    }

    clients: experiment.Clients = 24
    repeats: Annotated[int, Help("How often each of the two models is sent.", least=1)] = 1024

    def setting(self) -> attacks.Setting:
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
        total = 0.0 * truth
        marks = {2**power for power in range(0, 31, 2)} | {self.repeats}
        for number in range(1, self.repeats + 1):
            for update, sign in ((truth, 1.0), (dead, -1.0)):
                server.clients[VICTIM].restore(before)
                upload = server.upload(opened, VICTIM, update)
                total += sign * protocol_rounds.vector_of(upload, agreed)
            progress("answers", number, self.repeats, "")
            if number not in marks:
                continue
            guess = self.clients * total / number
            picture, psnr = federation.read_picture(guess)
            findings.rows.append(
                {
                    "client": "without memory",
                    "answers": 2 * number,
                    "refusal": "given",
                    "error": attacks.relative_error(guess, truth),
                    "predicted_error": sqrt((noise / number + unknown) / energy),
                    "psnr": psnr,
                }
            )
            findings.pictures.setdefault("steps", []).append((2 * number, picture))
        last = findings.rows[-1]
        findings.headline = (
            f"A client with its memory refuses the second time. Without it, {last['answers']} answers to one round "
            f"leave an error of {last['error']:.2g} times the update and a picture of {last['psnr']:.1f} dB."
        )
        findings.finished = True

    def draw(self, findings: Findings) -> attacks.drawing.Figure | None:
        """The picture, the error and the PSNR over the answers."""
        return attacks.drawing.draw_steps(findings, "answers", "Answers to the same round")


def _refusal(
    server: attacks.protocol_rounds.DishonestServer, opened: RoundOpen, truth: attacks.observation.FloatArray
) -> Row:
    """The client as it is meant to be: it answers once. Raises `PrivacyError` if it answers twice."""
    server.upload(opened, VICTIM, truth)
    try:
        server.upload(opened, VICTIM, truth)
    except RemoteProtocolError as error:
        return {"client": "with memory", "answers": 1, "refusal": f"refused: {error.message}"}
    raise PrivacyError("a client with its memory answered the same round twice")
