"""What a log may say of an error: all of it, less everything that could be key material or a password.

That is byte strings, long runs of digits, hex or base64, long lists of numbers, and the password in an address. A
traceback names files, lines and functions, never the values of variables. What a peer says passes `printable`.
"""

from __future__ import annotations

import os
import re
import traceback
import unicodedata

REDACTED = "[redacted]"
_LONGEST_REASON = 500
# A message longer than this is data, not words.
_MOST_SIGNS = 4000
_FRAME = re.compile(r"\s+File \"")
_BYTES = re.compile(r"""\bb(['"])(?:\\.|(?!\1)[^\\])*(?:\1|$)""")
_HEX = re.compile(r"(?<![0-9a-zA-Z])(?:0x)?[0-9a-fA-F]{24,}")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{40,}={0,2}")
_NUMBERS = re.compile(r"(?:[-+]?[\d.][\de.+-]*[\s,]+){11,}[-+]?[\d.][\de.+-]*")
_PASSWORD = re.compile(r"(?<=://)[^\s/@]+(?=@)")


def safe_traceback(error: BaseException) -> str:
    """The traceback with all causes, without the values of variables, and redacted."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(line if _FRAME.match(line) else redact(line) for line in lines) + "\n"


def redact(text: str) -> str:
    """`text` without anything that could be key material or a password."""
    text = text[:_MOST_SIGNS]
    for pattern in (_PASSWORD, _BYTES, _NUMBERS, _HEX):
        text = pattern.sub(REDACTED, text)
    return _BASE64.sub(_unless_a_path, text)


def printable(text: str, *, longest: int | None = _LONGEST_REASON, keep: str = "") -> str:
    """What somebody else said, fit for a log, a terminal or a page: each sign one that is seen, or a space.

    Escape codes, line breaks, marks that turn the direction of writing and lone surrogates become question marks, so
    that no peer can colour, move, erase or forge lines of a log, and no page carries what HTML and SVG may not.

    longest  what is longer is cut there; None: nothing is
    keep     signs that stay as they are, such as line breaks on a page
    """
    shown = "".join(sign if sign in keep or _is_seen(sign) else "?" for sign in text[:longest])
    return shown if longest is None or len(text) <= longest else shown + " ..."


def _is_seen(sign: str) -> bool:
    return sign.isprintable() or unicodedata.category(sign) == "Zs"


def _unless_a_path(found: re.Match[str]) -> str:
    """A long path looks like base64; one whose first folder is there is a path."""
    first = re.match(r"/[^/]+", found[0])
    return found[0] if first is not None and os.path.lexists(first[0]) else REDACTED
