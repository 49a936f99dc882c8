"""The table of Figure 4: what DLG recovered, by picture and level."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from niss.reproduce.figure4_levels import CLIENT_NOISE, IMAGES, LEVELS
from niss.reproduce.leaks import Attempt, Leaks, all_leaks, select_level
from niss.reproduce.markdown import decibels, or_missing, short
from niss.reproduce.records import Spread, spread


def leaks_in_order(folder: Path) -> list[Leaks]:
    """The pictures as they are listed, others behind them."""
    found = all_leaks(folder).values()
    return sorted(found, key=lambda one: (_place(one.base["image"]), one.base["image"]))


def _place(image: str) -> int:
    return IMAGES.index(image) if image in IMAGES else len(IMAGES)


def figure_4_table(folder: Path) -> str:
    """PSNR at the end and at the best of the frames, label, loss, and the epsilon of the joint view."""
    rows = []
    for leaks in leaks_in_order(folder):
        for level in LEVELS.values():
            cells = select_level(leaks, level.name)
            for noise in dict.fromkeys(cell.labels["noise"] for cell in cells):
                rows.append(_row(leaks, level.title, [c for c in cells if c.labels["noise"] == noise]))
    header = [
        "Picture",
        "Upload and view",
        "σ_k",
        "Noise ÷ update",
        "Loss",
        "PSNR, dB",
        "Best, dB",
        "Grey, dB",
        "Label",
        "ε, joint view",
    ]
    return or_missing(header, rows, words=(0, 1, 9))


def _row(leaks: Leaks, title: str, cells: Sequence[Attempt]) -> list[str]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return [
        f"`{leaks.base['image']}`",
        title,
        _noise(cells[0]),
        short(mean([cell.noise for cell in cells])),
        short(mean([cell.loss for cell in cells])),
        decibels(psnr(cells)).removesuffix(" dB"),
        f"{mean([cell.best_psnr for cell in cells]):.1f}",
        f"{leaks.grey:.1f}",
        f"{sum(cell.label_found for cell in cells)} of {len(cells)}",
        _held(cells),
    ]


def psnr(cells: Sequence[Attempt]) -> Spread | None:
    """PSNR at the end, over seeds."""
    return spread([cell.psnr for cell in cells]) if cells else None


def _noise(cell: Attempt) -> str:
    noise = cell.labels["noise"]
    if noise == CLIENT_NOISE:
        return "for\u00a0ε\u00a0=\u00a03"
    return "none" if noise == "none" else f"{cell.labels['sigma_k']:.3g}"


def _held(cells: Sequence[Attempt]) -> str:
    if cells[0].labels["noise"] == "none":
        return "not private"
    known = [cell.epsilon_joint for cell in cells if cell.epsilon_joint is not None]
    if len(known) < len(cells):
        return "none"
    return f"{max(known):.2f}" + ("" if cells[0].labels["noise"] == CLIENT_NOISE else ", heuristic")
