"""Learn that every rank has come to a point, without anyone waiting for it on the critical path.

A dissemination barrier over a courier: in round i each rank tells the one 2^i after it and hears from the one 2^i
before it; after log2(n) rounds every rank has heard, through others, from all. It carries a number, of which everyone
learns the greatest. Not a vote: nobody decides, and a lost rank ends the generation as everywhere else.
"""

from __future__ import annotations

import struct
from datetime import timedelta

from regrow.courier import Courier

_NUMBER = struct.Struct("<d")


def meet(
    courier: Courier, rank: int, world: int, name: str, number: float, timeout: timedelta, *, generation: int
) -> float:
    """Return when all ranks have called this with the same name; ``PeerLost`` if the generation is over before."""
    distance = 1
    while distance < world:
        told = memoryview(_NUMBER.pack(number))
        courier.send((rank + distance) % world, f"gate/{name}/{distance}", told, stays=True, generation=generation)
        heard = courier.take((rank - distance) % world, f"gate/{name}/{distance}", timeout, generation=generation)
        number = max(number, _NUMBER.unpack(heard)[0])
        distance *= 2
    return number
