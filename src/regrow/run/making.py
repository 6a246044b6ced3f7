"""Makes the parts of a run in its set-up, each only if the job needs it. All ranks do the same, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from regrow.courier import Courier
from regrow.group import Fabric
from regrow.ids import Rank
from regrow.peer.memory import Shelf
from regrow.rules import Policy, Rules
from regrow.run import refusals
from regrow.run.approximate import Approximate
from regrow.run.copies import Copies
from regrow.run.link import Link
from regrow.run.mirror import MirroredSlots
from regrow.run.pacing import Pacer
from regrow.run.parts import Parts
from regrow.run.rank_blocks import RankBlocks
from regrow.run.roles import Roles
from regrow.run.rounds import Rounds, directory_for
from regrow.run.snapshots import Snapshots
from regrow.run.stages import Place, Stages
from regrow.slots import Slots
from regrow.state.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Who this rank is, and what it has at hand when its parts are made."""

    rank: Rank
    world_size: int
    place: Place
    link: Link
    fabric: Fabric
    registry: Registry
    small_state_path: Path
    shelf: Shelf
    replacement: bool
    stage: int | None
    approximate: Approximate | None
    say: Callable[[str], None]
    event: Callable[..., None]

    def superseded(self) -> bool:
        """Whether a newer generation has begun."""
        return self.link.generation != self.fabric.generation


class Maker:
    """Puts what it makes into ``parts``, which is empty at first."""

    def __init__(self, scene: Scene, parts: Parts) -> None:
        place = scene.place
        self._scene = scene
        self._parts = parts
        self.rules: Rules = replace(place.rules, approximate=scene.approximate is not None)
        self.slots = Slots(scene.small_state_path)
        """Where this rank leaves its own small state."""
        self._courier: Courier | None = None
        self._copies: Copies | None = None
        self._committing = self.rules.policy is Policy.COMMIT
        snapshotting = self._committing or (self.rules.heals and scene.registry.sharded)
        if scene.stage is not None or snapshotting:
            self._courier = self._new_courier()
        if place.host is not None and (self.rules.heals or self._committing):
            self._copies = Copies(
                scene.rank, place.host, place.token, superseded=scene.superseded, say=scene.say, event=scene.event
            )
        if self._copies is not None and not snapshotting:  # of sharded state it is a part of the snapshots
            self.slots = parts.mirror = MirroredSlots(scene.small_state_path, self._copies)

    def _new_courier(self) -> Courier:
        scene = self._scene
        return Courier(scene.rank, scene.place.host_addr, scene.place.token, scene.say)

    def meet(self) -> Roles:
        """Tell everyone who this rank is. ``ValueError`` if they were started with what does not go together."""
        scene, place = self._scene, self._scene.place
        told = {
            "policy": [self.rules.policy.value, place.snapshot_every if self._committing else None],
            "ckpt": place.ckpt and place.ckpt.said,
            **(self._copies.envelope() if self._copies else {}),
        }
        address = self._courier.address if self._courier else ("", 0)
        roles = Roles.exchange(scene.stage, place.domain(scene.rank), address, told)
        refusals.check_policies([host["policy"] for host in roles.hosts])
        refusals.check_checkpointing([host["ckpt"] for host in roles.hosts])
        return roles

    def rounds(self, roles: Roles, large: Callable[[], list[torch.Tensor]]) -> None:
        """Make this rank's running checkpoint, if one may ever be used: not of plain replicas."""
        scene = self._scene
        if not self.rules.heals or scene.approximate is None or (scene.stage is None and not scene.registry.sharded):
            return
        self._parts.rounds = Rounds(
            scene.approximate,
            directory_for(scene.rank, roles.nonce, scene.place.ckpt, scene.place.scratch),
            RankBlocks(scene.registry, large),
            slots=self.slots,
            say=scene.say,
            event=scene.event,
        )

    def snapshots_or_stages(
        self, roles: Roles, preserving: Callable[[], AbstractContextManager[None]], **of_stages: Any
    ) -> None:
        """Make what keeps the state that no replica has: snapshots, or a pipeline's journal and checkpoints."""
        scene = self._scene
        if self._courier is None:
            return
        if scene.stage is not None:
            self._parts.stages = Stages(
                rank=scene.rank,
                roles=roles,
                place=scene.place,
                link=scene.link,
                fabric=scene.fabric,
                courier=self._courier,
                registry=scene.registry,
                preserving=preserving,
                replacement=scene.replacement,
                **of_stages,
            )
            return
        self._parts.snapshots = Snapshots(
            scene.rank,
            scene.world_size,
            shelf=scene.shelf,
            slots=self.slots,
            courier=self._courier,
            copies=self._copies,
            registry=scene.registry,
            ranks_here=scene.place.ranks_here,
            pacer=self._pacer(),
            every=scene.place.snapshot_every,
            blocking=self._committing,
            superseded=scene.superseded,
            say=scene.say,
            event=scene.event,
        )

    def _pacer(self) -> Pacer | None:
        """Return what keeps snapshots that go to other hosts out of the collectives' way."""
        if self._copies is None:
            return None
        parts = self._parts
        return Pacer(
            self._scene.fabric, self._copies.look, lambda: parts.snapshots is not None and parts.snapshots.waiting
        )

    def disk(self, roles: Roles) -> None:
        """Make what writes checkpoints of the whole job, if it was said where to."""
        scene = self._scene
        if scene.place.ckpt is None:
            return
        from regrow.run.disk import Disk  # takes seconds, and most runs do without

        self._parts.disk = Disk(
            scene.rank,
            roles,
            settings=scene.place.ckpt,
            courier=self._new_courier(),
            registry=scene.registry,
            replacement=scene.replacement,
            superseded=scene.superseded,
            say=scene.say,
            event=scene.event,
        )
