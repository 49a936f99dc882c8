"""The figures of a report, as inline SVG for the page and, two of them, as PNG for a README."""

from __future__ import annotations

from pathlib import Path

from niss.report.files import write_atomically
from niss.report.source import ReportInput
from niss.report.svg import inline_svg
from niss.report.table import format_accuracy, format_variance

ACCURACY_TITLE = "Test accuracy by round"
SPENDING_TITLE = "Privacy loss of the clients by round"
NOISE_TITLE = "Noise variance left in the aggregate, by method"


def accuracy_figure(report: ReportInput, *, prefix: str = "accuracy") -> str:
    """Inline SVG: one accuracy curve for each method, with its values under the pointer."""
    from niss.report.accuracy_chart import accuracy_bands, draw_accuracy
    from niss.report.canvas import THEME, as_svg
    from niss.report.hover import add_bands

    figure = draw_accuracy(report)
    return inline_svg(
        as_svg(figure, salt="niss-accuracy"),
        prefix=prefix,
        title=ACCURACY_TITLE,
        description=describe_accuracy(report),
        theme=THEME,
        overlay=lambda root: add_bands(root, *accuracy_bands(figure, report)),
    )


def spending_figure(report: ReportInput, notes: list[str], *, prefix: str = "spending") -> str | None:
    """Inline SVG: epsilon of the clients over the rounds; None where no ledger holds a finite one."""
    from niss.report.canvas import THEME, as_svg
    from niss.report.spending import read_spending
    from niss.report.spending_chart import describe_spending, draw_spending

    spendings = read_spending(report, notes)
    if not spendings:
        return None
    return inline_svg(
        as_svg(draw_spending(spendings), salt="niss-spending"),
        prefix=prefix,
        title=SPENDING_TITLE,
        description=describe_spending(spendings),
        theme=THEME,
    )


def noise_figure(report: ReportInput, *, prefix: str = "noise") -> str:
    """Inline SVG: one bar for each method's measured noise variance, with a mark where theory puts it."""
    from niss.report.canvas import THEME, as_svg
    from niss.report.noise_chart import draw_noise

    return inline_svg(
        as_svg(draw_noise(report), salt="niss-noise"),
        prefix=prefix,
        title=NOISE_TITLE,
        description=describe_noise(report),
        theme=THEME,
    )


def save_png(report: ReportInput, folder: Path) -> tuple[Path, Path]:
    """Writes accuracy.png and noise.png on white into `folder`."""
    from niss.report.accuracy_chart import draw_accuracy
    from niss.report.canvas import as_png
    from niss.report.noise_chart import draw_noise

    folder = Path(folder)
    return (
        write_atomically(folder / "accuracy.png", as_png(draw_accuracy(report))),
        write_atomically(folder / "noise.png", as_png(draw_noise(report))),
    )


def describe_accuracy(report: ReportInput) -> str:
    """The figure in words, for those who do not see it."""
    ends = [
        f"{method.label} {format_accuracy(method.evaluations[-1][1])} at round {method.evaluations[-1][0]}"
        for method in report.methods
        if method.evaluations
    ]
    return f"Line chart of test accuracy by round. The curves end at: {'; '.join(ends) or 'no curve yet'}."


def describe_noise(report: ReportInput) -> str:
    bars = [
        f"{method.label} measured {format_variance(method.aggregate_variance, finished=method.finished)}, "
        f"predicted {format_variance(method.aggregate_variance_predicted, finished=method.finished)}"
        for method in report.methods
    ]
    return f"Bar chart on a logarithmic axis of the noise variance in the aggregate: {'; '.join(bars)}."
