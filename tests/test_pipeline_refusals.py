"""What a pipeline cannot do is refused in a sentence that says what to do, before anything is trained."""

from __future__ import annotations

import pytest

from harness import run_job

HEAD = """
import torch
import torch.distributed as dist
from torch import nn
import regrow

run = regrow.init()
model = nn.Linear(4, 4)
"""
FSDP = """
from torch.distributed.fsdp import fully_shard
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
run.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), stage=0)
"""
TENSOR_PARALLEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
model = parallelize_module(model, dist.device_mesh.init_device_mesh("cpu", (2,)), ColwiseParallel())
run.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), stage=0)
"""
NO_SCHEDULE = "run.protect(model=model, stage=run.rank, build_stage=lambda index: nn.Linear(4, 4))"
NO_FUNCTION = "run.protect(model=model, stage=run.rank, build_stage=model.state_dict())"
NO_STAGE = "run.protect(model=model, checkpoint_every=5)"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (FSDP, "FSDP and tensor parallelism within a stage of a pipeline are not supported yet"),
        (TENSOR_PARALLEL, "FSDP and tensor parallelism within a stage of a pipeline are not supported yet"),
        (NO_SCHEDULE, "protect(build_stage=...) needs a schedule of torch.distributed.pipelining beside it"),
        (NO_FUNCTION, "protect(build_stage=...): a function is needed that takes a stage's index"),
        (NO_STAGE, "protect(stage=...) is missing: say which stage of the pipeline this rank holds"),
    ],
    ids=["fsdp", "tensor parallel", "no schedule", "no function", "no stage"],
)
def test_what_cannot_work_is_refused_in_one_sentence(tmp_path, body, sentence):
    script = tmp_path / "train.py"
    script.write_text(HEAD + body)
    job = run_job(script=script, nproc=2)
    assert job.code == 1
    assert "Traceback" not in job.output
    assert len([line for line in job.output.splitlines() if sentence in line]) == 1, job.output
