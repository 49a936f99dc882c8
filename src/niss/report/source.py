"""Turns a comparison folder or a single run folder, finished or not, into one `ReportInput`."""

from __future__ import annotations

from pathlib import Path

from niss.errors import RunFolderError
from niss.report.files import JsonObject, read_json_object, text_at
from niss.report.lookup import found_number, found_text, found_whole
from niss.report.method_folder import planned_methods, read_method
from niss.report.records import MethodResult, ReportInput, RoundMetrics

__all__ = ["MethodResult", "ReportInput", "RoundMetrics", "read_report_input"]


def read_report_input(folder: Path) -> ReportInput:
    """Reads a comparison folder (summary.json), a single run folder, or what an unfinished one has so far."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunFolderError(
            f"{folder} is not a folder.", hint="Give the folder that `niss` wrote the run to."
        )
    summary = read_json_object(folder / "summary.json")
    if summary is not None:
        return _finished_comparison(folder, summary)
    manifest = read_json_object(folder / "manifest.json")
    alone = any((folder / name).is_file() for name in ("metrics.jsonl", "result.json"))
    if manifest is not None and manifest.get("kind") == "comparison":
        return _unfinished_comparison(folder, manifest, _method_folders(folder, manifest))
    if alone or manifest is not None:
        return _single_run(folder, manifest or {})
    raise RunFolderError(
        f"{folder} holds no run: there is no summary.json, manifest.json or metrics.jsonl in it.",
        hint="Give the folder of a run or of a comparison, for example runs/demo.",
    )


def _method_folders(folder: Path, manifest: JsonObject) -> list[Path]:
    """The folders of the methods begun so far, in the order of the configuration where it is known."""
    found = {path.parent for name in ("manifest.json", "metrics.jsonl") for path in folder.glob(f"*/{name}")}
    order = [method.get("label") or method.get("name") for method in planned_methods(manifest)]
    return sorted(
        found, key=lambda path: (order.index(path.name) if path.name in order else len(order), path.name)
    )


def _finished_comparison(folder: Path, summary: JsonObject) -> ReportInput:
    where = folder / "summary.json"
    entries = summary.get("methods")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise RunFolderError(
            f"{where} lists no methods.", hint="The comparison was not written to its end; run it again."
        )
    methods, notes = [], list[str]()
    for entry in entries:
        inner = text_at(entry, "folder", where) or text_at(entry, "label", where) or ""
        if not (folder / inner).resolve().is_relative_to(folder.resolve()):
            raise RunFolderError(
                f"{where} names the folder {inner!r}, which lies outside the comparison.",
                hint="Move the run into the comparison folder and name it from there.",
            )
        methods.append(read_method(folder / inner, entry, where, notes, fallback_label=inner))
    manifest = read_json_object(folder / "manifest.json") or dict(methods[0].manifest)
    settings = [summary, {"created": manifest.get("created")}]
    return _report(folder, settings, manifest, methods, notes, is_comparison=True, finished=True)


def _unfinished_comparison(folder: Path, manifest: JsonObject, inner: list[Path]) -> ReportInput:
    notes: list[str] = []
    methods = [
        read_method(
            path,
            read_json_object(path / "result.json"),
            path / "result.json",
            notes,
            fallback_label=path.name,
        )
        for path in inner
    ]
    settings = [manifest, *(dict(method.manifest) for method in methods)]
    return _report(folder, settings, manifest, methods, notes, is_comparison=True, finished=False)


def _single_run(folder: Path, manifest: JsonObject) -> ReportInput:
    notes: list[str] = []
    where = folder / "result.json"
    result = read_json_object(where)
    planned = planned_methods(manifest)
    label = (planned[0].get("label") or planned[0].get("name")) if len(planned) == 1 else None
    fallback = label if isinstance(label, str) else folder.resolve().name
    method = read_method(folder, result, where, notes, fallback_label=fallback)
    settings = [result or {}, read_json_object(folder / "privacy.json") or {}, manifest]
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
    config = manifest.get("config")
    named = [part for part in (settings[0], config) if isinstance(part, dict)]
    name = next((part["name"] for part in named if isinstance(part.get("name"), str)), folder.resolve().name)
    title = name if is_comparison or methods[0].label == name else f"{name}: {methods[0].label}"
    target = found_number(settings, "target_epsilon")
    return ReportInput(
        folder=folder,
        name=name,
        title=found_text(settings, "title") or title,
        created=found_text(settings, "created"),
        niss_version=found_text(settings, "niss_version")
        or found_text([manifest.get("versions") or {}], "niss"),
        rounds=found_whole(settings, "rounds"),
        clients=found_whole(settings, "clients"),
        participants=found_whole(settings, "participants"),
        model_parameters=found_whole(settings, "model_parameters"),
        delta=found_number(settings, "delta"),
        # A summary that says null has no target; only where there is no summary the configuration speaks.
        target_epsilon=target if "methods" in settings[0] else target or _configured_epsilon(config),
        unit=found_text(settings, "unit"),
        relation=found_text(settings, "relation"),
        dataset=found_text(settings, "dataset"),
        split=found_text(settings, "split"),
        methods=tuple(methods),
        is_comparison=is_comparison,
        finished=finished,
        notes=tuple(notes),
    )


def _configured_epsilon(config: object) -> float | None:
    privacy = config.get("privacy") if isinstance(config, dict) else None
    return found_number([privacy], "epsilon") if isinstance(privacy, dict) else None
