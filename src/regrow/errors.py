"""The errors that regrow raises, as one tree.

    RegrowError
    |-- PeerLost          a collective failed because another rank is gone (healed inside ``with step:``)
    |-- Superseded        a newer generation began while an older one was being joined (internal, healed)
    |-- LinkLost          the agent of this host is gone; the worker must end
    |-- Unrecoverable     nothing that still exists can restore the state; says what was lost
    |   `-- StartOver     a policy's own: nothing was saved yet to go back to (internal, all start from the beginning)
    |-- SetupDiverged     a replacement's set-up asked for other collectives than the first time
    `-- UndoUnsupported   an optimizer (or an option of it) whose step cannot be taken back; raised by ``protect``

What a user got wrong (a flag, an argument) is a ``ValueError`` with the remedy in it.
"""

from __future__ import annotations


class RegrowError(RuntimeError):
    """Base of everything that regrow raises on its own account."""


class PeerLost(RegrowError):
    """A collective could not finish: a member of the group is gone or the group was aborted."""

    def __init__(self, message: str, *, generation: int | None = None) -> None:
        super().__init__(message)
        self.generation = generation


class Superseded(RegrowError):
    """The generation that was being joined is no longer the newest one."""

    def __init__(self, generation: int, newest: int) -> None:
        super().__init__(f"generation {generation} was superseded by {newest}")
        self.generation = generation
        self.newest = newest


class LinkLost(RegrowError):
    """The connection to this host's agent is gone."""


class Unrecoverable(RegrowError):
    """No surviving source can restore the state."""


class StartOver(Unrecoverable):
    """Nothing was saved yet that everyone could go back to; those who hold state give it up, too."""


class SetupDiverged(RegrowError):
    """The set-up of a replacement differs from the recorded one."""


class UndoUnsupported(RegrowError, ValueError):
    """The optimizer's step cannot be taken back."""
