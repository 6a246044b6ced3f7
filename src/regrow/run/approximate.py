"""What a user may say of running checkpoints. Imports nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass

from regrow.plan.priority import Priority, Schedule


@dataclass(frozen=True, kw_only=True)
class Approximate:
    """Lost state may be replaced by older values, where nothing exact is left: ``protect(approximate=...)``.

    Args:
        every: C; in so many steps as many bytes are saved as a rank's part of the state has.
        fraction: r, the part that is saved at once, every r * C steps.
        priority: which: ``distance`` (what has moved farthest), ``relative``, ``round_robin`` or ``random``.
    """

    every: int = 16
    fraction: float = 1 / 8
    priority: str = "distance"

    def __post_init__(self) -> None:
        Schedule(self.every, self.fraction)
        if self.priority not in {each.value for each in Priority}:
            choices = ", ".join(each.value for each in Priority)
            raise ValueError(f"Approximate(priority={self.priority!r}) is unknown: give one of {choices}")


def given(value: bool | Approximate) -> Approximate | None:
    """Return what ``protect(approximate=value)`` means; ``None``: nothing of the kind."""
    if isinstance(value, Approximate):
        return value
    if not isinstance(value, bool):
        raise ValueError(
            f"protect(approximate={value!r}): say True, or regrow.Approximate(every=..., fraction=..., priority=...)"
        )
    return Approximate() if value else None
