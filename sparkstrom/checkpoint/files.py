"""Write and read checkpoint files in local and remote folders, atomically and with a digest.

A file is written under a temporary name and then renamed. Object stores need no rename, because a
file appears there only when its upload is complete.

A checkpoint is an npz that plain NumPy can open, with a SHA-256 of its bytes in the zip comment:

    NAME.npy          one file per array, uncompressed
    description.json  {"format": 1, "sparkstrom": "0.1.0", "description": {...}}
    zip comment       "sparkstrom checkpoint, SHA-256 of all bytes before these digits: " + digits

The comment is the end of the file, so a truncated file does not have it.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import io
import json
import logging
import math
import os
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import CheckpointDamaged, SetupError, UsageError
from sparkstrom.base.untrusted_files import find_local_path, open_regular
from sparkstrom.base.version import __version__

log = logging.getLogger(__name__)

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci"}
PART_BYTES = 16 << 20  # size of an upload's parts; S3 allows 10,000 parts of at least 5 MiB

WriteContent = Callable[[Any], None]  # writes a file's content to the open file that it gets


def open_folder(url: str | os.PathLike[str]) -> Folder:
    """Return the folder at a path or URL, without creating the folder.

    Raise UsageError if the URL's protocol is unknown or its fsspec driver is not installed, and
    SetupError if the file system cannot be opened.
    """
    address = os.fspath(url)
    if not address:
        raise UsageError("a checkpoint directory is a path or a URL, and '' is neither")
    return _get_folder(*_find_filesystem(address, "checkpoint directory"))


def open_parent(url: str) -> tuple[Folder, str]:
    """Return the folder that contains the file at a URL, and the file's name.

    Raise the same errors as ``open_folder``.
    """
    filesystem, path = _find_filesystem(url, "path")
    folder, _, name = path.rpartition("/")
    return _get_folder(filesystem, folder), name


def _get_folder(filesystem: Any, path: str) -> Folder:
    """Return the folder at ``path`` of a file system from fsspec; make S3 retry less often."""
    protocols = (
        {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)
    )
    if "file" in protocols:
        # Absolute, because the program may change its working directory.
        return LocalFolder(Path(os.path.abspath(path)))
    if protocols & {"s3", "s3a"}:
        # botocore itself retries 5 times; with s3fs's 5 retries, errors would take 3 minutes
        filesystem.retries = 1
    return RemoteFolder(filesystem, path.rstrip("/"), appears_whole=bool(protocols & OBJECT_STORES))


def _find_filesystem(address: str, what: str) -> tuple[Any, str]:
    """Return fsspec's file system for a path or URL, and the path on this file system.

    A local path is used as it is, because fsspec would cut a name at ``::``. In errors, ``what``
    names what the address is for, such as "checkpoint directory". The errors are those of
    ``open_folder``.
    """
    import fsspec  # slow, and training tasks do not need it
    from fsspec.implementations.local import LocalFileSystem

    if (local := find_local_path(address)) is not None:
        return LocalFileSystem(), local
    *chain, last = address.split("::")
    if chain and "://" not in last:
        raise UsageError(
            f"{what} {address!r}: fsspec ignores {'::' + last!r} at its end: use a name without ::"
        )
    try:
        filesystem, path = fsspec.core.url_to_fs(address, skip_instance_cache=True)
    except ImportError as error:
        raise UsageError(
            f"{what} {address!r} needs a package that is not installed here "
            f"({error}): pip install 'sparkstrom[s3]' for s3://, and fsspec's driver for others"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"fsspec knows no file system for {what} {address!r} ({error}): "
            "use a local path, or a URL such as s3://bucket/... or hdfs://host/..."
        ) from None
    except OSError as error:
        raise SetupError(
            f"{what} {address!r} cannot be opened ({error}): check the URL and the network; for"
            " hdfs:// set JAVA_HOME, HADOOP_HOME and CLASSPATH=`hadoop classpath --glob`"
        ) from None
    return filesystem, str(path)


class LocalFolder:
    """A local folder. Methods raise the file system's errors unchanged.

    Writers lock their temporary files, so that no other process removes them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self) -> None:
        """Create the folder and its parents if they are missing."""
        self._path.mkdir(parents=True, exist_ok=True)

    def list_names(self) -> list[str]:
        """Return the names of all files, including temporary ones; [] if the folder is missing."""
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def put(self, name: str, write_content: WriteContent) -> None:
        """Write a temporary file under a lock, flush it to disk, and rename it to ``name``.

        ``write_content`` is called with the open temporary file. Raise FileExistsError if the file
        exists or another process is writing it.
        """
        temporary, target = self._path / temporary_name(name), self._path / name
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            _try_lock(descriptor)
            # Another process removed the file before it was locked.
            if os.fstat(descriptor).st_nlink == 0:
                raise FileExistsError(errno.EEXIST, "taken for a dead writer's", str(temporary))
            try:
                if target.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
                write_content(file)
                file.flush()
                os.fsync(descriptor)
                temporary.rename(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        self._sync()

    def open(self, name: str) -> IO[bytes]:
        """Open a regular file for reading. The returned file is seekable."""
        return open_regular(self._path / name)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        (self._path / name).unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        """Remove temporary files of writers that died: files that no process has locked.

        Files that only another user may remove are left.
        """
        for temporary in self._path.glob(temporary_name("*")):
            try:
                descriptor = os.open(temporary, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except (FileNotFoundError, PermissionError):
                continue  # its writer has finished, or is another user
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    raise
                continue  # a link, directory or socket is not one of our temporary files
            try:
                if _try_lock(descriptor):
                    with suppress(PermissionError):  # another user's, in a folder like /tmp
                        temporary.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def path_or_url(self, name: str) -> str:
        """Return a file's absolute path."""
        return str(self._path / name)

    def _sync(self) -> None:
        """Flush the folder to disk, so that a rename survives a crash."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class RemoteFolder:
    """A folder on a file system that fsspec supports. Only one fit at a time may write to it.

    Methods raise the file system's errors unchanged.

    Args:
        filesystem: the fsspec file system.
        path: the folder's path on that file system.
        appears_whole: whether a file is invisible until it is closed, as in object stores.
    """

    def __init__(self, filesystem: Any, path: str, *, appears_whole: bool) -> None:
        self._filesystem, self._path, self._appears_whole = filesystem, path, appears_whole

    def create(self) -> None:
        """Create the folder, unless the file system is an object store."""
        # Object stores have no folders, and a mistyped bucket must not be created.
        if not self._appears_whole:
            self._filesystem.makedirs(self._path, exist_ok=True)

    def list_names(self) -> list[str]:
        """Return the names of all files, including temporary ones; [] if the folder is missing."""
        self._filesystem.invalidate_cache(self._path)
        try:
            found = self._filesystem.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]

    def put(self, name: str, write_content: WriteContent) -> None:
        """Upload a file; on file systems that show incomplete files, use a temporary name first.

        ``write_content`` is called with the open file. Raise FileExistsError if the file exists.
        """
        target = f"{self._path}/{name}"
        self._filesystem.invalidate_cache(self._path)
        if self._filesystem.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        if self._appears_whole:
            with self._open_for_writing(target) as file:
                write_content(file)
            return
        temporary = f"{self._path}/{temporary_name(f'{name}.{uuid.uuid4().hex}')}"
        try:
            with self._open_for_writing(temporary) as file:
                write_content(file)
            self._filesystem.mv(temporary, target)
        except BaseException:
            if self._filesystem.exists(temporary):
                self._filesystem.rm_file(temporary)
            raise

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading, with a large read-ahead buffer."""
        opened: IO[bytes] = self._filesystem.open(
            f"{self._path}/{name}", "rb", block_size=PART_BYTES, cache_type="readahead"
        )
        return opened

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._filesystem.rm_file(f"{self._path}/{name}")

    def remove_abandoned(self) -> None:
        """Remove all temporary files, because no other fit writes to this folder.

        Files that only another user may remove are left.
        """
        for name in fnmatch.filter(self.list_names(), temporary_name("*")):
            with suppress(PermissionError):  # another user's
                self.remove(name)

    def path_or_url(self, name: str) -> str:
        """Return a file's URL."""
        return str(self._filesystem.unstrip_protocol(f"{self._path}/{name}"))

    @contextmanager
    def _open_for_writing(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file for writing; if the ``with`` block fails, discard the upload."""
        file = self._filesystem.open(path, "wb", block_size=PART_BYTES)
        try:
            yield file
        except BaseException:
            if self._appears_whole:
                _abort_upload(file)
            else:
                file.close()
            raise
        file.close()


def _abort_upload(upload: Any) -> None:
    """Discard an incomplete upload to an object store; if that fails, only log the error."""
    upload.closed = True  # otherwise its finalizer would close and so complete the upload
    try:
        upload.discard()
    except Exception:  # the store is unreachable, and invisible parts remain there
        log.debug("discarding an upload", exc_info=True)


Folder = LocalFolder | RemoteFolder


def temporary_name(name: str) -> str:
    """Return the temporary name under which the file ``name`` is written first."""
    return f".sparkstrom-{name}.tmp"


def _try_lock(descriptor: int) -> bool:
    """Lock an open file without waiting; return whether it is locked now.

    Return False if another process holds the lock, or if the file system does not support locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


FORMAT = 1
DESCRIPTION = "description.json"
DIGEST_MARK = b"sparkstrom checkpoint, SHA-256 of all bytes before these digits: "
DIGEST_CHARS = 2 * hashlib.sha256().digest_size
CHUNK_BYTES = 1 << 20
ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # constant, so that equal checkpoints are equal files
NPY_VERSION = (1, 0)
DTYPE_KINDS = "biufcSU"  # NumPy's dtype kinds of numbers and text, which need no pickle


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint: the state of a training, in a form that can be stored."""

    description: dict[str, Any]  # JSON values that describe the training
    arrays: dict[str, NDArray[Any]]  # arrays of numbers or text, by name

    def __post_init__(self) -> None:
        """Assert that each array has a name and a dtype that needs no pickle."""
        for name, array in self.arrays.items():
            assert name, "an array without a name"
            assert array.dtype.kind in DTYPE_KINDS, f"array {name} is of {array.dtype}"


def write_checkpoint(checkpoint: Checkpoint, sink: IO[bytes]) -> None:
    """Write a checkpoint file to ``sink``, chunk by chunk to save memory.

    Errors of the sink are raised unchanged; readers detect that the file is then incomplete.
    """
    writer = _DigestWriter(sink)
    header = {"format": FORMAT, "sparkstrom": __version__, "description": checkpoint.description}
    content = json.dumps(header, indent=1).encode()
    with zipfile.ZipFile(writer, "w") as npz:  # type: ignore[call-overload]
        for name, array in checkpoint.arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", ZIP_DATE)
            with npz.open(info, "w", force_zip64=True) as member:
                _write_array(member, array)
        with npz.open(zipfile.ZipInfo(DESCRIPTION, ZIP_DATE), "w") as member:
            member.write(content)
        npz.comment = DIGEST_MARK + b"0" * DIGEST_CHARS
    writer.finish()


def read_untrusted_checkpoint(file: IO[bytes], path: str) -> Checkpoint:
    """Verify the digest of a checkpoint file, read the checkpoint and return it.

    Args:
        file: the file, which must be seekable.
        path: the file's name, for error messages.

    Raises:
        CheckpointDamaged: the file is truncated, changed or not a checkpoint.
        UsageError: the file is intact, but its format is newer than this version can read.
        OSError: the file cannot be read.
    """
    verify_digest(file, path)
    try:
        with zipfile.ZipFile(file) as npz:
            if any(info.compress_type != zipfile.ZIP_STORED for info in npz.infolist()):
                raise ValueError("a member is compressed")
            header = json.loads(npz.read(DESCRIPTION))
            written_by, number = str(header["sparkstrom"]), int(header["format"])
            if number > FORMAT:
                raise UsageError(
                    f"{path} has checkpoint format {number}, written by sparkstrom {written_by}: "
                    f"this is sparkstrom {__version__}, which reads format {FORMAT}. Install "
                    f"sparkstrom {written_by} or newer, or use another checkpoint_directory"
                )
            arrays = {
                info.filename.removesuffix(".npy"): _read_array(npz, info)
                for info in npz.infolist()
                if info.filename != DESCRIPTION
            }
            return Checkpoint(dict(header["description"]), arrays)
    except (UsageError, CheckpointDamaged):
        raise
    except Exception as error:  # its digest is right, so another program or a bug made it
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a wrong offset
            raise
        raise CheckpointDamaged(path, f"it is not a checkpoint ({error!r})") from None


def verify_digest(file: IO[bytes], path: str) -> None:
    """Read the whole file. Raise CheckpointDamaged unless its bytes match its digest."""
    size = file.seek(0, os.SEEK_END)
    tail_bytes = len(DIGEST_MARK) + DIGEST_CHARS
    file.seek(max(0, size - tail_bytes))
    tail = bytearray(min(size, tail_bytes))
    _read_into(file, memoryview(tail), path)
    if len(tail) < tail_bytes or not tail.startswith(DIGEST_MARK):
        raise CheckpointDamaged(path, f"its end is missing or changed, after {size:,} bytes")
    digest, remaining = hashlib.sha256(), size - DIGEST_CHARS
    file.seek(0)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, remaining)))
    while remaining:
        part = buffer[: min(remaining, len(buffer))]
        _read_into(file, part, path)
        digest.update(part)
        remaining -= len(part)
    if digest.hexdigest().encode() != tail[len(DIGEST_MARK) :]:
        raise CheckpointDamaged(path, f"its {size:,} bytes are not those that were written")


class _DigestWriter:
    """Forwards bytes to a sink and hashes them; in the end, writes the hash.

    The last ``DIGEST_CHARS`` bytes are held back. They are placeholders ("0"), in whose place
    ``finish`` writes the digest of all bytes before them.
    """

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink, self._digest, self._held, self._passed = sink, hashlib.sha256(), b"", 0

    def write(self, data: Any) -> int:
        """Forward all bytes but the last ones, which are held back; return ``len(data)``."""
        view = memoryview(data).cast("B")
        if len(view) >= DIGEST_CHARS:
            self._forward(self._held)
            self._forward(view[:-DIGEST_CHARS])
            self._held = bytes(view[-DIGEST_CHARS:])
        else:
            held = self._held + bytes(view)
            self._forward(held[:-DIGEST_CHARS])
            self._held = held[-DIGEST_CHARS:]
        return len(view)

    def flush(self) -> None:
        """Do nothing; zipfile calls this after each member."""

    def tell(self) -> int:
        """Return the number of bytes written so far, including those held back."""
        return self._passed + len(self._held)

    def finish(self) -> None:
        """Write the digest in place of the bytes that were held back."""
        assert self._held == b"0" * DIGEST_CHARS, (
            "the checkpoint does not end with the zeros that its digest replaces"
        )
        self._sink.write(self._digest.hexdigest().encode())

    def _forward(self, data: bytes | memoryview) -> None:
        """Hash bytes and write them to the sink."""
        if data:
            self._digest.update(data)
            self._sink.write(data)
            self._passed += len(data)


def _write_array(member: IO[bytes], array: NDArray[Any]) -> None:
    """Write an array as an npy file to a zip member, in chunks."""
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(member, header)
    contiguous = array.T if header["fortran_order"] else array
    if contiguous.flags.c_contiguous:
        content = contiguous.reshape(-1).view(np.uint8).data
        for first in range(0, len(content), CHUNK_BYTES):
            member.write(content[first : first + CHUNK_BYTES])
        return
    count = max(1, CHUNK_BYTES // array.itemsize)
    flags: list[Any] = ["external_loop", "buffered", "zerosize_ok"]
    parts: Iterable[Any] = np.nditer(array, flags, buffersize=count, order="C")
    for part in parts:
        member.write(part.tobytes())


def _read_array(npz: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    """Read the array of an npy file in the zip. Raise ValueError if header and length disagree."""
    with npz.open(info) as member:
        if np.lib.format.read_magic(member) != NPY_VERSION:
            raise ValueError(f"{info.filename} is of an npy version that is not written here")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(member)
        n_bytes = math.prod(shape) * dtype.itemsize
        if dtype.kind not in DTYPE_KINDS or n_bytes != info.file_size - member.tell():
            raise ValueError(f"{info.filename} is not as long as {dtype}{list(shape)}")
        array = np.empty(shape, dtype, order="F" if fortran_order else "C")
        into = array.reshape(-1, order="A").view(np.uint8).data
        at = 0
        while at < n_bytes:
            count = member.readinto(into[at : at + CHUNK_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"{info.filename} ends early")
            at += count
        return array


def _read_into(file: IO[bytes], into: memoryview, path: str) -> None:
    """Fill a buffer from the file's position. Raise CheckpointDamaged if the file is too short."""
    reader: io.BufferedIOBase = file  # type: ignore[assignment]
    while into:
        count = reader.readinto(into)
        if not count:
            raise CheckpointDamaged(path, "it became shorter while it was read")
        into = into[count:]
