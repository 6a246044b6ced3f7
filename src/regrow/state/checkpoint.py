"""One rank's state on storage: taken at a step's start, written in the background, whole or not there.

A file is a head with length and checksum of the index, the index, and the parts of an image. It is written under
another name, flushed to the disk and then renamed. Parameters and optimizer state are first copied to memory that is
kept for the next time, which is all that the training thread waits for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from regrow import testing
from regrow.files import flush_directory
from regrow.ids import Step
from regrow.state import image
from regrow.state.image import Damaged, Image, Small
from regrow.state.registry import Registry

_MAGIC = b"RGCK"
_VERSION = 1
_HEAD = struct.Struct("<4sHHQQ")  # magic, version, reserved, the index's length, the index's checksum
_NAME = re.compile(r"step-(\d+)\.state")


class Writer:
    """Writes the checkpoints of one rank into a directory of its own; at most one is under way."""

    def __init__(self, directory: Path, registry: Registry, on_written: Callable[[Step, int, float], None]) -> None:
        self._directory = directory
        self._registry = registry
        self._on_written = on_written
        self._buffers: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self.failure: str | None = None
        for torn in directory.glob("*.part"):  # a predecessor's, which died over it
            _remove(torn)

    @property
    def busy(self) -> bool:
        """Whether one is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is under way; whether that is so."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def save(self, step: Step, small: Small) -> None:
        """Copy the state as it is now, and write it in the background."""
        index, tensors = image.take(self._registry, step, small)
        self._fill(tensors)
        arguments = (step, index, small.own, small.shared)
        self._thread = threading.Thread(target=self._write, args=arguments, name="regrow-checkpoint", daemon=True)
        self._thread.start()

    def _fill(self, tensors: list[torch.Tensor]) -> None:
        kept = [(buffer.dtype, buffer.shape) for buffer in self._buffers]
        if kept != [(tensor.dtype, tensor.shape) for tensor in tensors]:
            self._buffers = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        with torch.no_grad():
            for buffer, tensor in zip(self._buffers, tensors, strict=True):
                buffer.copy_(tensor)

    def _write(self, step: Step, index: dict[str, Any], own: bytes, shared: bytes) -> None:
        parts: list[memoryview | bytes] = [own, shared, *map(image.memory_of, self._buffers)]
        index["parts"] = [[len(part), image.checksum(part)] for part in parts]
        text = json.dumps(index).encode()
        head = _HEAD.pack(_MAGIC, _VERSION, 0, len(text), image.checksum(text))
        path = self._directory / f"step-{step}.state"
        torn = path.with_suffix(".part")
        began = os.times().elapsed
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with torn.open("wb") as file:
                for number, part in enumerate((head, text, *parts)):
                    if number == len(parts) // 2:
                        testing.point("checkpoint_write", step)
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                nbytes = file.tell()
            torn.rename(path)
            flush_directory(self._directory)
        except OSError as error:
            _remove(torn)
            where = "" if error.filename is not None else f" ({self._directory})"
            self.failure = f"the checkpoint of step {step} could not be written: {error}{where}"
            self._on_written(step, -1, 0.0)
            return
        self.failure = None
        self._on_written(step, nbytes, os.times().elapsed - began)

    def remove(self, step: Step) -> None:
        """Delete the checkpoint of a step."""
        _remove(self._directory / f"step-{step}.state")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # storage that takes nothing may not give anything up either
        path.unlink()


def saved(directory: Path) -> list[Step]:
    """Return the steps of which there is a checkpoint, oldest first; what it is worth, ``read`` tells."""
    names = [_NAME.fullmatch(path.name) for path in directory.glob("step-*.state")]
    return sorted(Step(int(name.group(1))) for name in names if name is not None)


def superseded(there: Sequence[Step], committed: Collection[Step], refused: Collection[Step]) -> list[Step]:
    """Return those of a rank's checkpoints that are not needed any more.

    Needed are the last one, and the last two that every rank has: should one of those be damaged, all go back to the
    other. One that some rank could not write (``refused``) serves for the loss of this rank alone, until there is a
    later one. Whatever is neither may still be committed.
    """
    common = [step for step in there if step in committed]
    needed = {*there[-1:], *common[-2:]}
    last = common[-1] if common else Step(0)
    return [step for step in there if step not in needed and (step in refused or step < last)]


def read(directory: Path, step: Step) -> Image:
    """Read a checkpoint and check all of it; ``Damaged`` says what is wrong."""
    path = directory / f"step-{step}.state"
    try:
        raw = memoryview(bytearray(path.read_bytes()))
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error}") from None
    if len(raw) < _HEAD.size:
        raise Damaged(f"{path.name} is cut short: {len(raw)} bytes")
    magic, version, _, length, digest = _HEAD.unpack_from(raw)
    text = raw[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or version != _VERSION or image.checksum(text) != digest:
        raise Damaged(f"{path.name} is damaged: its index does not match its checksum")
    index = json.loads(bytes(text))
    at = _HEAD.size + length
    parts = []
    for size, _ in index["parts"]:
        parts.append(raw[at : at + size])
        at += size
    image.check(index, parts, path.name)
    return image.assemble(index, [image.Held(part) for part in parts], path.name)
