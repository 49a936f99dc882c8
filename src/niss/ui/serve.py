"""Running the pages: from an address to a server that listens, and a browser that opens it."""

from __future__ import annotations

import socket
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path

import uvicorn

from niss.errors import ConfigError
from niss.ui.app import make_app


def serve(*, host: str, port: int, runs: Path, open_browser: bool, ready: Callable[[str], None]) -> None:
    """Listen until interrupted; `ready` is told the address once connections are accepted."""
    listening = _listen(host, port)
    name, number = listening.getsockname()[:2]
    url = f"http://{f'[{name}]' if ':' in name else name}:{number}/"
    config = uvicorn.Config(
        make_app(runs, host=host),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )
    ready(url)
    if open_browser:
        # The socket listens already: a browser that is quicker than the server waits for it.
        threading.Thread(target=webbrowser.open, args=(_reachable(url),), daemon=True).start()
    uvicorn.Server(config).run([listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}",
            field="--port",
            hint="another `niss ui` may have it; --port 0 takes a free one",
        ) from None


def _reachable(url: str) -> str:
    """An address of every interface is none that a browser can open."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
