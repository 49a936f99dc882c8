"""Follow one round through the source files, count the files it visits, and draw its way.

A file is visited when one of its functions is called. The simulated round is the second of a small run of NISS with a
folder (so that metrics, ledger and checkpoint are written); the Flower round is the second of a run on the grid in
one process that the tests use, with what ServerApp and ClientApp do counted apart.

Usage: python tools/trace_round.py [docs/images]
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from docs_pictures import BLUE, INK, LINES, MUTED, canvas, folder, save

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "niss"

Trace = dict[str, None]
"""The files a round visits, in the order of their first call."""


class Follow:
    """Notes calls while it is switched on; `trace` says where, None for nowhere."""

    trace: Trace | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        # Comprehensions and module bodies (a first import) are no calls of a function.
        if event != "call" or self.trace is None or frame.f_code.co_name.startswith("<"):
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            self.trace[path.relative_to(SOURCE).as_posix()] = None


def simulated_round() -> Trace:
    """The second round of a small simulated run."""
    import niss

    trace, follow = Trace(), Follow()

    def progress(event: Any) -> None:
        follow.trace = trace if event.round == 1 else None

    config = niss.make_config(
        {
            "rounds": 3,
            "data": {"clients": 24},
            "model": {"hidden": [4]},
            "training": {"participants": 12, "epochs": 1, "workers": 1, "device": "cpu"},
            "privacy": {"epsilon": 8.0},
            "methods": [{"name": "niss", "neighbours": 4.0}],
        }
    )
    with tempfile.TemporaryDirectory() as made, follow.on():
        niss.run(config, out=Path(made) / "run", progress=progress)
    return trace


def flower_round() -> tuple[Trace, Trace]:
    """What the server and what a client visit in the second round of a Flower run."""
    sys.path.insert(0, str(ROOT / "tests"))
    from flower import conftest  # noqa: F401 (prepares Flower for a run in one process)
    from flower.grid import FakeGrid
    from flower.test_trust import start

    server, client, follow = Trace(), Trace(), Follow()
    began = False

    class Watched(FakeGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            nonlocal began
            messages = list(messages)
            # The round begins when the first message of it is sent; what follows until the next one belongs to it.
            began = began or len(self.sent) >= 12
            follow.trace = server if began else None
            return super().send_and_receive(messages, timeout=timeout)

        def _deliver(self, message: Any) -> Any:
            before, follow.trace = follow.trace, client if began else None
            try:
                return super()._deliver(message)
            finally:
                follow.trace = before

    with follow.on():
        start(Watched(6), rounds=3)
    return server, client


def draw(traces: dict[str, Trace]) -> None:
    """Each trace as a line over the rooms: one dot a file, in the order of first visits."""
    rooms = {title: list(dict.fromkeys(map(_room, trace))) for title, trace in traces.items()}
    heights = [0.9 + 0.3 * len(lanes) for lanes in rooms.values()]
    figure, _ = canvas(width=11.0, height=sum(heights))
    figure.clf()
    grid = figure.add_gridspec(len(traces), 1, height_ratios=heights)
    for place, (title, trace) in enumerate(traces.items()):
        axes, lanes = figure.add_subplot(grid[place]), rooms[title]
        steps, levels = range(len(trace)), [-lanes.index(_room(name)) for name in trace]
        for lane in range(len(lanes)):
            axes.axhline(-lane, color=LINES, linewidth=0.8, zorder=0)
        axes.plot(steps, levels, color=MUTED, linewidth=1.0, zorder=1)
        axes.plot(steps, levels, linestyle="none", marker="o", markersize=7, color=BLUE, zorder=2)
        label = {"textcoords": "offset points", "fontsize": 7, "rotation": 32, "color": INK}
        for step, name in enumerate(trace):
            axes.annotate(name.split("/", 1)[-1].removesuffix(".py"), (step, levels[step]), (2, 5), **label)
        axes.set_yticks([-lane for lane in range(len(lanes))], lanes)
        axes.set_xticks([])
        axes.set_xlim(-0.5, max(len(trace), 20) + 1.0)
        axes.set_ylim(0.5 - len(lanes), 1.4)
        axes.set_title(f"{title}: {len(trace)} files", loc="left", fontsize=11, color=INK)
        axes.tick_params(length=0, colors=INK)
        for side in axes.spines.values():
            side.set_visible(False)
    title = "The source files that a round visits, in the order of its first calls"
    save(figure, folder() / "round-files.svg", title)


def _room(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


if __name__ == "__main__":
    simulated, (server, client) = simulated_round(), flower_round()
    traces = {"A simulated round": simulated, "A Flower round, server": server}
    draw(traces | {"A Flower round, client": client})
    print(f"simulated round: {len(simulated)} files")
    for side, trace in (("server", server), ("client", client)):
        near = sum(_room(name) in ("flower", "session", "protocol") for name in trace)
        print(f"Flower round, {side}: {len(trace)} files, {near} in flower, session and protocol")
