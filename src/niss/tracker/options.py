"""How a tracker is run: every described field is a flag of `niss tracker`.

Nothing heavy is imported here, so that `niss --help` can show the flags at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from typing_extensions import Doc

from niss.checks import require_one_of, require_real
from niss.errors import ConfigError, RemoteProtocolError
from niss.settings import option

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class TrackerSettings:
    """What the person who runs a tracker decides about rates and times."""

    ttl: Annotated[float, Doc("Seconds without a heartbeat until a client counts as gone.")] = 600.0
    tolerance: Annotated[float, Doc("Seconds by which a client's clock may be off.")] = 60.0
    address_rate: Annotated[float, Doc("Requests a second from one address; 0 for any number.")] = 200.0
    identity_rate: Annotated[float, Doc("Changing requests a second of one identity; 0 for any number.")] = (
        10.0
    )
    max_clients: Annotated[int, Doc("Most clients that can be registered.")] = 1_000_000

    forget_after: ClassVar[float] = 30 * 86_400.0
    """Seconds after a client's `ttl` until it is erased."""
    body_bytes: ClassVar[int] = 1 << 20
    """Largest body of a request."""
    stock: ClassVar[int] = 1024
    """Most prekeys of one client; with fewer than `low` it is told to replenish them, up to `wanted`."""
    low: ClassVar[int] = 4
    wanted: ClassVar[int] = 16

    def __post_init__(self) -> None:
        """Every setting is above 0 and finite; a rate may be 0, which means no limit."""
        for setting in fields(TrackerSettings):
            flag, may_be_zero = f"--{setting.name.replace('_', '-')}", setting.name.endswith("_rate")
            require_real(getattr(self, setting.name), field=flag, zero_allowed=may_be_zero)


@dataclass(frozen=True, kw_only=True)
class TrackerOptions(TrackerSettings):
    """Where a tracker listens, what it keeps where, and whom it admits."""

    server_key: Annotated[
        str, Doc("The public key of the server that opens rounds, from `niss keys show`.")
    ] = option(metavar="KEY")
    host: Annotated[str, Doc("The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Doc("0 takes a free one.")] = option(8440, min=0, max=65535)
    store: Annotated[str, Doc("sqlite:///FILE, or redis://HOST:PORT/0 for several processes.")] = option(
        "sqlite:///tracker.db", metavar="URL", envvar="NISS_TRACKER_STORE"
    )
    identity: Annotated[Path | None, Doc("The tracker's own key file. Default: beside the SQLite file.")] = (
        option(None, metavar="KEYFILE")
    )
    tls_cert: Annotated[Path | None, Doc("Serve TLS with this certificate.")] = option(None, metavar="PEM")
    tls_key: Annotated[Path | None, Doc("The certificate's private key.")] = option(None, metavar="PEM")
    external_beacon: Annotated[str | None, Doc("Another tracker, which holds the beacon chains.")] = option(
        None, metavar="URL"
    )
    external_ca: Annotated[Path | None, Doc("The authority of its certificate.")] = option(
        None, metavar="PEM"
    )
    holder_only: Annotated[
        bool, Doc("Only hold beacon chains, for the tracker whose key is given as the server's.")
    ] = False
    admit: Annotated[Path | None, Doc("A coalition file: only its members may register.")] = option(
        None, metavar="FILE"
    )
    coalition: Annotated[list[str] | None, Doc("Only the members in this file may join that coalition.")] = (
        option(None, metavar="NAME=FILE")
    )
    log_level: Annotated[str, Doc("debug, info, warning or error.")] = "info"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of(self.log_level, LOG_LEVELS, field="--log-level")

    @property
    def server(self) -> bytes:
        """The server's key; `ConfigError` where the text is not one, or one of small order."""
        from niss.protocol.keys import check_public

        try:
            public = bytes.fromhex(self.server_key)
            check_public(public)
        except (ValueError, RemoteProtocolError) as error:
            wrong = (
                error.message if isinstance(error, RemoteProtocolError) else "expected a public key in hex"
            )
            hint = "copy it from what its owner's `niss keys show` prints"
            raise ConfigError(wrong, field="--server-key", hint=hint) from None
        return public

    @property
    def coalitions(self) -> dict[str, Path]:
        """The file of each closed coalition, by its name."""
        found = {}
        for entry in self.coalition or []:
            name, _, path = entry.partition("=")
            if not name or not path:
                hint = "for example clinics=clinics.toml"
                raise ConfigError(f"expected NAME=FILE, got {entry!r}", field="--coalition", hint=hint)
            found[name] = Path(path)
        return found
