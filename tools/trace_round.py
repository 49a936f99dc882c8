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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "niss"


@dataclass
class Trace:
    """The files a round visits, in the order of their first call."""

    files: list[str] = field(default_factory=list)

    def visit(self, filename: str) -> None:
        path = Path(filename)
        if path.is_relative_to(SOURCE) and (name := path.relative_to(SOURCE).as_posix()) not in self.files:
            self.files.append(name)

    def count(self, *rooms: str) -> int:
        """How many of the files lie in these rooms; all without any."""
        return sum(not rooms or name.split("/")[0] in rooms for name in self.files)


class Follow:
    """Traces calls while it is switched on; `trace` says where they are counted, None for nowhere."""

    def __init__(self) -> None:
        self.trace: Trace | None = None

    def __enter__(self) -> Follow:
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        # Comprehensions and module bodies (a first import) are no calls of a function.
        if event == "call" and self.trace is not None and not frame.f_code.co_name.startswith("<"):
            self.trace.visit(frame.f_code.co_filename)


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
    with tempfile.TemporaryDirectory() as folder, follow:
        niss.run(config, out=Path(folder) / "run", progress=progress)
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

    with follow:
        start(Watched(6), rounds=3)
    return server, client


def draw(traces: dict[str, Trace], path: Path) -> None:
    """Each trace as a line over the rooms: one dot a file, in the order of first visits."""
    sys.path.insert(0, str(ROOT / "tools"))
    from docs_pictures import BLUE, INK, LINES, MUTED, canvas, save

    heights = [0.9 + 0.3 * len({_room(name) for name in trace.files}) for trace in traces.values()]
    figure, _ = canvas(width=11.0, height=sum(heights))
    figure.clf()
    grid = figure.add_gridspec(len(traces), 1, height_ratios=heights)
    for place, (title, trace) in enumerate(traces.items()):
        axes = figure.add_subplot(grid[place])
        rooms = list(dict.fromkeys(_room(name) for name in trace.files))
        lanes = {room: -number for number, room in enumerate(rooms)}
        steps = range(len(trace.files))
        levels = [lanes[_room(name)] for name in trace.files]
        for lane in lanes.values():
            axes.axhline(lane, color=LINES, linewidth=0.8, zorder=0)
        axes.plot(steps, levels, color=MUTED, linewidth=1.0, zorder=1)
        axes.plot(steps, levels, linestyle="none", marker="o", markersize=7, color=BLUE, zorder=2)
        for step, name in enumerate(trace.files):
            label = name.split("/", 1)[-1].removesuffix(".py")
            axes.annotate(
                label,
                (step, levels[step]),
                (2, 5),
                textcoords="offset points",
                fontsize=7,
                rotation=32,
                color=INK,
            )
        axes.set_yticks(list(lanes.values()), list(lanes))
        axes.set_xticks([])
        axes.set_xlim(-0.5, max(len(trace.files), 20) + 1.0)
        axes.set_ylim(min(lanes.values()) - 0.5, 1.4)
        axes.set_title(f"{title}: {len(trace.files)} files", loc="left", fontsize=11, color=INK)
        axes.tick_params(length=0, colors=INK)
        for side in axes.spines.values():
            side.set_visible(False)
    save(figure, path, "The source files that a round visits, in the order of its first calls")


def _room(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def main(folder: Path) -> None:
    simulated = simulated_round()
    server, client = flower_round()
    draw(
        {"A simulated round": simulated, "A Flower round, server": server, "A Flower round, client": client},
        folder / "round-files.svg",
    )
    print(f"simulated round: {simulated.count()} files")
    for side, trace in (("server", server), ("client", client)):
        near = trace.count("flower", "session", "protocol")
        print(f"Flower round, {side}: {trace.count()} files, {near} in flower, session and protocol")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
