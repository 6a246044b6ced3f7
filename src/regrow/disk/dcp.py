"""The one place that knows how ``torch.distributed.checkpoint`` lays out a checkpoint on storage.

Each rank writes one file, in which every tensor is what ``torch.save`` makes of it; the metadata names all of them. DCP
itself would let the ranks agree on that by collectives, at every checkpoint; here each rank knows what it writes, and
only tells whoever puts the metadata together. What is read goes through DCP's own ``load``.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from regrow.disk.storage import Storage
from regrow.state import bundles


def prod(sizes: Iterable[int]) -> int:
    """Return how many elements a tensor of this shape has."""
    return math.prod(sizes)


Row = list[Any]
"""``[name, path, dtype, size, offsets, sizes, at, length]`` of one item in a rank's file; an object has no dtype."""


@dataclass(frozen=True)
class Item:
    """Something that is written as a whole: the part of a tensor that a rank has, or an object."""

    name: str
    path: tuple[str | int, ...]
    """Where it stands in the nested state; ``name`` is that, joined."""
    dtype: str | None = None
    size: tuple[int, ...] = ()
    """Of the whole tensor."""
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    """Of this part."""

    @property
    def nbytes(self) -> int:
        """How large a part of a tensor is; nothing for an object."""
        return 0 if self.dtype is None else prod(self.sizes) * bundles.dtype_of([self.dtype]).itemsize


def items(nested: dict[str, Any]) -> list[tuple[Item, Any]]:
    """Return what a rank's state consists of: whole tensors and objects, with the part that this rank has of each."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(nested, None, is_coordinator=True)
    found = []
    for item in planner.create_local_plan().items:
        name = item.index.fqn
        value, path = planner.state_dict[name], tuple(planner.mappings[name])
        if item.tensor_data is None:
            found.append((Item(name, path), value))
            continue
        chunk, whole = item.tensor_data.chunk, tuple(item.tensor_data.size)
        dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
        if prod(chunk.sizes) == 0 and prod(whole):
            continue  # a rank that has nothing of it, as there are more ranks than rows
        found.append((Item(name, path, dtype, whole, tuple(chunk.offsets), tuple(chunk.sizes)), value))
    return found


class Summed:
    """A file that is written from its beginning to its end, and whose checksum and size are known then."""

    def __init__(self, file: BinaryIO, between: Callable[[int], None]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_64()
        self._between = between
        self.size = 0
        self.failure: Exception | None = None
        """What has ended the writing: whoever writes may say something else of it."""

    def write(self, content: Any) -> int:
        """Write, and tell how far it has come."""
        view = memoryview(content)
        try:
            self._file.write(view)
            self._digest.update(view)
            self.size += view.nbytes
            self._between(self.size)
        except Exception as error:
            self.failure = error
            raise
        return view.nbytes

    def flush(self) -> None:
        """Whoever has opened the file does that."""

    @property
    def facts(self) -> tuple[int, int]:
        """Size and checksum."""
        return self.size, self._digest.intdigest()


def write(
    storage: Storage, name: str, what: Iterable[tuple[Item, Any]], between: Callable[[int], None]
) -> tuple[list[Row], tuple[int, int]]:
    """Write a rank's file; return what is where in it, and its size and checksum. ``between`` may call it off."""
    rows: list[Row] = []
    with storage.writing(name) as file:
        summed = Summed(file, between)
        for item, value in what:
            at = summed.size
            try:
                torch.save(value, summed)  # type: ignore[arg-type]
            except RuntimeError:
                if summed.failure is not None:
                    raise summed.failure from None  # torch complains of a position instead
                raise
            place = [item.dtype, list(item.size), list(item.offsets), list(item.sizes), at, summed.size - at]
            rows.append([item.name, list(item.path), *place])
    return rows, summed.facts


def digest_of(rows: Sequence[Row]) -> str:
    """Return a name for rows: what has not changed since the last time need not be told again."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


class Incomplete(RuntimeError):
    """What all ranks have written together is not the whole state."""


def metadata(files: Iterable[tuple[str, Sequence[Row]]], save: str) -> bytes:
    """Return the metadata of a checkpoint of these files; ``Incomplete`` if a part of a tensor is missing.

    Of what is in several files, the first one counts. The whole of each tensor must have been written by somebody: that
    is all that can be known here of whether ranks that write different parts have understood each other.
    """
    state: dict[str, STORAGE_TYPES] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for file, rows in files:
        for name, path, dtype, size, offsets, sizes, at, length in rows:
            paths[name] = tuple(path)
            if dtype is None:
                state.setdefault(name, BytesStorageMetadata())
                where.setdefault(MetadataIndex(name), _StorageInfo(file, at, length))
                continue
            properties = TensorProperties(dtype=bundles.dtype_of([dtype]))
            known = state.setdefault(name, TensorStorageMetadata(properties, torch.Size(size), []))
            index = MetadataIndex(name, offsets)
            if isinstance(known, BytesStorageMetadata) or tuple(known.size) != tuple(size):
                raise Incomplete(f"{name} is of another shape on another rank")
            if index not in where:
                known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                where[index] = _StorageInfo(file, at, length)
    for name, known in state.items():
        if isinstance(known, TensorStorageMetadata):
            there = sum(prod(chunk.sizes) for chunk in known.chunks)
            if there != prod(known.size):
                raise Incomplete(f"of {name}, {there} of {prod(known.size)} elements were written")
    made = Metadata(state, paths, where, StorageMeta(save_id=save), CURRENT_DCP_VERSION)
    content = io.BytesIO()
    pickle.dump(made, content)
    return content.getvalue()


class Reader:
    """Reads one checkpoint. Its metadata is unpickled, by DCP, so its checksum must have been compared before."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self.metadata = storage.reader(directory).read_metadata()
        self._below: dict[str, list[str]] = {}
        for name in self.metadata.state_dict_metadata:
            self._below.setdefault(f"{name.rpartition('.')[0]}.", []).append(name)

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Return what is known of a tensor; ``None`` if there is none of that name."""
        found = self.metadata.state_dict_metadata.get(name)
        return found if isinstance(found, TensorStorageMetadata) else None

    def below(self, prefix: str) -> list[str]:
        """Return the names that consist of this and one more word."""
        return self._below.get(prefix, [])

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill tensors, of sharded ones this rank's part, however they were sharded when they were written."""
        if not tensors:
            return
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each reads for itself
                load(dict(tensors), storage_reader=self._storage.reader(self._directory), no_dist=True)
        except CheckpointException as error:  # not an Exception by its base
            raise OSError(f"{self._directory}: {error.failures}") from error

    def raw(self, name: str) -> bytes:
        """Return what was written as bytes."""
        found = self.tensor(name)
        if found is None:
            raise KeyError(name)
        tensor = torch.empty(found.size, dtype=found.properties.dtype)
        self.load({name: tensor})
        return tensor.numpy().tobytes()
