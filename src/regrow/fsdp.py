"""What ``fully_shard`` keeps of an iteration, and how to be rid of it when one was interrupted.

The one place that touches FSDP2's private parts; ``reset_iter_state`` itself is public.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def roots(module: nn.Module) -> list[Any]:
    """Return the outermost ``fully_shard`` modules within a module."""
    api = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded by it if the script has not imported it
    if api is None:
        return []
    if isinstance(module, api.FSDPModule):
        return [module]
    return [found for child in module.children() for found in roots(child)]


def abandon(root: Any) -> None:
    """Let the next forward start as if the interrupted iteration had never been.

    What was under way is not waited for: it has failed with its generation, and waiting for it would raise that again.
    """
    state = root._get_fsdp_state()
    if state._is_root is None:
        return  # no forward has been begun yet
    root = state._state_ctx.all_states[0]._modules[0]  # which may lie outside of what is protected
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group._all_gather_result = None
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    param.unsharded_param.grad = None
                param.unsharded_accumulated_grad = None
    root.reset_iter_state()
