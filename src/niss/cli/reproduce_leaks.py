"""What `niss reproduce figure-4` does with its flags."""

from __future__ import annotations

import time
from typing import Any

import typer

from niss.cli.attack_work import AttackProgress
from niss.cli.reproduce_work import Flags, names_in, presented, seconds_left, seeds_of
from niss.cli.terminal import messages
from experiments.reproduce.figure4 import load_victim, run_picture
from experiments.reproduce.figure4_levels import IMAGES, LEVELS, cells_of, find_levels, picture_name
from experiments.reproduce.leaks import FIGURE_4, read_leaks
from experiments.reproduce.records import result_path
from experiments.reproduce.sensitivity import find_reading

SECONDS_A_CELL = 25
"""The mean over the cells of the committed results, on one core of a busy machine: from 2 s to 2 min."""


def figure_4(given: Flags) -> None:
    """The pictures one after the other, every level with every seed; what ends it leaves whole cells."""
    chosen: dict[str, Any] = {
        "seeds": seeds_of(given),
        "levels": find_levels(tuple(LEVELS) if given["level"] == "all" else names_in(given["level"])),
        "readings": [find_reading(name) for name in names_in(given["reading"])],
    }
    images = IMAGES if given["image"] == "all" else tuple(names_in(given["image"]))
    if given["dry_run"]:
        for image in images:
            _announce(image, given, chosen)
        return
    for image in images:
        load_victim(image)
    _work_through(images, given, chosen)


def _announce(image: str, given: Flags, chosen: dict[str, Any]) -> None:
    known = read_leaks(result_path(given["out"], FIGURE_4, picture_name(image)))
    done = {cell.id for cell in known.cells} if known else set()
    left = [name for name in cells_of(**chosen) if name not in done]
    minutes = len(left) * SECONDS_A_CELL / 60
    typer.echo(f"{image}: {len(left)} cells left, about {minutes:.0f} min on one CPU core")


def _work_through(images: tuple[str, ...], given: Flags, chosen: dict[str, Any]) -> None:
    began = time.monotonic()
    settings = {name: given[name] for name in ("out", "work", "iterations", "restarts", "device")}
    with presented(given):
        for number, image in enumerate(images, start=1):
            messages().print(f"{image} ({number} of {len(images)})", soft_wrap=True)
            left = seconds_left(given, began)
            with AttackProgress(quiet=given["quiet"]) as progress:
                run_picture(image, **settings, **chosen, seconds=left, progress=progress)
