"""What files need that have to be there after a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def flush_directory(directory: Path) -> None:
    """Bring to the disk which names a directory has: a file's own flush does not."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
