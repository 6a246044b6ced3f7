"""What the agent tells its workers, as the heads of frames: which rank they are, and how the world stands."""

from __future__ import annotations

from typing import Any

from regrow.agent.seats import Site
from regrow.agent.worker import Environment, Worker
from regrow.agent.world import World


def world_frame(world: World, setup_deadline_s: float) -> dict[str, Any]:
    """How the world stands. A worker acts on the newest one only."""
    return {
        "type": "world",
        "generation": world.generation,
        "phase": str(world.phase),
        "lost": [{"rank": loss.rank, "why": loss.why, "t": loss.t} for loss in world.lost],
        "finished": list(world.finished),
        "holders": list(world.holders),
        "all_finished": world.all_finished,
        "reason": world.reason,
        "setup_deadline_s": setup_deadline_s,
        "homeless": list(world.homeless),
        "t": world.t,
    }


def assign_frame(worker: Worker, site: Site, env: Environment, world: World) -> dict[str, Any]:
    """Who the worker is. A spare also learns where its output has to go; others were started with it."""
    rank, paths = worker.rank, worker.paths
    assert rank is not None and paths is not None
    return {
        "type": "assign",
        "rank": rank,
        "local_rank": worker.local_rank,
        "world_size": site.world_size,
        "env": env.of_rank(worker, len(world.ranks_of(site.node))),
        "incarnation": worker.incarnation,
        "generation": world.generation,
        "replacement": worker.replacement,
        "small_state_path": str(env.small_state_path(rank)),
        "host_addr": site.host_addr,
        "stdout": paths.stdout if worker.spare and paths.stdout else None,
        "stderr": paths.stderr if worker.spare and paths.stderr else None,
    }
