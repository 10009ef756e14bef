"""Folders of files that appear whole or not at all: local ones, and those of other file systems.

A file is written under a temporary name and renamed, where the file system can. In an object store
it appears when its upload is completed, and a rename would be a copy.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import fsspec

from sparkstrom.base.errors import UsageError
from sparkstrom.base.files import open_regular

log = logging.getLogger(__name__)

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci"}
PART_BYTES = 16 << 20  # of an upload; S3 takes 10,000 parts, of 5 MiB at least
UNFINISHED = ".sparkstrom-", ".tmp"  # how temporary names begin and end

Fill = Callable[[Any], None]


class Folder(Protocol):
    """Where checkpoints lie. Methods raise what the file system raises."""

    def make(self) -> None:
        """Make the folder, where it is not there and the file system has such things."""

    def names(self) -> list[str]:
        """The files, unfinished ones too; nothing where there is no such folder."""

    def put(self, name: str, fill: Fill) -> None:
        """Make a file. Raise FileExistsError where the name is taken, or being written."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read it, here and there."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def remove_left(self) -> None:
        """Remove what writers that are dead have left."""

    def address(self, name: str) -> str:
        """The file's path, or its URL."""


def folder_of(url: str | os.PathLike[str]) -> Folder:
    """The folder at a path or URL, made by nobody yet.

    Raise UsageError where there is no such protocol, or its driver is not installed.
    """
    address = os.fspath(url)
    if not address:
        raise UsageError("a checkpoint directory is a path or a URL, and '' is neither")
    try:
        files, path = fsspec.core.url_to_fs(address, skip_instance_cache=True)
    except ImportError as error:
        raise UsageError(
            f"checkpoint directory {address!r} needs a package that is not installed here "
            f"({error}): pip install 'sparkstrom[s3]' for s3://, and fsspec's driver for others"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"checkpoint directory {address!r} is of no file system that fsspec knows ({error}): "
            "use a local path, or a URL such as s3://bucket/folder or hdfs://host/folder"
        ) from None
    protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
    if "file" in protocols:
        return LocalFolder(Path(os.path.abspath(path)))  # also where the program goes elsewhere
    if protocols & {"s3", "s3a"}:
        files.retries = 1  # botocore tries 5 times by itself, and s3fs that 5 times: 3 minutes
    return RemoteFolder(files, path.rstrip("/"), appears_whole=bool(protocols & OBJECT_STORES))


class LocalFolder:
    """A folder of this machine. Who writes a file holds a lock on it, which the kernel takes back
    from the dead."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def make(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def put(self, name: str, fill: Fill) -> None:
        temporary, target = self._path / unfinished(name), self._path / name
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            _locked(descriptor)
            if os.fstat(descriptor).st_nlink == 0:  # removed before it was locked
                raise FileExistsError(errno.EEXIST, "taken for a dead writer's", str(temporary))
            try:
                if target.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
                fill(file)
                file.flush()
                os.fsync(descriptor)
                temporary.rename(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        self._sync()

    def open(self, name: str) -> IO[bytes]:
        return open_regular(self._path / name)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def remove_left(self) -> None:
        for temporary in self._path.glob(unfinished("*")):
            try:
                descriptor = os.open(temporary, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # its writer has finished
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    raise
                continue  # a link, a directory or a socket: no writer of ours has left it
            try:
                if _locked(descriptor):
                    temporary.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def address(self, name: str) -> str:
        return str(self._path / name)

    def _sync(self) -> None:
        """The new name on the disk, not only the content."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class RemoteFolder:
    """A folder of a file system that fsspec reaches; one fit at a time writes to it.

    appears_whole   a file is there when it is closed, and not before
    """

    def __init__(self, files: Any, path: str, *, appears_whole: bool) -> None:
        self._files, self._path, self._appears_whole = files, path, appears_whole

    def make(self) -> None:
        if not self._appears_whole:  # stores have no folders, and nobody wants a bucket by mistake
            self._files.makedirs(self._path, exist_ok=True)

    def names(self) -> list[str]:
        self._files.invalidate_cache(self._path)
        try:
            found = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]

    def put(self, name: str, fill: Fill) -> None:
        target = f"{self._path}/{name}"
        self._files.invalidate_cache(self._path)
        if self._files.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        if self._appears_whole:
            with self._writing(target) as file:
                fill(file)
            return
        temporary = f"{self._path}/{unfinished(f'{name}.{uuid.uuid4().hex}')}"
        try:
            with self._writing(temporary) as file:
                fill(file)
            self._files.mv(temporary, target)
        except BaseException:
            if self._files.exists(temporary):
                self._files.rm_file(temporary)
            raise

    def open(self, name: str) -> IO[bytes]:
        opened: IO[bytes] = self._files.open(
            f"{self._path}/{name}", "rb", block_size=PART_BYTES, cache_type="readahead"
        )
        return opened

    def remove(self, name: str) -> None:
        self._files.rm_file(f"{self._path}/{name}")

    def remove_left(self) -> None:
        for name in fnmatch.filter(self.names(), unfinished("*")):
            self.remove(name)

    def address(self, name: str) -> str:
        return str(self._files.unstrip_protocol(f"{self._path}/{name}"))

    @contextmanager
    def _writing(self, path: str) -> Iterator[IO[bytes]]:
        """A file that is closed at the end; where writing fails, none appears in a store."""
        file = self._files.open(path, "wb", block_size=PART_BYTES)
        try:
            yield file
        except BaseException:
            if self._appears_whole:
                _discard(file)
            else:
                file.close()
            raise
        file.close()


def _discard(upload: Any) -> None:
    upload.closed = True  # else the garbage collector would close it, which completes it
    try:
        upload.discard()
    except Exception:  # the store is away: parts stay there, which nobody sees
        log.debug("discarding an upload", exc_info=True)


def unfinished(name: str) -> str:
    """What a file is called while it is being written."""
    begin, end = UNFINISHED
    return f"{begin}{name}{end}"


def _locked(descriptor: int) -> bool:
    """Lock the file for as long as it is open. No where somebody else has, or none can be had."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
