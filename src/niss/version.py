"""The version of the package, read from its installed metadata."""

from importlib.metadata import version

__version__ = version("niss")
