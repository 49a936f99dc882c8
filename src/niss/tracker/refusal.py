"""What the tracker answers when it will not do what was asked."""

from __future__ import annotations

from niss.errors import RemoteProtocolError
from niss.protocol.keys import fingerprint


class Refusal(RemoteProtocolError):
    """A request that is turned down: an HTTP status, the field at fault, and a hint that says what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        hint: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.field = field
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """The answer's JSON; the same three entries whatever went wrong."""
        return {"error": {"message": self.message, "field": self.field, "hint": self.hint}}


def require_server(caller: bytes, server: bytes) -> None:
    """Pass the server on, and nobody else."""
    if caller != server:
        raise Refusal(
            403,
            f"only the server may do this, not {fingerprint(caller)}",
            field="niss-identity",
            hint="the tracker was started with another --server-key",
        )
