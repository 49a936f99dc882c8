"""The server's identity: from a key file, so that nodes can pin it, or new in each run."""

from __future__ import annotations

import os
from pathlib import Path

from niss.protocol.keyfile import load_identity
from niss.protocol.keys import Identity


def server_identity(key: str | Path | None) -> Identity:
    return Identity.generate(os.urandom) if key is None else load_identity(Path(key).expanduser())
