"""What an attack experiment is: typed options, a run that fills `Findings`, and a figure.

A new attack is one module with a subclass of `Experiment` and one line in `niss.attacks.EXPERIMENTS`. The subclass is a
frozen dataclass, and its fields are the options of `niss attack NAME`: name, type and default are those of the field, help
text and choices stand in its annotation (`Annotated[int, Help("...")]`, or one of the shared ones below).
`options_of` lists them for whoever builds a command line.

This module and those of the experiments import nothing heavy at their top: the command line reads the options of all of them
before it knows which one will run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from niss.errors import ConfigError
from niss.files import SHARED, to_json, write_json
from niss.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Progress = Callable[[str, int, int, str], None]
"""Called with the name of a part, steps done, steps in all, and a note."""

RESULT_FILE, FIGURE_FILE = "attack.json", "attack.png"


def no_progress(_part: str, _done: int, _total: int, _note: str) -> None:
    """For callers who need no progress."""


@dataclass
class Findings:
    """What an experiment has found; filled as it runs, so that an interrupted one still leaves everything it had.

    attack     the name of the experiment
    settings   its options, for the file and the report
    columns    keys of the rows that a table shows, and their headings
    rows       one per case tried; may hold more keys than the table shows
    curves     numbers a figure draws, written to the file too
    pictures   pixels a figure draws, written nowhere else
    headline   the result in one or two sentences
    finished   False where the run was interrupted
    """

    attack: str
    settings: dict[str, Any]
    columns: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, Any] = field(default_factory=dict)
    headline: str = ""
    finished: bool = False

    def to_json(self) -> dict[str, Any]:
        """The content of `attack.json`; numbers that JSON cannot hold become null."""
        values = {
            "attack": self.attack,
            "niss": __version__,
            "finished": self.finished,
            "headline": self.headline,
            "settings": self.settings,
            "columns": self.columns,
            "rows": self.rows,
            "curves": self.curves,
        }
        return to_json(values)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """Options of one attack, and how to run it.

    name       the command, `niss attack NAME`
    summary    one line of help
    examples   command lines that the help shows
    columns    keys of the rows that the table shows, and their headings
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    columns: ClassVar[dict[str, str]]

    @abstractmethod
    def check(self) -> None:
        """Raise `ConfigError` for every option that cannot be used, before any work is done."""

    @abstractmethod
    def run(self, findings: Findings, progress: Progress) -> None:
        """Attack, and fill the findings on the way."""

    @abstractmethod
    def draw(self, findings: Findings) -> Figure | None:
        """The figure of what was found, finished or not; None where there is nothing to draw yet."""

    def start(self) -> Findings:
        """Check the options; returns the empty findings for `run`."""
        self.check()
        return Findings(self.name, self.settings(), dict(self.columns))

    def settings(self) -> dict[str, Any]:
        """The options as the results show them."""
        return asdict(self)


def check_at_least(least: int, **options: int) -> None:
    """Refuse the first option (named as the field is) that is below `least`."""
    for name, value in options.items():
        if value < least:
            raise ConfigError(f"must be at least {least}, not {value}", field="--" + name.replace("_", "-"))


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Create the folder of the results, or refuse one that cannot take them, before any work is done."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", field="--out", hint="give a folder")
    if (folder / RESULT_FILE).exists() and not overwrite:
        raise ConfigError(
            f"{folder} already holds the results of an attack",
            field="--out",
            hint="choose another folder, or add --overwrite",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create {folder}: {error.strerror}", field="--out", hint="choose another place"
        ) from None


def write_findings(findings: Findings, folder: Path) -> Path:
    """Write `attack.json`, whole or not at all; returns its path."""
    path = folder / RESULT_FILE
    write_json(path, findings.to_json(), mode=SHARED)
    return path


def write_results(experiment: Experiment, findings: Findings, folder: Path) -> None:
    """Write `attack.json` and, where there is enough to draw, `attack.png`."""
    write_findings(findings, folder)
    try:
        figure = experiment.draw(findings)
    except (KeyError, IndexError, ValueError):
        # An interrupted experiment may have too little for its figure.
        if findings.finished:
            raise
        return
    if figure is not None:
        from niss.attacks.drawing import save

        save(figure, folder / FIGURE_FILE)


@dataclass(frozen=True)
class Help:
    """What the annotation of an option says beyond its type.

    text       one line of help
    flag       the flag, where it is not the field's name with dashes
    choices    values to complete; for a comma-separated option, of each part
    metavar    the placeholder of the value in the help
    """

    text: str
    flag: str | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None


@dataclass(frozen=True)
class Option:
    """One option of an experiment, as a command line needs it.

    name       the field of the dataclass, `flag` what the user types
    kind       int, float or str; of a comma-separated option, the type of each part
    default    the value of the field; None: the experiment finds one
    several    whether the value is a comma-separated list (a tuple in the dataclass)
    """

    name: str
    flag: str
    kind: type
    default: Any
    several: bool
    help: str
    choices: tuple[str, ...]
    metavar: str | None

    @property
    def default_text(self) -> str | None:
        """The default of a comma-separated option as a user would type it."""
        if not self.several:
            return None
        return ",".join(f"{part:g}" if self.kind is float else str(part) for part in self.default)

    def parse(self, value: Any) -> Any:
        """The value of the field from what was typed: a comma-separated text becomes a tuple."""
        if not self.several:
            return value
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        try:
            return tuple(self.kind(part) for part in parts)
        except ValueError:
            raise ConfigError(
                f"expected comma-separated numbers, got {value!r}",
                field=self.flag,
                hint="for example 0,0.5,1",
            ) from None


def options_of(experiment: type[Experiment]) -> tuple[Option, ...]:
    """The options of an experiment, in order: its fields whose annotation carries a `Help`."""
    hints = get_type_hints(experiment, include_extras=True)
    options = []
    for one in fields(experiment):
        if get_origin(hints[one.name]) is not Annotated:
            continue
        annotated, help_ = get_args(hints[one.name])
        several = get_origin(annotated) is tuple
        kinds = get_args(annotated) or (annotated,)
        flag = help_.flag or "--" + one.name.replace("_", "-")
        options.append(
            Option(one.name, flag, kinds[0], one.default, several, help_.text, help_.choices, help_.metavar)
        )
    return tuple(options)


METHODS = ("fedavg", "dp-fedavg", "central-dp", "niss")
VIEWS = ("alone", "joint")
PRESETS = ("default", "paper")
MODELS = ("mlp", "cnn", "lenet")
DISTORTIONS = ("scalar", "coordinate", "additive")
DEVICES = ("auto", "cpu", "cuda")

DEFAULT_PICTURE = "mnist-mini:0"

Image = Annotated[
    str, Help("The private picture: a file, or one of a dataset.", metavar="PATH|DATASET:INDEX")
]
Label = Annotated[int | None, Help("Class of a picture from a file; default 0.")]
Clients = Annotated[int, Help("Participants of the round, the victim among them.")]
Neighbours = Annotated[float, Help("Unit shares each client sends.")]
Epsilon = Annotated[float | None, Help("Privacy target; default: that of the plan.")]
Delta = Annotated[float | None, Help("Privacy target; default: that of the plan.")]
Tau2 = Annotated[float | None, Help("Distortion of received shares; default: that of the plan.")]
Methods = Annotated[
    tuple[str, ...], Help("Comma-separated: fedavg, dp-fedavg, central-dp, niss.", choices=METHODS)
]
View = Annotated[str, Help("alone (the victim's upload) or joint (all uploads).", choices=VIEWS)]
PlanName = Annotated[str, Help("default, or paper: the noise of its Figure 4.", choices=PRESETS)]
Hidden = Annotated[int, Help("Width of the hidden layer of the model.")]
Iterations = Annotated[int, Help("Most iterations; it stops early when nothing moves any more.")]
Restarts = Annotated[int, Help("Random starts, tried side by side.")]
Seed = Annotated[int, Help("Seed of everything random here.")]
Device = Annotated[str, Help("auto, cpu or cuda.", choices=DEVICES)]
