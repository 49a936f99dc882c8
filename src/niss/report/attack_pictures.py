"""The pictures of attacks that lie beside a run: `attack.json` with `attack.png`, in the run or in its attacks/."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from html import escape
from pathlib import Path

from niss.errors import RunFolderError
from niss.report.files import read_json_object
from niss.report.source import ReportInput

MOST_PICTURES = 12
MOST_BYTES = 4_000_000
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class AttackPicture:
    """One attack: its name, what it found in words, and its picture where there is one."""

    where: str
    attack: str
    headline: str
    finished: bool
    png: bytes | None


def find_attacks(report: ReportInput, notes: list[str]) -> list[AttackPicture]:
    """Every attack in the folder of the report and in those of its methods; faults become notes."""
    homes = [report.folder, *(method.folder for method in report.methods if method.folder is not None)]
    places: list[Path] = []
    for home in dict.fromkeys(homes):
        places += [home / "attack.json", *sorted((home / "attacks").glob("*/attack.json"))]
        places += [home / "attacks" / "attack.json"]
    found: list[AttackPicture] = []
    for path in places:
        if not path.is_file():
            continue
        where = path.parent.relative_to(report.folder).as_posix()
        if len(found) == MOST_PICTURES:
            notes.append(f"More than {MOST_PICTURES} attacks lie in this folder; the others are not shown.")
            break
        try:
            found.append(read_attack_picture(path, where, notes))
        except RunFolderError as error:
            notes.append(f"An attack was left out: {error.message}")
    return found


def read_attack_picture(path: Path, where: str, notes: list[str]) -> AttackPicture:
    """The attack in `path`, with its picture where that can be shown; `where` is its name on the page."""
    values = read_json_object(path) or {}
    attack, headline = values.get("attack"), values.get("headline")
    picture = path.with_suffix(".png")
    content: bytes | None = None
    if picture.is_file():
        if picture.stat().st_size > MOST_BYTES:
            notes.append(f"{picture.name} of {where} is too large to be put into the page.")
        else:
            content = picture.read_bytes()
            if not content.startswith(_PNG):
                notes.append(f"{picture.name} of {where} is no PNG picture and was left out.")
                content = None
    return AttackPicture(
        where=where,
        attack=attack if isinstance(attack, str) else "attack",
        headline=headline if isinstance(headline, str) else "",
        finished=values.get("finished") is True,
        png=content,
    )


def attacks_section(attacks: list[AttackPicture]) -> str:
    """What the attacks could see; nothing where none was tried."""
    if not attacks:
        return ""
    shown = "\n".join(_named_figure(one) for one in attacks)
    return (
        "<section>\n<h2>Attacks</h2>\n<p>What an attacker recovered from what it could see. "
        f"A failed attack is no proof; the guarantees below are.</p>\n{shown}\n</section>"
    )


def _named_figure(one: AttackPicture) -> str:
    name = one.attack if one.where == "." else f"{one.attack} ({one.where})"
    return f"<h3>{escape(name)}</h3>\n{attack_figure(one)}"


def attack_figure(one: AttackPicture, caption: str | None = None) -> str:
    """The picture, where there is one, with `caption` or else what the attack found in words."""
    state = "" if one.finished else " This attack was interrupted; its results are those it had by then."
    words = f"{one.headline}{state}".strip()
    picture = ""
    if one.png is not None:
        data = base64.b64encode(one.png).decode("ascii")
        alt = f"Pictures of the attack {one.attack}. {words}".strip()
        picture = f'<img class="attack" alt="{escape(alt)}" src="data:image/png;base64,{data}">\n'
    return f"<figure>\n{picture}<figcaption>{escape(caption or words)}</figcaption>\n</figure>"
