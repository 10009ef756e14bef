"""Written batches: minibatches that somebody has exported before, as files, to be trained on.

Parquet is read by Spark. An npz file holds arrays of rows: ``features`` (or ``x``), ``labels``
(or ``y``), and ``weights`` where rows weigh differently. Files are listed on the driver and read
on executors, so paths must mean the same on both.
"""

from __future__ import annotations

import fnmatch
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.base.files import check_npz
from sparkstrom.spark.data.export import filesystem_of

NPZ, PARQUET = ".npz", ".parquet"
NAMES = {"features": ("features", "x"), "labels": ("labels", "label", "y"), "weights": ("weights",)}
WILD = "*?["
ZIP = b"PK\x03\x04"  # how such a file begins
DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def files_of(paths: str | Sequence[str]) -> tuple[str, list[str]]:
    """The kind of the files, and their URLs in order. Raise UsageError where there are none."""
    many = isinstance(paths, list | tuple)
    wanted: Sequence[str] = paths if many else [paths]  # type: ignore[list-item]
    if not wanted or not all(isinstance(one, str) and one for one in wanted):
        raise UsageError(f"paths={paths!r}: give a path, a folder, a pattern, or a list of these")
    found = sorted({file for one in wanted for file in _listed(one)})
    kinds = {kind for kind in (NPZ, PARQUET) for file in found if file.endswith(kind)}
    if len(kinds) != 1:
        said = "files of both kinds" if kinds else "neither .npz nor .parquet files"
        raise UsageError(
            f"paths={paths!r}: there are {said}; name minibatches of one kind, written as Parquet"
            " or by numpy.savez(file, features=..., labels=...). DL4J's own .bin is read by none"
        )
    kind = kinds.pop()
    return kind, [file for file in found if file.endswith(kind)]


def _listed(path: str) -> Iterator[str]:
    """URLs of the files at a path, in a folder and below, or of a pattern."""
    url = path if "://" in path else os.path.abspath(path.removeprefix("file:"))
    parts = url.split("/")
    count = next((i for i, part in enumerate(parts) if set(part) & set(WILD)), len(parts))
    wild = [part for part in parts[count:] if part]
    root = "/".join(parts[:count]) + ("/" if wild else "")
    filesystem, inside = filesystem_of(root)
    local = root.startswith(("/", "file:"))
    # What is below hdfs://host:8020/a is below /a there, and below bucket/a of s3://bucket/a.
    head, known = root.removesuffix("/") if inside else root, len(inside.removesuffix("/"))
    for file in _matching(filesystem, filesystem.get_file_info(inside), wild):
        yield file if local else head + file[known:]


def _matching(filesystem: Any, found: Any, wild: Sequence[str]) -> Iterator[str]:
    """Paths of files; below a folder those whose next parts match, or all where none are left.

    A part never reaches over a slash. A folder that matches stands for what is in it.
    """
    from pyarrow import fs

    if found.type == fs.FileType.File and not wild:
        yield found.path
    elif found.type == fs.FileType.Directory:
        selector = fs.FileSelector(found.path, recursive=not wild)
        for one in filesystem.get_file_info(selector):
            if not wild and one.type == fs.FileType.File:
                yield one.path
            elif wild and fnmatch.fnmatchcase(one.base_name, wild[0]):
                yield from _matching(filesystem, one, wild[1:])


def rows_of_files(files: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    """(features, label) or (features, label, weight) of each row; on an executor."""
    for file in files:
        yield from _rows_of(file)


def _rows_of(file: str) -> Iterator[tuple[Any, ...]]:
    filesystem, path = filesystem_of(file)
    try:
        with filesystem.open_input_file(path) as opened:
            if opened.read(len(ZIP)) != ZIP:
                raise ValueError("it is no npz file")  # NumPy's words would lead to pickles
            check_npz(opened)
            npz = np.load(opened, allow_pickle=False)
            arrays = {role: _array(npz, names) for role, names in NAMES.items()}
    except DAMAGE as error:
        raise SetupError(
            f"minibatch {file} cannot be read: {error}; write it by numpy.savez(file, "
            "features=..., labels=...)"
        ) from None
    features, labels, weights = arrays["features"], arrays["labels"], arrays["weights"]
    lacks = features is None or labels is None or 0 in (features.ndim, labels.ndim)
    if lacks or len(features) != len(labels):
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


def _array(npz: Any, names: tuple[str, ...]) -> Any:
    return next((npz[name] for name in names if name in npz.files), None)
