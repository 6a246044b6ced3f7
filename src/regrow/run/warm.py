"""What a spare does before it is needed: import what takes seconds, and touch the memory that it will fill.

A page that was never used costs a fault when it is first written, which is slower than the copy itself. A spare
therefore takes about as much memory as a worker's tensors need, writes to it once, and gives it back to the
allocator, which keeps it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from pathlib import Path

import torch

LIMIT_BYTES = 1 << 30
"""A spare touches no more than this, and no more than a tenth of what the host has free."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MMAP_THRESHOLD = 32 << 20  # where glibc's own adaptation ends in a process that frees large tensors
_BLOCK_BYTES = 4 << 20


def warm_up(param_bytes: int) -> None:
    """Get ready to hold a model of this size."""
    importlib.import_module("torch._dynamo")  # the first optimizer imports it
    _take_a_step()
    # parameters, gradients, DDP's buckets (twice while they are rebuilt), two moments, and some for what passes between
    _touch(min(8 * param_bytes, LIMIT_BYTES, _available_bytes() // 10))


def _take_a_step() -> None:
    """Do once, on something small, what is slow the first time in a process: a product, a backward, an update."""
    before = torch.get_rng_state()
    layer = torch.nn.Linear(256, 256)
    for make in (torch.optim.Adam, torch.optim.SGD):
        optimizer = make(layer.parameters(), lr=0.1)
        layer(torch.zeros(64, 256)).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_rng_state(before)


def settle() -> None:
    """Let the allocator give back what is not used, as in any other process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD)


def _touch(count: int) -> None:
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc, free, memset = libc.mallopt, libc.malloc, libc.free, libc.memset
    except (OSError, AttributeError):
        return  # another C library: the memory is touched when it is used
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.argtypes = [ctypes.c_void_p]
    memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    blocks = []
    for _ in range(count // _BLOCK_BYTES):
        block = malloc(_BLOCK_BYTES)
        if not block:
            break
        memset(block, 0, _BLOCK_BYTES)
        blocks.append(block)
    for block in blocks:
        free(block)


def _available_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
