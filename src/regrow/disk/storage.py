"""Where checkpoints lie: a directory, or whatever fsspec has a name for (``s3://``, ``gs://``, ``memory://``).

Names are relative to the root. Knows nothing of what is in a checkpoint. A directory can be flushed and renamed, object
stores cannot; so there what is half written has its final name already, and only the marks tell (``marks``).
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import fsspec  # type: ignore[import-untyped]

from regrow.disk.urls import local_path
from regrow.files import flush_directory

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader


class Storage(ABC):
    """A place for checkpoints. ``OSError`` for whatever it cannot do."""

    renames = True
    """Whether a directory appears under its final name at once, whole."""

    def __init__(self, url: str) -> None:
        self.url = url

    @staticmethod
    def of(url: str) -> Storage:
        """Return the storage of a path or URL; ``ValueError`` if nothing here can reach it."""
        path = local_path(url)
        if path is not None:
            return Local(path)
        try:
            return Remote(url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{url} cannot be used for checkpoints: {error}") from None

    @abstractmethod
    def names(self, directory: str = "") -> list[str]:
        """Return what is in a directory; nothing if it is not there."""

    @abstractmethod
    def make(self, directory: str) -> None:
        """Make a directory, unless it is there."""

    @abstractmethod
    def writing(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a file to be written; at the end of the block it is on the storage, not only on its way."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a small file."""

    @abstractmethod
    def reading(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a file to be read."""

    @abstractmethod
    def rename(self, name: str, to: str) -> None:
        """Give a directory, or a file, its final name; it keeps it through a power cut."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, or a directory with all that is in it, as far as that is possible."""

    @abstractmethod
    def reader(self, directory: str) -> FileSystemReader:
        """Return what ``torch.distributed.checkpoint.load`` reads a checkpoint with."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file: it is there whole, or not at all."""
        if not self.renames:
            with self.writing(name) as file:
                file.write(content)
            return
        torn = f"{name}.tmp"
        with self.writing(torn) as file:
            file.write(content)
        self.rename(torn, name)

    def __str__(self) -> str:
        return self.url


class Local(Storage):
    """A directory of a file system, shared with other hosts or not."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self._root = root

    def names(self, directory: str = "") -> list[str]:
        """Return what is in a directory."""
        try:
            return sorted(path.name for path in (self._root / directory).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make(self, directory: str) -> None:
        """Make a directory."""
        (self._root / directory).mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file to be written, and flush it to the disk."""
        with (self._root / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def read(self, name: str) -> bytes:
        """Return a small file."""
        return (self._root / name).read_bytes()

    def reading(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a file to be read."""
        return (self._root / name).open("rb")

    def rename(self, name: str, to: str) -> None:
        """Rename, and flush the directories around it: the name of a file is not in the file."""
        source, target = self._root / name, self._root / to
        if source.is_dir():
            flush_directory(source)
        source.rename(target)
        flush_directory(target.parent)

    def remove(self, name: str) -> None:
        """Remove a directory; its name goes first, so that nothing half removed looks whole."""
        doomed = self._root / name
        with contextlib.suppress(OSError):  # the next one to tidy up tries again
            if not doomed.is_dir():
                doomed.unlink(missing_ok=True)
                return
            gone = doomed.with_name(f"{doomed.name}.gone")
            doomed.rename(gone)
            doomed = gone
        shutil.rmtree(doomed, ignore_errors=True)

    def reader(self, directory: str) -> FileSystemReader:
        """Return DCP's reader of files."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader  # takes seconds, and is not needed to list

        return FileSystemReader(self._root / directory)


class Remote(Storage):
    """What fsspec reaches. A file is there when it is closed, whole; directories are but parts of names."""

    renames = False

    def __init__(self, url: str) -> None:
        super().__init__(url.rstrip("/"))
        self._files: Any
        self._files, self._root = fsspec.core.url_to_fs(self.url)
        self._root = self._root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def names(self, directory: str = "") -> list[str]:
        """Return what is in a directory, as it is now and not when it was last looked at."""
        with _as_os_error(self):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path(directory), detail=False)
            except FileNotFoundError:
                return []
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def make(self, directory: str) -> None:
        """Make a directory, where there is such a thing."""
        with _as_os_error(self):
            self._files.makedirs(self._path(directory), exist_ok=True)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file to be written; it appears when it is closed."""
        with _as_os_error(self), self._files.open(self._path(name), "wb") as file:
            yield file

    def read(self, name: str) -> bytes:
        """Return a small file."""
        with _as_os_error(self):
            return bytes(self._files.cat_file(self._path(name)))

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        """Open a file to be read."""
        with _as_os_error(self), self._files.open(self._path(name), "rb") as file:
            yield file

    def rename(self, name: str, to: str) -> None:
        """Nothing has a name that is not final here."""
        raise io.UnsupportedOperation(f"{self} cannot rename {name}")

    def remove(self, name: str) -> None:
        """Remove all files below a name."""
        with contextlib.suppress(Exception):  # the next one to tidy up tries again
            self._files.rm(self._path(name), recursive=True)

    def reader(self, directory: str) -> FileSystemReader:
        """Return DCP's reader of what fsspec reaches."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(f"{self.url}/{directory}")


@contextlib.contextmanager
def _as_os_error(storage: Storage) -> Iterator[None]:
    """Turn what the libraries below fsspec raise, each its own, into what a full or unreachable disk raises."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{storage}: {type(error).__name__}: {error}") from error
