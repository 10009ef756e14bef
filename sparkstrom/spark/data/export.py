"""Export: the rows once as Parquet, so that later fits read files instead of computing data again.

The rows are dealt out as for direct training, and each worker's share becomes one file, which that
worker of every later fit reads for itself: same rows, same minibatches, no shuffle. The driver
holds the list of files, so what a task left that failed half-way is in nobody's list; it goes with
the directory.
"""

from __future__ import annotations

import getpass
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparkstrom.base.errors import SetupError, UsageError, first_line
from sparkstrom.spark.data.columns import Chosen
from sparkstrom.spark.data.job_errors import in_one_line
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.data.row_blocks import BLOCK_BYTES, ROWS_AT_ONCE, Block
from sparkstrom.spark.data.shuffle_blocks import Blocks
from sparkstrom.spark.data.tables import form_in, from_arrow, schema_of, to_arrow

if TYPE_CHECKING:
    import pyarrow as pa


class File(NamedTuple):
    """One worker's rows."""

    url: str  # "" where there are none
    rows: int


class Export(NamedTuple):
    """What a fit wrote, and of which data: the same again needs no new one."""

    data: Any  # the user's own object
    chosen: Chosen
    workers: int  # asked for; partitions that stay in place may be fewer
    directory: str
    files: tuple[File, ...]

    def fits(self, data: Any, chosen: Chosen, workers: int) -> bool:
        """Is this an export of that very object, with the same columns, for so many workers?"""
        columns = self.chosen[:3], self.chosen.validation if self.chosen.fraction == 0 else None
        wanted = chosen[:3], chosen.validation if chosen.fraction == 0 else None
        return data is self.data and columns == wanted and workers == self.workers


def export(data: Any, chosen: Chosen, workers: int, spread: Spread, directory: str) -> Export:
    """Write the rows; one Spark job. Raises UsageError naming a row that does not fit."""
    directory = f"{directory.rstrip('/')}/sparkstrom-{secrets.token_hex(8)}"
    write = partial(write_file, directory, spread.blocks)
    files: list[File] = [File("", 0)] * spread.workers
    with in_one_line("exporting rows"):
        written = spread.rdd.mapPartitionsWithIndex(write).collect()
    for index, file in written:
        if not isinstance(file, File):
            remove(directory)
            raise file
        files[index] = file
    for i, rows in enumerate(spread.rows):
        if files[i].rows != rows:
            remove(directory)
            raise SetupError(
                f"partition {i} had {rows} rows when they were counted and {files[i].rows} when "
                "they were exported: the data change from one evaluation to the next"
            )
    return Export(data, chosen, workers, directory, tuple(files))


def exported(context: Any, made: Export) -> Spread:
    """The files over one partition per worker."""
    count = len(made.files)
    rows = tuple(file.rows for file in made.files)
    return Spread(
        context.parallelize(range(count), count), partial(blocks_of_file, made.files), count, rows
    )


class Exports:
    """What a network has exported: one directory, until other data or ``close``."""

    def __init__(self, context: Any, directory: str | None) -> None:
        self._context, self._wanted = context, directory
        self._made: Export | None = None

    @property
    def directory(self) -> str | None:
        """Where exported rows are, if there are some."""
        return None if self._made is None else self._made.directory

    def spread(
        self, data: Any, chosen: Chosen, workers: int, direct: Callable[[], Spread]
    ) -> Spread:
        """The files of these data, written now if the last fit was not of the same."""
        if self._made is None or not self._made.fits(data, chosen, workers):
            self.close()
            directory = self._wanted or default_directory(self._context)
            self._made = export(data, chosen, workers, direct(), directory)
        return exported(self._context, self._made)

    def close(self) -> None:
        """Delete the files. Raise SetupError saying what is left where that fails. Idempotent."""
        if self._made is not None:
            directory, self._made = self._made.directory, None
            remove(directory)


def default_directory(context: Any) -> str:
    """On the cluster's default filesystem. Raise UsageError where executors do not share one."""
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


def remove(directory: str) -> None:
    """Delete an export. Raise SetupError saying what is left where that fails."""
    filesystem, path = filesystem_of(directory)
    try:
        filesystem.delete_dir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SetupError(f"the exported rows in {directory} are left there: {error}") from error


def filesystem_of(url: str) -> tuple[pa.fs.FileSystem, str]:
    """Who opens ``url``, and by which path: pyarrow, or fsspec for what pyarrow does not know."""
    import pyarrow as pa
    from pyarrow import fs

    absolute = url if "://" in url else f"file://{url.removeprefix('file:')}"  # Hadoop's file:/a
    try:
        filesystem, path = fs.FileSystem.from_uri(absolute)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        try:
            import fsspec
        except ImportError:
            raise SetupError(
                f"pyarrow does not open {url} ({error}): pip install fsspec and the package for "
                "this kind of storage, on the driver and the executors"
            ) from None
        try:
            found, path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as unknown:  # no such protocol; its package is missing
            raise SetupError(f"cannot open {url}: {first_line(unknown)}") from None
        return fs.PyFileSystem(fs.FSSpecHandler(found)), path
    except OSError as error:
        raise SetupError(f"cannot open {url}: {error}") from None
    return filesystem, path


# -- on executors ----------------------------------------------------------------------------------


def write_file(
    directory: str, blocks: Blocks, index: int, items: Iterable[Any]
) -> Iterator[tuple[int, File | UsageError | SetupError]]:
    """One worker's rows as one file; what is wrong with the rows is an answer, not a failure."""
    try:
        url = f"{directory}/{index:05d}-{secrets.token_hex(4)}.parquet"
        yield index, _written(url, blocks(index, items))
    except (UsageError, SetupError) as error:
        yield index, error


def _written(url: str, blocks: Iterator[Block]) -> File:
    from pyarrow import parquet

    first = next(blocks, None)
    if first is None:
        return File("", 0)
    filesystem, path = filesystem_of(url)
    filesystem.create_dir(path.rpartition("/")[0], recursive=True)
    rows = 0
    with (
        filesystem.open_output_stream(path) as sink,
        parquet.ParquetWriter(sink, schema_of(first.form), use_dictionary=False) as writer,
    ):
        for block in itertools.chain([first], blocks):
            first.form.joined(block.form)
            writer.write_batch(to_arrow(block.form, block.records))
            rows += len(block.records)
    return File(url, rows)


def blocks_of_file(files: tuple[File, ...], partition: int, _: Iterable[Any]) -> Iterator[Block]:
    """What ``write_file`` wrote. Raise SetupError where the executor does not see it."""
    from pyarrow import parquet

    url, rows = files[partition]
    if not rows:
        return
    filesystem, path = filesystem_of(url)
    try:
        source = filesystem.open_input_file(path)
    except OSError as error:
        raise SetupError(
            f"exported rows are missing: {error}. export_directory must be one that all executors "
            "share, and its files must stay until network.close()"
        ) from None
    with source, parquet.ParquetFile(source) as file:
        base = form_in(file.schema_arrow)
        at, count = 0, max(1, BLOCK_BYTES // max(1, base.row_bytes))
        for batch in file.iter_batches(batch_size=min(count, ROWS_AT_ONCE)):
            form, records = from_arrow(base, batch)
            yield Block(form, records, np.arange(at, at + len(records)), url)
            at += len(records)
