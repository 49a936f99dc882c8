"""Takes a federation down when its owner cannot: a process that outlives `niss up` by as long as that takes.

    python -m niss.local.watchdog MARK [FOLDER]

It waits for the end of its standard input, a pipe whose other end its owner alone holds: when the owner ends, even by
kill -9, the system closes it. Then everything that was started under the mark is killed, and FOLDER, which holds
private keys, is removed. An owner that takes everything down itself leaves nothing to do.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

from niss.local.processes import OWNER, marked

_PAUSE_SECONDS = 0.1


def watch(mark: str, folder: str | None) -> None:
    """Wait for the owner's end, then kill whatever has its mark until nothing has, and remove the folder."""
    while sys.stdin.buffer.read(1):
        pass
    # Processes that are being killed can start others, so look until there are none.
    while processes := marked(mark, OWNER):
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
