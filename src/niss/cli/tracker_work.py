"""What `niss tracker` does with its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from niss.cli.switches import is_quiet
from niss.errors import ConfigError, RemoteProtocolError
from niss.protocol.keys import check_public
from niss.tracker.limits import Settings

_SETTINGS = ("ttl", "tolerance", "address_rate", "identity_rate", "max_clients")
_LEVELS = ("debug", "info", "warning", "error")


def run_tracker(*, server_key: str, coalition: list[str], log_level: str, **given: Any) -> None:
    """Check everything that can be checked, then listen."""
    settings = Settings(**{name: given.pop(name) for name in _SETTINGS})
    if log_level not in _LEVELS:
        raise ConfigError(f"{log_level!r} is none", field="--log-level", hint=f"one of {', '.join(_LEVELS)}")
    if is_quiet() and log_level == "info":
        log_level = "warning"
    server = _public_key(server_key)
    files = dict(_coalition(entry) for entry in coalition)
    try:
        from niss.tracker.serve import Options, serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the tracker needs the package {error.name}", hint="pip install 'niss[tracker]'"
        ) from None
    serve(Options(server=server, coalitions=files, settings=settings, log_level=log_level, **given))


def _public_key(text: str) -> bytes:
    hint = "copy it from what the server's `niss keys show` prints"
    try:
        public = bytes.fromhex(text)
    except ValueError:
        raise ConfigError("is no public key in hex", field="--server-key", hint=hint) from None
    try:
        check_public(public)
    except RemoteProtocolError as error:
        raise ConfigError(error.message, field="--server-key", hint=hint) from None
    return public


def _coalition(entry: str) -> tuple[str, Path]:
    name, separator, path = entry.partition("=")
    if not separator or not name or not path:
        raise ConfigError(
            f"{entry!r} is no NAME=FILE", field="--coalition", hint="for example clinics=clinics.toml"
        )
    return name, Path(path)
