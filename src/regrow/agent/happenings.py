"""What can happen to the world, as values. Agents report it; what becomes of it is ``membership``'s affair."""

from __future__ import annotations

from dataclasses import dataclass

from regrow.agent.world import Raised


@dataclass(frozen=True)
class SetupDone:
    """A rank's set-up is complete; it enters the training loop. ``kept``: hosts' memory has its state, too."""

    rank: int
    incarnation: int
    t: float = 0.0
    kept: bool = False


@dataclass(frozen=True)
class LostWorker:
    """One worker's end. ``step`` is the last it told of; ``raised`` is set if it ended by an exception of its own."""

    rank: int
    incarnation: int
    why: str
    step: int | None = None
    raised: Raised | None = None


@dataclass(frozen=True)
class NodeLost:
    """A host is gone with all its workers. The session says which of those that have had this number."""

    node: int
    session: str
    why: str


@dataclass(frozen=True)
class Lost:
    """Workers, or whole hosts, are gone; losses that are noticed together cost one generation together.

    Hosts are declared lost by a leader, on behalf of its ``epoch``. ``None``: the host itself says that it leaves.
    """

    workers: tuple[LostWorker, ...]
    t: float = 0.0
    nodes: tuple[NodeLost, ...] = ()
    epoch: int | None = None

    def together(self, other: Lost) -> Lost:
        """Return both as one. The other was noticed later."""
        epoch = other.epoch if other.nodes else self.epoch
        return Lost((*self.workers, *other.workers), other.t, (*self.nodes, *other.nodes), epoch)


@dataclass(frozen=True)
class NodeJoined:
    """A host has come, or has come back: it holds its place in the store under this session, and no rank yet."""

    node: int
    session: str
    slots: int
    standby: bool = True
    t: float = 0.0


@dataclass(frozen=True)
class Led:
    """A host was elected leader."""

    node: int
    session: str
    t: float = 0.0


@dataclass(frozen=True)
class Resumed:
    """A rank holds training state again and goes on at this generation."""

    rank: int
    incarnation: int
    generation: int
    t: float = 0.0


@dataclass(frozen=True)
class Forgotten:
    """Nobody lives who held state, and what is left in the memory of hosts does not make a whole.

    ``everyone``: some do live, and give up what they hold, as the run's policy has it.
    """

    rank: int
    incarnation: int
    generation: int
    why: str
    t: float = 0.0
    everyone: bool = False


@dataclass(frozen=True)
class Finished:
    """A rank has completed its last step at this generation."""

    rank: int
    incarnation: int
    generation: int
    t: float = 0.0


@dataclass(frozen=True)
class Suspect:
    """A rank's connection broke though its agent knows of nobody's death."""

    rank: int
    incarnation: int
    generation: int
    why: str
    t: float = 0.0


@dataclass(frozen=True)
class Exited:
    """A rank's process ended with exit code 0."""

    rank: int
    incarnation: int
    step: int | None = None
    t: float = 0.0


@dataclass(frozen=True)
class Stopped:
    """Somebody asked a node's agent to stop, or the agent cannot go on."""

    node: int
    why: str
    exit_code: int
    t: float = 0.0


Event = SetupDone | Lost | NodeJoined | Led | Resumed | Forgotten | Finished | Suspect | Exited | Stopped
