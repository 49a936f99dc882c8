"""`niss attack rerun`: the same round again, against a client that has lost its memory.

The seeds of the shares follow from the round's context, which is the same again: y - y' = p (x - x') + eta - eta', and
the shares are gone. The second time the server sends a model of zeros, on which nothing but the last bias can move, so
that x' is known up to a label; and it asks again and again until the fresh residual noise has averaged out too.
"""

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
    Row,
    Seed,
    check_at_least,
)
from niss.errors import PrivacyError, RemoteProtocolError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from niss.accounting import Plan
    from niss.attacks.protocol_rounds import DishonestServer
    from niss.attacks.rounds import FloatArray
    from niss.protocol.messages import RoundOpen


@dataclass(frozen=True, kw_only=True)
class RerunExperiment(Experiment):
    """Half of the answers are to the real model, half to the model of zeros."""

    name: ClassVar[str] = "rerun"
    summary: ClassVar[str] = (
        "Open the same round again and again: a client with its memory refuses, one without gives itself away."
    )
    examples: ClassVar[tuple[str, ...]] = ("niss attack rerun --repeats 256 --out runs/rerun",)
    columns: ClassVar[dict[str, str]] = {
        "client": "Client",
        "answers": "Answers",
        "refusal": "Second answer",
        "error": "Error ÷ update",
        "predicted_error": "Error, predicted",
        "psnr": "PSNR, dB",
    }

    image: Image = DEFAULT_PICTURE
    clients: Clients = 24
    epsilon: Epsilon = None
    delta: Delta = None
    repeats: Annotated[int, Help("How often each of the two models is sent.")] = 1024
    hidden: Hidden = 4
    seed: Seed = 1

    def check(self) -> None:
        """Refuse what cannot be used."""
        from niss.attacks.pictures import load_pictures
        from niss.randomness import SimStream

        check_at_least(1, repeats=self.repeats)
        self._plan()
        SimStream(self.seed)
        load_pictures(self.image)

    def _plan(self) -> Plan:
        from niss.attacks.rounds import make_setting

        return make_setting(
            "default",
            clients=self.clients,
            epsilon=self.epsilon,
            delta=self.delta,
            neighbours=float(self.clients - 1),
        ).plan

    def run(self, findings: Findings, progress: Progress) -> None:
        """Ask the victim, restored each time, for both answers; a row after 1, 4, 16, ... pairs of them."""
        import numpy as np
        import torch

        from niss.attacks.federation import VICTIM, make_federation
        from niss.attacks.pictures import blind_guess, load_pictures
        from niss.attacks.protocol_rounds import DishonestServer, vector_of
        from niss.attacks.rounds import clip_update, relative_error
        from niss.protocol.agreement import agree
        from niss.randomness import SimStream

        stream, plan, pictures = SimStream(self.seed), self._plan(), load_pictures(self.image)
        federation = make_federation(
            pictures, model="mlp", hidden=(self.hidden,), clients=self.clients, stream=stream.child("scene")
        )
        truth = clip_update(federation.updates[VICTIM], plan)
        server = DishonestServer(
            plan, self.clients, coordinates=truth.size, mode="tolerate", stream=stream.child("parties")
        )
        opened = server.open()
        agreed = agree(opened)
        before = server.clients[VICTIM].stored[-1]
        zeros = torch.zeros_like(federation.weights)
        dead = clip_update(federation.victims_update_from(zeros, stream.child("dead")), plan)
        findings.pictures["originals"] = pictures.pixels
        findings.curves["blind_guess_psnr"] = blind_guess(pictures.pixels)
        findings.rows.append(_refusal(server, opened, truth))
        # Of each difference the server does not know the noise of two answers, nor the dead model's update.
        noise = 2.0 * self.clients**2 * agreed.terms.residual_variance * truth.size
        unknown, energy = float(np.sum(dead**2)), float(np.sum(truth**2))
        total = np.zeros_like(truth)
        marks = {2**power for power in range(0, 31, 2)} | {self.repeats}
        for number in range(1, self.repeats + 1):
            for update, sign in ((truth, 1.0), (dead, -1.0)):
                server.clients[VICTIM].restore(before)
                total += sign * vector_of(server.upload(opened, VICTIM, update), agreed)
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
                    "error": relative_error(guess, truth),
                    "predicted_error": float(np.sqrt((noise / number + unknown) / energy)),
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

    def draw(self, findings: Findings) -> Figure | None:
        """The picture, the error and the PSNR over the answers."""
        from niss.attacks.drawing import draw_steps

        return draw_steps(findings, "answers", "Answers to the same round")


def _refusal(server: DishonestServer, opened: RoundOpen, truth: FloatArray) -> Row:
    """The client as it is meant to be: it answers once. Raises `PrivacyError` if it answers twice."""
    from niss.attacks.federation import VICTIM

    server.upload(opened, VICTIM, truth)
    try:
        server.upload(opened, VICTIM, truth)
    except RemoteProtocolError as error:
        return {"client": "with memory", "answers": 1, "refusal": f"refused: {error.message}"}
    raise PrivacyError("a client with its memory answered the same round twice")
