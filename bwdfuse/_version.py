"""The one place the version is written; setup and ``bwdfuse.show()`` read it."""

__version__ = "0.1.0"
