"""What an attack experiment is: typed options, a run that fills `Findings`, and charts of what was found.

A new attack is one module with a subclass of `Experiment` and one line in `niss.attacks.EXPERIMENTS`. The subclass is
a frozen dataclass, and its fields are the options of `niss attack NAME`: name, type and default are those of the
field; help text, range and choices stand in its annotation, as those of all settings do (`Annotated[Count, Doc("...")]`
or one of the shared ones below). The command line reads nothing else.

This module and those of the experiments import nothing heavy at their top, since the command line reads the options of
all of them before it knows which one will run. What a run needs is reached through `niss.attacks`, which imports its
modules on first use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from typing_extensions import Doc

from niss import attacks
from niss.claims import rounded_up
from niss.errors import ConfigError
from niss.files import SHARED, to_json, write_atomically, write_json
from niss.settings import Count, check

if TYPE_CHECKING:
    from niss.attacks.federation import AttackedFederation
    from niss.attacks.pictures import Pictures
    from niss.attacks.rounds import RoundSetting
    from niss.charts import Chart, Mark, Rows, Strip
    from niss.randomness import SimStream

Row = dict[str, Any]
# Called with the name of a part, steps done, steps in all, and a note.
Progress = Callable[[str, int, int, str], None]
# The same within a part.
Step = Callable[[int, int, str], None]

RESULT_FILE, FIGURE_FILE = "attack.json", "attack.png"
# The victim's seat in every round.
VICTIM = 0
DEFAULT_PICTURE = "mnist-mini:0"
ERROR_COLUMNS = {"error": "Error ÷ update", "predicted_error": "Error, predicted"}
PICTURE_COLUMNS = {**ERROR_COLUMNS, "psnr": "PSNR, dB"}


@dataclass
class Findings:
    """What an experiment has found; filled as it runs, so that an interrupted one still leaves everything it had.

    attack     the name of the experiment
    settings   its options, for the file and the report
    columns    keys of the rows that a table shows, and their headings
    rows       one per case tried; may hold more keys than the table shows
    curves     numbers a chart draws, written to the file too
    pictures   pixels, written nowhere but into the figure
    charts     what was found, as it is drawn; filled when results are written, as are the `strips` of pictures
    headline   the result in one or two sentences
    finished   False where the run was interrupted
    """

    attack: str
    settings: dict[str, Any]
    columns: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    curves: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, Any] = field(default_factory=dict)
    charts: list[Chart] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    headline: str = ""
    finished: bool = False

    def to_json(self) -> dict[str, Any]:
        """The content of `attack.json`; numbers that JSON cannot hold become null."""
        from niss.charts import charts_to_json
        from niss.version import __version__

        values = {**vars(self), "niss": __version__, "charts": charts_to_json(self.charts)}
        values["pictures"] = bool(values.pop("strips"))
        return to_json(values)  # type: ignore[no-any-return]


Preset = Literal["default", "paper"]

CLIENTS = Doc("Participants of the round, the victim among them.")
Clients = Annotated[int, Ge(3), CLIENTS]
Epsilon = Annotated[float | None, Doc("Privacy target; default: that of the plan.")]
Delta = Annotated[float | None, Doc("Privacy target; default: that of the plan.")]
Seed = Annotated[int, Doc("Seed of everything random here.")]
Neighbours = Annotated[float, Doc("Unit shares each client sends.")]
Hidden = Annotated[Count, Doc("Width of the hidden layer of the model.")]
Image = Annotated[str, Doc("The private picture: a file, or one of a dataset, as DATASET:INDEX.")]


def visible_names() -> Collection[str]:
    """Those under which a server sees single uploads, and whose rounds can be attacked one by one."""
    from niss.methods import METHODS

    return [name for name, method in METHODS.items() if not (method.masks_uploads or method.carries)]


def distortion_names() -> Iterable[str]:
    """The distortions of shares that are registered."""
    from niss.methods import DISTORTIONS

    return DISTORTIONS


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """Options of one attack, and how to run it.

    name       the command, `niss attack NAME`
    summary    one line of help: the first of the class's docstring
    examples   command lines that the help shows: those of the docstring
    columns    keys of the rows that the table shows, and their headings
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    columns: ClassVar[dict[str, str]]

    clients: Clients = 30
    epsilon: Epsilon = None
    delta: Delta = None
    seed: Seed = 1

    def __init_subclass__(cls) -> None:
        lines = [line.strip() for line in (cls.__doc__ or "").splitlines()]
        cls.summary = lines[0] if lines else ""
        cls.examples = tuple(line for line in lines if line.startswith("niss attack "))

    def run(self, findings: Findings, progress: Progress) -> None:
        """Attack to the end; what was found until then is in the findings, whatever happens."""
        self.attack(findings, progress)
        findings.headline, findings.finished = self.headline(findings), True

    @abstractmethod
    def attack(self, findings: Findings, progress: Progress) -> None:
        """Fill rows, curves and pictures on the way."""

    def headline(self, _findings: Findings) -> str:
        """The result of all that was found, in one or two sentences."""
        return ""

    @abstractmethod
    def charts(self, findings: Findings) -> list[Chart]:
        """What was found, finished or not, as charts; one for which there is nothing yet may be empty."""

    def strips(self, _findings: Findings) -> list[Strip]:
        """The pictures that were recovered, if that is what the attack is after."""
        return []

    def start(self) -> Findings:
        """Check the options; returns the empty findings for `run`."""
        self.check()
        return Findings(self.name, self.settings(), dict(self.columns))

    def check(self) -> None:
        """Raise `ConfigError` for every option that cannot be used, before any work is done."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        try:
            check(type(self), values)
        except ConfigError as error:
            flag = "--" + str(error.field).partition(".")[0].replace("_", "-")
            message = error.message.removeprefix(f"{error.field}: ")
            raise ConfigError(message, field=flag, hint=error.hint) from None
        for name, value in values.items():
            if isinstance(value, tuple) and (not value or len(set(value)) != len(value)):
                raise ConfigError("expected at least one value, each only once", field=f"--{name}")
        self.setting()
        self.stream()

    def settings(self) -> dict[str, Any]:
        """The options as the results show them."""
        return asdict(self)

    def setting(self) -> RoundSetting:
        """The plan under which clients are attacked; refuses numbers that no plan can have."""
        return self.make_setting()

    def make_setting(self, preset: Preset = "default", **numbers: float | None) -> RoundSetting:
        """`niss.attacks.rounds.make_setting` with the options that all experiments have."""
        return attacks.rounds.make_setting(
            preset, clients=self.clients, epsilon=self.epsilon, delta=self.delta, **numbers
        )

    def silo_setting(self, records: int, **changes: float) -> RoundSetting:
        """The same for silos that hide so many records: each shares with all, and every record is in every batch.

        Losses are tolerated: in a repair a silo adds noise that only a lie about its neighbours takes out again.
        """
        setting = self.make_setting(neighbours=self.clients - 1.0)
        return setting.with_plan(
            unit="record", batch=1.0, records=records, graph="complete", mode="tolerate", **changes
        )

    def stream(self, *names: str | int) -> SimStream:
        """Where everything random comes from: a part of the seed's stream, by name."""
        from niss.randomness import SimStream

        return SimStream(self.seed).child(*names) if names else SimStream(self.seed)


@dataclass(frozen=True, kw_only=True)
class PictureExperiment(Experiment):
    """An attack on the update of a victim with private pictures, among other clients."""

    image: Image = DEFAULT_PICTURE

    def check(self) -> None:
        """Refuse what cannot be used."""
        super().check()
        self.load_pictures()

    def load_pictures(self) -> Pictures:
        """The victim's pictures."""
        return attacks.federation.load_pictures(self.image)

    @abstractmethod
    def model_options(self) -> dict[str, Any]:
        """What is trained, and how: options of `make_federation`."""

    def train(self, findings: Findings) -> AttackedFederation:
        """The victim and the other clients after their steps; the findings get the pictures, and the PSNR of a grey."""
        pictures = self.load_pictures()
        findings.pictures["originals"] = pictures.pixels
        findings.curves["blind_guess_psnr"] = attacks.pictures.blind_guess(pictures.pixels)
        return attacks.federation.make_federation(
            pictures, clients=self.clients, stream=self.stream("scene"), **self.model_options()
        )


@dataclass(frozen=True, kw_only=True)
class ReadingExperiment(PictureExperiment):
    """One on a victim with one picture, after one step of a network with a linear first layer.

    From such an update the picture can be read without a search (`niss.attacks.pictures.read_picture`).
    """

    hidden: Hidden = 4

    def model_options(self) -> dict[str, Any]:
        """A hidden layer of that width."""
        return {"model": "mlp", "hidden": (self.hidden,)}


def strip_of(name: str, findings: Findings, pictures: Sequence[tuple[str, Any]], most: int) -> Strip:
    """The original, and beside it some of what was recovered, with the PSNR of the case of that name."""
    from niss.charts import Strip, evenly_spaced

    psnr = next((row["psnr"] for row in findings.rows if row.get("case") == name), None)
    original = ("original", findings.pictures["originals"][0])
    return Strip(name, [original, *evenly_spaced(pictures, most)], "" if psnr is None else f"{psnr:.1f} dB")


def grey_level(findings: Findings) -> dict[str, float]:
    """The PSNR of an even grey, below which nothing was learned, as a level of a chart."""
    level = findings.curves.get("blind_guess_psnr")
    return {} if level is None else {"an even grey": level}


def ruled_mark(row: Row, key: str, form: str) -> Mark:
    """A value of a case, with its rule off or on, and beside it the epsilon that it comes to."""
    from niss.charts import Mark, numbered

    look = numbered(0 if row["rule"] == "on" else 1)
    return Mark(f"rule {row['rule']}", look, row[key], f"{row[key]:{form}}, ε {rounded_up(row['epsilon'])}")


def rules_chart(title: str, across: str, marks: Iterable[tuple[str, Mark]]) -> Rows:
    """What is reached of the charge, row by row, perhaps with a rule off and on; 1 is what was charged."""
    from niss.charts import Rows

    rows: dict[str, list[Mark]] = {}
    for name, mark in marks:
        rows.setdefault(name, []).append(mark)
    return Rows(title=title, across=across, rows=list(rows.items()), level=("charged", 1.0))


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


def write_results(experiment: Experiment, findings: Findings, folder: Path) -> None:
    """Write `attack.json`, with the charts of what was found, and, where there is enough to draw, `attack.png`."""
    findings.charts, findings.strips = drawn(experiment, findings)
    write_json(folder / RESULT_FILE, findings.to_json(), mode=SHARED)
    if findings.charts or findings.strips:
        from niss.figures import png
        from niss.svg import sheet

        picture = png(sheet(findings.charts, findings.strips))
        write_atomically(folder / FIGURE_FILE, picture, mode=SHARED)


def drawn(experiment: Experiment, findings: Findings) -> tuple[list[Chart], list[Strip]]:
    """The charts and pictures that there is enough for.

    What cannot be drawn is an error only where the findings are finished: then it is a defect of ours.
    """
    from niss.charts import shown

    try:
        return shown(experiment.charts(findings)), experiment.strips(findings)
    except (KeyError, IndexError, ValueError):
        # An interrupted experiment may have too little for its figure.
        if findings.finished:
            raise
        return [], []
