"""What a rank begins with that did not exist before: another rank's own state, but random numbers of its own.

For a run that goes on with more ranks than it was saved with. Ranks that existed then keep what they have.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from regrow.ids import Rank, Step

_WORD = 8


def donor(rank: Rank, old_world: int) -> Rank:
    """Return the old rank whose own state ``rank`` begins with: itself if it existed, else one of them in turn."""
    if rank < 0 or old_world < 1:
        raise ValueError(f"rank={rank}, old_world={old_world}: a rank is 0 or more, a world has at least one")
    return Rank(rank % old_world)


def fork(rank: Rank, old_world: int, step: Step) -> None:
    """Seed the generators anew on a rank that is new; to be called when its donor's own state is in place.

    A new rank would otherwise draw what its donor draws: the same dropout, the same noise, on other samples. The seeds
    are a function of the donor's torch generator, the rank and the step, so that the same resumption is the same again.
    Nothing happens on a rank that existed.
    """
    if donor(rank, old_world) != rank:
        reseed(rank, step)


def reseed(rank: Rank, step: Step) -> None:
    """Seed the generators anew on a rank that has another one's own state in place."""
    inherited = torch.default_generator.get_state().numpy().tobytes()
    base = _hash(inherited, step)
    # Torch's generator on the CPU takes 32 bits of its seed, so hashes alone could meet. Counted on from the donor's,
    # they cannot: not between ranks of the same donor, nor where all donors stood alike, which is the usual case.
    torch.manual_seed((int.from_bytes(base[:_WORD]) + rank) % (1 << 63))  # accelerators too
    own = int.from_bytes(_hash(base, rank))
    random.seed(own)
    # not numpy.random.seed, which knows one kind of generator only; this also forgets a normal number kept aside
    of_numpy: Any = np.random  # its types leave out the generator behind it
    kind = type(of_numpy.get_bit_generator())
    of_numpy.set_state(kind(own).state)


def _hash(data: bytes, number: int) -> bytes:
    return hashlib.blake2b(data + number.to_bytes(_WORD), digest_size=32).digest()
