"""Export a fit's rows to Parquet for later fits; also find and read a user's minibatch files.

``ExportCache`` distributes the rows over the workers once, in the same way as a fit without an
export does, and writes each worker's rows to one file. In every later fit of the same data, the
worker of a partition reads the same file and trains on the same minibatches, and Spark shuffles
nothing. Workers read only files that the driver program has listed; files of failed task attempts
are ignored, and deleted with the directory.

``list_minibatch_files`` finds Parquet or npz files that a user wrote. Spark reads Parquet itself;
``read_file_rows``, in this module, reads npz files, which contain arrays of rows: ``features`` (or
``x``), ``labels`` (or ``label``, ``y``) and optionally ``weights``. The driver program lists files
and executors read them, so a path must have the same meaning on all these machines.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import getpass
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparkstrom.base.errors import SetupError, UsageError, first_line
from sparkstrom.base.untrusted_files import READ_ERRORS, check_npz, find_local_path
from sparkstrom.data.arrow_conversion import (
    read_stored_format,
    records_from_arrow,
    records_to_arrow,
    schema_from_format,
)
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_blocks import BLOCK_BYTES, ROWS_PER_CHUNK_MAX, Block, BlockReader
from sparkstrom.spark.data.partitioning import PartitionedData
from sparkstrom.spark.jobs import translate_job_errors

if TYPE_CHECKING:
    import pyarrow as pa


class ExportedFile(NamedTuple):
    """The file that holds one worker's rows."""

    url: str  # "" if the worker has no rows
    rows: int  # number of rows in the file


class ExportedData(NamedTuple):
    """An export, with a record of what was exported, to recognize the same data in a later fit."""

    data: Any  # the user's object, compared by identity
    columns: ColumnSpec  # the columns that were exported
    workers: int  # requested number; there may be fewer files if rows stayed in their partitions
    directory: str  # URL of the directory that contains the files
    files: tuple[ExportedFile, ...]  # one per worker

    def matches(self, data: Any, columns: ColumnSpec, workers: int) -> bool:
        """Return whether this is an export of the object ``data``, for these columns and workers.

        The fraction of rows to hold out may differ, because all rows are exported.
        """
        ours = self.columns[:3], self.columns.validation if self.columns.fraction == 0 else None
        theirs = columns[:3], columns.validation if columns.fraction == 0 else None
        return data is self.data and ours == theirs and workers == self.workers


def export_rows(
    data: Any, columns: ColumnSpec, workers: int, partitioned: PartitionedData, directory: str
) -> ExportedData:
    """Write the rows of ``partitioned`` to the new directory ``directory``, in one Spark job.

    ``data``, ``columns`` and ``workers`` are recorded in the returned export. If writing fails, the
    directory is deleted. Raise UsageError if a row does not suit the columns (the message names the
    row), and SetupError if a partition's row count has changed since the rows were counted.
    """
    write = partial(export_partition, directory, partitioned.blocks)
    files: list[ExportedFile] = [ExportedFile("", 0)] * partitioned.workers
    with _delete_on_error(directory):
        with translate_job_errors("exporting rows"):
            written = partitioned.rdd.mapPartitionsWithIndex(write).collect()
        for index, file in written:
            if not isinstance(file, ExportedFile):
                raise file
            files[index] = file
        for i, rows in enumerate(partitioned.rows):
            if files[i].rows != rows:
                raise SetupError(
                    f"partition {i} had {rows} rows when they were counted and {files[i].rows} when"
                    " they were exported: the data change from one evaluation to the next; persist"
                    " them"
                )
    # The user may change a list of column names before the next fit.
    return ExportedData(data, copy.deepcopy(columns), workers, directory, tuple(files))


@contextlib.contextmanager
def _delete_on_error(directory: str) -> Iterator[None]:
    """Delete a directory of exported files if the ``with`` block raises."""
    try:
        yield
    except BaseException as error:
        try:
            delete_export(directory)
        except SetupError as undeleted:  # the user must also learn of the first error
            error.add_note(str(undeleted))
        raise


def partition_export(context: Any, exported: ExportedData) -> PartitionedData:
    """Return the exported rows as data for training; each partition reads one file."""
    count = len(exported.files)
    rows = tuple(file.rows for file in exported.files)
    read = partial(read_exported_blocks, exported.files)
    return PartitionedData(
        context.parallelize(range(count), count),
        read,
        count,
        rows,
        first=partial(read, int(np.argmax(rows)), ()),
    )


class ExportCache:
    """Keeps the newest export of one SparkNetwork, until other data are exported or ``close``."""

    def __init__(self, context: Any, directory: str | None) -> None:
        """Store where to export: to ``directory``, or to the default directory if it is None."""
        self._context, self._configured_directory = context, directory
        self._directory: str | None = None  # newest one written to, even by a failed export
        self._made: ExportedData | None = None

    @property
    def directory(self) -> str | None:
        """URL of the directory with the exported rows, or None if nothing is exported."""
        return None if self._made is None else self._made.directory

    def partition_data(
        self,
        data: Any,
        columns: ColumnSpec,
        workers: int,
        partition_directly: Callable[[], PartitionedData],
    ) -> PartitionedData:
        """Return the data as exported rows; export them unless the newest export matches.

        For a new export, the previous one is deleted, and ``partition_directly`` is called, which
        distributes the rows over the workers.
        """
        if self._made is None or not self._made.matches(data, columns, workers):
            self.close()
            parent = self._configured_directory or get_default_directory(self._context)
            directory = f"{parent.rstrip('/')}/sparkstrom-{secrets.token_hex(8)}"
            open_filesystem(directory)  # a bad URL is refused before Spark reads the rows
            self._directory = directory
            partitioned = partition_directly()
            self._made = export_rows(data, columns, workers, partitioned, directory)
        return partition_export(self._context, self._made)

    def close(self) -> None:
        """Delete the exported files. Idempotent. Raise SetupError if they cannot be deleted.

        Files of a failed export are included, because its last tasks may have written some after
        the export was deleted.
        """
        directory, self._directory, self._made = self._directory, None, None
        if directory is not None:
            delete_export(directory)


def get_default_directory(context: Any) -> str:
    """Return the URL of a directory for exports on the cluster's default filesystem.

    Raise UsageError if executors do not share that filesystem.
    """
    conf = context._jsc.hadoopConfiguration()
    root = conf.get("fs.defaultFS") or "file:///"
    if root.startswith("file:") and not context.master.startswith("local"):
        raise UsageError(
            f"rdd_training_approach='export' on {context.master}: its default filesystem is "
            f"{root}, which executors do not share; give export_directory='hdfs://...' or a "
            "directory that is mounted on all of them"
        )
    directory = conf.get("hadoop.tmp.dir") or f"/tmp/hadoop-{getpass.getuser()}"
    path = directory.removeprefix("file:")
    return f"{root.rstrip('/')}/{path.lstrip('/')}" if "://" not in directory else directory


EXPORT_NAME = re.compile("sparkstrom-[0-9a-f]{16}")  # the last part of an export's path


def delete_export(directory: str) -> None:
    """Delete a directory of exported files, if it exists. Raise SetupError if that fails."""
    from pyarrow import fs

    filesystem, path = open_filesystem(directory)
    assert EXPORT_NAME.fullmatch(path.rpartition("/")[2]), f"{path} is not a directory of exports"
    try:
        if filesystem.get_file_info(path).type != fs.FileType.NotFound:
            filesystem.delete_dir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SetupError(
            f"cannot delete the exported rows in {directory}: {error}; delete them by hand"
        ) from error


def open_filesystem(url: str) -> tuple[pa.fs.FileSystem, str]:
    """Return a URL's filesystem, from pyarrow or otherwise from fsspec, and the path in it.

    The path of a local file is taken literally, even in a URL: as in Hadoop, %20 does not become a
    space. Raise SetupError if neither library can open the URL, and UsageError if pyarrow would
    ignore a part of it.
    """
    import pyarrow as pa
    from pyarrow import fs

    if (local := find_local_path(url)) is not None:
        return fs.LocalFileSystem(), os.path.abspath(local)
    try:
        filesystem, path = fs.FileSystem.from_uri(url)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        try:
            import fsspec
        except ImportError:
            raise SetupError(
                f"pyarrow does not open {url} ({error}): pip install fsspec and the package for "
                "this kind of storage, on the driver and the executors"
            ) from None
        try:
            filesystem_found, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as unknown:  # no such protocol; its package is missing
            raise SetupError(f"cannot open {url}: {first_line(unknown)}") from None
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem_found)), path
    except OSError as error:
        raise SetupError(f"cannot open {url}: {error}") from None
    if cut := re.search("[#?]", url):
        raise UsageError(
            f"{url} has a {cut[0]!r}, after which pyarrow ignores the path: use a name without it"
        )
    return filesystem, path


def export_partition(
    directory: str, blocks: BlockReader, index: int, items: Iterable[Any]
) -> Iterator[tuple[int, ExportedFile | UsageError | SetupError]]:
    """Write one worker's rows to a file; yield (index, file), or (index, error) for a bad row."""
    try:
        url = f"{directory}/{index:05d}-{secrets.token_hex(4)}.parquet"
        yield index, _write_parquet(url, blocks(index, items))
    except (UsageError, SetupError) as error:
        yield index, error


def _write_parquet(url: str, blocks: Iterator[Block]) -> ExportedFile:
    """Write blocks as one Parquet file; return its URL and row count. Without rows, write none."""
    from pyarrow import parquet

    first = next(blocks, None)
    if first is None:
        return ExportedFile("", 0)
    filesystem, path = open_filesystem(url)
    filesystem.create_dir(path.rpartition("/")[0], recursive=True)
    rows = 0
    with (
        filesystem.open_output_stream(path) as sink,
        parquet.ParquetWriter(sink, schema_from_format(first.form), use_dictionary=False) as writer,
    ):
        for block in itertools.chain([first], blocks):
            first.form.unify(block.form)
            form = block.form.ordered_like(first.form)
            writer.write_batch(records_to_arrow(form, block.form.repack(block.records, form)))
            rows += len(block.records)
    return ExportedFile(url, rows)


def read_exported_blocks(
    files: tuple[ExportedFile, ...], partition: int, _: Iterable[Any]
) -> Iterator[Block]:
    """Yield a worker's exported rows. Raise SetupError if the worker's file cannot be opened."""
    from pyarrow import parquet

    url, rows = files[partition]
    if not rows:
        return
    filesystem, path = open_filesystem(url)
    try:
        source = filesystem.open_input_file(path)
    except OSError as error:
        raise SetupError(
            f"exported rows are missing: {error}. export_directory must be one that all executors "
            "share, and its files must stay until network.close()"
        ) from None
    with source, parquet.ParquetFile(source) as file:
        base = read_stored_format(file.schema_arrow)
        at, count = 0, max(1, BLOCK_BYTES // max(1, base.row_bytes))
        for batch in file.iter_batches(batch_size=min(count, ROWS_PER_CHUNK_MAX)):
            form, records = records_from_arrow(base, batch)
            yield Block(form, records, np.arange(at, at + len(records)), url)
            at += len(records)


NPZ, PARQUET = ".npz", ".parquet"
ARRAY_NAMES = {  # accepted names of an npz file's arrays, the preferred name first
    "features": ("features", "x"),
    "labels": ("labels", "label", "y"),
    "weights": ("weights",),
}
WILDCARDS = "*?["
ZIP_MAGIC = b"PK\x03\x04"  # npz files are zip archives


def list_minibatch_files(paths: str | Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of the user's minibatch files, NPZ or PARQUET, and their sorted URLs.

    ``paths`` is a file, a folder, a pattern with wildcards, or a list of these. Files of other
    kinds are ignored. Raise UsageError if there are no files, or files of both kinds.
    """
    is_list = isinstance(paths, list | tuple)
    patterns: Sequence[str] = paths if is_list else [paths]  # type: ignore[list-item]
    if not patterns or not all(isinstance(path, str) and path for path in patterns):
        raise UsageError(f"paths={paths!r}: give a path, a folder, a pattern, or a list of these")
    found = sorted({file for path in patterns for file in _list_path(path)})
    kinds = {kind for kind in (NPZ, PARQUET) for file in found if file.endswith(kind)}
    if len(kinds) != 1:
        problem = "files of both kinds" if kinds else "neither .npz nor .parquet files"
        raise UsageError(
            f"paths={paths!r}: there are {problem}; name minibatches of one kind, written as"
            " Parquet or by numpy.savez(file, features=..., labels=...). DL4J's own .bin is not"
            " supported"
        )
    kind = kinds.pop()
    return kind, [file for file in found if file.endswith(kind)]


def to_spark_path(file: str) -> str:
    """Return the path by which Spark reads a file that ``list_minibatch_files`` found.

    Spark takes some characters as wildcards unless a backslash precedes them, and looks for a path
    without a scheme on the cluster's default filesystem.
    """
    path = re.sub(r"[][{}*?\\]", r"\\\g<0>", file)
    return path if "://" in path else f"file://{path}"


def _list_path(path: str) -> Iterator[str]:
    """Yield the URL of a file, of all files below a folder, or of all files that match a pattern.

    Files on local disks are yielded as paths.
    """
    url = path if "://" in path else os.path.abspath(path.removeprefix("file:"))
    parts = url.split("/")
    count = next((i for i, part in enumerate(parts) if set(part) & set(WILDCARDS)), len(parts))
    pattern_parts = [part for part in parts[count:] if part]
    root = "/".join(parts[:count]) + ("/" if pattern_parts else "")
    filesystem, inside = open_filesystem(root)
    local = root.startswith(("/", "file:"))
    # Filesystems list paths without scheme and host: /a for hdfs://host:8020/a.
    head, prefix_length = root.removesuffix("/") if inside else root, len(inside.removesuffix("/"))
    for file in _match_files(filesystem, filesystem.get_file_info(inside), pattern_parts):
        yield file if local else head + file[prefix_length:]


def _match_files(filesystem: Any, entry: Any, wild: Sequence[str]) -> Iterator[str]:
    """Yield the paths of the files below ``entry`` whose path components match ``wild``.

    ``wild`` has one pattern per component, and no pattern matches a slash. If a folder matches all
    patterns, all files below it match. Hidden files and folders are left out, as in Spark, unless a
    pattern begins with their first character.
    """
    from pyarrow import fs

    if entry.type == fs.FileType.File and not wild:
        yield entry.path
    elif entry.type == fs.FileType.Directory:
        selector = fs.FileSelector(entry.path, recursive=not wild)
        for child in filesystem.get_file_info(selector):
            if not wild and child.type == fs.FileType.File:
                if not any(map(_is_hidden, child.path[len(entry.path) :].split("/"))):
                    yield child.path
            elif wild and _matches(child.base_name, wild[0]):
                yield from _match_files(filesystem, child, wild[1:])


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name matches; a hidden name must share the pattern's first character."""
    is_meant = not _is_hidden(name) or pattern[0] == name[0]
    return is_meant and fnmatch.fnmatchcase(name, pattern)


def _is_hidden(name: str) -> bool:
    """Return whether Spark ignores a file or folder of this name in a folder that it reads.

    Names that begin with a dot or underscore are those of unfinished and temporary files. A
    partition's folder, such as ``_x=1``, is not hidden.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def read_file_rows(files: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    """Yield each row of npz files as (features, label) or (features, label, weight)."""
    for file in files:
        yield from _read_npz_rows(file)


def _read_npz_rows(file: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of one npz file. Raise SetupError if it is damaged or incomplete."""
    filesystem, path = open_filesystem(file)
    try:
        with filesystem.open_input_file(path) as opened:
            if opened.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
                raise ValueError("it is not an npz file")  # NumPy's message would suggest pickles
            check_npz(opened)
            npz = np.load(opened, allow_pickle=False)
            arrays = {role: _find_array(npz, names) for role, names in ARRAY_NAMES.items()}
    except READ_ERRORS as error:
        raise SetupError(
            f"minibatch {file} cannot be read: {error}; write it by numpy.savez(file, "
            "features=..., labels=...)"
        ) from None
    features, labels, weights = arrays["features"], arrays["labels"], arrays["weights"]
    is_incomplete = features is None or labels is None or 0 in (features.ndim, labels.ndim)
    if is_incomplete or len(features) != len(labels):
        raise SetupError(
            f"minibatch {file} has no arrays `features` and `labels` of equally many rows: write it"
            " by numpy.savez(file, features=..., labels=...)"
        )
    if weights is not None and weights.shape not in ((len(features),), (len(features), 1)):
        raise SetupError(
            f"minibatch {file} has weights of shape {list(weights.shape)} for {len(features)} rows:"
            " write one for each row, or none"
        )
    for i, feature in enumerate(features):
        label = labels[i].item() if labels.ndim == 1 else labels[i]
        yield (feature, label) if weights is None else (feature, label, float(weights[i].item()))


def _find_array(npz: Any, names: tuple[str, ...]) -> Any:
    """Return the array with the first of ``names`` that the npz file contains, or None."""
    return next((npz[name] for name in names if name in npz.files), None)
