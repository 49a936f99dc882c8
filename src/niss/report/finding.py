"""The finding at the head of the report: sentences that say what the numbers support and no more."""

from __future__ import annotations

from dataclasses import dataclass

from niss.report.source import MethodResult, ReportInput
from niss.report.table import format_accuracy

# Calibration stops a little below its target; two epsilons this close are the same budget.
SAME_BUDGET = 0.01


@dataclass(frozen=True, slots=True)
class Scored:
    """A method that has an accuracy, with that accuracy as printed, in tenths of a percent point."""

    result: MethodResult
    accuracy: float
    tenths: int


def finding(report: ReportInput) -> str:
    """The one sentence that the page begins with."""
    if not report.finished:
        return _unfinished(report)
    scored = _scored(report)
    if not scored:
        return "No accuracy was measured, so there is nothing to compare."
    if len(report.methods) == 1:
        return _single(scored[0], report)
    protected = _within_budget(scored, report)
    reference = _best([one for one in scored if not one.result.is_private])
    if not protected:
        return "No method here has both an accuracy and a guarantee against a server that sees every upload."
    return _compared(protected, reference)


def caveats(report: ReportInput) -> list[str]:
    """What a reader of the finding must know beside it."""
    if not report.finished or len(report.methods) == 1:
        return []
    scored = _scored(report)
    said = []
    trusting = [
        one for one in scored if one.result.trusts_the_server and one.result.epsilon_joint is not None
    ]
    if trusting:
        said.append(
            f"{_names_with_accuracy(trusting)} trusts the server with the clear updates, so its ε holds "
            "only for those who see the released models; it is left out of the finding."
        )
    unproven = [one for one in scored if one.result.is_private and one.result.epsilon_joint is None]
    if unproven:
        verb = (
            "has no guarantee in the joint view and is"
            if len(unproven) == 1
            else ("have no guarantee in the joint view and are")
        )
        said.append(f"{_names_with_accuracy(unproven)} {verb} left out of the finding.")
    dearer = [one for one in _protected(scored) if one not in _within_budget(scored, report)]
    if dearer:
        verb = (
            "spends more than the target ε and is"
            if len(dearer) == 1
            else "spend more than the target ε and are"
        )
        said.append(f"{_names_with_accuracy(dearer)} {verb} left out of the finding.")
    said.append("Each method was run once, so small differences between neighbours may be chance.")
    return said


def _unfinished(report: ReportInput) -> str:
    done = min((method.rounds_done for method in report.methods), default=0)
    of_all = f" of {report.rounds}" if report.rounds else ""
    what = "comparison" if report.is_comparison else "run"
    if report.is_comparison:
        begun = len(report.methods)
        count = f"{begun} method{'s have' if begun != 1 else ' has'} begun"
    else:
        count = f"{done}{of_all} rounds are done"
    return (
        f"This {what} is unfinished: {count}, the figures show what there is so far, and nothing follows yet."
    )


def _single(one: Scored, report: ReportInput) -> str:
    rounds = f" after {report.rounds} rounds" if report.rounds else ""
    head = f"{one.result.label} reached {format_accuracy(one.accuracy)} accuracy{rounds}"
    if not one.result.is_private:
        return f"{head}, without any privacy."
    if one.result.epsilon_joint is None:
        return f"{head}, without a guarantee in the joint view."
    if one.result.trusts_the_server:
        return f"{head}, at ε = {one.result.epsilon_joint:.2f} for those who see only the released models."
    return f"{head}, at ε = {one.result.epsilon_joint:.2f} in the joint view."


def _compared(protected: list[Scored], reference: list[Scored]) -> str:
    best = _best(protected)
    names = _joined([one.result.label for one in best])
    budget = _budget_phrase(protected)
    accuracy = format_accuracy(best[0].accuracy)
    ending, ending_es = ("", "") if len(best) > 1 else ("s", "es")
    if not reference:
        start = f"{names} reach{ending_es} the highest accuracy, {accuracy}"
        return f"{budget}, {start}{_other_side(protected, best, best[0])}."
    open_one = reference[0]
    shown = f"{open_one.result.label} ({format_accuracy(open_one.accuracy)})"
    gap = open_one.tenths - best[0].tenths
    if gap == 0:
        start = f"{names} do{ending_es} as well as {open_one.result.label}, at {accuracy}"
    elif gap < 0:
        start = f"{names} reach{ending_es} {accuracy}, {_points(-gap)} above {shown}"
    elif len(protected) == 1:
        start = f"{names} reaches {accuracy}, {_points(gap)} below {shown}"
    else:
        start = f"{names} come{ending} closest to {shown}, at {accuracy}, {_points(gap)} below it"
    return f"{budget}, {start}{_other_side(protected, best, open_one)}."


def _other_side(protected: list[Scored], best: list[Scored], measure: Scored) -> str:
    """The other side of the comparison: dp-fedavg where NISS is best, and NISS where dp-fedavg is best."""
    won_by = {one.result.method for one in best}
    rivals = [one for one in protected if one.result.method not in won_by]
    others = _best([one for one in rivals if one.result.method == "dp-fedavg"] or rivals)
    if not others:
        return ""
    rival = others[0]
    gap = measure.tenths - rival.tenths
    accuracy = format_accuracy(rival.accuracy)
    if gap <= 0:
        return f"; {rival.result.label} reaches {accuracy}"
    return f"; {rival.result.label} falls {_points(gap)} behind {measure.result.label}, at {accuracy}"


def _budget_phrase(protected: list[Scored]) -> str:
    epsilons = [one.result.epsilon_joint for one in protected if one.result.epsilon_joint is not None]
    largest = max(epsilons)
    if largest - min(epsilons) <= SAME_BUDGET * largest:
        same = "the same joint " if len(protected) > 1 else "a joint "
        return f"At {same}ε of {largest:.2f}"
    return f"At a joint ε of at most {largest:.2f}"


def _scored(report: ReportInput) -> list[Scored]:
    return [
        Scored(method, method.accuracy, round(10 * float(f"{100 * method.accuracy:.1f}")))
        for method in report.methods
        if method.accuracy is not None
    ]


def _protected(scored: list[Scored]) -> list[Scored]:
    return [
        one
        for one in scored
        if one.result.is_private and not one.result.trusts_the_server and one.result.epsilon_joint is not None
    ]


def _within_budget(scored: list[Scored], report: ReportInput) -> list[Scored]:
    target = report.target_epsilon
    return [
        one
        for one in _protected(scored)
        if target is None or (one.result.epsilon_joint or 0.0) <= (1 + SAME_BUDGET) * target
    ]


def _best(scored: list[Scored]) -> list[Scored]:
    """Those with the highest accuracy as printed: a difference the reader cannot see is no difference."""
    top = max((one.tenths for one in scored), default=0)
    return [one for one in scored if one.tenths == top]


def _points(tenths: int) -> str:
    return "1 percentage point" if tenths == 10 else f"{tenths / 10:.1f} percentage points"


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _names_with_accuracy(scored: list[Scored]) -> str:
    return _joined([f"{one.result.label} ({format_accuracy(one.accuracy)})" for one in scored])
