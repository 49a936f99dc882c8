"""`niss verify`: do the result files bear out what the text claims?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  niss verify results/

  niss verify results/ --text README.md --text docs/concepts/paper.md --json
"""


def verify_command(
    results: Annotated[Path, typer.Argument(help="The folder that `niss reproduce` wrote.")] = Path(
        "results"
    ),
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Files whose numbers are checked; by default README.md and docs/."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Recompute every claim from the result files; fail where one does not hold or the text disagrees."""
    from dataclasses import asdict

    from niss.cli.terminal import print_json
    from niss.errors import RunFolderError
    from experiments.reproduce.claims import check_claims
    from experiments.reproduce.text import disagreements, results_folder

    folder = results_folder(results)
    if not folder.is_dir():
        raise RunFolderError(f"{folder} does not exist", hint="run `niss reproduce` first")
    files = text if text is not None else [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
    claims = check_claims(folder)
    wrong = [one for path in files if path.exists() for one in disagreements(path, folder)]
    failed = [claim for claim in claims if claim.required and claim.holds is False]
    if as_json:
        print_json(
            {
                "claims": [asdict(claim) for claim in claims],
                "disagreements": [{**asdict(one), "path": str(one.path)} for one in wrong],
            }
        )
    else:
        for claim in claims:
            typer.echo(f"{claim.verdict:16}  {claim.name}: {claim.detail}")
        for one in wrong:
            typer.echo(f"{'text is wrong':16}  {one.path}: {one.key} does not say what the files say")
    if failed or wrong:
        typer.echo(
            f"{len(failed)} claims do not hold, {len(wrong)} places in the text disagree; "
            "`python tools/update_results.py` fills the text from the files",
            err=True,
        )
        raise typer.Exit(1)
