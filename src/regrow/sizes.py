"""Numbers of bytes, as people write and read them. Decimal units, as of disks and networks."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bytes(text: str) -> float:
    """Read a size like ``200GB``, ``1.5T`` or ``1e9``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size: give a number of bytes, like 200GB, 1.5TB or 1e9")
    return float(match.group(1)) * _UNITS[match.group(2).upper()]


def show_bytes(count: float) -> str:
    """Return a size as ``1.50 TB`` or ``7 B``."""
    for unit, factor in reversed(_UNITS.items()):
        if count >= factor and unit:
            return f"{count / factor:.2f} {unit.lower() if unit == 'K' else unit}B"
    return f"{count:.0f} B"
