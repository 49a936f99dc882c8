"""The version of the package, read from its installed metadata, and what to say where two versions do not fit."""

from importlib.metadata import version

__version__ = version("niss")


def which_to_upgrade(what: str, theirs: object, ours: int, *, them: str, us: str) -> str:
    """That a format of theirs is not one that we read, which side is the older one, and what to do about it.

    what      the format, in words
    theirs    its version, as the other side wrote it: it may be anything, and only a small number is repeated
    ours      the version that this side reads
    them, us  the two sides, in words

    The whole advice is in the message: a client that declines tells the server its message, and no hint.
    """
    reads = f"{us} (niss {__version__}) reads {ours}"
    if type(theirs) is not int or not 0 <= theirs < 1000:
        return f"{what} has no version that niss knows, and {reads}: use the same release on both sides"
    older = them if theirs < ours else us
    return f"{what} has version {theirs}, and {reads}: upgrade niss on {older}"
