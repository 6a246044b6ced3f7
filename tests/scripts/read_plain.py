"""Reads a checkpoint with stock PyTorch, without regrow: one process, its own model and optimizer."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict


def main() -> None:
    directory, width, depth = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    layers: list[nn.Module] = [nn.Linear(16, width), nn.BatchNorm1d(width)]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    weights = [float(param.detach().double().sum()) for param in model.parameters()]
    moments = [float(optimizer.state[param]["exp_avg"].double().sum()) for param in model.parameters()]
    steps = [float(optimizer.state[param]["step"]) for param in model.parameters()]
    rate = optimizer.param_groups[0]["lr"]
    assert "regrow" not in sys.modules
    print(json.dumps({"weights": weights, "moments": moments, "steps": steps, "lr": rate}))


if __name__ == "__main__":
    main()
