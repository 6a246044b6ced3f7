"""``regrow checkpoints DIR``: which checkpoints there are, and whether their bytes are what was written."""

from __future__ import annotations

import argparse
import time

from regrow.disk import marks
from regrow.disk.storage import Storage
from regrow.sizes import show_bytes


def print_checkpoints(args: argparse.Namespace) -> int:
    """Print a line for each checkpoint, and what is wrong with it; return 1 if one that counts is damaged."""
    storage = Storage.of(args.directory)
    try:
        found = marks.find(storage)
    except OSError as error:
        raise ValueError(f"{args.directory} cannot be read: {error}") from None
    if not found:
        print(f"no checkpoints in {storage}")
        return 0
    damaged = False
    print(f"{'step':>10}  {'ranks':>5}  {'size':>10}  {'written':19}  state")
    for one in found:
        wrong = marks.damage(storage, one) if one.complete and not args.no_verify else []
        damaged = damaged or bool(wrong)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.t)) if one.marks else "-"
        whole = "complete" if args.no_verify else "complete, verified"
        state = one.why_not or ("damaged" if wrong else whole)
        print(f"{one.step:>10}  {one.world or '-':>5}  {show_bytes(one.nbytes):>10}  {when:19}  {state}")
        for text in wrong:
            print(f"{'':12}{text}")
    return 1 if damaged else 0
