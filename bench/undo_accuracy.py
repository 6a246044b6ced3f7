"""Print how well, how fast and at what price each optimizer's step is taken back.

    PYTHONPATH=src python bench/undo_accuracy.py [--elements 1000000] [--layers 10] [--quick]

Prints the tables of docs/undo.md. Times are processor time of one thread, medians, and given as ratios to the
optimizer's own step in the same run, interleaved with it. Gradients are random: normal, times the cube of a uniform
number, so that they span some decades.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from regrow.optim import LAMB, Lion
from regrow.undo import Ledger

STEPS = (2, 10, 100)
SMALL = 200
"""Side of Muon's matrices: its bfloat16 products take seconds for larger ones on a CPU without such instructions."""
FAMILIES: list[tuple[str, type[optim.Optimizer], dict[str, Any]]] = [
    ("SGD", optim.SGD, {"lr": 0.1}),
    ("SGD momentum", optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
    ("SGD Nesterov", optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", optim.Adam, {}),
    ("Adam foreach", optim.Adam, {"foreach": True}),
    ("Adam fused", optim.Adam, {"fused": True}),
    ("Adam coupled decay", optim.Adam, {"weight_decay": 0.01}),
    ("Adam AMSGrad", optim.Adam, {"amsgrad": True}),
    ("AdamW", optim.AdamW, {}),
    ("Adamax", optim.Adamax, {}),
    ("NAdam", optim.NAdam, {}),
    ("RAdam", optim.RAdam, {}),
    ("Adagrad", optim.Adagrad, {}),
    ("Adadelta", optim.Adadelta, {}),
    ("RMSprop", optim.RMSprop, {}),
    ("RMSprop centered, momentum", optim.RMSprop, {"centered": True, "momentum": 0.9}),
    ("Rprop", optim.Rprop, {}),
    ("ASGD", optim.ASGD, {"t0": 1}),
    ("Adafactor", optim.Adafactor, {}),
    ("Muon", optim.Muon, {}),
    ("LAMB", LAMB, {"weight_decay": 0.01}),
    ("Lion", Lion, {"weight_decay": 0.01}),
]


def gradient(shape: torch.Size) -> Tensor:
    return torch.randn(shape) * torch.rand(shape) ** 3 * 0.01


def ordered(tensor: Tensor) -> Tensor:
    """Return integers that differ by one where the floats are neighbours."""
    bits = tensor.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def quantiles(old: Tensor, got: Tensor) -> str:
    ulp = (ordered(old) - ordered(got)).abs()
    shares = [100 * float((ulp <= limit).double().mean()) for limit in (0, 1, 7, 127)]
    return " ".join(f"{share:.5g}" for share in shares) + f" {float(ulp.max()):.2g}"


def accuracy(cls: type[optim.Optimizer], options: dict[str, Any], elements: int) -> dict[str, list[str]]:
    """Return, by tensor, the quantiles at each of STEPS."""
    torch.manual_seed(0)
    side = SMALL if cls is optim.Muon else int(elements**0.5)
    param = nn.Parameter(torch.randn(side, side) * 0.05)
    optimizer = cls([param], **options)
    ledger = Ledger(optimizer, exact=False)
    rows: dict[str, list[str]] = {}
    for step in range(1, max(STEPS) + 1):
        param.grad = gradient(param.shape)
        if step in STEPS:
            state = optimizer.state.get(param, {})
            old = {"p": param.detach().clone()}
            old |= {k: v.clone() for k, v in state.items() if isinstance(v, Tensor) and v.numel() > 1}
            grad = param.grad.clone()
            ledger.before()
            optimizer.step()
            ledger.after()
            ledger.undo([param])
            got = {"p": param.detach(), **optimizer.state.get(param, {})}
            for name, value in old.items():
                rows.setdefault(name, []).append(quantiles(value, got[name]))
            with torch.no_grad():  # go on from the truth
                param.copy_(old["p"])
                for name in old.keys() - {"p"}:
                    optimizer.state[param][name].copy_(old[name])
            param.grad = grad
            ledger.clear()
        optimizer.step()
    return rows


def timed(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def cost(
    cls: type[optim.Optimizer], options: dict[str, Any], layers: int, rounds: int
) -> tuple[float, float, float, float]:
    """Return undo/step, notes in microseconds per parameter, exact bytes per element, exact (before + after)/step."""
    torch.manual_seed(0)
    side = SMALL if cls is optim.Muon else 1000
    params = [nn.Parameter(torch.randn(side, side) * 0.05) for _ in range(layers)]
    optimizer = cls(params, **options)
    near, exact = Ledger(optimizer, exact=False), Ledger(optimizer)
    sets = [[gradient(param.shape) for param in params] for _ in range(3)]
    times: dict[str, list[float]] = {"step": [], "undo": [], "note": [], "exact": []}
    held = 0
    for index in range(rounds + 3):
        for param, grad in zip(params, sets[index % 3], strict=True):
            param.grad = grad
        note = timed(near.before)
        step = timed(optimizer.step)
        note += timed(near.after)
        undo = timed(lambda: near.undo(params))
        near.clear()
        keep = timed(exact.before)
        optimizer.step()
        keep += timed(exact.after)
        held = exact.nbytes()
        exact.clear()
        if index >= 3:
            for name, value in (("step", step), ("undo", undo), ("note", note), ("exact", keep)):
                times[name].append(value)
    median = {name: statistics.median(values) for name, values in times.items()}
    elements = sum(p.numel() for p in params)
    return (
        median["undo"] / median["step"],
        1e6 * median["note"] / len(params),
        held / elements,
        median["exact"] / median["step"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1_000_000, help="of the matrix whose accuracy is measured")
    parser.add_argument("--layers", type=int, default=10, help="matrices of a million elements whose undo is timed")
    parser.add_argument("--quick", action="store_true", help="small and few: to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    elements, layers, rounds = (10_000, 1, 2) if args.quick else (args.elements, args.layers, 7)

    print("| optimizer | tensor | step 2 | step 10 | step 100 |\n|---|---|---|---|---|")
    for label, cls, options in FAMILIES:
        for name, cells in accuracy(cls, options, elements).items():
            print(f"| {label} | {name} | " + " | ".join(["", *cells][-3:]) + " |", flush=True)
    print("\n| optimizer | undo / step | notes, us per parameter | exact: bytes per element | exact: notes / step |")
    print("|---|---|---|---|---|")
    for label, cls, options in FAMILIES:
        undo, note, held, keep = cost(cls, options, layers, rounds)
        print(f"| {label} | {undo:.2f} | {note:.0f} | {held:.2f} | {keep:.2f} |", flush=True)


if __name__ == "__main__":
    main()
