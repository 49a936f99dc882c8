"""Draw the pictures of docs/concepts from the code on those pages, which is run for that.

Usage: python tools/draw_concepts.py [docs/images]
"""

from __future__ import annotations

import contextlib
import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from docs_pictures import (
    BLUE,
    GREEN,
    INK,
    LINES,
    MUTED,
    ORANGE,
    PALE,
    arrow,
    box,
    canvas,
    folder,
    save,
    words,
)
from matplotlib.axes import Axes

import niss

PAGES = Path(__file__).parents[1] / "docs" / "concepts"
Names = dict[str, Any]


def names_of(page: str) -> Names:
    """What the Python blocks of a page leave behind."""
    text = (PAGES / page).read_text(encoding="utf-8")
    names: Names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(block, names)  # noqa: S102  (the documentation's own code)
    return names


def draw_idea(_: Names) -> None:
    figure, axes = canvas(width=5.4, height=3.6)
    shares = (("+ a", "− c"), ("− a", "+ b"), ("− b", "+ c"))
    for client, (first, second) in enumerate(shares):
        place = 2.6 * client
        box(axes, place, 2.2, f"client {client}\nlearned $x_{client}$", pad=0.5, fontsize=12)
        words(axes, place, 1.0, f"$x_{client}$ {first} {second}", fontsize=13, color=ORANGE)
        arrow(axes, (place, 1.7), (place, 1.2))
        arrow(axes, (place, 0.75), (2.6 + 0.55 * (client - 1), -0.2))
    box(axes, 2.6, -0.65, "the server adds:  $x_0 + x_1 + x_2$", pad=0.5, fontsize=13)
    axes.set_xlim(-1.1, 6.3)
    axes.set_ylim(-1.2, 2.9)
    axes.set_axis_off()
    save(figure, folder() / "concept-0-idea.svg", "Noise that cancels: what one adds another subtracts")


def draw_graph(made: Names) -> None:
    graph = made["graph"]
    figure, axes = canvas(width=4.4, height=3.7)
    angles = np.pi / 2 - 2 * np.pi * np.arange(graph.size) / graph.size
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for sender, receiver in zip(graph.senders, graph.receivers, strict=True):
        arrow(axes, places[sender], places[receiver], bend=0.14, shrink=15)
    axes.scatter(*places.T, s=620, color=PALE, edgecolors=BLUE, linewidths=1.6, zorder=3)
    for client, place in enumerate(places):
        words(axes, *place, str(client), fontsize=12, zorder=4)
    axes.set_xlim(-1.3, 1.3)
    axes.set_ylim(-1.25, 1.25)
    axes.set_aspect("equal")
    axes.set_axis_off()
    save(figure, folder() / "concept-2-graph.svg", "Who shares noise with whom")


def draw_shares(made: Names) -> None:
    graph, noise = made["graph"], made["noise"][:, 0]
    edges = graph.senders.size
    figure, axes = canvas(width=8.6, height=3.3)
    bold = {"fontsize": 9.5, "weight": "bold"}
    for edge in range(edges):
        words(axes, edge, graph.senders[edge], f"{noise[edge]:+.2f}", color=BLUE)
        words(axes, edge, graph.receivers[edge], f"{-noise[edge]:+.2f}", color=ORANGE)
        words(axes, edge, graph.size, "0", color=MUTED)
    for client in range(graph.size):
        words(axes, edges + 0.3, client, f"{made['shared'][client, 0]:+.2f}", **bold)
    words(axes, edges + 0.3, -1, "sum", color=MUTED)
    words(axes, edges + 0.3, graph.size, "0", **bold)
    for row in range(graph.size + 1):
        axes.axhline(row - 0.5, color=LINES, linewidth=0.8)
    axes.set_yticks([*range(graph.size), graph.size], [*(f"client {k}" for k in range(graph.size)), "all"])
    names = [f"{a}→{b}" for a, b in zip(graph.senders, graph.receivers, strict=True)]
    axes.set_xticks(range(edges), names, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xlim(-0.6, edges + 0.9)
    axes.set_ylim(graph.size + 0.5, -1.4 + 0.9)
    for side in axes.spines.values():
        side.set_visible(False)
    save(figure, folder() / "concept-3-shares.svg", "Shares: each column holds a number and its negative")


def draw_uploads(made: Names) -> None:
    figure, axes = canvas(height=2.6)
    _bars(axes, made["updates"][:, 0], BLUE, shift=-0.2, label="update")
    _bars(axes, made["uploads"][:, 0], ORANGE, shift=0.2, label="upload")
    axes.set_ylabel("first coordinate")
    axes.legend(frameon=False, loc="upper right", ncols=2)
    axes.set_title("What a client has, and what leaves it", loc="left", fontsize=11)
    save(figure, folder() / "concept-4-uploads.svg", "Updates and uploads")


def draw_sum(made: Names) -> None:
    figure, axes = canvas(height=2.8)
    steps = np.arange(made["clients"] + 1)
    for name, colour in (("uploads", ORANGE), ("updates", BLUE)):
        running = np.concatenate([[0.0], np.cumsum(made[name][:, 0])])
        axes.plot(steps, running, color=colour, marker="o", markersize=4, label=f"sum of {name}")
    axes.axhline(0.0, color=LINES, linewidth=0.8, zorder=0)
    axes.set_xlabel("uploads that have arrived")
    axes.set_ylabel("first coordinate")
    axes.legend(frameon=False)
    axes.set_title("The noise cancels when the last upload is there", loc="left", fontsize=11)
    save(figure, folder() / "concept-5-sum.svg", "Running sums of uploads and updates")


def draw_promise(made: Names) -> None:
    graph, unit = made["graph"], made["this_round"].unit_variance
    target = float(made["this_round"].own_variance[0])
    tau2 = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, 200)])
    worst = [
        min(niss.effective_variance(graph, unit_variance=unit, residual_variance=t * unit * graph.in_weight))
        for t in tau2
    ]
    figure, axes = canvas(height=2.9)
    axes.plot(tau2, np.array(worst) / target, color=BLUE, label="all uploads together (joint view)")
    alone = unit * (graph.out_weight + graph.in_weight)[0] / target
    axes.axhline(alone, color=ORANGE, linestyle="--", label="one upload alone (marginal view)")
    axes.axhline(1.0, color=GREEN, linewidth=1.0)
    axes.text(0.985, 1.2, "needed for the target", color=GREEN, ha="right", fontsize=9)
    chosen = float(made["this_round"].tau2[0])
    axes.plot([chosen], [1.0], "o", color=INK)
    _note(axes, f"calibrated: {chosen:.3f}", (chosen, 1.0), (chosen + 0.08, 1.55))
    axes.plot([0.0], [0.0], "s", color=ORANGE, clip_on=False, zorder=4)
    axes.text(0.015, 0.25, "tau = 0: nothing", fontsize=9)
    axes.set_xlabel(r"$\tau^2$")
    axes.set_ylabel("effective noise variance\n(target = 1)")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, None)
    axes.legend(frameon=False, loc="center right")
    save(figure, folder() / "concept-6-promise.svg", "What a distortion is worth in the joint view")


def draw_joint(made: Names) -> None:
    graph, unit = made["crowd"], made["unit_variance"]
    covariance = unit * graph.laplacian() + np.diag(made["fresh"] * np.ones(graph.size))
    values = np.linalg.eigvalsh(covariance)
    figure, axes = canvas(height=2.7)
    axes.bar(range(1, graph.size + 1), values, color=BLUE, width=0.75)
    axes.bar([1], values[:1], color=ORANGE, width=0.75)
    _note(axes, f"the direction of the sum: {values[0]:.3f}", (1, values[0]), (0.6, values.max() * 0.8))
    axes.set_xlabel("directions of the server's view, from the weakest")
    axes.set_ylabel("noise variance")
    axes.set_title(r"Eigenvalues of $\Sigma_H$: one direction is nearly bare", loc="left", fontsize=11)
    save(figure, folder() / "concept-joint-view.svg", "The noise in each direction of the joint view")


def draw_dropouts(made: Names) -> None:
    figure, axes = canvas(height=2.8)
    lost = np.arange(len(made["left_over"]))
    dots = {"marker": "o", "markersize": 4}
    axes.plot(lost, made["left_over"], color=ORANGE, label="tolerate: edges stay in the sum", **dots)
    axes.plot(lost, made["repaired"], color=BLUE, label="repair: edges taken out", **dots)
    axes.axhline(made["participants"], color=MUTED, linestyle=":", linewidth=1.2)
    axes.text(0, made["participants"] * 1.1, "DP-FedAvg", color=MUTED, fontsize=9)
    axes.set_yscale("log")
    axes.set_xlabel(f"clients that drop out, of {made['participants']}")
    axes.set_ylabel("noise in the sum\n(trusted server = 1)")
    axes.legend(frameon=False, loc="center right")
    save(figure, folder() / "concept-dropouts.svg", "What dropouts leave in the sum")


def draw_seeds(_: Names) -> None:
    figure, axes = canvas(width=9.4, height=2.9)
    # Place and half width of each box, in the units of the drawing.
    boxes = (
        (0.0, 0.95, "one-time key of {own}\nsigned key of {other}"),
        (2.5, 0.75, "X25519\nshared secret"),
        (5.15, 1.2, "HKDF-SHA256\nrun, round, attempt, beacon,\nparticipants, graph, a → b"),
        (8.0, 1.0, "AES-256 stream\nGaussians on the grid"),
    )
    for height, own, other, sign in ((1.0, "a", "b", "+ n"), (-1.0, "b", "a", "− n")):
        for place, _half, text in boxes:
            box(axes, place, height, text.format(own=own, other=other), pad=0.5, fontsize=8.5)
        for (left, left_half, _), (right, right_half, _) in pairwise(boxes):
            arrow(axes, (left + left_half, height), (right - right_half, height))
        axes.text(9.35, height, sign, fontsize=13, color=BLUE if sign[0] == "+" else ORANGE, va="center")
        axes.text(-1.2, height, f"client {own}", va="center", ha="right", weight="bold")
    words(axes, 4.0, 0.0, "nothing is sent between the clients", color=MUTED, fontsize=10)
    axes.set_xlim(-2.2, 9.9)
    axes.set_ylim(-1.8, 1.8)
    axes.set_axis_off()
    save(figure, folder() / "concept-seeds.svg", "Both ends of an edge derive the same noise")


def draw_carried_graph(made: Names) -> None:
    cohort, cohorts, rounds = made["cohort"], made["cohorts"], made["rounds"]
    figure, axes = canvas(width=8.2, height=3.4)
    wide = 2.2
    for number in range(rounds):
        place = wide * number
        axes.text(place, 0.75, f"round {number + 1}", ha="center", color=MUTED, fontsize=10)
        pairs = zip(made["within"].senders, made["within"].receivers, strict=True)
        for one, other in {tuple(sorted(pair)) for pair in pairs}:
            bend = 0.35 * (other - one - 1)
            arrow(axes, (place, -one), (place, -other), bend=bend, shrink=13, arrowstyle="-")
        rim = ORANGE if number >= cohorts or number + cohorts < rounds else BLUE
        for client in range(cohort):
            axes.scatter(place, -client, s=520, color=PALE, edgecolors=rim, linewidths=1.6, zorder=3)
            words(axes, place, -client, str(number % cohorts * cohort + client), fontsize=12, zorder=4)
    for number, graph in enumerate(made["carried"]):
        for sender, receiver in zip(graph.senders, graph.receivers, strict=True):
            start, end = (wide * number, -sender), (wide * (number + 1), -receiver)
            arrow(axes, start, end, BLUE, shrink=14, linewidth=1.4)
            for share, sign, colour in ((0.27, "+ n", BLUE), (0.73, "− n", ORANGE)) if number == 0 else ():
                height = start[1] + (end[1] - start[1]) * share + 0.1
                words(axes, wide * share, height, sign, va="baseline", fontsize=8.5, color=colour)
    axes.set_xlim(-0.6, wide * (rounds - 1) + 0.6)
    axes.set_ylim(-cohort + 0.55, 1.05)
    axes.set_axis_off()
    save(
        figure, folder() / "concept-carried-graph.svg", "Shares within rounds, and shares carried to the next"
    )


def draw_carried_noise(made: Names) -> None:
    planned = made["planned"]
    curves, final = planned.over_rounds, planned.over_rounds["central"][-1]
    figure, axes = canvas(height=3.2)
    for values, name, colour, style in (
        (curves["central"], "trusted server, fresh noise in every round", ORANGE, "--"),
        (curves["niss"], "carried shares, nobody trusted", BLUE, "-"),
        (curves["banded"], "trusted server, BandMF", GREEN, "-."),
        (curves["best"], "trusted server, best correlated noise", INK, ":"),
    ):
        rounds, look = np.arange(1, len(values) + 1), {"color": colour, "linestyle": style, "label": name}
        axes.plot(rounds, np.array(values) / final, linewidth=2.4 if style == "-" else 1.6, **look)
    axes.set_xlabel("round")
    axes.set_ylabel("noise variance in the model\n(fresh noise, at the end = 1)")
    axes.set_xlim(1, len(curves["niss"]))
    axes.set_ylim(0, None)
    axes.legend(frameon=False, loc="upper left")
    save(figure, folder() / "concept-carried-noise.svg", "Noise in the model over the rounds")


def _bars(axes: Axes, values: Any, colour: str, *, shift: float = 0.0, label: str | None = None) -> None:
    places = np.arange(len(values))
    axes.bar(places + shift, values, width=0.38 if shift else 0.55, color=colour, label=label)
    axes.axhline(0.0, color=LINES, linewidth=0.8)
    axes.set_xticks(places, [f"client {k}" for k in places])
    axes.tick_params(axis="x", length=0)


def _note(axes: Axes, text: str, place: Any, at: Any) -> None:
    """A text with a thin line to what it speaks of."""
    axes.annotate(text, place, at, arrowprops={"arrowstyle": "-", "color": MUTED}, fontsize=9)


BASICS = (draw_idea, draw_graph, draw_shares, draw_uploads, draw_sum, draw_promise, draw_joint)
PICTURES = {
    "how-niss-works.md": BASICS,
    "protocol.md": (draw_dropouts, draw_seeds),
    "carried-shares.md": (draw_carried_graph, draw_carried_noise),
}

if __name__ == "__main__":
    for page, drawings in PICTURES.items():
        made = names_of(page)
        for drawing in drawings:
            drawing(made)
