"""The first contact of torch's pipeline schedules: recorded once, and given again to a replacement.

At its first step a schedule's stages exchange shapes and votes with their neighbours. A replacement's stages do so,
too, but its neighbours are long past it. The one place that touches the schedules' private parts: the method in which
all of that happens, and the flags that say that it has. ``tests/test_pipeline_seam.py`` fails when these change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from regrow.errors import Unrecoverable
from regrow.group import Fabric
from regrow.ids import Step

_FLAGS = ("_stage_forward_initialized", "_stage_backward_initialized")  # of one stage; those of several have an s
_END = b"\n"  # of the step, which stands before the record
METHOD = "_initialize_pp_stages"
OF_A_STEP = ("_internal_losses", "backward_counter", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops")
OF_A_STEP_IN_STAGES = ("backward_state", "dw_runner", "bwd_cache")


def is_schedule(value: Any) -> bool:
    """Whether this is one of ``torch.distributed.pipelining``'s schedules. Imports nothing."""
    module = sys.modules.get("torch.distributed.pipelining.schedules")
    return module is not None and isinstance(value, (module.PipelineScheduleSingle, module.PipelineScheduleMulti))


def to_be_made_again(told: Sequence[tuple[bool, Step | None]], positions: Sequence[Step]) -> bool:
    """Whether somebody was lost in the middle of a first contact; ``told``: each rank's ``made`` and ``step``.

    Raises:
        Unrecoverable: somebody goes on after that step, and so will not take part in it again.
    """
    made = [made for made, _ in told]
    if all(made) or not any(made):
        return False
    if max(positions) > min(step for _, step in told if step is not None):
        raise Unrecoverable("a stage was lost in its first contact with the others, but some have gone on")
    return True


class Contact:
    """The first contact of one schedule: ``keep`` puts its record where a replacement finds it.

    To learn the shapes torch runs the model once, on memory that nobody has written to, and batch norm counts what it
    finds there. ``preserving`` takes such traces away: no result may depend on them, nor on who made the contact when.
    """

    def __init__(
        self,
        schedule: Any,
        fabric: Fabric,
        *,
        record: bytes | None,
        keep: Callable[[bytes], None],
        preserving: Callable[[], AbstractContextManager[None]],
        now: Callable[[], Step],
    ) -> None:
        """``now`` tells the step in progress; ``record`` is what ``keep`` was given by a predecessor."""
        self._schedule = schedule
        self._fabric = fabric
        self._keep = keep
        self._preserving = preserving
        self._now = now
        self._record: bytes | None = None
        self.made = record is not None
        """Whether this rank has made it, or has the record of a predecessor that did."""
        self.step: Step | None = None
        """The step in which it was made, or is being made."""
        if record is not None:
            step, _, self._record = record.partition(_END)
            self.step = Step(int(step))
        if not hasattr(schedule, METHOD) or not (_plural(schedule) or hasattr(schedule, _FLAGS[0])):
            raise RuntimeError("this PyTorch's pipeline schedules are built differently: regrow supports torch 2.13")
        self._original = getattr(schedule, METHOD)
        setattr(schedule, METHOD, self._initialize)

    def _initialize(
        self, stages: list[Any], args: Any, kwargs: Any, target: Any, forward: bool, backward: bool, **more: Any
    ) -> Any:
        if forward:
            if self._schedule._has_backward != backward:
                raise ValueError(
                    "a protected pipeline schedule cannot change between step() and eval() yet: make a second schedule "
                    "over stages of its own for evaluation, and protect it, too"
                )
            return self._original(stages, args, kwargs, target, forward, backward, **more)
        given, self._record = self._record, None
        with self._preserving():
            if given is not None:
                with self._fabric.replaying(given):
                    return self._original(stages, args, kwargs, target, forward, backward, **more)
            step = self.step = self._now()
            with self._fabric.recording() as recorder:
                result = self._original(stages, args, kwargs, target, forward, backward, **more)
        self._keep(b"%d%b%b" % (step, _END, recorder.bytes()))
        self.made = True
        return result

    def again(self) -> None:
        """Somebody was lost in the middle of it: everyone makes it anew."""
        self._record = None
        self.made = False
        self.step = None
        for name in _FLAGS:
            name = name.replace("_stage_", "_stages_") if _plural(self._schedule) else name
            setattr(self._schedule, name, False)

    def abandon(self) -> None:
        """Forget the micro-batches of an interrupted step: a schedule would take them for those of the next one."""
        for name in OF_A_STEP:
            _clear(self._schedule, name)
        for stage in self._schedule._stages if _plural(self._schedule) else [self._schedule._stage]:
            stage.clear_runtime_states()
            for name in OF_A_STEP_IN_STAGES:
                _clear(stage, name)


def _clear(owner: Any, name: str) -> None:
    container = getattr(owner, name, None)  # some kinds of schedules lack some
    if container is not None:
        container.clear()


def _plural(schedule: Any) -> bool:
    return hasattr(schedule, "_stages_forward_initialized")
