"""Which names of storage are directories of a file system. Imports nothing that takes time."""

from __future__ import annotations

from pathlib import Path


def local_path(url: str) -> Path | None:
    """Return the directory that a path or URL names; ``None`` if it is something else, an object store perhaps."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        return Path(url).expanduser().absolute()
    return Path(rest).absolute() if scheme in ("file", "local") else None
