"""What regrow relies on in torch's pipeline schedules: fails loudly when PyTorch changes it."""

from __future__ import annotations

import inspect

from torch.distributed.pipelining import schedules, stage

from regrow.run import sharing
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


def test_micro_batches_are_done_in_one_method_that_asks_the_stages():
    """What a shared replay stands in for."""
    for kind in (schedules.ScheduleGPipe, schedules.Schedule1F1B, schedules.ScheduleInterleaved1F1B):
        parameters = list(inspect.signature(getattr(kind, sharing.METHOD)).parameters)
        assert parameters[1:3] == ["arg_mbs", "kwarg_mbs"]
    base = stage._PipelineStageBase
    forward = list(inspect.signature(base.forward_one_chunk).parameters)
    assert forward == ["self", "fwd_chunk_id", "args", "kwargs", "save_forward_output"]
    backward = list(inspect.signature(base.backward_one_chunk).parameters)
    assert backward == ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"]
    for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"):
        assert len(inspect.signature(getattr(base, name)).parameters) == 2
    assert "self.scale_grads(" in inspect.getsource(base.perform_reduce_grad)
    assert "self.fwd_cache[fwd_chunk_id] = (" in inspect.getsource(base.forward_one_chunk)
    assert "self.output_chunks.append(output)" in inspect.getsource(base.forward_one_chunk)
    assert "self.bwd_cache.pop(bwd_chunk_id)" in inspect.getsource(base.get_bwd_send_ops)
    assert "self.fwd_cache[fwd_chunk_id]" in inspect.getsource(base.get_fwd_send_ops)
