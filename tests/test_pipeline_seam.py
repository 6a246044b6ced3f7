"""What regrow relies on in torch's pipeline schedules: fails loudly when PyTorch changes it."""

from __future__ import annotations

import inspect

from torch.distributed.pipelining import schedules, stage

from regrow.run.contact import METHOD, OF_A_STEP, OF_A_STEP_IN_STAGES, is_schedule


def test_first_contact_happens_in_one_method():
    parameters = list(inspect.signature(schedules._PipelineSchedule._initialize_pp_stages).parameters)
    assert parameters[1:7] == ["stages", "args", "kwargs", "target", "fwd_initialized", "bwd_initialized"]
    assert METHOD == "_initialize_pp_stages"
    assert "_stage_forward_initialized" in inspect.getsource(schedules.PipelineScheduleSingle.__init__)
    assert "_stages_forward_initialized" in inspect.getsource(schedules.PipelineScheduleMulti.__init__)
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        assert METHOD in inspect.getsource(kind)


def test_an_interrupted_step_can_be_forgotten():
    assert hasattr(stage._PipelineStageBase, "clear_runtime_states")
    source = inspect.getsource(schedules)
    assert all(f"self.{name}" in source for name in OF_A_STEP)
    source = inspect.getsource(stage._PipelineStageBase.__init__)
    assert all(f"self.{name}: dict" in source for name in OF_A_STEP_IN_STAGES)


def test_what_is_a_schedule():
    assert not is_schedule(object())
