"""Pictures and errors over a growing number of rounds or answers: the figure of `average` and `rerun`."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from niss.attacks.drawing import INK, QUIET, STYLE, grid, line, new_figure, points, show_picture, two_parts
from niss.attacks.findings import Findings

_SHOWN = 6
_COUNTED = {
    "average": ("rounds", "Rounds of a still model"),
    "rerun": ("answers", "Answers to the same round"),
}


def draw_steps(findings: Findings) -> Figure | None:
    """A strip of pictures, then the error (measured and predicted) and the PSNR over the count."""
    steps = findings.pictures.get("steps", [])
    if not steps:
        return None
    key, title = _COUNTED[findings.attack]
    rows = [row for row in findings.rows if row.get("error") is not None]
    counts = [row[key] for row in rows]
    with mpl.rc_context(STYLE):
        figure = new_figure(4.5)
        upper, lower = two_parts(figure, (1.4, 3.0))
        axes = upper.subplots(1, _SHOWN + 1)
        show_picture(axes[0], findings.pictures["original"], "original")
        chosen = np.unique(np.linspace(0, len(steps) - 1, _SHOWN).astype(int))
        for number, place in enumerate(axes[1:]):
            if number < chosen.size:
                count, shown = steps[chosen[number]]
                show_picture(place, shown, f"{count:,}")
            else:
                place.set_axis_off()
        errors, ratios = lower.subplots(1, 2)
        line(errors, counts, [row["predicted_error"] for row in rows], 0, "predicted", marks=False)
        points(errors, counts, [row["error"] for row in rows], 1, "measured")
        errors.set_yscale("log")
        errors.set_ylabel("Error ÷ update")
        line(ratios, counts, [row["psnr"] for row in rows], 2, "recovered")
        ratios.axhline(findings.curves["blind_guess_psnr"], color=QUIET, linewidth=1.2, linestyle=":")
        ratios.text(
            0.02,
            findings.curves["blind_guess_psnr"],
            "an even grey",
            color=QUIET,
            fontsize=9,
            va="bottom",
            transform=ratios.get_yaxis_transform(),
        )
        ratios.set_ylabel("PSNR of the picture, dB")
        for each in (errors, ratios):
            each.set_xscale("log")
            each.set_xlabel(title)
            grid(each)
        if "allowed_rounds" in findings.curves:
            limit = findings.curves["allowed_rounds"]
            for each in (errors, ratios):
                each.axvline(limit * 1.02, color=INK, linewidth=1.2, linestyle="--")
            errors.text(
                limit * 1.2,
                0.04,
                "the ledger\nstops here",
                fontsize=9,
                transform=errors.get_xaxis_transform(),
            )
        errors.legend(loc="upper right")
    return figure
