"""Names for the integers that travel together and must not be mixed up."""

from typing import NewType

Rank = NewType("Rank", int)
"""A worker's place in the world. It outlives the process that holds it."""

Step = NewType("Step", int)
"""Number of completed steps: state *at* step 5 is the state before step 5 runs."""

Generation = NewType("Generation", int)
"""Counts the world's reconnections. Anything stamped with an older one is ignored."""

Incarnation = NewType("Incarnation", int)
"""Counts the processes that have held one rank: 0 is the first."""
