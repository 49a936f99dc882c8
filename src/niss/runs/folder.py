"""The folder of a run as it is read, finished or not: what a report is made of.

What the files are is listed in `niss.files`, which also writes them: every write is whole or not at all.

`read_report_input` takes a comparison (a folder with summary.json and one folder per method) or a single run, and
returns a `ReportInput`: its settings and, in `methods`, one `MethodResult` each. Nothing is formatted here.

A folder may have been edited by hand or written by another version, so every value is checked for its type where it
is read. A value of the wrong type in a result is a `RunFolderError` that names file and key; in a manifest, where a
setting is only looked up, it counts as absent. The last line of metrics.jsonl may be cut off, as a crash leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from niss.errors import RunFolderError, meant
from niss.files import (
    MANIFEST,
    METRICS,
    PRIVACY,
    RESULT,
    SUMMARY,
    JsonObject,
    find_json,
    read_json_lines,
)
from niss.methods.look import Look, distinct
from niss.redaction import printable
from niss.runs import RoundRecord, five_before

if TYPE_CHECKING:
    from niss.methods import Method

_NUMBERS_OF_A_RESULT = (
    *("accuracy", "aggregate_variance", "aggregate_variance_predicted", "tau2", "kappa"),
    *("epsilon_joint", "epsilon_marginal"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """One method of a comparison, or the one method of a single run.

    label       its name in this comparison, chosen by the user
    method      the registered name of the method; an older or newer version may have written one unknown here
    epsilon_*   None where nothing is guaranteed, and while the run is unfinished
    adversary   against whom the guarantee holds, in words
    curve       the rounds so far, by number
    manifest    the method's manifest.json, empty where there is none
    """

    label: str
    method: str
    kappa: float | None
    tau2: float | None
    accuracy: float | None
    aggregate_variance: float | None
    aggregate_variance_predicted: float | None
    epsilon_joint: float | None = None
    epsilon_marginal: float | None = None
    adversary: str | None = None
    guarantee: str | None = None
    finished: bool
    curve: tuple[RoundRecord, ...]
    manifest: JsonObject
    folder: Path

    @property
    def registered(self) -> Method | None:
        """The method itself; None for one that this version does not know."""
        return _registered(self.method)

    @property
    def model_noise_variance(self) -> float | None:
        """Of the noise in the model after the latest round, predicted; None where that is not known."""
        return self.curve[-1].model_noise_variance if self.curve else None

    @property
    def is_private(self) -> bool:
        """Whether the method sets out to protect anyone, with or without a guarantee; an unknown one may."""
        return self.registered is None or self.registered.private

    @property
    def is_unprotected(self) -> bool:
        """Whether it is known to guarantee nothing: no noise at all, a finished run without an epsilon, or a round."""
        if self.finished:
            return not self.is_private or self.epsilon_joint is None
        return not self.is_private or any(point.unguaranteed for point in self.curve)

    @property
    def is_protected(self) -> bool:
        """Whether it has a guarantee against the server or, while it goes, nothing yet says that it will not."""
        return not self.is_unprotected and not self.trusts_the_server

    @property
    def trusts_the_server(self) -> bool:
        """Whether its epsilon holds only for those who see the released models, not for the server."""
        return self.registered is not None and self.registered.trusts_server

    @property
    def shares_noise(self) -> bool:
        """Whether clients exchange noise shares, so that kappa, tau^2 and a share graph mean something."""
        return self.registered is not None and self.registered.shares_noise

    @property
    def rounds_done(self) -> int:
        return max((point.round for point in self.curve), default=0)

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """The rounds with an evaluation, each with its accuracy."""
        return [(point.round, point.accuracy) for point in self.curve if point.accuracy is not None]

    @property
    def accuracy_before(self) -> float | None:
        """Mean over the five evaluations before the last: what a run has that ends a little earlier.

        None where there are fewer: a run that has only begun to learn rises too fast for a mean to say anything.
        """
        return (
            five_before([accuracy for _, accuracy in self.evaluations]) if len(self.evaluations) > 5 else None
        )

    @property
    def carries(self) -> bool:
        """Whether any round left noise in the model that the next one takes out."""
        return any(point.carried_variance for point in self.curve)


def _registered(name: str) -> Method | None:
    """The method of that name; None for one that this version does not know."""
    # Loads scipy, which takes longer than all the rest of this room.
    from niss.methods import METHODS

    return METHODS.get(name)


@dataclass(frozen=True, slots=True)
class ReportInput:
    """All that a report says about one folder; a setting is None where no file of the folder names it.

    title           what the page is headed with, after the name of the folder
    created         when the run was made, as its manifest has it
    unit, relation  what is hidden, and what counts as a neighbouring input; see `niss.accounting.Plan`
    target_epsilon  what every method was calibrated to in the joint view
    is_comparison   whether the folder compares methods, even where it holds only one so far
    finished        whether the last file of the run has been written, so that its epsilons are final
    notes           what was wrong with the folder, in sentences for the reader
    """

    folder: Path
    title: str
    created: str | None
    niss_version: str | None
    rounds: int | None
    clients: int | None
    participants: int | None
    model_parameters: int | None
    delta: float | None
    target_epsilon: float | None
    unit: str | None
    relation: str | None
    dataset: str | None
    split: str | None
    methods: tuple[MethodResult, ...]
    is_comparison: bool
    finished: bool
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """That of its folder."""
        return self.folder.resolve().name


def looks(report: ReportInput) -> list[Look]:
    """How each method is drawn, the same in all figures; two variants of one method are told apart."""
    from niss.methods import look_of

    return distinct(look_of(method.method, protected=not method.is_unprotected) for method in report.methods)


def read_report_input(folder: Path) -> ReportInput:
    """Read a comparison folder, a single run folder, or what an unfinished one has so far.

    A folder with summary.json is a finished comparison. Without it, one whose manifest says so is an unfinished
    comparison, and the methods begun so far are read from their folders. Anything else with a manifest, metrics or
    a result is a single run, finished once it has result.json.

    Raises `RunFolderError` where the folder holds no run, or a file in it is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        beside = [one.name for one in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = meant(folder.name, beside) or "give the folder that `niss` wrote the run to"
        raise RunFolderError(f"{folder} is not a folder", hint=hint)
    summary, manifest = read_object(folder / SUMMARY), read_object(folder / MANIFEST)
    if summary is not None:
        return _finished_comparison(folder, summary, manifest)
    if manifest is not None and manifest.get("kind") == "comparison":
        return _unfinished_comparison(folder, manifest)
    if manifest is not None or any((folder / name).is_file() for name in (METRICS, RESULT)):
        return _single_run(folder, manifest or {})
    raise RunFolderError(
        f"{folder} does not contain a run: it has no {SUMMARY}, {MANIFEST} or {METRICS}",
        hint="give the folder of a run or of a comparison, for example runs/demo",
    )


def planned_methods(manifest: JsonObject) -> list[dict[str, Any]]:
    """The methods as the manifest's configuration lists them, none where it has no such list.

    Each is the object in the configuration: `name`, `label` and the settings of the method, unchecked.
    """
    methods = section(manifest, "config").get("methods")
    return [method for method in methods if isinstance(method, dict)] if isinstance(methods, list) else []


def section(values: JsonObject, *names: str) -> JsonObject:
    """The object under these keys, one within the other; an empty one where there is none."""
    for name in names:
        found = values.get(name)
        values = found if isinstance(found, dict) else {}
    return values


def _finished_comparison(folder: Path, summary: JsonObject, manifest: JsonObject | None) -> ReportInput:
    where = folder / SUMMARY
    entries = summary.get("methods")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise RunFolderError(
            f"{where} lists no methods", hint="the comparison was not written to its end; run it again"
        )
    methods, notes = [], list[str]()
    for entry in entries:
        inner = text_at(entry, "folder", where) or text_at(entry, "label", where) or ""
        if not (folder / inner).resolve().is_relative_to(folder.resolve()):
            raise RunFolderError(
                f"{where} names the folder {inner!r}, which lies outside the comparison",
                hint="move the run into the comparison folder and name it from there",
            )
        methods.append(_read_method(folder / inner, entry, where, notes, fallback_label=inner))
    if manifest is None:
        manifest = methods[0].manifest
    settings = [summary, {"created": manifest.get("created")}]
    return _report(folder, settings, manifest, methods, notes, is_comparison=True, finished=True)


def _unfinished_comparison(folder: Path, manifest: JsonObject) -> ReportInput:
    """The methods begun so far, in the order of the configuration where it is known."""
    begun = {path.parent for name in (MANIFEST, METRICS) for path in folder.glob(f"*/{name}")}
    order = [method.get("label") or method.get("name") for method in planned_methods(manifest)]
    notes: list[str] = []
    methods = [
        _read_method(path, read_object(path / RESULT), path / RESULT, notes, fallback_label=path.name)
        for path in sorted(
            begun, key=lambda path: (order.index(path.name) if path.name in order else len(order), path.name)
        )
    ]
    settings = [manifest, *(method.manifest for method in methods)]
    return _report(folder, settings, manifest, methods, notes, is_comparison=True, finished=False)


def _single_run(folder: Path, manifest: JsonObject) -> ReportInput:
    notes: list[str] = []
    result = read_object(folder / RESULT)
    planned = planned_methods(manifest)
    label = (planned[0].get("label") or planned[0].get("name")) if len(planned) == 1 else None
    fallback = label if isinstance(label, str) else folder.resolve().name
    method = _read_method(folder, result, folder / RESULT, notes, fallback_label=fallback)
    settings = [result or {}, read_object(folder / PRIVACY) or {}, manifest]
    return _report(folder, settings, manifest, [method], notes, is_comparison=False, finished=method.finished)


def _report(
    folder: Path,
    settings: list[JsonObject],
    manifest: JsonObject,
    methods: list[MethodResult],
    notes: list[str],
    *,
    is_comparison: bool,
    finished: bool,
) -> ReportInput:
    """Look every setting up in `settings`, files of the folder in the order in which they are believed."""
    what = f"{len(methods)} methods on the same clients" if is_comparison else methods[0].label
    target = find_number(settings, "target_epsilon")
    # A summary that says null has no target; only where there is no summary the configuration speaks.
    if "methods" not in settings[0] and not target:
        target = find_number([section(manifest, "config", "privacy")], "epsilon")
    found: dict[str, Any] = {
        name: _find_text(settings, name) for name in ("created", "unit", "relation", "dataset", "split")
    }
    for key in ("rounds", "clients", "participants", "model_parameters"):
        number = find_number(settings, key)
        found[key] = None if number is None else int(number)
    return ReportInput(
        folder=folder,
        title=f"{folder.resolve().name}: {what}",
        niss_version=_find_text(settings, "niss_version")
        or _find_text([manifest.get("versions") or {}], "niss"),
        delta=find_number(settings, "delta"),
        target_epsilon=target,
        methods=tuple(methods),
        is_comparison=is_comparison,
        finished=finished,
        notes=tuple(notes),
        **found,
    )


def _read_method(
    folder: Path, entry: JsonObject | None, where: Path, notes: list[str], *, fallback_label: str
) -> MethodResult:
    """The method in `folder`.

    entry           its results, read from the file `where`; None while there are none
    notes           gets a sentence for each fault that the report can live with
    fallback_label  its name where the results have none
    """
    manifest = read_object(folder / MANIFEST) or {}
    label = (text_at(entry, "label", where) if entry else None) or fallback_label
    curve = _read_curve(folder / METRICS, label, notes)
    if entry is not None and not curve:
        notes.append(f"{label} has no rounds in {METRICS}, so it has no curve.")
    values = _so_far(label, manifest, curve) if entry is None else entry
    return MethodResult(
        label=label,
        method=text_at(values, "method", where) or label,
        adversary=text_at(values, "adversary", where),
        guarantee=text_at(values, "guarantee", where),
        finished=entry is not None,
        curve=curve,
        manifest=manifest,
        folder=folder,
        **{key: number_at(values, key, where) for key in _NUMBERS_OF_A_RESULT},
    )


def _so_far(label: str, manifest: JsonObject, curve: tuple[RoundRecord, ...]) -> JsonObject:
    """What stands for result.json while there is none: what the manifest planned and the rounds have shown.

    Variances are means over the rounds. There is no epsilon, since none is final.
    """
    planned = planned_methods(manifest)
    plan: JsonObject = planned[0] if len(planned) == 1 else {}
    name = plan["name"] if isinstance(plan.get("name"), str) else label
    kappa = plan.get("kappa")
    values: JsonObject = {
        "method": name,
        "kappa": kappa if isinstance(kappa, int | float) else None,
        "tau2": _mean(point.tau2 for point in curve),
        "accuracy": next((one.accuracy for one in reversed(curve) if one.accuracy is not None), None),
        "aggregate_variance": _mean(point.aggregate_variance for point in curve),
        "aggregate_variance_predicted": _mean(point.aggregate_variance_predicted for point in curve),
    }
    known = _registered(name)
    return values if known is not None and known.shares_noise else {**values, "kappa": None, "tau2": None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _read_curve(path: Path, label: str, notes: list[str]) -> tuple[RoundRecord, ...]:
    """The rounds in metrics.jsonl by number; a last line that is cut off becomes a note."""
    lines, cut_off = read_lines(path)
    if cut_off:
        notes.append(f"The last line of {label}’s {METRICS} is cut off and was left out.")
    by_round: dict[int, RoundRecord] = {}
    for line in lines:
        record = RoundRecord.from_json(line, path)
        # A run resumed from a checkpoint writes some rounds twice; what was written last holds.
        by_round[record.round] = record
    return tuple(by_round[number] for number in sorted(by_round))


def read_object(path: Path) -> JsonObject | None:
    """The JSON object in a file, with `printable` texts; None where there is no such file.

    Raises `RunFolderError` where the file cannot be read or holds anything else.
    """
    value = find_json(path)
    return None if value is None else _shown(value)


def read_lines(path: Path) -> tuple[list[JsonObject], bool]:
    """The objects of a .jsonl file, with `printable` texts, and whether the last line is cut off."""
    lines, cut_off = read_json_lines(path)
    return _shown(lines), cut_off


def _shown(value: Any) -> Any:
    """`value` with all its texts `printable`: escaping does not help against characters that no page may carry."""
    if isinstance(value, str):
        return printable(value, longest=None, keep="\n\t")
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    return value


def number_at(entry: Mapping[str, Any], key: str, where: Path) -> float | None:
    """A finite number, or None where it is absent, null or infinite (an infinite ε promises nothing).

    Raises `RunFolderError` naming the file `where` for anything else, as does `text_at`.
    """
    value = entry.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise _wrong_type(where, key, "number", value)
    return None if value is None or not _is_finite(value) else float(value)


def _is_finite(value: float) -> bool:
    """Whether it is a number that fits a float; JSON may hold whole numbers that do not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def text_at(entry: Mapping[str, Any], key: str, where: Path) -> str | None:
    """A text, or None where it is absent or null."""
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong_type(where, key, "text", value)
    return value


def _wrong_type(where: Path, key: str, wanted: str, value: object) -> RunFolderError:
    return RunFolderError(
        f"{where}: {key} should be a {wanted} or null, not {value!r}",
        hint="the file was changed by hand or written by another version of niss",
    )


def _candidates(settings: Sequence[JsonObject], key: str) -> list[Any]:
    """Every value of `key`, the outer levels first: a manifest keeps its settings in nested sections."""
    values: list[Any] = []
    level: list[Any] = list(settings)
    while level:
        values += [section[key] for section in level if key in section]
        level = [value for section in level for value in section.values() if isinstance(value, dict)]
    return values


def find_number(settings: Sequence[JsonObject], key: str) -> float | None:
    """The first finite number of that name in files of a folder; anything else counts as absent."""
    numbers = (value for value in _candidates(settings, key) if type(value) in (int, float))
    return next((float(value) for value in numbers if _is_finite(value)), None)


def _find_text(settings: Sequence[JsonObject], key: str) -> str | None:
    """A text, or the name of a section: `dataset` may be given as either."""
    names = (one.get("name") if isinstance(one, dict) else one for one in _candidates(settings, key))
    return next((name for name in names if isinstance(name, str) and name), None)
